"""Which deliveries count towards max_attempts."""

from __future__ import annotations

import pytest

from nsqtools.client import attempts
from nsqtools.client.attempts import Attempts

KEY = ("nsqd:4150", b"0" * 16)


def decisions(known: Attempts, *counts: int) -> list[str]:
    return [known.decide(KEY, count) for count in counts]


def test_a_message_that_a_handler_here_saw_is_given_up_above_the_limit() -> None:
    known = Attempts(5)
    known.was_seen(KEY)
    assert decisions(known, 1, 5, 6) == ["deliver", "deliver", "give_up"]


def test_a_message_that_nobody_here_saw_is_handed_out_alone_once_above_twice_the_limit() -> None:
    assert decisions(Attempts(5), 6, 10, 11, 12) == ["deliver", "deliver", "alone", "give_up"]


def test_deliveries_that_expired_here_do_not_count() -> None:
    known = Attempts(5)
    known.was_seen(KEY)
    known.was_unseen(KEY, 3)
    assert decisions(known, 8, 9) == ["deliver", "give_up"]
    known.was_unseen(KEY)
    assert decisions(known, 9) == ["deliver"]


def test_a_finished_message_is_forgotten() -> None:
    known = Attempts(5)
    known.was_seen(KEY)
    assert len(known) == 1
    known.forget(KEY)
    assert len(known) == 0
    known.forget(KEY)


def test_without_a_limit_everything_is_delivered_and_nothing_remembered() -> None:
    known = Attempts(0)
    known.was_seen(KEY)
    assert decisions(known, 65535) == ["deliver"]
    assert len(known) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_KNOWN", 2)
    known = Attempts(5)
    for number in range(3):
        known.was_seen(("nsqd:4150", b"%d" % number))
    assert len(known) == 2
    assert known.decide(("nsqd:4150", b"0"), 6) == "deliver"
    assert known.decide(("nsqd:4150", b"2"), 6) == "give_up"
