"""The dispatcher during an outage, and dead letters in a file: on disk before a FIN."""

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.disks import full
from plugins.power_cut import PowerCut
from plugins.waiting import patience_s

from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.forward.dispatcher import DeadLetterFile, DeadLetterTopic, Dispatcher
from nsqtools.forward.parcel import DELIVERED, Counters, Fate, Outcome, Parcel, Report
from nsqtools.protocol.frames import OK, RESPONSE, encode_frame
from nsqtools.testing import fake_batch


def parcel(*numbers: int, nsqd: str = "127.0.0.1:4150", size: int = 1) -> Parcel:
    """Messages in flight on a connection that accepts every answer."""
    bodies = [b"body %d" % number * size for number in numbers]
    return Parcel(fake_batch(bodies, topic="clicks", nsqd=nsqd), bodies, "clicks", 0.0)


class Destination:
    """A sink that reports the ``outcome`` set by the test."""

    def __init__(self) -> None:
        away = Outcome(Fate.UNREACHABLE, "connection refused")
        self.outcome: Outcome | None = away  # None: no report yet
        self.sizes: list[int] = []

    def parts(self, parcel: Parcel) -> list[Parcel]:
        return [parcel]

    def submit(self, parcel: Parcel, report: Report) -> None:
        self.sizes.append(len(parcel))
        if self.outcome is not None:
            report([parcel], self.outcome)

    def check(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...


def dispatcher_to(
    sink: Destination, counters: Counters | None = None, **arguments: Any
) -> Dispatcher:
    arguments = {"dead_letters": None, "on_circuit": lambda is_open: None, **arguments}
    return Dispatcher(sink, counters or Counters(), max_attempts=0, **arguments)


def test_the_dispatcher_fails_until_a_message_is_delivered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also while no message is left for a retry, as nsqd requeued them."""
    destination, lost, circuit = Destination(), parcel(1), []
    dispatcher = dispatcher_to(destination, on_circuit=circuit.append)
    dispatcher.send(lost)
    dispatcher.process_outcomes(0.0)
    assert (dispatcher.is_failing, dispatcher.is_open) == (True, True)

    lost.messages._source.in_flight.clear()  # the connection was lost
    dispatcher.tick(100.0)
    assert (dispatcher.is_failing, dispatcher.is_open) == (True, False)  # another may be tried

    dispatcher.send(parcel(2))
    dispatcher.process_outcomes(100.0)
    assert (dispatcher.is_failing, dispatcher.is_open) == (True, True)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["cannot deliver"]

    destination.outcome = DELIVERED
    dispatcher.tick(200.0)
    dispatcher.process_outcomes(200.0)
    assert (dispatcher.is_failing, dispatcher.is_open) == (False, False)
    assert circuit == [True, False, True, False]
    assert caplog.messages[-1] == "delivering again"
    assert dispatcher.last_error == ""


def test_a_slow_delivery_blocks_no_messages_after_a_busy_report() -> None:
    destination = Destination()
    dispatcher = dispatcher_to(destination)
    for number, destination.outcome in enumerate([None, Outcome(Fate.BUSY)]):
        dispatcher.send(parcel(number))
    dispatcher.process_outcomes(0.0)
    assert dispatcher.is_open
    dispatcher.tick(100.0)
    assert not dispatcher.is_open


@pytest.mark.parametrize("places", [[], [(0, 2)], [(0, 3), (0, 3)], [(0, 1), (0, 1), (1, 2)]])
def test_parts_must_have_each_message_once(places: list[tuple[int, int]]) -> None:
    destination, three = Destination(), parcel(1, 2, 3)
    destination.parts = lambda parcel: [parcel.part(*place) for place in places]  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"Destination\.parts returned \d messages"):
        dispatcher_to(destination).send(three)
    assert not destination.sizes


def test_only_messages_that_failed_in_this_run_count_as_redelivered() -> None:
    destination, parcels = Destination(), {number: parcel(number) for number in (1, 2, 3)}
    dispatcher = dispatcher_to(destination)
    destination.outcome = Outcome(Fate.FAILED, "HTTP 500")
    for number in (1, 2):
        dispatcher.send(parcels[number])
    dispatcher.process_outcomes(0.0)
    for number, again in ((3, 0), (1, 1), (1, 1)):  # the third was requeued before this run
        dispatcher.count_redelivered(parcels[number].messages)
        assert dispatcher.redelivered_count == again


def test_a_batch_stored_in_part_is_sent_again_one_by_one() -> None:
    """A nearly full disk would otherwise store the first messages of the batch with each retry."""
    destination, three, counters = Destination(), parcel(1, 2, 3), Counters()
    dispatcher = dispatcher_to(destination, counters)
    destination.outcome = Outcome(Fate.UNKNOWN, "E_MPUB_FAILED", may_split=True)
    dispatcher.send(three)
    dispatcher.process_outcomes(0.0)
    destination.outcome = DELIVERED
    dispatcher.tick(1.0)
    dispatcher.process_outcomes(1.0)

    assert destination.sizes == [3, 1, 1, 1]
    assert (counters.totals.delivered, counters.totals.repeated) == (3, 3)
    assert not three.messages._source.in_flight


def test_repeated_counts_every_message_of_a_shared_request() -> None:
    class Together(Destination):
        def submit(self, parcel: Parcel, report: Report) -> None:
            parcels.append(parcel)
            if len(parcels) == 2:
                report(parcels, Outcome(Fate.DELIVERED, repeated=1))

    parcels: list[Parcel] = []
    counters = Counters()
    dispatcher = dispatcher_to(Together(), counters)
    dispatcher.send(parcel(1, 2))
    dispatcher.send(parcel(3))

    assert (counters.totals.delivered, counters.totals.repeated) == (3, 3)
    assert dispatcher.is_idle
    assert all(message.is_answered for part in parcels for message in part.messages)


def test_a_message_that_times_out_while_delivered_counts_as_repeated() -> None:
    destination, counters, two = Destination(), Counters(), parcel(1, 2)
    destination.outcome = DELIVERED
    two.messages._source.in_flight.pop(two.messages[0].id)  # as if it had timed out
    dispatcher_to(destination, counters).send(two)
    assert (counters.totals.delivered, counters.totals.repeated) == (2, 1)


@pytest.mark.parametrize(("fate", "kept"), [(Fate.REFUSED, 2), (Fate.FAILED, 0)])
def test_reports_while_the_sink_stops_dead_letter_or_requeue(fate: Fate, kept: int) -> None:
    counters, sink, box = Counters(), Mock(parts=lambda parcel: [parcel]), Mock(is_open=True)
    box.put = lambda parcel, error, kept: kept(parcel, box.is_open)
    box.close = lambda: setattr(box, "is_open", False)
    dispatcher = dispatcher_to(sink, counters, dead_letters=box)
    dispatcher.send(parcel(1, 2))
    ended, report = sink.submit.call_args.args
    sink.stop = lambda timeout_s: report([ended], Outcome(fate, "HTTP 500", may_split=not kept))
    dispatcher.drain(0.0, lambda: None)
    sink.submit.assert_called_once()
    assert (counters.totals.dead_lettered, counters.totals.requeued) == (kept, 2 - kept)


def test_dead_letters_for_a_hanging_nsqd_block_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = "{}:{}".format(*hanging.getsockname())
        # more than a producer may have outstanding
        letters = parcel(*range(200), nsqd=address, size=10_000)
        topic = DeadLetterTopic("dead", ClientOptions(publish_timeout_s=patience_s(60)))
        dispatcher = dispatcher_to(Destination(), dead_letters=topic)
        work = threading.Thread(target=dispatcher.refuse, args=(letters, "HTTP 400"), daemon=True)
        work.start()
        connection, _ = hanging.accept()
        with connection:
            connection.recv(4096)  # IDENTIFY, the only command that gets an answer
            connection.sendall(encode_frame(RESPONSE, OK))
            work.join(patience_s(20))
            assert not work.is_alive()
            assert dispatcher.held == 200
    dispatcher.drain(0.0, lambda: None)
    assert (dispatcher.held, len(letters.messages._source.in_flight)) == (0, 0)


def test_a_stored_dead_letter_survives_a_power_cut(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    with PowerCut(tmp_path) as record:
        for run in range(2):
            box = DeadLetterFile(path)
            for number in range(5 * run, 5 * run + 5):
                box.put(
                    parcel(number),
                    "HTTP 400",
                    lambda parcel, is_kept: record.note(*[m.body for m in parcel.messages]),
                )
            box.close()

    cuts = list(record.cuts())
    assert len(cuts[-1][0]) == 10
    for promised, cut in cuts:
        content = cut.files.get("dead.jsonl", b"")
        assert [body for body in promised if b'"%s"' % body not in content] == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_dead_letters_are_kept_in_the_named_regular_file(tmp_path: Path) -> None:
    """Also after the file was renamed, and after the partial line of another process. A pipe is
    refused, as it keeps nothing."""
    path = tmp_path / "dead.jsonl"
    box = DeadLetterFile(path)
    path.rename(tmp_path / "taken")
    box.put(parcel(1), "HTTP 400", lambda parcel, is_kept: None)
    with path.open("ab") as torn:
        torn.write(b"torn")
    box.put(parcel(2), "HTTP 400", lambda parcel, is_kept: None)

    one, torn_line, two = path.read_bytes().splitlines()
    assert (b'"body 1"' in one, torn_line, b'"body 2"' in two) == (True, b"torn", True)

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="must be in a regular file"):
        DeadLetterFile(tmp_path / "pipe")


def test_a_full_disk_is_reported_once_not_for_each_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    box, sync = DeadLetterFile(tmp_path / "dead.jsonl"), os.fdatasync
    for number, disk in enumerate([full, full, sync, full]):
        monkeypatch.setattr(os, "fdatasync", disk)
        box.put(parcel(number), "HTTP 400", lambda parcel, is_kept: None)
    assert caplog.text.count("No space left on device") == 2


def test_a_failed_write_removes_no_dead_letter_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dead.jsonl"
    one, other = DeadLetterFile(path), DeadLetterFile(path)
    kept: list[tuple[bytes, bool]] = []

    def note(parcel: Any, is_kept: bool) -> None:
        kept.append((parcel.bodies[0], is_kept))

    writing = threading.Thread(target=other.put, args=(parcel(2), "HTTP 400", note))
    sync = os.fdatasync

    def full(descriptor: int) -> None:
        monkeypatch.setattr(os, "fdatasync", sync)
        writing.start()
        writing.join(0.2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    one.put(parcel(1), "HTTP 400", note)
    writing.join()

    assert sorted(kept) == [(b"body 1", False), (b"body 2", True)]
    [line] = path.read_bytes().splitlines()
    assert b'"body 2"' in line
