"""What the courier says of itself while a destination is away."""

from __future__ import annotations

from typing import Any

import pytest

from nsqtools.client.message import Batch, Message
from nsqtools.forward.courier import Courier
from nsqtools.forward.parcel import DELIVERED, Counters, Fate, Outcome, Parcel, Report

AWAY = Outcome(Fate.UNREACHABLE, "connection refused")


class Source:
    """A connection that takes every answer."""

    topic, nsqd, msg_timeout_s, received_at = "clicks", "127.0.0.1:4150", 60.0, 0.0

    def __init__(self) -> None:
        self.in_flight: dict[bytes, Message] = {}

    def parcel(self, *numbers: int) -> Parcel:
        source: Any = self
        messages = [Message(source, 1, 1, b"%016d" % number, b"body") for number in numbers]
        self.in_flight.update({message.id: message for message in messages})
        return Parcel(Batch(source, messages), [b"body"] * len(numbers), "clicks", 0.0)

    def finish_many(self, ids: list[bytes]) -> None:
        for each in ids:
            self.in_flight.pop(each, None)

    def touch(self, message_id: bytes) -> None: ...


class Destination:
    """A sink that answers with what the test says."""

    def __init__(self) -> None:
        self.outcome = AWAY
        self.sizes: list[int] = []

    def parts(self, parcel: Parcel) -> list[Parcel]:
        return [parcel]

    def submit(self, parcel: Parcel, report: Report) -> None:
        self.sizes.append(len(parcel))
        report(parcel, self.outcome)

    def check(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...


def test_it_fails_until_something_has_arrived(caplog: pytest.LogCaptureFixture) -> None:
    """Also while it has nothing left to try with, as nsqd took back what was held."""
    destination, source, circuit = Destination(), Source(), []
    courier = Courier(
        destination, Counters(), max_attempts=0, dead_letters=None, on_circuit=circuit.append
    )
    courier.send(source.parcel(1))
    courier.act(0.0)
    assert (courier.is_failing, courier.is_open) == (True, True)

    source.in_flight.clear()  # the connection was lost
    courier.tick(100.0)
    assert (courier.is_failing, courier.is_open) == (True, False)  # the next one may try
    assert circuit == [True, False]

    courier.send(source.parcel(2))
    courier.act(100.0)
    assert (courier.is_failing, courier.is_open) == (True, True)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["cannot deliver"]

    destination.outcome = DELIVERED
    courier.tick(200.0)
    courier.act(200.0)
    assert (courier.is_failing, courier.is_open) == (False, False)
    assert circuit == [True, False, True, False]
    assert caplog.messages[-1] == "delivering again"


def test_a_message_that_arrives_after_the_others_were_taken_back_ends_the_failure() -> None:
    destination, source = Destination(), Source()
    courier = Courier(
        destination, Counters(), max_attempts=0, dead_letters=None, on_circuit=lambda is_open: None
    )
    courier.send(source.parcel(1))
    courier.act(0.0)
    source.in_flight.clear()
    courier.tick(100.0)

    destination.outcome = DELIVERED
    courier.send(source.parcel(2))
    courier.act(100.0)

    assert not courier.is_failing


def test_what_was_stored_in_part_is_sent_again_one_by_one() -> None:
    """A full disk that has room for a few would take the first of a batch with each try."""
    destination, source, counters = Destination(), Source(), Counters()
    courier = Courier(
        destination, counters, max_attempts=0, dead_letters=None, on_circuit=lambda is_open: None
    )
    destination.outcome = Outcome(Fate.UNKNOWN, "E_MPUB_FAILED", may_split=True)
    courier.send(source.parcel(1, 2, 3))
    courier.act(0.0)
    destination.outcome = DELIVERED
    courier.tick(1.0)
    courier.act(1.0)

    assert destination.sizes == [3, 1, 1, 1]
    assert (counters.totals.delivered, counters.totals.repeated) == (3, 3)
    assert not source.in_flight
