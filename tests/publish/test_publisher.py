"""Outcomes of records that travel in parts to several nsqd."""

from __future__ import annotations

from nsqtools.client.outcomes import not_sent, rejected, unknown
from nsqtools.client.publication import Parts, PendingPublication
from nsqtools.errors import ConnectionLost, PublishRejected, ServerError
from nsqtools.publish.publisher import PublishBatch, PublishOutcome, outcome_of

LOST = ConnectionLost("nsqd:4150: gone")
TOO_LARGE = rejected(ServerError("E_BAD_MESSAGE", "", fatal=True), 1)
DISK_FULL = rejected(ServerError("E_PUB_FAILED", "", fatal=True), 1)


def test_an_error_says_what_a_record_counts_as() -> None:
    errors = [None, unknown(LOST), not_sent(LOST), DISK_FULL, TOO_LARGE]
    kinds = PublishOutcome
    assert [outcome_of(error) for error in errors] == [
        *(kinds.CONFIRMED, kinds.UNKNOWN, kinds.UNSENT, kinds.UNSENT, kinds.REJECTED)
    ]


def test_the_worst_outcome_of_a_record_counts() -> None:
    batch = PublishBatch("events", [b"0", b"1"], 6, on_ended=lambda batch: None)
    for nsqd, place, error in (
        ("b", 0, unknown(LOST)),
        ("b", 1, TOO_LARGE),
        ("c", 0, not_sent(LOST)),
        ("c", 1, not_sent(LOST)),
    ):
        batch.note(nsqd, place, error)
    assert batch.failures == {0: PublishOutcome.UNSENT, 1: PublishOutcome.REJECTED}
    assert batch.missing == {"b": {0, 1}, "c": {0, 1}}


# -- a batch that goes on in parts ----------------------------------------------------------------


def test_halves_are_the_whole_and_the_whole_has_the_outcome_of_each() -> None:
    bodies = [b"%d" % n for n in range(5)]
    whole = PendingPublication("events", bodies, 5, 0.0)
    parts = Parts(whole)
    left, right = parts.split(whole, 3)
    fourth, rest = parts.split(right, 1)
    assert [*left.bodies, *fourth.bodies, *rest.bodies] == bodies

    left.settle(None)
    rest.settle(None)
    assert not parts.are_settled
    fourth.settle(TOO_LARGE)
    assert parts.are_settled
    whole.settle(parts.error())
    assert [type(error) for error in whole.errors] == [
        *([type(None)] * 3),
        PublishRejected,
        type(None),
    ]


def test_what_may_be_stored_stays_so_in_both_halves() -> None:
    whole = PendingPublication("events", [b"0", b"1"], 2, 0.0)
    whole.may_be_stored = True
    parts = Parts(whole)
    assert [half.may_be_stored for half in parts.split(whole, 1)] == [True, True]
