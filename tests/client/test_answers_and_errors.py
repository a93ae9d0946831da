"""Answers, errors and wrong peers."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.clients import Consume, Dialog, InBackground
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until
from plugins.wire import RESPONSE, frame

from nsqtools.client.connection import open_connection
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import NsqError, ServerError
from nsqtools.protocol.names import parse_address
from nsqtools.testing import fake_message


def batch_of(consumer: Consumer) -> Batch:
    batch = consumer.next_batch(timeout_s=patience_s(5))
    assert batch is not None
    return batch


def test_an_answer_that_is_too_late_is_counted_and_harmless(dialog: Dialog) -> None:
    consumer, conn = dialog("RDY 200")
    message_id = conn.message(b"x")
    batch_of(consumer).finish()
    conn.expect(f"FIN {message_id}")
    conn.error(f"E_FIN_FAILED FIN {message_id} failed ID not in flight")
    conn.error("E_REQ_FAILED whatever it says")
    conn.error("E_TOUCH_FAILED")
    wait_until(lambda: consumer.stats.late == 3, what="three late answers")
    conn.heartbeat()
    conn.expect("NOP")


def test_nothing_after_a_fatal_error_counts(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    on_error = Mock(side_effect=LookupError("of the callback: it harms nothing"))
    consume(scripted_nsqd.address, more={"on_error": on_error})
    conn = scripted_nsqd.subscribed("RDY 200")
    conn.send(b"\x00\x00\x00\x0d\x00\x00\x00\x01E_INVALID" * 2)
    conn.expect_closed()
    scripted_nsqd.subscribed("RDY 200")
    [[error]] = [call.args for call in on_error.call_args_list]
    assert isinstance(error, ServerError)
    assert error.code == "E_INVALID"
    assert scripted_nsqd.address in str(error)


def test_zero_is_a_delay_and_seconds_become_milliseconds(dialog: Dialog) -> None:
    """nsqd closes the connection for more than its limit, an hour. By default none is given up."""
    consumer, conn = dialog("RDY 200", max_attempts=3)
    given: dict[float | None, int] = {0: 0, 0.0015: 2, 3600: 3_600_000, 7200: 3_600_000}
    by_attempts = {1: 90_000, 4: 360_000, 5: 450_000, 60_000: 900_000}
    cases = [(1, *case) for case in given.items()]
    cases += [(attempts, None, delay_ms) for attempts, delay_ms in by_attempts.items()]
    message_id = conn.new_id()
    for attempts, delay_s, delay_ms in cases:
        conn.message(b"x", message_id=message_id, attempts=attempts)
        [message] = batch_of(consumer)
        message.requeue(delay_s, backoff=False)
        conn.skip_to(f"REQ {message_id} {delay_ms}")


def test_of_two_answers_at_once_one_is_taken(in_background: InBackground) -> None:
    both = threading.Barrier(2)

    class SeenByBoth(dict[bytes, Message]):
        def get(self, *arguments: Any) -> Any:
            found = super().get(*arguments)
            both.wait(patience_s(5))
            return found

    message = fake_message()
    message._source.in_flight = SeenByBoth(message._source.in_flight)
    answers = [in_background(message.finish) for _ in range(2)]
    assert sorted(int(answer.result(patience_s(5))) for answer in answers) == [0, 1]
    assert message.answers == ["finish"]


def test_an_answer_stays_with_its_connection(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    consumer = consume(scripted_nsqd.address)
    conn = scripted_nsqd.subscribed("RDY 200")
    message_id = conn.message(b"x")
    [old] = batch_of(consumer)
    conn.close()
    scripted_nsqd.identified()  # it is looked for
    again = scripted_nsqd.subscribed()
    again.take()  # an RDY: the count falls with the time that `old` is held
    again.message(b"x", message_id=message_id, attempts=2)
    [new] = batch_of(consumer)
    assert not old.finish()
    assert not [line for line in again.not_yet_expected if line.startswith("FIN")]
    assert new.finish()
    again.skip_to(f"FIN {message_id}")


def test_a_redelivered_message_replaces_its_unanswered_delivery(dialog: Dialog) -> None:
    """A batch is finished but for that one, and for what was answered."""
    consumer, conn = dialog("RDY 200")
    ids = [conn.message(b"x") for _ in range(3)]
    source = batch_of(consumer).source
    wait_until(lambda: len(source.in_flight) == 3, what="all of them")
    old, answered, _ = batch = Batch(source, source.in_flight.values())
    answered.requeue(0, backoff=False)
    conn.expect(f"REQ {ids[1]} 0")
    conn.message(b"x", message_id=ids[0], attempts=2)
    wait_until(lambda: old.is_answered, what="the new delivery")
    new = source.in_flight[old.id]
    assert (old.finish(), batch.finish()) == (False, 1)
    conn.expect(f"FIN {ids[2]}")
    assert (batch.finish(), batch.requeue()) == (0, 0)
    assert not new.is_answered
    assert new.finish()
    conn.expect(f"FIN {ids[0]}")
    wait_until(lambda: consumer._io.rdy.in_flight == 0, what="nothing in flight")
    assert conn.not_yet_expected == []


HEARTBEAT = frame(RESPONSE, b"_heartbeat_")
OK_HEAD = b"\x00\x00\x00\x06\x00\x00\x00"
ANSWERS = {  # to IDENTIFY, and the complaint
    OK_HEAD + b"\x00{}": "",  # everything at its default: accepted
    HEARTBEAT + OK_HEAD + b"\x00OK": "",  # as old ones answer
    OK_HEAD + b"\x00[]": "neither OK nor JSON",
    b"\x00\x00\x00\x0d\x00\x00\x00\x01E_BAD_BOD": "E_BAD_BOD",
    b"\x00\x00\x00\x22\x00\x00\x00\x02" + bytes(30): "message before SUB",
    OK_HEAD + b"\x07OK": "unknown frame type 7",
    b"\x00\x00\x00": "closed the connection",
}


def test_any_answer_to_identify_is_taken_or_named(in_background: InBackground) -> None:
    for reply, complaint in ANSWERS.items():
        with ScriptedNsqd() as peer:
            address = parse_address(peer.address)
            opening = in_background(open_connection, address, ClientOptions())
            conn = peer.accept()
            conn.expect("IDENTIFY")
            conn.send(reply)
            conn.half_close()
            if not complaint:
                opening.result(patience_s(5)).close()
                continue
            with pytest.raises(NsqError, match=complaint) as caught:
                opening.result(patience_s(5))
            assert str(address) in str(caught.value)
            conn.expect_closed()
