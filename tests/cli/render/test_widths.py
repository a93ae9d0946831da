"""Tables at 80, 100 and 140 columns: which columns stay, that no value is cut, and what is said."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest

from nsqtools.cli.render import output
from nsqtools.cli.render.output import Form, Kind, write_listing
from nsqtools.cli.render.stat_output import OPTIONAL
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cluster.stats_documents import COLUMNS

TOPIC = "orders-eu-west-1-production"
NAMES = [name for name in COLUMNS if name != "node"]
ROW = (TOPIC, "billing", 182_000, 2_000, 180_000, 25, 3, 10.0, 9.0, 9.0, 0.0, 7, 1, 999_999, 4)
ROWS = [(*ROW, True, 12.5)]

FIRST = f"{TOPIC} billing 182000"
SCREENS = {
    80: [
        "topic channel depth in_flight clients paused",
        f"{FIRST} 25 4 yes",
    ],
    100: [
        "topic channel depth in_flight ingress egress finish clients paused",
        f"{FIRST} 25 10.0 9.0 9.0 4 yes",
    ],
    140: [
        "topic channel depth memory disk in_flight deferred ingress egress finish requeue clients "
        "paused",
        f"{FIRST} 2000 180000 25 3 10.0 9.0 9.0 0.0 4 yes",
    ],
}
"""What is on the screen, with one blank between columns."""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of its own."""
    ours, theirs = os.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def shown(
    terminal: tuple[int, int], width: int, form: Form, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], str]:
    ours, theirs = terminal
    stderr = io.StringIO()
    monkeypatch.setattr(Runtime, "width", property(lambda _: width))
    with open(theirs, "w", closefd=False) as stdout:
        runtime = Runtime(stdout, stderr, {"NO_COLOR": "1"})
        write_listing(runtime, NAMES, ROWS, form, optional=OPTIONAL)
    return [line.rstrip() for line in os.read(ours, 65536).decode().splitlines()], stderr.getvalue()


@pytest.mark.parametrize("width", SCREENS)
def test_columns_are_dropped_before_values_are_cut_and_that_is_said(
    width: int, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, said = shown(terminal, width, output.PLAIN, monkeypatch)

    assert [" ".join(line.split()) for line in lines] == SCREENS[width]
    assert max(map(len, lines)) <= width
    left_out = [name for name in NAMES if name not in lines[0].split()]
    assert said == (f"nsq: left out on this narrow terminal: {', '.join(left_out)}; see -o wide\n")


def test_wide_and_chosen_columns_are_whole(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, _ = shown(terminal, 80, Form(Kind.wide), monkeypatch)
    chosen, said = shown(terminal, 80, Form(None, ("e2e_ms", "topic")), monkeypatch)

    assert wide[0].split() == NAMES
    assert chosen == ["e2e_ms  topic", f"  12.5  {TOPIC}"]
    assert said == ""
