"""The embedded daemons answer as the Go ones did when the exchanges of this folder were recorded.

What Go answered is in ``answers/``, a line of JSON for each case, its bytes as latin-1. One test
here asks the Go daemons again. After a change of the cases record them again:

    NSQTOOLS_RECORD_EXCHANGES=1 pytest tests/conformance/test_exchanges.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conformance import http_exchanges, nsqlookupd_exchanges, tcp_exchanges
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.embedded import EmbeddedLookupServer, EmbeddedServer

ANSWERS = Path(__file__).with_name("answers")
MODULES = {"tcp": tcp_exchanges, "http": http_exchanges, "nsqlookupd": nsqlookupd_exchanges}
TABLES = {
    f"{protocol}-{table}": (module.play, cases)
    for protocol, module in MODULES.items()
    for table, cases in module.TABLES.items()
}
GO = {"nsqd": GoNsqd, "nsqlookupd": GoNsqlookupd}
EMBEDDED = {"nsqd": EmbeddedServer, "nsqlookupd": EmbeddedLookupServer}


@pytest.mark.parametrize("table", TABLES)
def test_the_embedded_daemon_answers_as_recorded(table: str) -> None:
    found = differences(table, EMBEDDED)
    assert not found, "\n".join(found)


@pytest.mark.real_nsqd
def test_the_go_daemons_answer_as_recorded() -> None:
    if os.environ.get("NSQTOOLS_RECORD_EXCHANGES"):
        for table in TABLES:
            (ANSWERS / f"{table}.jsonl").write_text("".join(lines(table, GO)))
    found = [each for table in TABLES for each in differences(table, GO)]
    assert not found, "\n".join(found)


def differences(table: str, kinds: dict[str, Any]) -> list[str]:
    """What is answered otherwise than it was recorded, a line for each case."""
    recorded = list(map(json.loads, (ANSWERS / f"{table}.jsonl").read_text().splitlines()))
    found = list(map(json.loads, lines(table, kinds)))
    assert [name for name, _ in found] == [name for name, _ in recorded], "record the cases"
    return [
        f"{table}, {name}: {now!r}, recorded {then!r}"
        for (name, now), (_, then) in zip(found, recorded, strict=True)
        if now != then
    ]


def lines(table: str, kinds: dict[str, Any]) -> Iterator[str]:
    """The answers as they are recorded: what repeats a character often is short."""
    for line in answers(table, kinds):
        text = json.dumps(line) + "\n"
        yield re.sub(r"(.)\1{99,}", lambda run: f"{run[1]} {len(run[0])} times", text)


def answers(table: str, kinds: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Play all cases; those of nsqd with the same flags have one, each of nsqlookupd its own."""
    play, cases = TABLES[table]
    with ExitStack() as stack:
        nsqds: dict[tuple[str, ...], Any] = {}
        for case in cases:
            if table.startswith("nsqlookupd"):
                with running(kinds["nsqlookupd"](*case.flags)) as lookupd:
                    yield case.name, play(lookupd, case)
            else:
                if case.flags not in nsqds:
                    path = Path(stack.enter_context(TemporaryDirectory(prefix="nsqd-")))
                    nsqds[case.flags] = stack.enter_context(
                        running(kinds["nsqd"](path, *case.flags))
                    )
                yield case.name, play(nsqds[case.flags], case)


@contextmanager
def running(daemon: Any) -> Iterator[Any]:
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()
