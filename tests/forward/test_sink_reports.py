"""Sinks that raise, hang, or report nothing or nonsense: no message is lost or unaccounted for."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.servers import AnyNsqd, EmbeddedServer
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Fate, Forwarder, Outcome, Parcel, ThreadedSink, forward_to
from nsqtools.errors import ConfigurationError
from nsqtools.forward.exec_sink import ExecSettings, ExecSink
from nsqtools.forward.parcel import DELIVERED, Report
from nsqtools.tail import End


class Scripted:
    """A sink that calls the function of the test with a part and its ``report``."""

    def __init__(self, submit: Callable[[Parcel, Report], object]) -> None:
        self.submit = submit

    def parts(self, parcel: Parcel) -> list[Parcel]:
        return [parcel]

    def check(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...


def forwarder_of(sink: Any, nsqd: Any, *bodies: bytes, **arguments: Any) -> Forwarder:
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", *bodies)
    arguments = {"exit_idle_s": 0.3, "options": ClientOptions(drain_timeout_s=0.1), **arguments}
    return forward_to(sink, "clicks", "c", nsqd_tcp_addresses=nsqd.tcp_address, **arguments)


class Rows(ThreadedSink):
    """Store the bodies of a part in one transaction, which an invalid body aborts."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[bytes] = []

    def deliver(self, parcel: Parcel) -> Outcome:
        if b"invalid" in parcel.bodies:
            raise LookupError("CHECK constraint failed")
        self.stored += parcel.bodies
        return DELIVERED


def in_a_pool(part: Parcel, report: Report) -> None:
    """Like a pool whose future is never read: the exception is lost, and the part with it."""

    def work() -> None:
        try:
            report([part], rows.deliver(part))
        except LookupError:
            pass

    rows = sinks[0]
    threading.Thread(target=work).start()


sinks = [Rows()]


@pytest.mark.parametrize(
    ("make", "error"),
    [(Rows, "LookupError: CHECK"), (lambda: Scripted(in_a_pool), "the sink dropped it")],
    ids=["threaded", "pool"],
)
def test_an_exception_fails_only_the_message_that_caused_it(
    quick_nsqd: EmbeddedServer, tmp_path: Path, make: Callable[[], Any], error: str
) -> None:
    sinks[0] = Rows()
    sink = make()
    bodies = [b"%d" % number for number in range(20)]
    letters = tmp_path / "dead.jsonl"
    settings: Any = {"max_attempts": 1, "dead_letter_file": letters}
    forwarder = forwarder_of(sink, quick_nsqd, *bodies, b"invalid", **settings)
    assert forwarder.run() is End.IDLE
    stored = sink.stored if isinstance(sink, Rows) else sinks[0].stored
    assert sorted(stored) == sorted(bodies)
    [line] = letters.read_text().splitlines()
    assert '"invalid"' in line
    assert error in line


def test_unreported_messages_are_logged_counted_and_requeued(
    quick_nsqd: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    unreported: list[Parcel] = []
    forwarder = forwarder_of(
        Scripted(lambda part, report: unreported.append(part)), quick_nsqd, b"x"
    )
    assert forwarder.run() is End.IDLE
    assert forwarder.counters.totals.unreported == 1
    assert "Scripted has not reported 1 message within 50% of msg_timeout" in caplog.text
    wait_until(lambda: quick_nsqd.depth("clicks", "c") == 1, what="it is given back")


NONSENSE: dict[str, Callable[[Parcel, Report | Any], object]] = {
    r"Parcel\(.* where a list of parcels belongs": lambda part, report: report(part, DELIVERED),
    "'DELIVERED' where an Outcome belongs": lambda part, report: report([part], "DELIVERED"),
    "None where an Outcome belongs": lambda part, report: report([part], None),
    "<Fate.DELIVERED.*where an Outcome belongs": lambda p, report: report([p], Fate.DELIVERED),
    "fate is 'delivered' and no Fate": lambda p, report: report([p], Outcome("delivered")),  # type: ignore[arg-type]
    "error is OSError.* and no text": lambda part, report: report(
        [part],
        Outcome(Fate.FAILED, OSError()),  # type: ignore[arg-type]
    ),
    "retry_after_s is -1": lambda part, report: report([part], Outcome(Fate.FAILED, "x", -1)),
}


@pytest.mark.parametrize("complaint", NONSENSE)
@pytest.mark.parametrize("thread", [False, True])
def test_invalid_arguments_of_report_are_named_and_end_the_run(
    quick_nsqd: EmbeddedServer, complaint: str, thread: bool
) -> None:
    def submit(part: Parcel, report: Report) -> None:
        def work() -> None:
            with pytest.raises(ConfigurationError):
                NONSENSE[complaint](part, report)

        if thread:
            threading.Thread(target=work).start()
        else:
            work()

    forwarder = forwarder_of(
        Scripted(submit), quick_nsqd, b"x", options=ClientOptions(drain_timeout_s=3600)
    )
    with pytest.raises(ConfigurationError, match=f"Scripted reported .*{complaint}"):
        forwarder.run()
    wait_until(lambda: quick_nsqd.depth("clicks", "c") == 1, what="it is given back")


def test_a_part_reported_twice_counts_once(
    quick_nsqd: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(part: Parcel, report: Report) -> None:
        for _ in range(2):
            report([part], DELIVERED)

    forwarder = forwarder_of(Scripted(submit), quick_nsqd, b"x")
    assert forwarder.run() is End.IDLE
    totals = forwarder.counters.totals
    assert (totals.delivered, totals.repeated) == (1, 0)
    assert "Scripted reported a part twice" in caplog.text


@pytest.mark.parametrize("threads", [0, -1, "2"])
def test_a_sink_without_a_thread_is_refused(threads: Any) -> None:
    class Idle(ThreadedSink):
        def deliver(self, parcel: Parcel) -> Outcome:
            return DELIVERED

    with pytest.raises(ConfigurationError, match="threads must be a whole number >= 1"):
        Idle(threads)


class Hanging(ThreadedSink):
    def __init__(self) -> None:
        super().__init__(threads=2)
        self.begun: Counter[bytes] = Counter()
        self.release = threading.Event()

    def deliver(self, parcel: Parcel) -> Outcome:
        self.begun.update(parcel.bodies)
        if parcel.bodies[0].startswith(b"hang"):
            self.release.wait(patience_s(20))
        return DELIVERED


def test_a_hanging_message_is_not_delivered_again_and_uses_one_thread(
    embedded_nsqd: AnyNsqd,
) -> None:
    """No touch extends the timeout here, so nsqd redelivers the message repeatedly."""
    nsqd = embedded_nsqd("--msg-timeout=1s", "--max-msg-timeout=1s")
    sink = Hanging()
    forwarder = forwarder_of(sink, nsqd, b"hang", exit_idle_s=None)
    running = threading.Thread(target=forwarder.run)
    running.start()
    consumer = forwarder._sources._consumers.__getitem__
    try:
        wait_until(lambda: sink.begun, what="the sink to hang")
        wait_until(lambda: consumer("clicks").stats.received >= 3, what="more deliveries")
        nsqd.publish("clicks", b"other")
        wait_until(lambda: sink.begun[b"other"], what="the other thread")
        nsqd.publish("clicks", b"hang 2")
        wait_until(lambda: consumer("clicks")._io.rdy.max_in_flight == 0, what="RDY 0")
        assert sink.begun == {b"hang": 1, b"other": 1, b"hang 2": 1}
        sink.release.set()
        wait_until(lambda: nsqd.depth("clicks", "c") == 0, what="both to end")
    finally:
        sink.release.set()
        forwarder.stop()
        running.join(patience_s(10))
    assert not running.is_alive()


def test_hanging_commands_leave_the_messages_to_other_consumers(quick_nsqd: EmbeddedServer) -> None:
    settings = ExecSettings("/bin/sleep", ("sleep", "60"), "c", workers=2)
    sink = ExecSink(settings, lambda stream, data: None)
    forwarder = forwarder_of(sink, quick_nsqd, b"1", b"2", exit_idle_s=None)
    running = threading.Thread(target=forwarder.run)
    running.start()
    try:
        rdy = lambda: forwarder._sources._consumers["clicks"]._io.rdy  # noqa: E731
        wait_until(lambda: len(sink.running) == 2, what="both commands")
        wait_until(lambda: rdy().max_in_flight == 0, what="RDY 0")
    finally:
        forwarder.stop()
        running.join(patience_s(20))
    assert not running.is_alive()


@pytest.mark.parametrize("method", ["check", "stop"])
def test_a_sink_that_raises_at_the_end_leaves_no_consumer_connected(
    quick_nsqd: EmbeddedServer, method: str
) -> None:
    sink = Scripted(lambda part, report: report([part], Outcome(Fate.BUSY)))
    setattr(sink, method, Mock(side_effect=OSError("the disk is gone")))
    forwarder = forwarder_of(sink, quick_nsqd, b"x")
    if method == "check":
        with pytest.raises(OSError, match="the disk is gone"):
            forwarder.run()
    else:
        threading.Timer(0.5, forwarder.stop).start()
        forwarder.run()
    assert not forwarder._sources._consumers["clicks"].connections
    wait_until(lambda: quick_nsqd.depth("clicks", "c") == 1, what="it is given back")
