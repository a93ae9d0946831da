"""``nsq drain`` as a process: what moves, what stays, and that nothing gets lost between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import ValidJson
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer

BODIES = [b"%d" % number for number in range(1000)]


@pytest.fixture
def nsqds(any_nsqd: Callable[..., Nsqd]) -> tuple[Nsqd, Nsqd]:
    """The nsqd to retire, and the one that takes over."""
    return any_nsqd(), any_nsqd()


def bodies(nsqd: Nsqd, topic: str, channel: str, count: int) -> list[bytes]:
    """The bodies of so many messages, consumed and finished."""
    found: list[bytes] = []
    with Consumer(topic, channel, nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        for batch in consumer.batches(timeout_s=patience_s(5)):
            found += [message.body for message in batch]
            batch.finish()
            if len(found) >= count:
                break
    return sorted(found)


def command(source: Nsqd, target: Nsqd, *arguments: str) -> list[str]:
    return ["drain", source.http_address, "--to", target.http_address, *arguments]


def test_a_channel_is_moved_to_the_last_message(
    run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd], valid_json: ValidJson
) -> None:
    source, target = nsqds
    source.create_channel("clicks", "arch")
    source.publish("clicks", *BODIES)

    result = run_nsq(command(source, target, "--yes", "--json"))

    document = valid_json("drain", result.out)
    assert (result.status, result.err) == (0, "nsq: 1000 messages moved, 0 left\n")
    assert (document["moved"], document["left"]) == (1000, 0)
    assert source.depth("clicks", "arch") == 0
    assert bodies(target, "clicks", "arch", 1000) == sorted(BODIES)


def test_a_topic_without_channels_gets_none(run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]) -> None:
    source, target = nsqds
    source.publish("clicks", *BODIES[:10])

    result = run_nsq(command(source, target, "--yes"))

    assert (result.status, result.err) == (0, "nsq: 10 messages moved, 0 left\n")
    assert source.topic_stats("clicks")["channels"] == []
    assert target.topic_stats("clicks")["channels"] == []
    assert target.depth("clicks") == 10


def test_several_channels_are_left_alone_unless_repeats_are_allowed(
    run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]
) -> None:
    source, target = nsqds
    for channel in ("arch", "live"):
        source.create_channel("clicks", channel)
    source.publish("clicks", *BODIES[:10])

    refused = run_nsq(command(source, target, "--yes"))
    moved = run_nsq(command(source, target, "--yes", "--allow-repeats"))

    assert refused.status == 6
    assert "stays: topic clicks has 2 channels, with 20 messages" in refused.err
    assert moved.err == "nsq: 10 messages moved, 0 left\n"
    for channel in ("arch", "live"):
        assert bodies(target, "clicks", channel, 10) == sorted(BODIES[:10])


def test_a_dry_run_and_a_pipe_without_yes_move_nothing(
    run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]
) -> None:
    source, target = nsqds
    source.create_channel("clicks", "arch")
    source.publish("clicks", b"a")

    shown = run_nsq(command(source, target, "--dry-run"))
    refused = run_nsq(command(source, target))

    assert shown.status == 0
    assert shown.out == b"move about 1 message of topic clicks from arch\n"
    assert refused.status == 2
    assert (source.depth("clicks", "arch"), target.stats()["topics"]) == (1, [])


def test_what_is_paused_stays_and_is_named(run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]) -> None:
    source, target = nsqds
    source.create_channel("clicks", "arch")
    source.publish("clicks", b"a")
    source.post("/channel/pause", topic="clicks", channel="arch")

    result = run_nsq(command(source, target, "--yes"))

    assert result.status == 6
    assert "stays: channel clicks/arch is paused, with 1 in it" in result.err
    assert source.depth("clicks", "arch") == 1


def test_what_the_other_nsqd_refuses_is_still_there(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd]
) -> None:
    source, target = any_nsqd(), any_nsqd("-max-msg-size=10")
    source.create_channel("clicks", "arch")
    source.publish("clicks", b"short", b"longer than ten bytes")

    result = run_nsq(command(source, target, "--yes"))

    assert result.status == 1
    assert "E_BAD_MESSAGE" in result.err
    wait_until(lambda: target.depth("clicks") == 0, what="what was moved is in the channel")
    left = source.channel_stats("clicks", "arch")
    assert left["depth"] + target.depth("clicks", "arch") == 2
    # given back, maybe more than once, and not left in flight until it times out
    assert left["requeue_count"] >= left["depth"] >= 1
    assert (left["in_flight_count"], left["timeout_count"]) == (0, 0)


def test_itself_and_nobody_are_no_targets(run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]) -> None:
    source, target = nsqds
    source.create_channel("clicks", "arch")
    source.publish("clicks", b"a")
    itself = run_nsq(command(source, source, "--yes"))
    target.kill()
    nobody = run_nsq(command(source, target, "--yes"))

    assert (itself.status, nobody.status) == (2, 4)
    assert "cannot be drained into itself" in itself.err
    assert source.depth("clicks", "arch") == 1
