"""Which messages were tried too often, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from nsqtools.client.giving_up import Attempts, GivingUp, Policy
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, PublishError


class Source:
    """A connection that notes the answers."""

    topic, nsqd = "clicks", "nsqd:4150"
    received_at = 0.0

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.in_flight: dict[bytes, Message] = {}
        for number in range(2):
            message = Message(self, 0, 9, b"%016d" % number, b"x")  # type: ignore[arg-type]
            self.in_flight[message.id] = message
        self.batch = Batch(self, list(self.in_flight.values()))  # type: ignore[arg-type]

    def finish_unseen(self, message_id: bytes) -> None:
        self.answers.append("give up")

    def requeue(self, message_id: bytes, delay_s: object, attempts: int, backoff: bool) -> None:
        self.answers.append("requeue with backoff" if backoff else "requeue")


class Producer:
    """Settles each publish at once."""

    def __init__(self, error: PublishError | None, *, refuses: bool = False) -> None:
        self.error = error
        self.refuses = refuses
        self.published: list[tuple[str, list[bytes]]] = []

    def submit(self, topic: str, bodies: list[bytes], on_settled: Any) -> None:
        if self.refuses:
            raise PublishError("its window is full")
        self.published.append((topic, bodies))
        on_settled(self)


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
        ("finish", None, "give up"),
        ("finish", RuntimeError("a defect of the user's"), "give up"),
        ("requeue", True, "give up"),
        ("requeue", None, "requeue with backoff"),
        ("requeue", "true enough", "requeue with backoff"),
        ("requeue", RuntimeError("a defect of the user's"), "requeue with backoff"),
    ],
)
def test_only_a_callback_that_says_so_takes_a_message(
    policy: Policy, outcome: object, answer: str
) -> None:
    seen: list[Message] = []

    def on_giving_up(message: Message) -> object:
        seen.append(message)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    source = Source()
    giving_up(policy, on=on_giving_up).messages(source.batch)
    assert (source.answers, seen) == ([answer] * 2, list(source.batch))
    assert not source.batch[0].give_up()  # it was answered


@pytest.mark.parametrize(
    ("producer", "answer", "count"),
    [
        (Producer(None), "give up", 2),
        (Producer(PublishError("refused")), "requeue", 2),
        (Producer(None, refuses=True), "requeue", 0),
    ],
    ids=["published", "failed", "refused"],
)
def test_a_dead_letter_is_finished_when_it_has_arrived(
    producer: Producer, answer: str, count: int
) -> None:
    source, dead_letters = Source(), giving_up(dead_letter="clicks.dead")
    assert dead_letters._dead_letters is not None
    dead_letters._dead_letters._producers["nsqd:4150"] = producer  # type: ignore[assignment]
    dead_letters.messages(source.batch)
    assert source.answers == [answer] * 2
    assert producer.published == [("clicks.dead", [b"x"])] * count


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
