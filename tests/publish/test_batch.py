"""Outcomes of records that travel in parts to several nsqd."""

from __future__ import annotations

from nsqtools.publish.batch import Batch, Counts, Outcome, Part


def batch_of(count: int, nsqd: int) -> Batch:
    bodies = [b"%d" % n for n in range(count)]
    return Batch("events", bodies, count * nsqd, on_ended=lambda batch: None)


def test_a_batch_is_settled_when_every_nsqd_has_answered() -> None:
    batch = batch_of(4, nsqd=2)

    assert not batch.settle(Part(batch, 0, 4, "a"), Outcome.CONFIRMED)
    assert batch.settle(Part(batch, 0, 4, "b"), Outcome.CONFIRMED)
    assert batch.failures == {}


def test_halves_are_the_whole_and_end_in_single_records() -> None:
    batch = batch_of(5, nsqd=1)
    left, right = Part(batch, 0, 5, "a").halves()

    assert [*left.bodies, *right.bodies] == batch.bodies
    assert [len(part) for part in left.halves()] == [1, 1]


def test_the_worst_outcome_of_a_record_counts() -> None:
    batch = batch_of(2, nsqd=3)
    batch.settle(Part(batch, 0, 2, "a"), Outcome.CONFIRMED)
    batch.settle(Part(batch, 0, 1, "b"), Outcome.UNKNOWN)
    batch.settle(Part(batch, 1, 2, "b"), Outcome.REJECTED)

    assert batch.settle(Part(batch, 0, 2, "c"), Outcome.UNSENT)
    assert batch.failures == {0: Outcome.UNSENT, 1: Outcome.REJECTED}


def test_counts_add_up() -> None:
    counts = Counts()
    for outcome in Outcome:
        counts.add(outcome, 2)

    assert (counts.confirmed, counts.unconfirmed, counts.skipped) == (2, 6, 0)
