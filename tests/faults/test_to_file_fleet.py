"""``nsq to-file`` with hundreds of topics: few descriptors, killed, and restarts of everything.

The long forms run with ``-m slow``: 1,000 topics, ten kills of 200 topics, two minutes of restarts.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from plugins.archives import (
    assert_each_once,
    ended,
    killed_again_and_again,
    lines_of,
    messages_of,
    parts,
)
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.scripted_lookupd import MakeScripted
from plugins.servers import MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.archive import archiver

CHANNEL = "archive"
DEADLINE_S = patience_s(60.0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def lookupd(nsqlookupd: MakeLookupd) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def nsqd(go_nsqd: MakeNsqd, lookupd: GoNsqlookupd) -> GoNsqd:
    return go_nsqd(
        f"-lookupd-tcp-address={lookupd.tcp_address}",
        "-broadcast-address=127.0.0.1",
        "-mem-queue-size=1000",
        "-msg-timeout=2s",
    )


def fleet(lookupd: GoNsqlookupd, out: Path, *flags: str) -> list[str]:
    place = ["--lookupd-http-address", lookupd.http_address, "--output-dir", str(out)]
    pattern = ["--topic-pattern", "^orders", "--topic-refresh", "300ms", "-c", CHANNEL]
    return ["to-file", *pattern, *place, *flags]


def filled(nsqd: GoNsqd, lookupd: GoNsqlookupd, topics: int, messages: int) -> list[bytes]:
    """Publish messages that all differ to so many topics, and wait until nsqlookupd has them."""
    published = []
    for topic in [f"orders{number:04d}" for number in range(topics)]:
        bodies = [b"%s %06d" % (topic.encode(), number) for number in range(messages)]
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *bodies)
        published += bodies
    wait_until(
        lambda: len(lookupd.json("/topics")["topics"]) == topics,
        what="the topics are known",
        timeout_s=60,
    )
    return published


def left(nsqd: GoNsqd) -> int:
    """What is not archived yet, of all topics."""
    channels = (each for topic in nsqd.stats()["topics"] or () for each in topic["channels"])
    return sum(c["depth"] + c["in_flight_count"] + c["deferred_count"] for c in channels)


def wait_until_archived(nsqd: GoNsqd, process: subprocess.Popen[bytes]) -> None:
    def is_empty() -> bool:
        assert process.poll() is None, "it ended by itself"
        return left(nsqd) == 0

    wait_until(is_empty, what="empty channels", timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("topics", "memory_mb"), [(200, 130), pytest.param(1000, 250, marks=pytest.mark.slow)]
)
def test_a_fleet_needs_few_threads_descriptors_and_megabytes(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq, topics: int, memory_mb: int
) -> None:
    published = filled(nsqd, lookupd, topics, 50)

    process = spawn_nsq(fleet(lookupd, out), soft_descriptors=64)
    wait_until_archived(nsqd, process)

    proc = Path(f"/proc/{process.pid}")
    assert len(os.listdir(proc / "fd")) <= topics + 20  # a connection each; three each would do
    wait_until(  # those that connect end when they are not needed any more
        lambda: len(os.listdir(proc / "task")) <= 8, what="<= 8 threads", timeout_s=20
    )
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())
    assert int(kilobytes) <= 1000 * memory_mb
    assert "the limit of open files" not in ended(process)
    assert_each_once((message["body"] for message in messages_of(out)), published)


@pytest.mark.parametrize("room", [12, 0])
def test_topics_beyond_the_limit_of_open_files_are_named_and_the_others_are_archived(
    nsqd: GoNsqd,
    lookupd: GoNsqlookupd,
    out: Path,
    run_nsq: RunNsq,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    published = filled(nsqd, lookupd, 8, 5)
    limit = len(os.listdir("/dev/fd")) + archiver.RESERVE + (room or -50)
    monkeypatch.setattr(archiver.resource, "getrlimit", lambda which: (limit, limit))

    result = run_nsq(fleet(lookupd, out, "--until-empty"), timeout=DEADLINE_S)

    assert result.status == 1, result.err
    assert "nsq: error: the limit of open files is too low to archive" in result.err
    assert "hint: Raise it: ulimit -n" in result.err
    assert ("even one topic" if not room else "orders0007 as well") in result.err
    found = [message["body"] for message in messages_of(out)] if room else []
    assert_each_once(found, published[: len(found)])
    assert left(nsqd) == len(published) - len(found)
    assert bool(found) == bool(room)


@pytest.mark.parametrize(
    ("topics", "messages", "kills"),
    [(40, 100, 2), pytest.param(200, 1000, 10, marks=pytest.mark.slow)],
)
def test_a_fleet_killed_at_random_points_loses_and_doubles_nothing(
    lookupd: GoNsqlookupd,
    nsqd: GoNsqd,
    out: Path,
    spawn_nsq: SpawnNsq,
    topics: int,
    messages: int,
    kills: int,
) -> None:
    published = filled(nsqd, lookupd, topics, messages)
    flags = ["--max-in-flight", "20", "--rotate-text-size", "20KB", "--sync-interval", "50ms"]
    args = fleet(lookupd, out, "--gzip", *flags)
    process = killed_again_and_again(lambda: spawn_nsq(args), lambda: left(nsqd), kills)
    nsqd.publish("orders0000", b"the last one")  # which shows that the last run has begun
    published.append(b"the last one")
    wait_until_archived(nsqd, process)
    ended(process)

    assert_each_once((message["body"] for message in messages_of(out)), published)
    assert parts(out) == []


@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_restarts_of_everything_and_deletions_of_topics_lose_and_double_nothing(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq, seconds: int
) -> None:
    """What a deletion discards is counted apart: as much as was in the channel, and no more."""
    rng = random.Random(7)
    steady = [f"orders-steady-{number}" for number in range(5)]
    deleted = [f"orders-deleted-{number}" for number in range(3)]
    filled(nsqd, lookupd, 1, 1)
    options = ("lookupd_poll_interval=1s", "reconnect_base=200ms", "max_backoff_duration=1s")
    flags = [flag for option in options for flag in ("-X", option)]
    process = spawn_nsq(fleet(lookupd, out, "--sync-interval", "100ms", *flags))
    confirmed: dict[str, list[bytes]] = {topic: [] for topic in (*steady, *deleted)}
    discarded = Counter[str]()

    def publish() -> None:
        for topic, bodies in confirmed.items():
            more = [b"%s %d" % (topic.encode(), len(bodies) + each) for each in range(3)]
            nsqd.publish(topic, *more)
            bodies += more

    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(rng.randrange(10, 60)):
            publish()
            time.sleep(0.01)
        what = rng.choice(["nsqlookupd", "nsqd", "delete", "delete"])
        if what == "delete":
            topic = rng.choice(deleted)
            there = nsqd.topic_stats(topic)
            queues = [each["depth"] + each["in_flight_count"] for each in there["channels"]]
            discarded[topic] += there["depth"] + sum(queues)
            nsqd.post("/topic/delete", topic=topic)
        else:
            daemon = lookupd if what == "nsqlookupd" else nsqd
            daemon.stop()
            daemon.start()
    publish()  # which gives each topic that was deleted back
    nsqd.stop()
    nsqd.start()  # so that nsqlookupd hears of all topics now, and not at the next heartbeat
    wait_until(lambda: len(lookupd.json("/topics")["topics"]) == 9, what="all topics", timeout_s=60)
    wait_until(
        lambda: all(
            any(c["client_count"] for c in topic["channels"]) for topic in nsqd.stats()["topics"]
        ),
        what="the archiver at all topics",
        timeout_s=DEADLINE_S,
    )
    wait_until_archived(nsqd, process)
    said = ended(process)

    found = Counter(message["body"] for message in messages_of(out))
    assert [body for body, times in found.items() if times > 1] == [], "messages were doubled"
    for topic in steady:
        assert set(confirmed[topic]) - set(found) == set(), f"lost\n{said}"
    for topic in deleted:
        missing = set(confirmed[topic]) - set(found)
        assert len(missing) <= discarded[topic], f"lost\n{said}"
    assert "Traceback" not in said
    everything = {body for bodies in confirmed.values() for body in bodies}
    assert set(found) <= everything | {b"orders0000 000000"}
    assert lines_of(out)


SOON = ("-X", "lookupd_poll_interval=300ms")


def create_topic(nsqd: GoNsqd, lookupd: GoNsqlookupd) -> None:
    nsqd.create_channel("orders", CHANNEL)
    wait_until(lambda: len(lookupd.producers("orders")) == 1, what="the topic at nsqlookupd")


def wait_for_consumer(nsqd: GoNsqd) -> None:
    def clients() -> int:
        topics = nsqd.stats()["topics"] or ()
        return sum(each["client_count"] for topic in topics for each in topic["channels"])

    wait_until(lambda: clients() == 1, what="the archiver at the topic", timeout_s=DEADLINE_S)


def test_an_nsqlookupd_that_forgot_everything_ends_no_topic(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    create_topic(nsqd, lookupd)
    process = spawn_nsq(fleet(lookupd, out, *SOON))
    wait_for_consumer(nsqd)
    nsqd.publish("orders", b"before")
    wait_until_archived(nsqd, process)

    lookupd.stop()
    lookupd.start()  # nsqd registers again at its next heartbeat, in up to 15 s, or just now
    until_s = time.monotonic() + 2  # several refreshes
    while time.monotonic() < until_s:
        assert nsqd.channel_stats("orders", CHANNEL)["client_count"] == 1
        time.sleep(0.05)
    nsqd.publish("orders", b"meanwhile")
    wait_until_archived(nsqd, process)

    ended(process)
    assert len(messages_of(out)) == 2


def test_a_further_nsqd_of_a_topic_is_found_with_the_topics_not_by_the_topics_own_lookups(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, go_nsqd: MakeNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    """A thousand topics may then ask seldom by themselves."""
    other = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    create_topic(nsqd, lookupd)
    process = spawn_nsq(fleet(lookupd, out, "-X", "lookupd_poll_interval=300s"))
    nsqd.publish("orders", b"one")
    wait_until_archived(nsqd, process)
    other.create_channel("orders", CHANNEL)
    other.publish("orders", b"two")
    wait_until_archived(other, process)


def test_the_topics_of_a_fleet_are_not_looked_up_one_by_one(
    scripted_lookupd: MakeScripted, nsqd: GoNsqd, out: Path, run_nsq: RunNsq
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
    assert [each for each in lookupd.requests if each.target.startswith("/lookup")] == []


def test_a_topic_that_is_deleted_and_made_again_is_archived_again(
    lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    """One that was named; those of a pattern are deleted above."""
    create_topic(nsqd, lookupd)
    args = fleet(lookupd, out, *SOON)
    args[1:3] = ["-t", "orders"]
    process = spawn_nsq(args)
    wait_for_consumer(nsqd)
    nsqd.publish("orders", b"before")
    wait_until_archived(nsqd, process)

    lookupd.post("/topic/delete", topic="orders")  # first, as nsqadmin does: or it sends us back
    nsqd.post("/topic/delete", topic="orders")
    wait_until(lambda: not nsqd.stats()["topics"], what="the topic is deleted")
    wait_until(lambda: len(list(out.glob("orders*"))) > 0, what="its files", timeout_s=DEADLINE_S)
    assert not nsqd.stats()["topics"]
    nsqd.publish("orders", b"after 1", b"after 2")
    wait_for_consumer(nsqd)
    nsqd.publish("orders", b"after 3")
    wait_until_archived(nsqd, process)

    ended(process)
    assert len(messages_of(out)) == 4
