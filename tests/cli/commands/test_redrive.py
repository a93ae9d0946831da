"""``nsq redrive``: dead letters back to their topics, counted, and kept if that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.clients import bodies_in
from plugins.http_api import Nsqd

from nsqtools.protocol.message import WireMessage
from nsqtools.records.envelope import encode_dead_letter, encode_many


def letter(topic: str, body: bytes, error: str = "HTTP 500") -> bytes:
    message = WireMessage(1, 3, b"0f1e2d3c4b5a6978", body)
    return encode_dead_letter(topic, "n:1", message, error=error, failed_at_ns=2)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    path = tmp_path / "dead.jsonl"
    path.write_bytes(
        letter("clicks", b"one")
        + letter("views", b"\xfftwo", "HTTP 404")
        + b"nonsense\n"
        + encode_many("clicks", "n:1", [WireMessage(1, 1, b"0" * 16, b"plain")])
    )
    return path


def test_each_goes_to_its_topic_and_the_rest_is_named(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], letters: Path, tmp_path: Path
) -> None:
    nsqd, unsent = any_nsqd(), tmp_path / "again"
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--unsent-file", str(unsent)]
    result = run_nsq(["redrive", str(letters), *place])

    assert result.status == 6, result.err
    assert "line 3 is rejected: not JSON" in result.err
    assert "3 confirmed, 1 rejected" in result.err
    assert bodies_in(nsqd, "clicks", 2) == [b"one", b"plain"]
    assert bodies_in(nsqd, "views", 1) == [b"\xfftwo"]
    assert unsent.read_bytes() == b"nonsense\n"


def test_some_of_them_go_to_another_topic(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], letters: Path
) -> None:
    nsqd = any_nsqd()
    more = ["-t", "fixed", "--error", "404$", "--nsqd-tcp-address", nsqd.tcp_address]
    result = run_nsq(["redrive", str(letters), *more])

    assert "1 confirmed, 1 rejected" in result.err
    assert bodies_in(nsqd, "fixed", 1) == [b"\xfftwo"]


def test_a_dry_run_publishes_nothing(run_nsq: RunNsq, letters: Path) -> None:
    result = run_nsq(["redrive", str(letters), "--dry-run", "--nsqd-tcp-address", "127.0.0.1:1"])

    assert result.status == 0, result.err
    assert result.out.decode().splitlines() == [
        "1 message for clicks: HTTP 500",
        "1 message for clicks: no error",
        "1 message for views: HTTP 404",
    ]


def test_without_nsqd_everything_is_kept(run_nsq: RunNsq, letters: Path, tmp_path: Path) -> None:
    place = ["--nsqd-tcp-address", "127.0.0.1:1", "--retry-timeout", "0s"]
    unsent = tmp_path / "again"
    result = run_nsq(["redrive", str(letters), *place, "--unsent-file", str(unsent)])

    assert result.status == 4, result.err
    assert sorted(unsent.read_bytes().splitlines()) == sorted(letters.read_bytes().splitlines())
