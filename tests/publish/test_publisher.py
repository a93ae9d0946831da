"""Outcomes of records that travel in parts to several nsqd."""

from __future__ import annotations

from nsqtools.publish.publisher import BatchPart, PublishBatch, PublishCounts, PublishOutcome


def batch_of(count: int, nsqd: int) -> PublishBatch:
    bodies = [b"%d" % n for n in range(count)]
    return PublishBatch("events", bodies, count * nsqd, on_ended=lambda batch: None)


def test_a_batch_has_ended_when_every_nsqd_has_answered() -> None:
    batch = batch_of(4, nsqd=2)

    assert not batch.note(BatchPart(batch, 0, 4, "a"), PublishOutcome.CONFIRMED)
    assert batch.note(BatchPart(batch, 0, 4, "b"), PublishOutcome.CONFIRMED)
    assert batch.failures == {}


def test_halves_are_the_whole_and_end_in_single_records() -> None:
    batch = batch_of(5, nsqd=1)
    left, right = BatchPart(batch, 0, 5, "a").halves()

    assert [*left.bodies, *right.bodies] == batch.bodies
    assert [len(part) for part in left.halves()] == [1, 1]


def test_the_worst_outcome_of_a_record_counts() -> None:
    batch = batch_of(2, nsqd=3)
    batch.note(BatchPart(batch, 0, 2, "a"), PublishOutcome.CONFIRMED)
    batch.note(BatchPart(batch, 0, 1, "b"), PublishOutcome.UNKNOWN)
    batch.note(BatchPart(batch, 1, 2, "b"), PublishOutcome.REJECTED)

    assert batch.note(BatchPart(batch, 0, 2, "c"), PublishOutcome.UNSENT)
    assert batch.failures == {0: PublishOutcome.UNSENT, 1: PublishOutcome.REJECTED}


def test_counts_add_up() -> None:
    counts = PublishCounts()
    for outcome in PublishOutcome:
        counts.add(outcome, 2)

    assert (counts.confirmed, counts.unconfirmed, counts.skipped) == (2, 6, 0)
