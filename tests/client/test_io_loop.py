"""The I/O thread of all consumers and producers, and the thread pool for blocking work."""

import gc
import sys
import threading
import time
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, InBackground, Produce, run_program, take
from plugins.daemons import GoNsqd
from plugins.http_server import MakeScripted
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Producer
from nsqtools.client.consumer_io import Subscription
from nsqtools.client.io_loop import LoopMember, next_multiple
from nsqtools.client.thread_pool import MAX_POOL_THREADS, ThreadPool
from nsqtools.errors import ConnectionFailed, PublishNotSent
from nsqtools.protocol.names import Address
from nsqtools.transport.stream import Deadline, connect


@pytest.mark.parametrize("place", ["call", "timer", "turn", "bytes", "flush"])
def test_a_defect_ends_only_its_member(
    nsqd: GoNsqd, consume: Consume, produce: Produce, place: str
) -> None:
    producer = produce(nsqd.tcp_address)
    producer.publish(TOPIC, b"x")
    healthy = consume(nsqd.tcp_address, topic="other", fail_fast=True)
    consumer = consume(nsqd.tcp_address, fail_fast=True)
    (subscription,) = consumer._io.subscriptions
    loop, connection = consumer._io.loop, subscription.connection

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    def break_it() -> None:
        match place:
            case "call":
                fail()
            case "timer":
                loop.call_later(0, fail)
            case "turn":
                loop._each_turn = fail  # type: ignore[method-assign]
            case "bytes":
                connection._user = None  # type: ignore[assignment]
            case "flush":
                connection._send = fail  # type: ignore[method-assign, assignment]
                connection.write(b"x")

    loop.call_soon(break_it)
    producer.publish(TOPIC, b"y")
    with pytest.raises(RuntimeError, match="I/O thread failed") as caught:
        take(consumer, 3)
    assert caught.value.__cause__ is not None
    assert not consumer.connections
    producer.publish("other", b"z")
    [message] = take(healthy, 1)
    assert message.body == b"z"


def test_a_failed_registration_releases_waiting_threads(
    nsqd: GoNsqd, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopMember, "register", Mock(side_effect=OSError))
    with pytest.raises(PublishNotSent, match="has stopped"):
        produce(nsqd.tcp_address).publish(TOPIC, b"x", timeout_s=patience_s(5))


def test_a_forked_child_closes_its_copies_of_the_sockets(nsqd: GoNsqd) -> None:
    program = """
        import os, sys, warnings
        from nsqtools import ConfigurationError, Consumer, Producer
        warnings.simplefilter("ignore", DeprecationWarning)
        def files():
            return len(os.listdir("/proc/self/fd"))
        before = files()
        with Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1]) as consumer, \\
                Producer(sys.argv[1]) as producer:
            producer.publish("t", b"x")
            while producer._io.direct is None:  # a connection that is lent is copied, too
                producer.publish("other", b"x")
            while not consumer.connections:
                pass
            pid = os.fork()
            if not pid:
                try:
                    consumer.next_batch(timeout_s=1)
                except ConfigurationError as error:
                    assert "fork" in str(error)
                    os._exit(files() - before if consumer.stop(timeout_s=5) else 99)
                os._exit(98)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert consumer.connections
            next(iter(consumer)).finish()
        """
    assert run_program(program, nsqd.tcp_address) == ""


def test_a_forked_child_leaves_a_consumer_that_its_parent_is_connecting() -> None:
    program = """
        import os, socket, sys, warnings
        from nsqtools import Consumer
        warnings.simplefilter("ignore", DeprecationWarning)
        with socket.create_server(("127.0.0.1", 0)) as hanging:
            address = "127.0.0.1:%d" % hanging.getsockname()[1]
            consumer = Consumer("t", "c", nsqd_tcp_addresses=address)
            consumer.start()
            with hanging.accept()[0] as accepted, consumer:
                accepted.recv(1)
                pid = os.fork()
                if not pid:
                    sys.exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    assert run_program(program) == ""


def test_a_message_after_a_long_idle_time_arrives_immediately(
    nsqd: GoNsqd, consume: Consume
) -> None:
    """No timer runs then, and the message must not seem as old as the sleep before it."""
    consumer = consume(nsqd.tcp_address, fail_fast=True, msg_timeout_s=2)
    time.sleep(2.1)
    published_after = time.monotonic()
    nsqd.publish(TOPIC, b"x")
    [message] = take(consumer, 1)
    assert message.received_at > published_after - 0.5
    message.finish()
    assert consumer.stats.expired == 0


# -- the loop alone -------------------------------------------------------------------------------


def test_periodic_calls_of_members_share_iterations() -> None:
    """A thousand members must not wake the thread a thousand times a second."""
    calls: list[float] = []
    members = [LoopMember("test", lambda: None, lambda: None) for _ in range(20)]
    for member in members:
        member.start(partial(member.call_every, 0.2, lambda: calls.append(time.monotonic())))
        time.sleep(0.005)
    wait_until(lambda: len(calls) >= 100, what="calls")
    for member in members:
        member.call_soon(member.stop)
        assert member.join(patience_s(5))
    assert len({round(at, 1) for at in calls}) <= len(calls) / 10
    # rounding the next multiple down to now would let the thread make no other call
    assert all(next_multiple(at, interval_s) > at for at, interval_s in [(1e3, 0.1), (1000.8, 0.3)])


def test_members_join_while_others_end(in_background: InBackground) -> None:
    """A member that joins while the last one leaves gets a thread that serves it."""

    def come_and_go() -> None:
        for _ in range(200):
            member = LoopMember("passer-by", lambda: None, sys.exit)
            member.start(member.stop)
            assert member.join(patience_s(10))

    for future in [in_background(come_and_go) for _ in range(4)]:
        future.result(patience_s(60))
    running = threading.enumerate
    wait_until(lambda: sum(t.name == "nsq-io" for t in running()) <= 1, what="threads end")


def test_a_stopped_member_keeps_no_later_member_alive(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer for each request ends its I/O thread, and the next starts another."""
    monkeypatch.setattr("nsqtools.client.io_loop._shared", None)  # others may have set timers

    def stopped_producer() -> Producer:
        with Producer(nsqd.tcp_address) as producer:
            producer.publish(TOPIC, b"x")
        return producer

    producer = stopped_producer()
    with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        message = next(iter(consumer))
        message.finish()
    later = [weakref.ref(stopped_producer()) for _ in range(5)]
    # the thread of the last producer may just be ending
    wait_until(
        lambda: gc.collect() + 1 and not any(reference() for reference in later),
        what="all are gone",
    )
    assert isinstance(message._source, Subscription)
    ended = producer._io.loop.io_thread, consumer._io.loop.io_thread
    assert not any([*(thread.buffer for thread in ended), message._source.connection._buffer])


def test_a_stopped_consumer_does_not_stay_in_memory_until_its_next_lookup(
    nsqd: GoNsqd, scripted_lookupd: MakeScripted, produce: Produce
) -> None:
    produce(nsqd.tcp_address).publish(TOPIC, b"x")  # keeps the thread alive
    lookupd = scripted_lookupd()
    options = ClientOptions(lookupd_poll_interval_s=300, lookupd_poll_timeout_s=patience_s(0.1))
    with Consumer(
        TOPIC, CHANNEL, lookupd_http_addresses=lookupd.address, options=options
    ) as consumer:
        wait_until(consumer._io.tried_all.is_set, what="the first lookup")
    reference = weakref.ref(consumer._io)
    del consumer
    wait_until(lambda: gc.collect() + 1 and not reference(), what="it is gone")


def test_the_thread_wakes_after_an_interrupted_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsqtools.client.io_loop._shared", None)  # others may have set timers
    member = LoopMember("one", lambda: None, lambda: None)
    member.start(lambda: None)
    wait_until(lambda: member.io_thread._asleep and not member.io_thread._due, what="sleep")
    member.io_thread._asleep = False  # the first step, so that only one byte is sent
    member.call_soon(member.stop)
    assert member.join(patience_s(5))


NOBODY = LoopMember("nobody", lambda: None, lambda: None)


def ignore(result: object) -> None:
    pass


@pytest.mark.parametrize(("peers", "answered", "most"), [(3, False, 4), (20, None, 6)])
def test_hanging_peers_leave_threads_to_responsive_ones(
    peers: int, answered: bool | None, most: int
) -> None:
    """A peer that hangs has failed before, or is new, like an announced nsqd."""
    background = ThreadPool()
    background._has_answered["good"] = True
    release = threading.Event()
    running: list[str] = []

    def hang() -> None:
        running.append("")
        release.wait(patience_s(10))
        raise ConnectionFailed("no answer")

    for peer in range(peers):
        if answered is not None:
            background._has_answered[peer] = answered
        for _ in range(MAX_POOL_THREADS):
            background.run(NOBODY, peer, hang, ignore)
    wait_until(lambda: len(running) == most, what="their share of the threads")
    served = [threading.Event() for _ in range(20)]
    for event in served:
        background.run(NOBODY, "good", event.set, ignore)
    assert all(event.wait(patience_s(5)) for event in served)
    assert len(running) == most
    release.set()
    wait_until(lambda: len(running) == peers * MAX_POOL_THREADS, what="all the others")


def test_failed_work_costs_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqtools.client.thread_pool.THREAD_IDLE_S", 0.05)
    background = ThreadPool()
    for _ in range(2 * MAX_POOL_THREADS):
        background.run(NOBODY, "x", sys.exit, ignore)
    wait_until(lambda: "cannot reach x" in caplog.text, what="the log")
    wait_until(lambda: background._threads == 0, what="the end of the threads")
    done = threading.Event()
    background.run(NOBODY, "y", done.set, ignore)
    assert done.wait(patience_s(5))


def test_without_threads_work_fails(
    scripted_nsqd: ScriptedNsqd, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background, start = ThreadPool(), threading.Thread.start
    monkeypatch.setattr("nsqtools.client.io_loop._shared", None)  # others may have started it
    monkeypatch.setattr(threading.Thread, "start", refuse)
    loop, outcomes = LoopMember("x", lambda: None, lambda: None), list[object]()
    background.run(loop, "x", lambda: None, outcomes.append)
    loop.take_turn()
    assert [str(outcome) for outcome in outcomes] == ["cannot reach x (can't start new thread)"]
    assert not background._queue
    consumer = consume(scripted_nsqd.address, started=False)
    begun = Mock(wraps=consumer._io._begin)
    monkeypatch.setattr(consumer._io, "_begin", begun)
    with pytest.raises(RuntimeError, match="start new thread"):
        consumer.start()
    with pytest.raises(ConnectionFailed, match="start new thread"):
        connect(Address("localhost", 1), Deadline(1))
    monkeypatch.setattr(threading.Thread, "start", start)
    consumer.start()
    scripted_nsqd.subscribed("RDY 1")
    assert begun.call_count == 1
    assert consumer.stop(timeout_s=patience_s(5))
