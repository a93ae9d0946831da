"""The queues without a network: ids, messages, in flight, deferred, memory before disk."""

import tracemalloc
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsqtools.protocol.text import NS
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues import queued_message
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.message_buffer import DiskHealth, QueueBacklog, encoded
from nsqtools.server.queues.queued_message import (
    InFlightMessages,
    LatencyWindow,
    MessageIds,
    attempts_of,
    for_redelivery,
    from_record,
    latency_stats,
    message_ids,
    new_messages,
    to_record,
)
from nsqtools.server.queues.waiting_messages import MessageBatch

NOW_NS = 1_790_000_000_000_000_000
TICK_NS = 1 << 20
HEALTH = DiskHealth(NsqdOptions())


def messages(*bodies: bytes) -> list[bytes]:
    return new_messages(bodies, MessageIds(1).take(len(bodies), NOW_NS), NOW_NS)


def batch(bodies: list[bytes]) -> MessageBatch:
    data = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return MessageBatch(data, len(bodies), MessageIds(1).reserve(len(bodies), NOW_NS), NOW_NS)


def bodies(messages: list[bytes]) -> list[bytes]:
    return [message[34:] for message in messages]


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 5000)), max_size=6))
def test_ids_are_unique_and_increase_with_any_clock(steps: list[tuple[int, int]]) -> None:
    ids = MessageIds(617)
    generated: list[bytes] = []
    now_ns = NOW_NS
    for ticks, size in steps:
        now_ns += ticks * TICK_NS
        taker = ids if size % 2 else ids.reserve(size, now_ns)
        generated += taker.take(size, now_ns)

    assert generated == sorted(set(generated))
    assert {(len(id_), int(id_, 16) >> 12 & 1023) for id_ in generated} <= {(16, 617)}


@given(st.binary(max_size=50), st.integers(0, 65535))
@example(b"", 0)
@example(b"", 254)
@example(b"", 65535)
def test_attempts_survive_the_disk_and_wrap_at_16_bits(body: bytes, made: int) -> None:
    [message] = messages(body)
    record = message[8:16] + made.to_bytes(2, "big") + message[18:]
    queued = from_record(record)

    assert to_record(queued) == record
    assert (len(queued), attempts_of(queued)) == (len(message), (made + 1) % 65536)
    [requeued] = for_redelivery([queued])
    assert int.from_bytes(to_record(requeued)[8:10]) == (made + 1) % 65536
    assert requeued[:16] + requeued[18:] == message[:16] + message[18:]


def held_ids(*names: str) -> list[bytes]:
    return [name.encode().rjust(16, b"0") for name in names]


def holding(in_flight: InFlightMessages, names: str, now_s: float, timeout_s: float) -> list[bytes]:
    ids = held_ids(*names)
    in_flight.add(new_messages([b"x"] * len(ids), ids, NOW_NS), now_s, timeout_s)
    return ids


@pytest.mark.parametrize("timeout_s", [60, 899.9, 900])
def test_touches_leave_at_most_one_entry_for_each_message(timeout_s: float) -> None:
    in_flight = InFlightMessages()
    [kept] = holding(in_flight, "k", 0, timeout_s)
    for step in range(1, 2000):
        now_s = step / 10
        in_flight.touch([kept], now_s, timeout_s, 900)
        ids = holding(in_flight, chr(step + 256), now_s, timeout_s)
        in_flight.touch(ids, now_s + 0.2, timeout_s, 900)
        in_flight.take(ids)

    assert len(in_flight._capped) < 100
    assert in_flight.next_deadline_s() == min(199.9 + timeout_s, 900)


@given(st.lists(st.tuples(st.sampled_from("hft"), st.integers(0, 9), st.integers(0, 3))))
def test_messages_in_flight_are_never_lost_or_late(steps: list[tuple[str, int, int]]) -> None:
    in_flight = InFlightMessages()
    expected: dict[bytes, tuple[float, float]] = {}  # deadline, delivery
    now_s = 0.0
    for action, which, passes_s in steps:
        now_s += passes_s
        [message_id] = held_ids(str(which))
        if action == "h" and message_id not in expected:
            holding(in_flight, str(which), now_s, 4)
            expected[message_id] = now_s + 4, now_s
        elif action == "f":
            taken, failed = in_flight.take([message_id, message_id])
            assert len(taken) == (message_id in expected)
            assert len(failed) == 2 - len(taken)
            expected.pop(message_id, None)
        elif action == "t" and not in_flight.touch([message_id], now_s, 4, 6):
            delivered_s = expected[message_id][1]
            expected[message_id] = min(now_s + 4, delivered_s + 6), delivered_s
        due = {id_ for id_, (deadline_s, _) in expected.items() if deadline_s <= now_s}
        expired = in_flight.take_expired(now_s, 2)
        while batch := in_flight.take_expired(now_s, 2):
            expired += batch
        assert set(message_ids(expired)) == due
        expected = {id_: times for id_, times in expected.items() if id_ not in due}
        assert in_flight.next_deadline_s() == min((d for d, _ in expected.values()), default=None)


def test_due_messages_keep_their_order_and_a_get_is_bounded_by_bytes() -> None:
    deferred = QueueBacklog(9, None, HEALTH)
    for message, due_s in zip(messages(b"late", b"1", b"2", b"3"), (9, 1, 1, 1), strict=True):
        deferred.defer(message, due_s)
    assert deferred.next_due_s() == 1
    assert deferred.take_due(0.9, 99) == []

    assert bodies(deferred.take_due(1, 2)) == [b"1", b"2"]
    assert bodies(deferred.take_due(1, 2)) == [b"3"]
    assert (deferred.deferred_count, deferred.next_due_s()) == (1, 9)
    deferred.empty()
    assert (deferred.deferred_count, deferred.next_due_s()) == (0, None)
    backlog = QueueBacklog(9, None, HEALTH)
    backlog.put(messages(b"x" * 50, b"y" * 50, b"z"))

    assert bodies(backlog.get(9, 100)) == [b"x" * 50]
    assert bodies(backlog.get(9, 1)) == [b"y" * 50]
    assert bodies(backlog.get(9, 1)) == [b"z"]


def disk_queue(path: Path, *, max_bytes_per_file: int = 1000, max_msg_size: int = 100) -> DiskQueue:
    limits = {"max_bytes_per_file": max_bytes_per_file, "max_msg_size": max_msg_size}
    return DiskQueue("t", path, existing={}, **limits, sync_every=2500, log=DaemonLog(None, ""))


MODES = ["", "in blocks", "in a batch", "taken back", "in a batch, taken back"]
PUT = st.tuples(st.integers(1, 12), st.sampled_from(MODES))


@given(st.integers(0, 9), st.sampled_from([150, 1 << 20]), st.lists(PUT | st.integers(1, 12)))
def test_order_is_kept_through_memory_and_disk_after_an_undo(
    tmp_path_factory: pytest.TempPathFactory,
    limit: int,
    max_bytes_per_file: int,
    steps: list[tuple[int, str] | int],
) -> None:
    """A tuple puts messages, and a number gets that many."""
    path = tmp_path_factory.mktemp("queue")
    backlog = QueueBacklog(limit, disk_queue(path, max_bytes_per_file=max_bytes_per_file), HEALTH)
    numbers, waiting = count(), list[bytes]()
    for step in steps:
        if isinstance(step, int):
            received = backlog.get(step, 1 << 20)
            assert bool(received) == bool(waiting)
            assert received == waiting[: len(received)]
            del waiting[: len(received)]
            continue
        size, mode = step
        files = len(list(path.glob("*.0*.dat")))
        numbered = [b"%d" % next(numbers) for _ in range(size)]
        new = messages(*numbered)
        put = new if "batch" not in mode else batch(numbered)
        blocks = [encoded(new[at : at + 4]) for at in range(0, size, 4)]
        undo = backlog.put(put, blocks=blocks if mode == "in blocks" else ())
        if "taken back" in mode:
            backlog.undo(undo)
            assert len(list(path.glob("*.0*.dat"))) <= files + 1  # the put may have created one
        else:
            waiting += new
        assert len(backlog) == len(waiting)
        assert len(backlog) - backlog.disk_depth <= limit  # in memory
    while backlog.has_messages:
        received = backlog.get(4, 1000)
        assert received == waiting[: len(received)]
        del waiting[: len(received)]
    assert (waiting, len(backlog), backlog.disk_depth) == ([], 0, 0)


def test_closing_needs_little_additional_memory(tmp_path: Path) -> None:
    disk = disk_queue(tmp_path, max_bytes_per_file=100 << 20, max_msg_size=1 << 20)
    backlog = QueueBacklog(1 << 30, disk, HEALTH)
    backlog.put(messages(*[bytes(1000)] * 30_000))

    tracemalloc.start()
    try:
        backlog.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 << 20
    assert sum(path.stat().st_size for path in tmp_path.glob("*.0*.dat")) > 30_000_000


@pytest.mark.parametrize("jump_s", [0, 86_400, -86_400])
def test_samples_expire_with_any_clock(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    now_s, now_ns = 1000.0, NOW_NS
    monkeypatch.setattr(queued_message, "monotonic", lambda: now_s)
    monkeypatch.setattr(queued_message, "time_ns", lambda: now_ns)
    window = LatencyWindow([0.5], window_s=60)

    def count_after(seconds: int) -> int:
        nonlocal now_s
        now_s += seconds
        return latency_stats([window]).count

    window.add([now_ns - NS, now_ns - 2 * NS])
    now_ns += jump_s * NS

    assert count_after(0) == 2
    assert count_after(31) == 2  # in the older half now
    window.add([now_ns - 3 * NS])
    assert count_after(10) == 3
    assert count_after(21) == 1  # the older half is dropped
    assert count_after(61) == 0
