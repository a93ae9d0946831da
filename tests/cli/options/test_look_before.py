"""What is said before a subscription: one error where nobody answers, and names first of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

DEAD = "127.0.0.1:1"
COMMANDS = {
    "tail": ["tail", "-t", "clicks"],
    "peek": ["peek", "-t", "clicks", "-c", "archive"],
    "to-file": ["to-file", "-t", "clicks", "--output-dir", "DIR"],
    "to-nsq": ["to-nsq", "-t", "clicks", f"--destination-nsqd-tcp-address={DEAD}"],
    "to-http": ["to-http", "-t", "clicks", "--post=http://127.0.0.1:1/"],
    "to-exec": ["to-exec", "-t", "clicks", "true"],
    "spark ingest": ["spark", "ingest", "-t", "clicks", "-o", "DIR/o", "--checkpoint", "DIR/c"],
}
SUBSCRIBING = [each for each in COMMANDS if each not in ("spark ingest", "peek")]


def words(command: str, tmp_path: Path) -> list[str]:
    return [word.replace("DIR", str(tmp_path)) for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_where_nobody_answers_that_alone_is_said(
    command: str, run_nsq: RunNsq, tmp_path: Path
) -> None:
    if command == "spark ingest":
        pytest.importorskip("pyspark")
    nsqd = run_nsq([*words(command, tmp_path), f"--nsqd-tcp-address={DEAD}"])
    lookupd = run_nsq([*words(command, tmp_path), f"--lookupd-http-address={DEAD}"])

    for result, place in ((nsqd, DEAD), (lookupd, f"http://{DEAD}")):
        assert (result.status, result.out) == (4, b"")
        [error, hint] = result.err.splitlines()
        assert error == f"nsq: error: cannot connect to {place} (connection refused)"
        assert hint.startswith("hint: ")


@pytest.mark.parametrize("command", SUBSCRIBING)
def test_a_name_is_refused_before_anybody_is_asked(
    command: str, run_nsq: RunNsq, tmp_path: Path
) -> None:
    given = [word.replace("clicks", "a/b") for word in words(command, tmp_path)]

    result = run_nsq([*given, f"--nsqd-tcp-address={DEAD}", "--create"])

    assert result.status == 2
    assert result.err.splitlines()[0] == "nsq: error: invalid topic name 'a/b'"


def test_an_nsqd_that_answers_without_its_http_api_is_subscribed_to_and_that_is_said(
    nsqd: GoNsqd, run_nsq: RunNsq
) -> None:
    nsqd.publish("clicks", b"one")
    place = [f"--nsqd-tcp-address={nsqd.tcp_address}", f"--nsqd-http-address={DEAD}"]

    result = run_nsq(["tail", "-t", "clicks", "-n", "1", "-c", "archive", *place])

    assert (result.status, result.out) == (0, b"one\n")
    assert "cannot check whether topic clicks exists" in result.err
