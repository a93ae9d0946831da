"""What is suggested for a mistyped command or option: what was meant, not what is a bit like it."""

from __future__ import annotations

import pytest
from plugins.cli import RunNsq

from nsqtools.cli.parsing.app import closest


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("shcema", "Did you mean 'schema'?"),
        ("tial", "Did you mean 'tail'?"),
        ("topic lits", "Did you mean 'list'?"),
        ("topic pauze", "Did you mean 'pause'?"),
        ("tail --topc x", "Did you mean --topic?"),
        ("stat --max-dept 1", "Did you mean --max-depth?"),
        ("bench pub --bach 1", "Did you mean --batch?"),
    ],
)
def test_only_what_is_closest_is_suggested(run_nsq: RunNsq, command: str, meant: str) -> None:
    result = run_nsq(command.split())

    assert result.status == 2
    assert meant in result.err


def test_a_topic_without_its_option_is_told_how_to_be_given(run_nsq: RunNsq) -> None:
    for command in ("tail", "peek"):
        result = run_nsq([command, "clicks"])
        assert (result.status, f"nsq {command} -t clicks" in result.err) == (2, True), result.err
    assert "-t hello" not in run_nsq(["pub", "hello"]).err  # which is a message


def test_what_is_as_close_is_suggested_too() -> None:
    assert closest("uploaf", ["upload", "download"]) == ["upload"]
    assert closest("tls-k", ["tls-ca", "tls-kex", "tls-key"]) == ["tls-kex", "tls-key"]
    assert closest("x", []) == []
