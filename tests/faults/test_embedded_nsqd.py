"""The embedded nsqd under attack, and killed: it serves other clients and keeps synced messages."""

import json
import os
import random
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.daemons import MAX_TURN_S, EmbeddedNsqdProcess, GoNsqd
from plugins.disks import fill
from plugins.http_server import AuthServer
from plugins.raw_client import CODECS, TIMEOUT_S, RawClient, mpub, sized, subscribed
from plugins.servers import AnyNsqd, DataPath, EmbeddedServer, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.server import client_connection

Start = Callable[..., EmbeddedNsqdProcess]


@pytest.fixture
def process(data_path: DataPath, serve: Serve) -> Start:
    return lambda *flags: serve(EmbeddedNsqdProcess(data_path(), *flags))


def assert_serves(nsqd: EmbeddedNsqdProcess | EmbeddedServer) -> None:
    """A well-behaved client publishes and consumes."""
    with RawClient(nsqd.tcp_address) as client:
        client.publish("probe#ephemeral", b"body")
        client.subscribe("probe#ephemeral", "ch#ephemeral", ready=1)
        client.finish([client.read_message()])
        client.settle()
    assert nsqd.request("GET", "/ping") == (200, b"OK")


def resident_bytes(nsqd: EmbeddedNsqdProcess) -> int:
    return int(Path(f"/proc/{nsqd.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    "successor", [EmbeddedNsqdProcess, pytest.param(GoNsqd, marks=pytest.mark.real_nsqd)]
)
def test_synced_messages_survive_a_kill(
    process: Start, serve: Serve, successor: type[GoNsqd]
) -> None:
    flags = ("-mem-queue-size=0", "-sync-every=1", "-max-bytes-per-file=10000")
    nsqd = process(*flags)
    nsqd.create_channel("t", "ch")
    confirmed: list[bytes] = []

    def publish() -> None:
        with suppress(OSError, EOFError), RawClient(nsqd.tcp_address) as client:  # it is killed
            for number in range(100_000):
                client.publish("t", b"%d" % number)
                confirmed.append(b"%d" % number)

    publisher = threading.Thread(target=publish)
    publisher.start()
    wait_until(lambda: len(confirmed) > 500, what="load", timeout_s=20)
    nsqd.kill()
    publisher.join()

    restarted = serve(successor(nsqd.data_path, *flags))
    # the Go nsqd delivers more than its depth, which counts only messages up to the saved position
    with subscribed(restarted.tcp_address, "t", "ch", ready=100) as client:
        received: set[bytes] = set()
        while not received >= set(confirmed):
            message = client.read_message()
            received.add(message.body)
            client.finish([message])
    assert len(received) <= len(confirmed) + 1  # the last one may have been written unconfirmed


@pytest.mark.parametrize("codec", ["", "snappy", "deflate"])
def test_decompression_bombs_and_deep_nesting_end_only_the_connection(
    process: Start, codec: str
) -> None:
    nsqd = process()
    baseline = resident_bytes(nsqd)
    too_large = b"\xff\x06\0\0sNaPpY\0\xff\xff\xff" + bytes(1000)  # a chunk of 16 MB
    hostile = [b"\xff" * 1000, random.Random(1).randbytes(100_000), too_large]
    if codec:
        compress = CODECS[codec]().compress
        hostile.append(b"".join(compress(b"x" * 1_000_000) for _ in range(100)))  # a line
    else:
        hostile.append(b"IDENTIFY\n" + sized(b"[" * 1_000_000))
        assert nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", b"[" * 30_000)[0] == 400
    for data in hostile:
        with RawClient(nsqd.tcp_address) as client:
            if codec:
                client.identify(**{codec: True})
            with suppress(OSError):  # closed with input unread
                client.send(data)
                client.socket.shutdown(socket.SHUT_WR)
                while client.socket.recv(1 << 16):
                    pass
    assert_serves(nsqd)
    assert resident_bytes(nsqd) - baseline < 100_000_000
    assert "Traceback" not in nsqd.log


@pytest.mark.parametrize(
    ("codec", "line", "count"),
    [("snappy", b"NOP\n", 8_000_000), ("deflate", b"PUB bomb#ephemeral\n\0\0\0\x01x", 300_000)],
)
def test_millions_of_compressed_commands_delay_no_other_client(
    process: Start, codec: str, line: bytes, count: int
) -> None:
    nsqd = process()
    with RawClient(nsqd.tcp_address) as bomber, RawClient(nsqd.tcp_address) as client:
        client.publish("t", b"first")
        bomber.identify(**{codec: True})
        bomber.socket.setblocking(False)
        with suppress(BlockingIOError):
            bomber.socket.send(CODECS[codec]().compress(line * count))
        for _ in range(50):
            client.publish("t", b"x")
    assert resident_bytes(nsqd) < 150_000_000
    assert nsqd.longest_turn_cpu_s() < MAX_TURN_S


def test_a_large_mpub_is_published_although_the_client_leaves(process: Start) -> None:
    nsqd = process("-mem-queue-size=10000")  # the rest goes to disk
    nsqd.create_topic("t")
    bodies = [b"%200d" % number for number in range(24_000)]
    with RawClient(nsqd.tcp_address) as client:
        client.send(mpub("t", bodies))
    wait_until(lambda: nsqd.depth("t") == len(bodies), what="all of it is published")
    assert nsqd.longest_turn_cpu_s() < MAX_TURN_S


def test_many_topics_and_messages_delay_no_client(process: Start) -> None:
    nsqd = process("-mem-queue-size=1000000", "-sync-every=1")
    with RawClient(nsqd.tcp_address) as client:
        for number in range(1_000):
            client.send(b"PUB t%d\n" % number + sized(b"x"))
        for _ in range(1_000):
            assert client.read_response() == b"OK"
        for _ in range(15):
            assert client.ask(mpub("full", [b"x"] * 20_000)) == b"OK"
    nsqd.get("/stats", format="json")
    nsqd.get("/stats")
    nsqd.get("/metrics")
    nsqd.post("/topic/pause", topic="t0")
    nsqd.create_channel("full", "ch")
    wait_until(lambda: nsqd.depth("full", "ch") == 300_000, what="all is in the channel")
    nsqd.post("/channel/empty", topic="full", channel="ch")
    nsqd.post("/topic/delete", topic="full")
    assert nsqd.longest_turn_cpu_s() < MAX_TURN_S
    nsqd.stop()
    nsqd.start()
    assert len(nsqd.stats()["topics"]) == 1_000


def test_waiting_for_auth_takes_bounded_memory(process: Start, auth_server: AuthServer) -> None:
    requests, may_answer = threading.Semaphore(0), threading.Event()

    def answer(*_: object) -> tuple[int, bytes]:
        requests.release()
        may_answer.wait()
        return 401, b"{}"

    auth_server.answers = Mock(get=answer)
    nsqd = process(f"-auth-http-address={auth_server.address}")
    baseline = resident_bytes(nsqd)
    bomb = CODECS["deflate"]().compress(b"AUTH\n" + sized(b"s") + bytes(100_000_000))
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(RawClient(nsqd.tcp_address))
            client.identify(deflate=True)
            client.send(bomb)
            assert requests.acquire(timeout=patience_s(10))
        assert nsqd.request("GET", "/ping") == (200, b"OK")
        assert resident_bytes(nsqd) - baseline < 30_000_000
        may_answer.set()


def test_a_slow_disk_delays_no_client(
    embedded_nsqd: AnyNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither timed syncs nor writes of nsqd.dat run on the event loop."""
    fsync, syncs, go_on = os.fsync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncs.set()
        go_on.wait(3 * TIMEOUT_S)  # longer than the timeout of a client
        fsync(descriptor)

    nsqd = embedded_nsqd("-mem-queue-size=0", "-sync-timeout=100ms")
    with RawClient(nsqd.tcp_address) as client:
        for number in range(20):
            client.publish(f"t{number}", b"x")
        monkeypatch.setattr(os, "fsync", slow)
        client.publish("new", b"x")
        assert syncs.wait(patience_s(10))
        for number in range(100):
            client.publish(f"t{number % 20}", b"x")
        client.publish("newer", b"x")
        go_on.set()
        monkeypatch.undo()
    nsqd.stop()
    nsqd.start()
    assert sum(nsqd.depth(f"t{number}") for number in range(20)) == 120


def test_running_out_of_descriptors_is_logged_once_a_minute(process: Start) -> None:
    nsqd = process("-mem-queue-size=1")
    nsqd.create_channel("t", "ch")
    for topic in ("t", "moves"):
        nsqd.publish(topic, b"in memory", b"on disk")
    began_s = time.monotonic()
    with RawClient(nsqd.tcp_address) as early, RawClient(nsqd.tcp_address) as late:
        early.subscribe("t", "ch")
        resource.prlimit(nsqd.pid, resource.RLIMIT_NOFILE, (60, 60))
        with ExitStack() as stack:
            for _ in range(120):
                stack.enter_context(RawClient(nsqd.tcp_address))
            wait_until(lambda: "out of system resource" in nsqd.log, what="a line")
            tried_again_s = time.monotonic() + 1.5  # asyncio does every second
            wait_until(lambda: time.monotonic() > tried_again_s, what="it was tried again")
            logged = nsqd.log.count("out of system resource")
            assert logged <= 1 + (time.monotonic() - began_s) / 60
            early.send(b"RDY 2\n")
            late.subscribe("moves", "ch", ready=2)
            for queue in ("t:ch", "moves"):
                line = f"DISKQUEUE({queue}) reading"
                wait_until(lambda line=line: line in nsqd.log, what=line)
        for client in (early, late):
            assert [message.body for message in client.read_messages(2)] == [
                b"in memory",
                b"on disk",
            ]
    assert_serves(nsqd)
    nsqd.stop()
    assert "Traceback" not in nsqd.log
    assert "Invalid file descriptor" not in nsqd.log


def test_clients_that_never_read_take_bounded_memory(process: Start) -> None:
    """A consumer that never reads, and a publisher whose responses nobody reads."""
    nsqd = process("-mem-queue-size=10")
    body = b"x" * 100_000
    with RawClient(nsqd.tcp_address, receive_buffer=4096) as sleeper:
        sleeper.identify(heartbeat_interval=3000)
        sleeper.subscribe("t", "ch", ready=2500)
        nsqd.publish("t", body)
        baseline = resident_bytes(nsqd)
        for _ in range(20):
            nsqd.publish("t", *[body] * 50)
        assert resident_bytes(nsqd) - baseline < 30_000_000
        wait_until(
            lambda: nsqd.channel_stats("t", "ch")["client_count"] == 0, what="gone", timeout_s=15
        )
    assert 0 < nsqd.channel_stats("t", "ch")["in_flight_count"] < 100
    command = b"PUB t#ephemeral\n" + sized(b"x")
    with RawClient(nsqd.tcp_address, receive_buffer=4096) as client:
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            [client.send(command * 10_000) for _ in range(10_000)]
        assert_serves(nsqd)
        assert resident_bytes(nsqd) - baseline < 50_000_000


def test_deleting_a_channel_disconnects_a_client_that_never_reads(
    embedded_nsqd: AnyNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "_CLOSE_S", 0.1)
    nsqd = embedded_nsqd()
    with subscribed(nsqd.tcp_address, "t", "ch", ready=2500):
        for _ in range(5):
            nsqd.publish("t", *[b"x" * 1_000_000] * 4)
        nsqd.post("/channel/delete", topic="t", channel="ch")
        wait_until(lambda: b"\nnsqd_connections 0\n" in nsqd.get("/metrics"), what="its end")


@pytest.fixture
def nsqd(embedded_nsqd: AnyNsqd) -> EmbeddedServer:
    return embedded_nsqd("-mem-queue-size=2")


def obstruct(nsqd: EmbeddedServer, name: str) -> Path:
    obstacle = nsqd.data_path / f"{name}.diskqueue.000000.dat"
    obstacle.mkdir()
    return obstacle


def test_a_failed_write_is_reported_to_the_publisher_and_in_health(nsqd: EmbeddedServer) -> None:
    nsqd.create_topic("t")
    obstacle = obstruct(nsqd, "t")
    reason = f"open {obstacle}: is a directory"
    with RawClient(nsqd.tcp_address) as client:
        client.publish("t", b"1", b"2")
        client.send(b"PUB t\n" + sized(b"3"))
        assert client.read_error() == f"E_PUB_FAILED PUB failed {reason}".encode()

    assert nsqd.request("POST", "/pub?topic=t", b"4") == (503, b'{"message":"EXITING"}')
    assert nsqd.request("GET", "/ping") == (500, f"NOK - {reason}".encode())
    assert nsqd.stats()["health"] == f"NOK - {reason}"
    assert nsqd.depth("t") == 2

    obstacle.rmdir()
    nsqd.publish("t", b"5")
    assert nsqd.request("GET", "/ping") == (200, b"OK")
    assert nsqd.depth("t") == 3


def test_messages_that_consumers_return_are_kept(nsqd: EmbeddedServer) -> None:
    with (
        subscribed(nsqd.tcp_address, "t", "ch", ready=8) as client,
        RawClient(nsqd.tcp_address) as producer,
    ):
        client.settle()
        producer.publish("t", *[b"%d" % number for number in range(8)])
        held = client.read_messages(8)
        client.send(b"RDY 0\n")
        client.settle()
        obstruct(nsqd, "t:ch")
        client.send(b"".join(b"REQ %b 0\n" % message.id for message in held))
        client.settle()
        assert nsqd.depth("t", "ch") == 8
        producer.send(b"PUB t\n" + sized(b"refused"))
        assert producer.read_error().startswith(b"E_PUB_FAILED PUB failed open")

        client.send(b"RDY 100\n")
        bodies = [message.body for message in client.read_messages(8)]
        assert bodies == [message.body for message in held]
        client.settle()
        assert nsqd.depth("t", "ch") == 0


TOPICS = 200


def test_a_full_disk_keeps_the_list_of_topics_complete(small_disk: Path, serve: Serve) -> None:
    nsqd = serve(EmbeddedServer(small_disk))
    for number in range(TOPICS):
        nsqd.create_topic(f"{number:040d}")
    nsqd.request("POST", f"/topic/pause?topic={0:040d}")  # writes nsqd.dat immediately
    written = (small_disk / "nsqd.dat").read_bytes()
    assert len(json.loads(written)["topics"]) == TOPICS
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (8 << 10)))

    nsqd.request("POST", f"/topic/pause?topic={1:040d}")
    nsqd.kill()

    def listed() -> int:
        return len(json.loads((small_disk / "nsqd.dat").read_bytes())["topics"])

    assert listed() == TOPICS
    nsqd.start()
    assert len(nsqd.stats()["topics"]) == TOPICS
    fill(small_disk / "rest")
    for number in range(TOPICS, 2 * TOPICS):
        nsqd.create_topic(f"{number:040d}")
    failure = "failed to persist metadata"
    wait_until(lambda: failure in nsqd.log.splitlines()[-1], what="there is no room")
    nsqd.post("/topic/pause", topic=f"{2:040d}")  # the pause takes effect, as in Go's nsqd
    (small_disk / "rest").unlink()
    (small_disk / "filler").unlink()
    wait_until(lambda: listed() == 2 * TOPICS, what="it is written")
    assert b'"%040d","paused":true' % 2 in (small_disk / "nsqd.dat").read_bytes()
