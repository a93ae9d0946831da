"""Which messages were tried too often, and what becomes of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest

from nsqtools.client.giving_up import Attempts, GivingUp, Policy
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, PublishNotSent
from nsqtools.testing import FakeProducer, Published, fake_batch


def giving_up(policy: Policy = "requeue", dead_letter: str = "", on: Any = None) -> GivingUp:
    return GivingUp(ClientOptions(max_attempts=5), on, policy, dead_letter)


def test_there_is_a_limit_only_where_a_message_has_somewhere_to_go() -> None:
    assert giving_up().max_attempts == 0
    assert giving_up("finish").max_attempts == 5
    assert giving_up(dead_letter="clicks.dead").max_attempts == 5
    assert giving_up(on=lambda message: True).max_attempts == 5


@pytest.mark.parametrize(
    ("policy", "outcome", "answer"),
    [
        ("finish", None, "give_up"),
        ("finish", RuntimeError("a defect of the user's"), "give_up"),
        ("requeue", True, "give_up"),
        ("requeue", None, "requeue"),
        ("requeue", "true enough", "requeue"),
        ("requeue", RuntimeError("a defect of the user's"), "requeue"),
    ],
)
def test_only_a_callback_that_says_so_takes_a_message(
    policy: Policy, outcome: object, answer: str
) -> None:
    batch: Any = fake_batch([b"x", b"y"])
    on_giving_up = Mock(side_effect=[outcome] * 2)  # an exception is raised
    giving_up(policy, on=on_giving_up).messages(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert on_giving_up.call_args_list == [call(message) for message in batch]
    assert [message.has_backoff for message in batch] == [answer == "requeue"] * 2
    assert not batch[0].give_up()  # it was answered


@pytest.mark.parametrize(
    ("fate", "answer"), [("published", "give_up"), ("failed", "requeue"), ("refused", "requeue")]
)
def test_a_dead_letter_is_finished_when_it_has_arrived(fate: str, answer: str) -> None:
    batch: Any = fake_batch([b"x", b"x"])
    producer, dead_letters = FakeProducer(), giving_up(dead_letter="clicks.dead")
    if fate == "failed":
        producer.error = PublishNotSent("nsqd is away")
    if fate == "refused":
        producer.stop()
    dead_letters._dead_letters._producers[batch[0].nsqd] = producer
    dead_letters.messages(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert not any(message.has_backoff for message in batch)
    assert producer.published == [Published("clicks.dead", b"x")] * (2 * (fate == "published"))


@pytest.mark.parametrize(
    ("policy", "dead_letter"), [("drop", ""), ("finish", "clicks.dead"), ("requeue", "no topic")]
)
def test_what_contradicts_itself_is_refused(policy: Any, dead_letter: str) -> None:
    with pytest.raises(ConfigurationError):
        giving_up(policy, dead_letter)


# -- which deliveries count towards max_attempts --------------------------------------------------

KEY = ("nsqd:4150", b"0" * 16)


UNCOUNTED = ["does_not_count"] * 3


@pytest.mark.parametrize(
    ("keeps", "events", "verdicts"),
    [
        # no handler here has requeued it: never given up where that loses it
        (False, [], {6: "usual", 12: "usual", 65535: "usual"}),
        (True, [], {5: "usual", 6: "alone", 7: "alone", 8: "give up"}),
        (False, ["was_tried"], {1: "usual", 5: "usual", 6: "give up"}),
        # deliveries that ended without a word of a handler
        (True, ["does_not_count"], {6: "usual", 8: "alone"}),
        (True, ["does_not_count", "was_tried"], {6: "usual", 7: "give up"}),
        (False, UNCOUNTED, {100: "usual"}),
        (False, [*UNCOUNTED, "was_tried"], {8: "usual", 9: "give up"}),
        (False, [*UNCOUNTED, "was_tried", "does_not_count"], {9: "usual"}),
        (False, ["does_not_count", "late"], {5: "usual", 6: "give up"}),  # a late word counts
    ],
)
def test_what_a_handler_requeued_or_nobody_handled_is_given_up_or_alone(
    keeps: bool, events: list[str], verdicts: dict[int, str]
) -> None:
    known = Attempts(5, keeps=keeps)
    for event in events:
        if event == "late":
            known.was_tried(KEY, late=True)
        else:
            getattr(known, event)(KEY)
    assert {count: known.verdict(KEY, count) for count in verdicts} == verdicts


def test_a_finished_message_is_forgotten() -> None:
    known = Attempts(5)
    known.was_tried(KEY)
    assert len(known) == 1
    known.forget(KEY)
    assert len(known) == 0
    known.forget(KEY)


def test_without_a_limit_everything_is_delivered_and_nothing_remembered() -> None:
    known = Attempts(0)
    known.was_tried(KEY)
    assert known.verdict(KEY, 65535) == "usual"
    assert len(known) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.client.giving_up.MAX_KNOWN", 2)
    known = Attempts(5)
    for number in range(3):
        known.was_tried(("nsqd:4150", b"%d" % number))
    assert len(known) == 2
    assert known.verdict(("nsqd:4150", b"0"), 6) == "usual"
    assert known.verdict(("nsqd:4150", b"2"), 6) == "give up"
