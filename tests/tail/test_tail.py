"""Tail on a real nsqd: written messages are finished, and all others are requeued."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import InBackground
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer_io import ConsumerIO
from nsqtools.records.envelope import encode_lines
from nsqtools.tail import End, LimitWatch, RunLimits, Tail

MakeTail = Callable[..., Tail]


@pytest.fixture
def written() -> list[bytes]:
    return []


@pytest.fixture
def make_tail(nsqd: GoNsqd, written: list[bytes]) -> MakeTail:
    def make(topics: Sequence[str] = ("clicks",), **arguments: Any) -> Tail:
        options = ClientOptions(output_buffer_timeout_s=0.025)
        arguments = {"options": options, "encode": encode_lines} | arguments
        connection = arguments.pop("connection", ConnectionSettings((nsqd.tcp_address,)))
        return Tail(topics, "c", connection, **{"write": written.append, **arguments})

    return make


def publish_lines(nsqd: GoNsqd, topic: str, count: int) -> list[bytes]:
    lines = [b"%s %05d" % (topic.encode(), n) for n in range(count)]
    nsqd.create_channel(topic, "c")
    nsqd.publish(topic, *lines)
    return lines


def test_silence_ends_a_tail_and_a_slow_reader_is_not_silence(
    nsqd: GoNsqd, make_tail: MakeTail, written: list[bytes]
) -> None:
    lines = publish_lines(nsqd, "clicks", 2) + publish_lines(nsqd, "views", 1)
    # longer than a busy machine keeps nsqd from running
    idle_s = patience_s(0.2)

    def write_slowly(text: bytes) -> None:
        time.sleep(1.5 * idle_s)
        written.append(text)

    tail = make_tail(("clicks", "views"), write=write_slowly, limits=RunLimits(idle_s=idle_s))

    assert tail.run() is End.IDLE
    assert sorted(b"".join(written).splitlines()) == lines
    assert [unfinished(nsqd, topic, "c") for topic in ("clicks", "views")] == [0, 0]


def test_exit_idle_waits_until_every_nsqd_could_send(
    nsqd: GoNsqd, make_tail: MakeTail, written: list[bytes]
) -> None:
    """A single message in flight rotates among the subscriptions."""
    topics = [f"t{n}" for n in range(4)]
    lines = [publish_lines(nsqd, topic, 1)[0] for topic in topics]
    tail = make_tail(topics, options=ClientOptions(max_in_flight=1), limits=RunLimits(idle_s=0.05))

    assert tail.run() is End.IDLE
    assert sorted(b"".join(written).splitlines()) == lines


def test_exit_idle_waits_until_every_nsqd_was_tried(
    nsqd: GoNsqd, make_tail: MakeTail, written: list[bytes], unreachable_address: str
) -> None:
    lines = publish_lines(nsqd, "clicks", 1)
    tail = make_tail(
        connection=ConnectionSettings((nsqd.tcp_address, unreachable_address)),
        options=ClientOptions(dial_timeout_s=1),
        limits=RunLimits(idle_s=0.05),
    )

    assert tail.run() is End.IDLE
    assert written == [lines[0] + b"\n"]
    assert tail._consumer._has_tried_all


def test_a_count_is_exact_over_all_topics_and_its_messages_are_finished(
    nsqd: GoNsqd, make_tail: MakeTail, written: list[bytes]
) -> None:
    lines = publish_lines(nsqd, "clicks", 500) + publish_lines(nsqd, "views", 500)

    tail = make_tail(("clicks", "views"), limits=RunLimits(count=123))

    assert tail.run() is End.COUNT
    assert tail.watch.count == len(b"".join(written).splitlines()) == 123
    assert set(b"".join(written).splitlines()) <= set(lines)  # none is torn
    assert not tail.watch.falls_short

    def count(kind: str) -> int:
        return sum(nsqd.channel_stats(topic, "c")[kind] for topic in ("clicks", "views"))

    wait_until(lambda: count("depth") == 877, what="the rest waits in the channels")
    assert count("in_flight_count") == 0


def test_a_count_with_a_filter_does_not_limit_messages_in_flight(make_tail: MakeTail) -> None:
    searches = [make_tail(limits=RunLimits(count=3), keep=keep) for keep in (None, bool)]
    assert [search._consumer.options.max_in_flight for search in searches] == [3, 200]


def test_an_nsqd_is_checked_only_before_its_first_subscription(
    nsqd: GoNsqd, in_background: InBackground, make_tail: MakeTail, written: list[bytes]
) -> None:
    """It may have joined after the command's own check. A later backlog belongs to the channel."""
    publish_lines(nsqd, "clicks", 1)
    looks: list[tuple[str, object]] = []
    tail = make_tail(
        options=ClientOptions(reconnect_base_s=0.1), subscribe_check=lambda *at: looks.append(at)
    )
    running = in_background(tail.run)
    wait_until(lambda: written, what="the message")
    nsqd.kill()
    wait_until(lambda: tail.connections == {"clicks": []}, what="the loss")
    nsqd.start()
    wait_until(lambda: tail.connections == {"clicks": [nsqd.tcp_address]}, what="a connection")
    tail.stop()
    running.result(patience_s(10))
    assert [(topic, str(at)) for topic, at in looks] == [("clicks", nsqd.tcp_address)]


def test_an_exception_of_the_io_thread_is_raised(
    nsqd: GoNsqd, make_tail: MakeTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_lines(nsqd, "clicks", 1)
    monkeypatch.setattr(ConsumerIO, "received", None)
    with pytest.raises(RuntimeError, match="the I/O thread failed"):
        make_tail().run()


def test_stopping_finishes_written_messages_and_requeues_the_rest(
    nsqd: GoNsqd, in_background: InBackground, make_tail: MakeTail, written: list[bytes]
) -> None:
    publish_lines(nsqd, "clicks", 5000)
    is_writing, may_go_on = threading.Event(), threading.Event()

    def write(data: bytes) -> None:
        is_writing.set()
        may_go_on.wait(patience_s(10))
        written.append(data)

    tail = make_tail(write=write)
    running = in_background(tail.run)
    assert is_writing.wait(patience_s(10))
    tail.stop()
    may_go_on.set()
    running.result(patience_s(10))

    count = len(b"".join(written).splitlines())
    assert 0 < count < 5000
    wait_until(lambda: nsqd.depth("clicks", "c") == 5000 - count, what="the rest", timeout_s=3)


def test_a_stream_ends_by_count_silence_or_time_whichever_comes_first() -> None:
    watch = LimitWatch(RunLimits(), 0.0)
    assert (watch.room_for(1000), watch.end(1e9), watch.wait_s(1e9)) == (1000, None, None)
    assert not watch.falls_short

    watch = LimitWatch(RunLimits(count=5), 0.0)
    assert (watch.room_for(3), watch.end(0.0), watch.falls_short) == (3, None, True)
    assert (watch.room_for(3), watch.end(0.0), watch.falls_short) == (2, End.COUNT, False)

    watch = LimitWatch(RunLimits(idle_s=5), 100.0)
    assert watch.wait_s(102.0) == 3.0
    watch.record_activity(104.0)  # idle is counted from the last one
    assert (watch.end(108.9), watch.wait_s(108.0), watch.end(109.0)) == (None, 1.0, End.IDLE)

    watch = LimitWatch(RunLimits(idle_s=5, for_s=3), 0.0)
    assert (watch.wait_s(0.0), watch.end(3.0), watch.wait_s(10.0)) == (3.0, End.TIME, 0.0)
