"""``nsq drain`` as a process: what moves, what stays, and that nothing gets lost between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import ValidJson
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer

BODIES = [b"%d" % number for number in range(1000)]


@pytest.fixture
def nsqds(go_nsqd: Callable[..., GoNsqd]) -> tuple[Nsqd, Nsqd]:
    """The nsqd to retire, and the one that takes over."""
    return go_nsqd(), go_nsqd()


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
    plan = "move about 1000 messages of topic clicks from arch; they go to clicks/arch\n"
    assert (result.status, result.err) == (0, f"{plan}nsq: 1000 messages moved, 0 left\n")
    assert (document["moved"], document["left"]) == (1000, 0)
    assert source.depth("clicks", "arch") == 0
    assert bodies(target, "clicks", "arch", 1000) == sorted(BODIES)


def test_a_topic_without_channels_gets_none(run_nsq: RunNsq, nsqds: tuple[Nsqd, Nsqd]) -> None:
    source, target = nsqds
    source.publish("clicks", *BODIES[:10])

    result = run_nsq(command(source, target, "--yes"))

    assert (result.status, result.err) == (
        0,
        "move about 10 messages of topic clicks\nnsq: 10 messages moved, 0 left\n",
    )
    assert source.topic_stats("clicks")["channels"] == []
    assert target.topic_stats("clicks")["channels"] == []
    assert target.depth("clicks") == 10


def test_what_the_other_nsqd_refuses_is_still_there(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd]
) -> None:
    source, target = go_nsqd(), go_nsqd("-max-msg-size=10")
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
