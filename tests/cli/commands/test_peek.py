"""``nsq peek`` as a process: messages are seen, and stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import ValidJson
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until


@pytest.fixture
def nsqd(any_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd with three messages in clicks/arch."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"one", b"two", b"three")
    return nsqd


def at(nsqd: Nsqd, *arguments: str) -> list[str]:
    addresses = [f"--nsqd-tcp-address={nsqd.tcp_address}"]
    return ["peek", *arguments, *addresses, f"--nsqd-http-address={nsqd.http_address}"]


def test_messages_are_shown_and_stay_where_they_are(
    run_nsq: RunNsq, nsqd: Nsqd, valid_json: ValidJson
) -> None:
    first = run_nsq(at(nsqd, "-t", "clicks", "-c", "arch", "-n", "3"))
    wait_until(lambda: nsqd.depth("clicks", "arch") == 3, what="all are back in the queue")
    again = run_nsq(at(nsqd, "-t", "clicks", "-c", "arch", "-n", "3", "--json"))

    assert (first.status, sorted(first.out.split())) == (0, [b"one", b"three", b"two"])
    assert first.err == ("nsq: 3 messages shown and given back; the attempts of each grew by one\n")
    messages = [valid_json("message", line) for line in again.out.splitlines()]
    assert sorted(message["body"] for message in messages) == ["one", "three", "two"]
    assert {message["attempts"] for message in messages} == {2}
    wait_until(lambda: nsqd.depth("clicks", "arch") == 3, what="all are back in the queue")


def test_messages_are_shown_by_a_template(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    shape = ["--format", "{topic}:{body:hex}\\n"]
    result = run_nsq(at(nsqd, "-t", "clicks", "-c", "arch", "-n", "3", *shape))

    assert result.status == 0
    assert sorted(result.out.split()) == sorted(
        f"clicks:{body.hex()}".encode() for body in (b"one", b"two", b"three")
    )


def test_fewer_than_asked_for_are_no_reason_to_wait_for_ever(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    silence = ["--exit-idle", f"{patience_s(0.7):g}s"]  # of nsqd too, on a busy machine
    result = run_nsq(at(nsqd, "-t", "clicks", "-c", "arch", "-n", "9", *silence))

    assert (result.status, result.out.count(b"\n")) == (0, 3)


def test_a_look_creates_nothing(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    no_topic = run_nsq(at(nsqd, "-t", "click", "-c", "arch"))
    no_channel = run_nsq(at(nsqd, "-t", "clicks", "-c", "arhc"))
    tcp_alone = ["--nsqd-tcp-address=127.0.0.1:1"]
    nobody = run_nsq(["peek", "-t", "clicks", "-c", "arch", *tcp_alone])

    assert [no_topic.status, no_channel.status, nobody.status] == [3, 3, 4]
    assert "Did you mean arch?" in no_channel.err
    assert "cannot connect to 127.0.0.1:1 (connection refused)" in nobody.err
    [topic] = nsqd.stats()["topics"]
    assert [channel["channel_name"] for channel in topic["channels"]] == ["arch"]
