"""``nsq to-file`` with hundreds of topics: descriptors, kills and restarts of all daemons.

The long forms run with ``-m slow``: 1,000 topics, ten kills of 200 topics, two minutes of restarts.
"""

import os
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from plugins.archives import assert_each_once, ended, killed_again_and_again, messages_of, parts
from plugins.cli import RunNsq, SpawnNsq
from plugins.clients import InBackground
from plugins.examples import slow
from plugins.http_server import MakeScripted
from plugins.servers import GoNsqd, GoNsqlookupd, MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.archive import archiver
from nsqtools.cluster import topics

CHANNEL = "archive"
DEADLINE_S = patience_s(60.0)
SOON = ("-X", "lookupd_poll_interval=300ms")


class Fleet:
    """An archiver of all topics whose names begin with "orders", one nsqd, and its files."""

    def __init__(self, lookupd: GoNsqlookupd, nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq) -> None:
        self.lookupd, self.nsqd, self.out = lookupd, nsqd, out
        self.process: subprocess.Popen[bytes]
        self._spawn_nsq = spawn_nsq

    def command(self, *flags: str) -> list[str]:
        place = ["--lookupd-http-address", self.lookupd.http_address, "--output-dir", str(self.out)]
        pattern = ["--topic-pattern", "^orders", "--topic-refresh", "300ms", "-c", CHANNEL]
        return ["to-file", *pattern, *place, *flags]

    def start(self, *flags: str, **more: int) -> subprocess.Popen[bytes]:
        self.process = self._spawn_nsq(self.command(*flags), **more)
        return self.process

    def fill(self, topics: int, messages: int) -> list[bytes]:
        """Publish distinct messages to a number of topics, and wait until nsqlookupd lists them."""
        published = []
        for topic in [f"orders{number:04d}" for number in range(topics)]:
            bodies = [b"%s %06d" % (topic.encode(), number) for number in range(messages)]
            self.nsqd.create_channel(topic, CHANNEL)
            self.nsqd.publish(topic, *bodies)
            published += bodies
        self.wait_for_topics(topics)
        return published

    def wait_for_topics(self, count: int) -> None:
        request = self.lookupd.json
        wait_until(lambda: len(request("/topics")["topics"]) == count, what="topics", timeout_s=60)

    def channels(self, nsqd: GoNsqd) -> list[dict[str, int]]:
        return [channel for topic in nsqd.stats()["topics"] or () for channel in topic["channels"]]

    def left(self, nsqd: GoNsqd | None = None) -> int:
        """Count the messages of all topics that are not archived yet."""
        counts = ("depth", "in_flight_count", "deferred_count")
        return sum(channel[name] for channel in self.channels(nsqd or self.nsqd) for name in counts)

    def wait_until_archived(self, nsqd: GoNsqd | None = None) -> None:
        def is_empty() -> bool:
            assert self.process.poll() is None, "it ended by itself"
            return self.left(nsqd) == 0

        wait_until(is_empty, what="empty channels", timeout_s=DEADLINE_S)

    def wait_for_consumers(self) -> None:
        def clients() -> list[int]:
            return [channel["client_count"] for channel in self.channels(self.nsqd)]

        wait_until(lambda: min(clients(), default=0), what="the archiver", timeout_s=DEADLINE_S)

    def archived(self) -> list[bytes]:
        return [message["body"] for message in messages_of(self.out)]


@pytest.fixture
def fleet(nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, spawn_nsq: SpawnNsq, tmp_path: Path) -> Fleet:
    lookupd = nsqlookupd()
    where = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd = go_nsqd(*where, "-mem-queue-size=1000", "-msg-timeout=2s")
    return Fleet(lookupd, nsqd, tmp_path / "out", spawn_nsq)


@pytest.mark.parametrize(("topics", "memory_mb"), [(200, 130), slow(1000, 250)])
def test_a_fleet_needs_few_threads_and_megabytes(fleet: Fleet, topics: int, memory_mb: int) -> None:
    published = fleet.fill(topics, 50)

    process = fleet.start(soft_descriptors=64)
    fleet.wait_until_archived()

    proc = Path(f"/proc/{process.pid}")
    for what, most in (("fd", topics + 20), ("task", 8)):  # a connection each; three would do
        wait_until(  # threads that connect end after their work
            lambda: len(os.listdir(proc / what)) <= most,  # noqa: B023
            what=f"<= {most} in {what}",
            timeout_s=20,
        )
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())
    assert int(kilobytes) <= 1000 * memory_mb
    assert "the limit of open files" not in ended(process)
    assert_each_once(fleet.archived(), published)


@pytest.mark.parametrize("room", [12, 0])
def test_topics_beyond_the_limit_of_open_files_are_reported(
    fleet: Fleet, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    published = fleet.fill(8, 5)
    limit = len(os.listdir("/dev/fd")) + archiver.RESERVED_DESCRIPTORS + (room or -50)
    monkeypatch.setattr(archiver.resource, "getrlimit", lambda which: (limit, limit))

    result = run_nsq(fleet.command("--until-empty"), timeout=DEADLINE_S)

    assert result.status == 1, result.err
    assert "nsq: error: the limit of open files is too low to archive" in result.err
    assert "hint: Raise it: ulimit -n" in result.err
    assert ("even one topic" if not room else "orders0007 as well") in result.err
    archived = fleet.archived() if room else []
    assert_each_once(archived, published[: len(archived)])
    assert fleet.left() == len(published) - len(archived)
    assert bool(archived) == bool(room)


@pytest.mark.parametrize(("topics", "messages", "kills"), [(40, 100, 2), slow(200, 1000, 10)])
def test_a_fleet_survives_kills(fleet: Fleet, topics: int, messages: int, kills: int) -> None:
    published = fleet.fill(topics, messages)
    flags = ["--max-in-flight", "20", "--rotate-text-size", "20KB", "--sync-interval", "50ms"]
    process = killed_again_and_again(lambda: fleet.start("--gzip", *flags), fleet.left, kills)
    # its arrival shows that the last run has begun
    fleet.nsqd.publish("orders0000", b"the last one")
    fleet.wait_until_archived()
    ended(process)

    assert_each_once(fleet.archived(), [*published, b"the last one"])
    assert parts(fleet.out) == []


@pytest.mark.parametrize("seconds", [6, slow(120)])
def test_restarts_and_deletions_neither_lose_nor_double_messages(
    fleet: Fleet, seconds: int
) -> None:
    """A deletion discards at most the messages of the channel, which are counted separately."""
    rng, nsqd = random.Random(7), fleet.nsqd
    steady = [f"orders-steady-{number}" for number in range(5)]
    deleted = [f"orders-deleted-{number}" for number in range(3)]
    fleet.fill(1, 1)
    options = ("lookupd_poll_interval=1s", "reconnect_base=200ms", "max_backoff_duration=1s")
    flags = [flag for option in options for flag in ("-X", option)]
    fleet.start("--sync-interval", "100ms", *flags)
    confirmed: dict[str, list[bytes]] = {topic: [] for topic in (*steady, *deleted)}
    discarded = Counter[str]()

    def publish() -> None:
        for topic, bodies in confirmed.items():
            batch = [b"%s %d" % (topic.encode(), len(bodies) + index) for index in range(3)]
            nsqd.publish(topic, *batch)
            bodies += batch

    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(rng.randrange(10, 60)):
            publish()
            time.sleep(0.01)
        target = rng.choice(["nsqlookupd", "nsqd", "delete", "delete"])
        if target == "delete":
            topic = rng.choice(deleted)
            stats = nsqd.topic_stats(topic)
            queues = [
                channel["depth"] + channel["in_flight_count"] for channel in stats["channels"]
            ]
            discarded[topic] += stats["depth"] + sum(queues)
            nsqd.post("/topic/delete", topic=topic)
        else:
            daemon = fleet.lookupd if target == "nsqlookupd" else nsqd
            daemon.stop()
            daemon.start()
    publish()  # recreates each deleted topic
    nsqd.stop()
    nsqd.start()  # so that it registers all topics now, and not at the next heartbeat
    fleet.wait_for_topics(9)
    fleet.wait_for_consumers()
    fleet.wait_until_archived()
    log = ended(fleet.process)

    archived = Counter(fleet.archived())
    assert [body for body, times in archived.items() if times > 1] == [], "messages were doubled"
    for topic in steady:
        assert set(confirmed[topic]) - set(archived) == set(), f"lost\n{log}"
    for topic in deleted:
        missing = set(confirmed[topic]) - set(archived)
        assert len(missing) <= discarded[topic], f"lost\n{log}"
    assert "Traceback" not in log
    everything = {body for bodies in confirmed.values() for body in bodies}
    assert set(archived) <= everything | {b"orders0000 000000"}
    assert archived


@pytest.fixture
def orders(fleet: Fleet) -> Fleet:
    """A fleet with one topic and its channel, which nsqlookupd lists."""
    fleet.nsqd.create_channel("orders", CHANNEL)
    wait_until(lambda: fleet.lookupd.producers("orders"), what="the topic at nsqlookupd")
    return fleet


def test_a_restarted_nsqlookupd_without_topics_ends_no_topic(orders: Fleet) -> None:
    orders.start(*SOON)
    orders.wait_for_consumers()
    orders.nsqd.publish("orders", b"before")
    orders.wait_until_archived()

    orders.lookupd.stop()
    orders.lookupd.start()  # nsqd registers again at its next heartbeat, in up to 15 s, or just now
    until_s = time.monotonic() + 2  # several refreshes
    while time.monotonic() < until_s:
        assert orders.nsqd.channel_stats("orders", CHANNEL)["client_count"] == 1
        time.sleep(0.05)
    orders.nsqd.publish("orders", b"meanwhile")
    orders.wait_until_archived()

    ended(orders.process)
    assert len(orders.archived()) == 2


def test_a_discovery_of_topics_finds_a_second_nsqd(orders: Fleet, go_nsqd: MakeNsqd) -> None:
    """So the lookups of a thousand single topics may be rare."""
    lookupd = f"-lookupd-tcp-address={orders.lookupd.tcp_address}"
    second = go_nsqd(lookupd, "-broadcast-address=127.0.0.1")
    orders.start("-X", "lookupd_poll_interval=300s")
    orders.nsqd.publish("orders", b"one")
    orders.wait_until_archived()
    second.create_channel("orders", CHANNEL)
    second.publish("orders", b"two")
    orders.wait_until_archived(second)


def test_a_discovery_of_topics_needs_no_lookup_of_each_topic(
    fleet: Fleet, scripted_lookupd: MakeScripted, run_nsq: RunNsq
) -> None:
    """The discovery already has the list of all nsqd with their topics."""
    published, lookupd = fleet.fill(5, 1), scripted_lookupd()
    lookupd.list_nsqd(fleet.nsqd.tcp_address)
    topics = ["clicks", *fleet.lookupd.json("/topics")["topics"]]
    lookupd.answer["topics"] = lookupd.answer["producers"][0]["topics"] = topics
    fleet.lookupd.stop()

    place = ["--lookupd-http-address", lookupd.address, "-n", "5"]
    result = run_nsq(fleet.command(*place))

    assert result.status == 0, result.err
    assert_each_once(fleet.archived(), published)
    assert len(fleet.nsqd.stats()["topics"]) == 5
    assert [request for request in lookupd.requests if request.target.startswith("/lookup")] == []


@pytest.mark.parametrize("runs", [["to-file"], ["to-exec", "--", "/bin/cat"]])
def test_a_recreated_topic_is_consumed_again(
    orders: Fleet, spawn_nsq: SpawnNsq, runs: list[str]
) -> None:
    """A named topic; the test of deletions above covers the topics of a pattern."""
    place, nsqd = ["--lookupd-http-address", orders.lookupd.http_address], orders.nsqd
    out = ["--output-dir", str(orders.out)] if runs == ["to-file"] else []
    named = ["-t", "orders", "-c", CHANNEL, *place, *SOON, *out]
    orders.process = process = spawn_nsq([runs[0], *named, *runs[1:]])
    orders.wait_for_consumers()
    nsqd.publish("orders", b"before")
    orders.wait_until_archived()

    # first, as nsqadmin does; otherwise it would list the nsqd again
    orders.lookupd.post("/topic/delete", topic="orders")
    nsqd.post("/topic/delete", topic="orders")
    assert any(b"topic orders was deleted; waiting" in line for line in process.stderr)
    assert not nsqd.stats()["topics"]
    nsqd.publish("orders", b"after 1", b"after 2")
    orders.wait_for_consumers()
    nsqd.publish("orders", b"after 3")
    orders.wait_until_archived()

    summary = ended(process)
    assert "4 delivered" in summary or len(orders.archived()) == 4


def test_until_empty_waits_for_a_restarting_nsqd(
    orders: Fleet, in_background: InBackground, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", patience_s(60))
    nsqd, lookupd = orders.nsqd, orders.lookupd
    nsqd.publish("orders", b"one")
    nsqd.stop()
    wait_until(lambda: not lookupd.producers("orders"), what="its nsqd is gone")
    lookups = lookupd.log.count("GET /lookup")

    def start_once_asked() -> None:
        wait_until(lambda: lookupd.log.count("GET /lookup") > lookups, what="it is asked")
        nsqd.start()

    started = in_background(start_once_asked)
    command = orders.command("--until-empty", *SOON)
    command[1:3] = ["-t", "orders"]
    result = run_nsq(command)

    started.result()
    assert result.status == 0, result.err
    assert orders.archived() == [b"one"]
