"""The benchmarks run: every contestant does its work. How fast is for a person to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import ours, peers
from benchmarks.contestants import Contestant
from benchmarks.measure import drain, publish
from plugins.daemons import GoNsqd

MESSAGES = 2000

PRODUCERS = peers.PRODUCERS + ours.PRODUCERS + peers.LIBRARY_PRODUCERS + ours.LIBRARY_PRODUCERS


def name_of(contestant: Contestant) -> str:
    return contestant.name


@pytest.mark.parametrize(
    "contestant",
    peers.CONSUMERS + ours.CONSUMERS + peers.HANDLERS + ours.HANDLERS[:-1],
    ids=name_of,
)
def test_a_consumer_finishes_everything(nsqd: GoNsqd, contestant: Contestant) -> None:
    assert drain(nsqd, contestant, MESSAGES, into_pipe=True).rate > 0


@pytest.mark.parametrize("contestant", PRODUCERS, ids=name_of)
def test_a_producer_publishes_every_line(nsqd: GoNsqd, contestant: Contestant) -> None:
    assert publish(nsqd, contestant, MESSAGES).rate > 0


def test_a_producer_that_stops_early_is_an_error(nsqd: GoNsqd) -> None:
    idle = Contestant("idle", lambda job: ["sh", "-c", "exit 3"])
    with pytest.raises(RuntimeError, match="stopped at 0 of 2000"):
        publish(nsqd, idle, MESSAGES)


@pytest.mark.parametrize("benchmark", ["connections", "transports"])  # others are run above
@pytest.mark.real_nsqd
def test_the_comparison_prints_a_table(benchmark: str) -> None:
    here = str(Path(__file__).parent)
    arguments = [benchmark, "--messages=2000", "--rounds=1"]
    table = subprocess.check_output([sys.executable, here, *arguments], text=True)
    assert table.startswith("messages/s")
    assert len(table.splitlines()) > 2
