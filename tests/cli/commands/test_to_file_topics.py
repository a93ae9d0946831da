"""``nsq to-file`` when topics go and come back, and when nsqlookupd forgets them for a while."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import messages_of, unfinished
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.scripted_lookupd import ScriptedLookupd
from plugins.waiting import patience_s, wait_until

CHANNEL = "archive"
DEADLINE_S = patience_s(30.0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def lookupd(nsqlookupd: Callable[..., GoNsqlookupd]) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def nsqd(go_nsqd: Callable[..., GoNsqd], lookupd: GoNsqlookupd) -> GoNsqd:
    return go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")


def by_pattern(lookupd: GoNsqlookupd, out: Path) -> list[str]:
    place = ["--lookupd-http-address", lookupd.http_address, "--output-dir", str(out)]
    pattern = ["--topic-pattern", "^orders", "--topic-refresh", "300ms", "-c", CHANNEL]
    return ["to-file", *pattern, *place, "-X", "lookupd_poll_interval=300ms"]


def wait_for_topic(lookupd: GoNsqlookupd, topic: str) -> None:
    wait_until(lambda: len(lookupd.producers(topic)) == 1, what=f"{topic} at nsqlookupd")


def wait_for_consumer(nsqd: GoNsqd, topic: str) -> None:
    def clients() -> int:
        topics = nsqd.stats()["topics"] or ()
        channels = [c for t in topics if t["topic_name"] == topic for c in t["channels"]]
        return sum(c["client_count"] for c in channels if c["channel_name"] == CHANNEL)

    wait_until(lambda: clients() == 1, what=f"the archiver at {topic}", timeout_s=DEADLINE_S)


def archive(nsqd: GoNsqd, topic: str, *bodies: bytes) -> None:
    """Publish, and wait until the archiver has finished them."""
    if bodies:
        nsqd.publish(topic, *bodies)
    wait_until(
        lambda: unfinished(nsqd, topic, CHANNEL) == 0,
        what="the messages are archived",
        timeout_s=DEADLINE_S,
    )


def bodies_after(process: subprocess.Popen[bytes], out: Path) -> list[bytes]:
    process.terminate()
    process.communicate(timeout=DEADLINE_S)
    return sorted(message["body"] for message in messages_of(out))


def test_an_nsqlookupd_that_forgot_everything_ends_no_topic(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    nsqd.create_channel("orders", CHANNEL)
    wait_for_topic(lookupd, "orders")
    process = spawn_nsq(by_pattern(lookupd, out))
    wait_for_consumer(nsqd, "orders")
    archive(nsqd, "orders", b"before")

    lookupd.stop()
    lookupd.start()  # nsqd registers again at its next heartbeat, in up to 15 s, or just now
    until_s = time.monotonic() + 2  # several refreshes
    while time.monotonic() < until_s:
        assert nsqd.channel_stats("orders", CHANNEL)["client_count"] == 1
        time.sleep(0.05)
    archive(nsqd, "orders", b"meanwhile")

    assert process.poll() is None
    assert len(bodies_after(process, out)) == 2


def test_a_further_nsqd_of_a_topic_is_found_with_the_topics_not_by_the_topics_own_lookups(
    lookupd: GoNsqlookupd,
    nsqd: GoNsqd,
    go_nsqd: Callable[..., GoNsqd],
    out: Path,
    spawn_nsq: SpawnNsq,
) -> None:
    """A thousand topics may then ask seldom by themselves."""
    other = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.create_channel("orders", CHANNEL)
    wait_for_topic(lookupd, "orders")
    spawn_nsq([*by_pattern(lookupd, out), "-X", "lookupd_poll_interval=300s"])
    archive(nsqd, "orders", b"one")

    other.create_channel("orders", CHANNEL)
    archive(other, "orders", b"two")


def test_the_topics_of_a_fleet_are_not_looked_up_one_by_one(
    scripted_lookupd: Callable[[], ScriptedLookupd], nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    """The discovery has just got the list of all nsqd with their topics."""
    topics = [f"orders{number}" for number in range(5)]
    for topic in topics:
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, b"one")
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(nsqd.tcp_address)
    lookupd.answer["topics"] = lookupd.answer["producers"][0]["topics"] = topics

    place = ["--lookupd-http-address", lookupd.address, "--output-dir", str(out)]
    pattern = ["--topic-pattern", "^orders", "-c", CHANNEL]
    result = run_nsq(["to-file", *pattern, *place, "-n", "5"])

    assert result.status == 0, result.err
    assert len(messages_of(out)) == 5
    assert [path for path, _ in lookupd.requests if path.startswith("/lookup")] == []


def test_a_topic_that_is_deleted_and_made_again_is_archived_again(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    """One that was named; those of a pattern are deleted in tests/faults/test_to_file_fleet.py."""
    nsqd.create_channel("orders", CHANNEL)
    wait_for_topic(lookupd, "orders")
    args = by_pattern(lookupd, out)
    args[1:3] = ["-t", "orders"]
    process = spawn_nsq(args)
    wait_for_consumer(nsqd, "orders")
    archive(nsqd, "orders", b"before")

    lookupd.post("/topic/delete", topic="orders")  # first, as nsqadmin does: or it sends us back
    nsqd.post("/topic/delete", topic="orders")
    wait_until(lambda: not nsqd.stats()["topics"], what="the topic is deleted")
    wait_until(lambda: len(list(out.glob("orders*"))) > 0, what="its files", timeout_s=DEADLINE_S)
    assert not nsqd.stats()["topics"]
    nsqd.publish("orders", b"after 1", b"after 2")
    wait_for_consumer(nsqd, "orders")
    archive(nsqd, "orders", b"after 3")

    assert process.poll() is None
    assert len(bodies_after(process, out)) == 4


def test_many_topics_fit_under_a_low_soft_limit_of_descriptors(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    topics = [f"orders{number}" for number in range(30)]
    for topic in topics:
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, b"one")
    wait_until(
        lambda: len(lookupd.json("/topics")["topics"]) == len(topics), what="the topics are known"
    )
    process = spawn_nsq(by_pattern(lookupd, out), soft_descriptors=64)

    for topic in topics:
        wait_for_consumer(nsqd, topic)
        archive(nsqd, topic)

    assert len(bodies_after(process, out)) == len(topics)
