"""Messages for one channel: their receivers, ids and timestamps, after kills and failures too."""

import json
import os
import socket
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugins.archives import BEGIN_NS, write_archive
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq
from plugins.clusters import ValidJson
from plugins.daemons import EmbeddedServer, GoNsqd, GoNsqlookupd, Nsqd, Running
from plugins.examples import slow
from plugins.http_server import AuthServer
from plugins.raw_client import RawClient
from plugins.servers import DataPath, GoProgram, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.errors import OutputError, PublishError
from nsqtools.one_channel import channel_publisher, temporary_nsqd
from nsqtools.one_channel.channel_publisher import ChannelPublisher, plan_channel_moves
from nsqtools.one_channel.temporary_nsqd import TemporaryNsqd
from nsqtools.protocol.frames import WireMessage
from nsqtools.protocol.stats import read_stats
from nsqtools.server import job_nsqd
from nsqtools.server.job_nsqd import MARK, JobNsqd

CHANNELS = ("audit", "billing", "email")
OPTIONS = ClientOptions(lookupd_poll_interval_s=0.1, max_in_flight=100)


class Consumed:
    """Consumers of channels that nsqlookupd directs to the nsqd, and the messages they received."""

    def __init__(self, lookupd: GoNsqlookupd, stack: ExitStack) -> None:
        self.seen: defaultdict[tuple[str, str], list[Message]] = defaultdict(list)
        self.lookupd, self._stack = lookupd, stack

    def begin(self, topic: str, *channels: str, options: ClientOptions = OPTIONS) -> None:
        address = self.lookupd.http_address
        for channel in channels:
            consumer = Consumer(topic, channel, lookupd_http_addresses=address, options=options)
            take = self.seen[topic, channel].append
            thread = threading.Thread(target=consumer.run, args=(take,))
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(consumer.stop)

    def of(self, channel: str) -> list[Message]:
        return self.seen["orders", channel]

    def counts(self, topic: str, channel: str) -> Counter[bytes]:
        return Counter(message.body for message in self.seen[topic, channel])

    def options(self, *more: object) -> list[str]:
        http, tcp = self.lookupd.http_address, self.lookupd.tcp_address
        return ["--lookupd-http-address", http, "--lookupd-tcp-address", tcp, *map(str, more)]

    def command(self, *words: object) -> list[str]:
        return [*map(str, words), "-c", "billing", *self.options()]

    @contextmanager
    def temporary_nsqd(self, place: Path) -> Iterator[TemporaryNsqd]:
        lookupd = (self.lookupd.tcp_address,)
        with (
            Cluster(ClusterAddresses((), (self.lookupd.http_address,))) as cluster,
            TemporaryNsqd(place, cluster, lookupd_tcp_addresses=lookupd, report=print) as temporary,
        ):
            yield temporary


@pytest.fixture
def consumed(lookupd: GoNsqlookupd) -> Iterator[Consumed]:
    with ExitStack() as stack:
        yield Consumed(lookupd, stack)


@pytest.fixture
def orders(consumed: Consumed, lookupd: GoNsqlookupd, go_nsqd: MakeNsqd) -> Consumed:
    """A cluster with a topic and its channels."""
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    for name in CHANNELS:
        nsqd.create_channel("orders", name)
    wait_until(
        lambda: len(lookupd.json("/channels?topic=orders")["channels"]) == len(CHANNELS),
        what="nsqlookupd knows the channels",
    )
    return consumed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def archived(path: Path, count: int, *, kind: str = "old") -> Path:
    messages = [
        WireMessage(BEGIN_NS + n * 10**9, 6, b"%016x" % (n + 1), b"%b %d" % (kind.encode(), n))
        for n in range(count)
    ]
    return write_archive(path, messages, topic="orders")


def test_only_one_channel_gets_the_messages_with_ids_and_timestamps(
    orders: Consumed, run_nsq: RunNsq, tmp_path: Path
) -> None:
    orders.begin("orders", *CHANNELS)

    result = run_nsq(orders.command("replay", archived(tmp_path / "a.gz", 5)))

    assert result.status == 0, result.err
    assert "nsq: 5 messages consumed\n" in result.err
    assert sorted(
        (message.id, message.timestamp_ns, message.attempts) for message in orders.of("billing")
    ) == [(b"%016x" % (n + 1), BEGIN_NS + n * 10**9, 1) for n in range(5)]
    assert not orders.of("audit") + orders.of("email")
    assert not (tmp_path / "nsqd-billing").exists()
    assert len(orders.lookupd.json("/nodes")["producers"]) == 1

    published = run_nsq(orders.command("pub", "-t", "orders", "a", "b", "--defer", "1s"))
    assert published.status == 0, published.err
    assert sorted(message.body for message in orders.of("billing")[5:]) == [b"a", b"b"]
    assert not orders.of("audit") + orders.of("email")


def test_dead_letters_with_equal_ids_reach_a_go_consumer(
    orders: Consumed, run_nsq: RunNsq, tmp_path: Path, go_program: GoProgram
) -> None:
    # go-nsq silently finishes a message after five attempts
    ids = ["0d9c5a1b2c3d4001", "0d9c5a1b2c3d4002", "not hexadecimal!"]
    letter = {"topic": "orders", "nsqd": "nsqd:4150", "ts": BEGIN_NS, "attempts": 6}
    letter |= {"error": "HTTP 500", "failed_at": BEGIN_NS}
    letters = zip([*ids, *ids], "abcdef", strict=True)
    lines = (json.dumps(letter | {"id": id, "body": body}) for id, body in letters)
    (dead := tmp_path / "dead").write_text("\n".join(lines) + "\n")
    words = ["-topic=orders", "-channel=billing", "-consumer-opt=lookupd_poll_interval,100ms"]
    place = f"-lookupd-http-address={orders.lookupd.http_address}"
    command = [go_program("nsq_tail"), *words, place]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=nowhere) as tail:
        try:
            result = run_nsq(orders.command("redrive", dead))
        finally:
            tail.terminate()
            printed, _ = tail.communicate()

    assert result.status == 0, result.err
    assert sorted(printed.split()) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert "nsq: 6 messages consumed, 4 with a new id\n" in result.err
    assert "message 0d9c5a1b2c3d4001 is 1" in result.err


def test_messages_that_a_full_disk_refuses_are_in_the_unsent_file(
    orders: Consumed, run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: object, **__: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(JobNsqd, "put", put)
    lines = [b"%d %b\n" % (n, b"x" * 1000) for n in range(4000)]
    command = orders.command("pub", "-t", "orders", "--unsent-file", tmp_path / "u")
    result = run_nsq(command, stdin=b"".join(lines))
    assert result.status == 1
    assert "nsq: 0 confirmed, 0 rejected, 0 unknown, 4000 unsent\n" in result.err
    assert (tmp_path / "u").read_bytes() == b"".join(lines)


@pytest.mark.parametrize("others", [False, True])
def test_a_run_without_consumers_ends_and_the_next_one_continues(
    orders: Consumed,
    run_nsq: RunNsq,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: bool,
) -> None:
    monkeypatch.setattr(channel_publisher, "REPORTED_AFTER_S", 0.0)
    archive, new_archive = (
        archived(tmp_path / "a.gz", 5),
        archived(tmp_path / "b.gz", 5, kind="new"),
    )
    place = tmp_path / "place"

    def run(path: Path, *more: object) -> tuple[int, str]:
        result = run_nsq(orders.command("replay", path, "--data-path", place, *more))
        return result.status, result.err

    status, stderr = run(archive, "--wait", "0.2s", "--max-depth", 3)
    assert status == 7
    assert stderr.count("waiting for consumers of orders/billing: most ask nsqlookupd") == 1
    assert "no consumer of orders/billing connected within 200ms" in stderr
    assert stderr.endswith(f"nsq: {place} has 3 messages, and how far this came: run it again\n")

    status, stderr = run(new_archive)
    assert status == 2
    assert f"{place} has the rest of a run with other messages" in stderr

    orders.begin("orders", "billing")
    if others:  # a run without its progress delivers only the messages that are left
        result = run_nsq(orders.command("pub", "-t", "orders", "old 5", "--data-path", place))
        assert "nsq: 4 messages consumed\n" in result.err
        assert "has 0 messages, and how far an earlier run came: run that again" in result.err
    status, stderr = run(archive)
    assert (status, f"nsq: {2 if others else 5} messages consumed\n" in stderr) == (0, True), stderr
    expected = {b"old %d" % n: 1 for n in range(6 if others else 5)}
    assert orders.counts("orders", "billing") == expected
    assert not place.exists()


def test_an_nsqlookupd_that_does_not_list_it_is_reported(
    orders: Consumed, run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary_nsqd, "_REGISTRATION_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wrong = f"127.0.0.1:{silent.getsockname()[1]}"
        command = orders.command("replay", archived(tmp_path / "a.gz", 1))
        result = run_nsq([*command[:-1], wrong])
    assert (result.status, "does not show the nsqd that registered at" in result.err) == (4, True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("nsqd-")] == []


def test_producers_are_refused_and_consumers_get_the_limits_of_the_cluster(
    lookupd: GoNsqlookupd, consumed: Consumed, go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    register = f"-lookupd-tcp-address={lookupd.tcp_address}"
    nsqd = go_nsqd(register, "-msg-timeout=2m", "-max-msg-timeout=1h", "-max-heartbeat-interval=5m")
    nsqd.create_channel("orders", "billing")
    wait_until(lambda: lookupd.json("/channels?topic=orders")["channels"], what="it is registered")
    with consumed.temporary_nsqd(tmp_path / "place") as temporary:
        temporary.join("orders", "billing")
        with RawClient(str(temporary.nsqd.address)) as client:
            assert client.identify()["msg_timeout"] == 120_000
            client.identify(msg_timeout=3_600_000, heartbeat_interval=300_000)
        with Producer(str(temporary.nsqd.address), retry_timeout_s=0) as producer:
            for publish in (
                lambda: producer.publish("orders", b"a"),
                lambda: producer.publish_many("other", [b"a", b"b"]),
                lambda: producer.publish_deferred("orders", b"a", 1),
            ):
                with pytest.raises(PublishError, match="takes none"):
                    publish()
        api = Running()
        api.http_address = temporary.nsqd.http_address
        for target in ("/pub?topic=orders", "/topic/create?topic=b", "/channel/empty?topic=orders"):
            assert api.request("POST", target, b"a")[0] == 403
        assert temporary.nsqd.unfinished_channels() == []
        assert (tmp_path / "place" / MARK).exists()


def test_a_new_run_keeps_its_data_path_when_another_one_ends(
    orders: Consumed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_data_path, locks = job_nsqd.lock_data_path, []

    def lock(place: Path) -> int:
        locks.append(lock_data_path(place))  # the other run is faster
        return lock_data_path(place)

    monkeypatch.setattr(job_nsqd, "lock_data_path", lock)
    with orders.temporary_nsqd(tmp_path / "place"):
        pass
    os.close(*locks)
    assert (tmp_path / "place" / MARK).exists()


@pytest.mark.parametrize("removed", range(3))
def test_a_kill_during_removal_leaves_a_usable_data_path(
    orders: Consumed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    def use() -> None:
        with orders.temporary_nsqd(tmp_path / "place") as temporary:
            assert temporary.nsqd.unfinished_channels() == []

    unlink, remove = Path.unlink, JobNsqd._remove_files
    unlinked: list[str] = []

    def killed(path: Path, missing_ok: bool = False) -> None:
        if len(unlinked) == removed:
            raise KeyboardInterrupt
        unlink(path, missing_ok)
        unlinked.append(path.name)

    def remove_some(nsqd: JobNsqd) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", killed)
            remove(nsqd)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(JobNsqd, "_remove_files", remove_some)
        use()
    assert len(unlinked) == removed
    use()

    assert not (tmp_path / "place").exists()


def test_a_cluster_with_auth_needs_an_nsqd_with_auth(
    lookupd: GoNsqlookupd,
    consumed: Consumed,
    go_nsqd: MakeNsqd,
    auth_server: AuthServer,
    certificates: Certificates,
    run_nsq: RunNsq,
    tmp_path: Path,
) -> None:
    auth = auth_server.address
    auth_server.allow("s3cret", topic="orders")
    place = (f"-lookupd-tcp-address={lookupd.tcp_address}", f"-auth-http-address={auth}")
    nsqd = go_nsqd(*place, "-tls-required=tcp-https", *certificates.server.nsqd_flags)
    nsqd.create_channel("orders", "billing")
    wait_until(lambda: lookupd.json("/channels?topic=orders")["channels"], what="it is registered")
    config = tmp_path / "nsqd.cfg"
    config.write_text(
        f'auth_http_addresses = ["{auth}"]\ntls_required = true\n'
        f'tls_cert = "{certificates.server.cert}"\ntls_key = "{certificates.server.key}"\n'
    )
    command = consumed.command("replay", archived(tmp_path / "a.gz", 5))
    refused = run_nsq(command)
    assert (refused.status, "asks an auth server" in refused.err) == (2, True), refused.err

    ca = str(certificates.ca)
    secured = replace(OPTIONS, tls_v1=True, tls_root_ca_file=ca, auth_secret="s3cret")
    consumed.begin("orders", "billing", options=secured)
    result = run_nsq([*command, "--nsqd-config", str(config)])

    assert (result.status, "has TLS" in result.err) == (0, False), result.err
    assert len(consumed.of("billing")) == 5


@pytest.mark.parametrize(("count", "kills"), [(4_000, 2), slow(200_000, 20)])
def test_kills_lose_no_message_and_redeliver_only_messages_in_flight(
    orders: Consumed, spawn_nsq: SpawnNsq, tmp_path: Path, count: int, kills: int
) -> None:
    orders.begin("orders", *CHANNELS)
    received = orders.of("billing")
    command = orders.command("replay", archived(tmp_path / "a.gz", count), "--max-depth", 2000)
    for number in range(1, kills + 1):
        job = spawn_nsq(command)
        wait_until(
            lambda part=number: len(received) > part * count / (kills + 1),
            what=f"part {number} came",
            timeout_s=60,
        )
        job.kill()
        job.wait()
    job = spawn_nsq(command)
    _, stderr = job.communicate(timeout=patience_s(120))

    assert job.returncode == 0, stderr
    counts = orders.counts("orders", "billing")
    assert counts.keys() == {b"old %d" % n for n in range(count)}
    doubled = counts.total() - count
    print(f"{doubled} of {count} messages came twice after {kills} kills")
    assert doubled <= kills * OPTIONS.max_in_flight
    assert not orders.of("audit") + orders.of("email")


# -- nsq drain NODE: the messages of each channel of an nsqd are moved, under load ---------------

TOPICS = ("clicks", "orders", "views")


@pytest.fixture
def source(
    request: pytest.FixtureRequest, lookupd: GoNsqlookupd, data_path: DataPath, serve: Serve
) -> Nsqd:
    kind = getattr(request, "param", GoNsqd)
    register = f"-lookupd-tcp-address={lookupd.tcp_address}"
    timeouts = (f"-msg-timeout={patience_s(2):g}s", "-max-req-timeout=2h")
    return serve(kind(data_path(), *timeouts, register))


def left(source: Nsqd) -> int:
    figures = ("depth", "in_flight_count", "deferred_count")
    channels = [channel for topic in source.stats()["topics"] for channel in topic["channels"]]
    return sum(channel[figure] for channel in channels for figure in figures)


@pytest.mark.parametrize(
    ("source", "count"), [(EmbeddedServer, 40), slow(GoNsqd, 5000)], indirect=["source"]
)
def test_a_drain_moves_messages_to_the_same_channel_only(
    source: Nsqd, consumed: Consumed, spawn_nsq: SpawnNsq, valid_json: ValidJson, count: int
) -> None:
    expected: dict[tuple[str, str], list[bytes]] = {}
    with Producer(source.tcp_address) as producer:
        for topic in TOPICS:
            for number, channel in enumerate(CHANNELS):  # later channels have fewer messages
                source.create_channel(topic, channel)
                bodies = [b"%b %d %d" % (topic.encode(), number, n) for n in range(count)]
                # publish waits for the copies, so that the next channel gets none of them
                source.publish(topic, *bodies)
                for existing in CHANNELS[: number + 1]:
                    expected.setdefault((topic, existing), []).extend(bodies)
            producer.publish_deferred(topic, b"deferred", 2.0)
        with Consumer("orders", "email", nsqd_tcp_addresses=source.tcp_address) as other:
            other.start()
            batch = other.next_batch(patience_s(5))
            assert batch is not None
            requeued = {message.body for message in batch}
            batch.requeue(1.0, backoff=False)

        job = spawn_nsq(["drain", source.http_address, *consumed.options("--yes", "--json")])
        for number in range(100):  # under load
            producer.publish_many("views", [b"meanwhile %d %d" % (number, n) for n in range(10)])
    meanwhile = [b"meanwhile %d %d" % (number, n) for number in range(100) for n in range(10)]
    wait_until(lambda: left(source) == 0, what="the nsqd is empty", timeout_s=30)
    for topic, channel in expected:
        consumed.begin(topic, channel)
    out, stderr = job.communicate(timeout=patience_s(60))

    assert job.returncode == 0, stderr
    assert valid_json("drain", out)["left"] == 0
    for (topic, channel), bodies in expected.items():
        published_meanwhile = meanwhile if topic == "views" else []
        assert consumed.counts(topic, channel) == Counter(
            [*bodies, b"deferred", *published_meanwhile]
        )
    total = sum(map(len, expected.values())) + len(expected) + 3 * len(meanwhile)
    assert f"nsq: {total} messages moved, 0 left\n".encode() in stderr
    assert f"nsq: {total} messages consumed\n".encode() in stderr
    attempts = {message.body: message.attempts for message in consumed.seen["orders", "email"]}
    assert {attempts[body] for body in requeued} == {2}  # the drain adds no attempt
    assert attempts[b"deferred"] == 1


def test_moved_messages_are_delivered_after_the_nsqd_has_stopped(
    source: Nsqd, consumed: Consumed, run_nsq: RunNsq, tmp_path: Path
) -> None:
    source.create_channel("orders", "billing")
    source.publish("orders", b"a", b"b")
    drain = ["drain", f"http://u:secret@{source.http_address}", *consumed.options("--yes")]

    alone = run_nsq([*drain, "--wait", "100ms"])
    place = next(tmp_path.glob("nsqd-127*"))
    assert (alone.status, left(source)) == (7, 0), alone.err
    assert f"{place.name} has 2 messages, and how far this came: run it again" in alone.err
    assert "secret" not in alone.err
    source.stop()
    consumed.begin("orders", "billing")
    result = run_nsq(drain)

    assert result.status == 0, result.err
    assert f"; what {place.name} has of it is delivered\n" in result.err
    assert f"0 messages moved, what is left on {source.http_address} is unknown\n" in result.err
    assert consumed.counts("orders", "billing") == {b"a": 1, b"b": 1}
    assert not place.exists()
    assert run_nsq(drain).status == 4


def test_a_drain_skips_paused_topics_and_waits_once_for_a_dead_nsqlookupd(
    source: Nsqd, consumed: Consumed, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in TOPICS:
        source.create_channel(topic, "billing")
    source.post("/topic/pause", topic="orders")
    source.publish("orders", b"a")
    dead = "127.0.0.1:1"
    wait, lacking = TemporaryNsqd._wait_for_listing, list[list[str]]()

    def look(temporary: TemporaryNsqd, topics: list[str], *, listed: bool) -> list[str]:
        if listed and not lacking:
            monkeypatch.setattr(temporary_nsqd, "_REGISTRATION_TIMEOUT_S", 0.0)
            wait_until(
                lambda: wait(temporary, topics, listed=True) == [dead], what="the other does"
            )
            monkeypatch.setattr(temporary_nsqd, "_REGISTRATION_TIMEOUT_S", patience_s(10))
            missing = [dead]
        else:
            missing = wait(temporary, topics, listed=listed)
        if listed:
            lacking.append(missing)
        return missing

    monkeypatch.setattr(TemporaryNsqd, "_wait_for_listing", look)
    options = consumed.options("--lookupd-http-address", dead, "--yes")
    result = run_nsq(["drain", source.http_address, *options])

    assert result.status == 6, result.err
    assert lacking == [[dead], [], []]
    assert result.err.count(f"{dead} does not show this nsqd: its consumers will not come") == 1
    assert "nsq: 0 messages moved, 1 left\n" in result.err


def test_messages_between_a_topic_and_its_channels_are_no_obstacle() -> None:
    topic = {"topic_name": "t", "depth": 5, "paused": False, "channels": [{"channel_name": "c"}]}
    nsqd: Any = SimpleNamespace(stats=lambda: read_stats({"topics": [topic]}))

    moves, stays = plan_channel_moves(nsqd, "")

    assert (len(moves), stays) == (1, [])


def test_channels_are_drained_together_and_a_stop_waits_for_none(
    source: Nsqd, consumed: Consumed, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    for channel in CHANNELS[:2]:
        source.create_channel("orders", channel)
    source.publish("orders", *(b"%d" % n for n in range(5000)))
    stored: list[str] = []
    store_received = ChannelPublisher.store_received

    def slowly(self: ChannelPublisher, topic: str, channel: str, messages: list[Message]) -> None:
        stored.append(channel)
        threading.Event().wait(0.02)  # more messages arrive in the meantime
        store_received(self, topic, channel, messages)
        if len(stored) == 10:
            self.stop()

    shares: list[int] = []

    class Sharing(Consumer):
        def __init__(self, *args: Any, options: ClientOptions, **more: Any) -> None:
            shares.append(options.max_in_flight_bytes)
            super().__init__(*args, options=options, **more)

    monkeypatch.setattr(channel_publisher, "Consumer", Sharing)
    monkeypatch.setattr(ChannelPublisher, "store_received", slowly)
    result = run_nsq(["drain", source.http_address, *consumed.options("--yes")])

    assert result.status == 6, result.err
    assert (len(stored), set(stored)) == (10, set(CHANNELS[:2]))
    assert sum(shares) == ClientOptions().max_in_flight_bytes
