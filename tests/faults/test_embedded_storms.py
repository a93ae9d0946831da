"""The embedded nsqd under bursts of events: no other client waits, and no message is lost.

The short forms run always; `slow` has the sizes that an operator may meet.
"""

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from plugins.daemons import MAX_TURN_S, EmbeddedLookupServer, EmbeddedNsqdProcess
from plugins.examples import slow
from plugins.raw_client import RawClient, mpub, sized, subscribed
from plugins.servers import AnyNsqd, DataPath, EmbeddedServer, Serve
from plugins.waiting import wait_until

sizes = pytest.mark.parametrize("size", [1, slow(10)])


@pytest.fixture
def nsqd(data_path: DataPath, serve: Serve) -> Iterator[EmbeddedNsqdProcess]:
    """An nsqd whose event loop must never stall."""
    nsqd = serve(EmbeddedNsqdProcess(data_path(), "-mem-queue-size=1000000"))
    yield nsqd
    assert nsqd.longest_turn_cpu_s() < MAX_TURN_S


@contextmanager
def paused(nsqd: EmbeddedNsqdProcess) -> Iterator[None]:
    """Suspend nsqd, so that it sees all events of the block at the same time."""
    nsqd.pause()
    yield
    nsqd.resume()


def publish(nsqd: EmbeddedNsqdProcess, count: int) -> None:
    with RawClient(nsqd.tcp_address) as client:
        for start in range(0, count, 1000):
            bodies = [b"%d" % number for number in range(start, min(count, start + 1000))]
            assert client.ask(mpub("t", bodies)) == b"OK"


def consumed(client: RawClient, count: int) -> dict[bytes, int]:
    """Finish ``count`` messages with different bodies; return the attempts of each."""
    attempts: dict[bytes, int] = {}
    while len(attempts) < count:
        messages = client.read_messages(min(1000, count - len(attempts)))
        attempts |= {message.body: message.attempts for message in messages}
        client.finish(messages)
    return attempts


@sizes
def test_messages_that_are_requeued_often_are_delivered(
    nsqd: EmbeddedNsqdProcess, size: int
) -> None:
    count, attempts = 2000 * size, 5
    nsqd.create_channel("t", "ch")
    publish(nsqd, count)
    deliveries: Counter[bytes] = Counter()
    finished = 0
    with subscribed(nsqd.tcp_address, "t", "ch", ready=2500) as client:
        while finished < count:
            message = client.read_message()
            deliveries[message.body] += 1
            assert message.attempts == deliveries[message.body]
            is_done = message.attempts == attempts
            client.send(b"FIN %b\n" % message.id if is_done else b"REQ %b 0\n" % message.id)
            finished += is_done
        client.settle()
    stats = nsqd.channel_stats("t", "ch")
    assert (stats["depth"], stats["in_flight_count"]) == (0, 0)
    assert stats["requeue_count"] == count * (attempts - 1)


@sizes
def test_simultaneous_timeouts_are_redelivered(nsqd: EmbeddedNsqdProcess, size: int) -> None:
    count, msg_timeout_s = 25_000 * size, 3.0
    nsqd.create_channel("t", "ch")
    publish(nsqd, count)
    with ExitStack() as stack:
        for _ in range(count // 2500):
            sleeper = stack.enter_context(RawClient(nsqd.tcp_address))
            sleeper.identify(msg_timeout=round(msg_timeout_s * 1000))
            sleeper.subscribe("t", "ch", ready=2500)
            sleeper.read_messages(2500)
            sleeper.send(b"RDY 0\n")
        with paused(nsqd):
            time.sleep(msg_timeout_s + 0.2)
        wait_until(
            lambda: nsqd.channel_stats("t", "ch")["timeout_count"] >= count,
            what="all have timed out",
        )
        client = stack.enter_context(RawClient(nsqd.tcp_address))
        client.subscribe("t", "ch", ready=2500)
        attempts = consumed(client, count)
    assert min(attempts.values()) >= 2


@sizes
def test_simultaneously_due_messages_are_delivered(nsqd: EmbeddedNsqdProcess, size: int) -> None:
    count = 15_000 * size
    nsqd.create_channel("t", "ch")
    with RawClient(nsqd.tcp_address) as client:
        due_s = time.monotonic() + 2 * size
        for start in range(0, count, 1000):
            line = b"DPUB t %d\n" % max(1, int((due_s - time.monotonic()) * 1000))
            client.send(b"".join(line + sized(b"%d" % n) for n in range(start, start + 1000)))
            assert [client.read_response() for _ in range(1000)] == [b"OK"] * 1000
        with paused(nsqd):
            time.sleep(max(0.0, due_s - time.monotonic()) + 0.1)
        client.subscribe("t", "ch", ready=2500)
        consumed(client, count)


def test_finishes_of_messages_not_in_flight_are_answered(nsqd: EmbeddedNsqdProcess) -> None:
    count = 12_000
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(RawClient(nsqd.tcp_address)).subscribe("t", "ch")
        client = stack.enter_context(RawClient(nsqd.tcp_address))
        client.subscribe("t", "ch")
        finishes = b"".join(b"FIN %016d\n" % number for number in range(count))
        sending = threading.Thread(target=client.send, args=[finishes])
        with paused(nsqd):
            sending.start()
            time.sleep(0.2)
        sending.join()
        for number in range(count):
            expected = b"E_FIN_FAILED FIN %016d failed ID not in flight" % number
            assert client.read_error() == expected


@sizes
def test_consumers_that_leave_together_delay_no_other_client(
    nsqd: EmbeddedNsqdProcess, size: int
) -> None:
    count = 1000 * size
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    nsqd.create_channel("t", "ch")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # nsqd raises its own
        clients = [stack.enter_context(RawClient(nsqd.tcp_address)) for _ in range(count)]
        for client in clients:
            client.subscribe("t", "ch", ready=1)
        publish(nsqd, count)
        for client in clients:
            client.read_message()
        with paused(nsqd):
            stack.close()
        wait_until(lambda: nsqd.channel_stats("t", "ch")["client_count"] == 0, what="all have left")
    assert nsqd.channel_stats("t", "ch")["in_flight_count"] == count


Jump = Callable[[float], None]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Jump:
    """Set the wall clock of this process forward, or back."""
    real_s, real_ns = time.time, time.time_ns

    def jump(by_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real_s() + by_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(by_s * 1e9))

    return jump


@pytest.mark.parametrize(("by_s", "flags"), [(-7200, ["-durable"]), (7200, [])])
def test_a_jump_of_the_clock_neither_hastens_nor_delays_messages(
    embedded_nsqd: AnyNsqd, jump: Jump, by_s: float, flags: list[str]
) -> None:
    nsqd = embedded_nsqd(*flags)
    nsqd.create_channel("t", "ch")
    address = nsqd.tcp_address
    with RawClient(address) as sleeper, subscribed(address, "t", "ch") as client:
        sleeper.identify(msg_timeout=1000)
        sleeper.subscribe("t", "ch", ready=1)
        began_s = time.monotonic()
        nsqd.publish("t", b"in flight")
        first = sleeper.read_message()
        sleeper.send(b"RDY 0\n")
        client.publish_deferred("t", 1500, b"deferred")
        client.publish_deferred("t", 3_000_000, b"late")
        jump(by_s)
        nsqd.publish("t", b"after")
        client.send(b"RDY 10\n")
        came_s: dict[bytes, float] = {}
        for _ in range(3):
            message = client.read_message()
            came_s[message.body] = time.monotonic() - began_s
            if message.body == b"after":
                assert message.id > first.id
            assert message.attempts == 1 if message.body != b"in flight" else message.attempts > 1
        client.finish([message])
        assert came_s.keys() == {b"after", b"in flight", b"deferred"}
        assert came_s[b"in flight"] > 0.9
        assert came_s[b"deferred"] > 1.4
    assert nsqd.channel_stats("t", "ch")["deferred_count"] == 1


def test_a_clock_set_back_defers_no_message_for_long(
    embedded_nsqd: AnyNsqd, serve: Serve, jump: Jump
) -> None:
    """Messages that were requeued in different runs can have the same place in the queue."""
    nsqd = embedded_nsqd("-durable")
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"1", b"2", b"3")
    for _ in range(3):
        with subscribed(nsqd.tcp_address, "t", "ch", ready=1) as client:
            client.send(b"RDY 0\nREQ %b 3600000\n" % client.read_message().id)
            client.settle()
        nsqd.stop()
        nsqd.start()
    nsqd.stop()
    jump(-10 * 365 * 86400)
    began_s = time.monotonic()
    nsqd = serve(EmbeddedServer(nsqd.data_path, "-durable", "-max-req-timeout=2s"))
    with subscribed(nsqd.tcp_address, "t", "ch", ready=3) as client:
        assert [message.body for message in client.read_messages(3)] == [b"1", b"2", b"3"]
    assert time.monotonic() - began_s > 1


def test_a_jump_of_the_clock_hides_no_nsqd(
    serve: Serve, embedded_nsqd: AnyNsqd, jump: Jump
) -> None:
    lookupd = serve(EmbeddedLookupServer("-tombstone-lifetime=1h"))
    flags = [f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1"]
    nsqd = embedded_nsqd(*flags)
    nsqd.create_topic("t")
    wait_until(lambda: len(lookupd.producers("t")) == 1, what="it is registered")
    node = f"127.0.0.1:{nsqd.http_address.rpartition(':')[2]}"
    for by_s in (7200, -7200):
        jump(by_s)
        assert len(lookupd.producers("t")) == 1
    lookupd.post("/topic/tombstone", topic="t", node=node)
    jump(7200)
    assert lookupd.producers("t") == []
