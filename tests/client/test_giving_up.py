"""What becomes of messages that were tried too often."""

from __future__ import annotations

from typing import Any

import pytest

from nsqtools.client.giving_up import GivingUp, Policy
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
        assert not backoff  # it is no failure of the handler
        self.answers.append("requeue")


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


def giving_up(policy: Policy = "finish", dead_letter: str = "", on: Any = None) -> GivingUp:
    return GivingUp(ClientOptions(), on, policy, dead_letter)


@pytest.mark.parametrize(("policy", "answer"), [("finish", "give up"), ("requeue", "requeue")])
def test_each_message_is_answered_whatever_is_done_with_it(policy: Policy, answer: str) -> None:
    seen: list[Message] = []

    def on_giving_up(message: Message) -> None:
        seen.append(message)
        raise RuntimeError("a defect of the user's")

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
    dead_letters._producers["nsqd:4150"] = producer  # type: ignore[assignment]
    dead_letters.messages(source.batch)
    assert source.answers == [answer] * 2
    assert producer.published == [("clicks.dead", [b"x"])] * count


@pytest.mark.parametrize(
    ("policy", "dead_letter"), [("drop", ""), ("requeue", "clicks.dead"), ("finish", "no topic")]
)
def test_what_contradicts_itself_is_refused(policy: Any, dead_letter: str) -> None:
    with pytest.raises(ConfigurationError):
        giving_up(policy, dead_letter)
