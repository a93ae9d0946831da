"""The protocol state of one subscribed connection: messages in, answers out.

Handler threads call the methods of `message.Answers`: they only append to ``_finished`` and
``_answers``, and note the subscription for its consumer. Everything else runs on the I/O thread.
There the consumer collects the answers of a turn, puts RDY changes before them (nsqd would
send one message more between a FIN and the RDY 0 after it), and all of it leaves in one write.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Set, Sized
from typing import NamedTuple, Protocol

from nsqtools.client.connection import Connection
from nsqtools.client.message import Batch, Message
from nsqtools.errors import NsqError, ProtocolError, ServerError
from nsqtools.protocol import commands
from nsqtools.protocol.frames import CLOSE_WAIT

MOST_BEYOND_RDY = 4  # times, as what nsqd takes back by its timeout may still be held here
FLUSH_INTERVAL_S = 0.001  # of a handler that answers messages one by one and fast


class SubscriptionUser(Protocol):
    """What a subscription needs of its consumer. ``answered`` and ``wake`` come from any thread.

    Quick FINs of all subscriptions gather until ``next_wake``, or the last of what ``waiting`` has.
    With ``has_more_in_hand`` the thread that finishes one has others and wakes the loop after them,
    so that many connections with a message each gather as one with many does.
    """

    topic: str

    @property
    def waiting(self) -> Sized: ...

    next_wake: float
    has_more_in_hand: bool

    def answered(self, subscription: Subscription) -> None:
        """There are answers to collect, on this turn or a later one."""

    def wake(self) -> None:
        """See that the I/O loop takes a turn."""

    def now(self) -> float: ...
    def requeue_delay_s(self, attempts: int) -> float: ...
    def redelivered(
        self, subscription: Subscription, again: Set[bytes], dropped: list[bytes]
    ) -> None:
        """Messages in flight came ``again``: called before the new deliveries take over. Others
        were ``dropped``, for a later delivery came in the same read."""

    def received(self, subscription: Subscription, batch: Batch, replaced: int) -> None:
        """New deliveries, ``replaced`` of them of messages that are in flight."""

    def answer_refused(self, error: ServerError) -> None: ...
    def lost(self, subscription: Subscription, error: NsqError) -> None: ...


class Answer(NamedTuple):
    """A REQ, a TOUCH or the FIN of a message that was given up, on its way to the I/O thread.

    A TOUCH is not ``final``. ``failure`` is None where the answer is not a handler's.
    """

    message_id: bytes
    command: bytes
    is_final: bool = False
    failure: bool | None = None


class Subscription:
    """One of a consumer's connections. ``in_flight`` maps ids of unanswered messages to them."""

    make_message = Message

    def __init__(self, user: SubscriptionUser, connection: Connection) -> None:
        self.topic = user.topic
        self.nsqd = connection.nsqd
        self.connection = connection
        self.msg_timeout_s = connection.reply.msg_timeout / 1000
        self.in_flight: dict[bytes, Message] = {}
        self.saw_close_wait = False
        self._user = user
        self.received_at = 0.0
        self._now: Callable[[], float] = user.now
        self._is_closing = False  # CLS has been sent
        self._most_ready = 250  # the greatest RDY so far, and room for those that never sent one
        # ``in_flight`` would not do: a handler takes a message out before it queues the answer
        self._unanswered = 0
        self._is_noted = False
        self._finished: list[bytes] = []
        self._answers: collections.deque[Answer] = collections.deque()
        self._outgoing: list[bytes] = []

    # -- from handler threads -------------------------------------------------------------------

    def finish(self, message_id: bytes) -> None:
        """Queue a FIN. Quick ones gather for a moment, unless it is the last."""
        self._finished.append(message_id)
        user = self._user
        if not self._is_noted:
            self._is_noted = True
            user.answered(self)
        now = self._now()
        if now >= user.next_wake or not (self.in_flight or user.waiting or user.has_more_in_hand):
            user.next_wake = now + FLUSH_INTERVAL_S
            user.wake()

    def finish_many(self, ids: list[bytes]) -> None:
        """Queue FINs that belong together."""
        self._finished += ids
        self._note()

    def requeue(
        self, message_id: bytes, delay_s: float | None, attempts: int, backoff: bool
    ) -> None:
        if delay_s is None:
            delay_s = self._user.requeue_delay_s(attempts)
        delay_ms = round(min(delay_s, commands.MAX_DELAY_S) * 1000)
        command = commands.Requeue(message_id, delay_ms).encode()
        self._answers.append(Answer(message_id, command, is_final=True, failure=backoff))
        self._note()

    def touch(self, message_id: bytes) -> None:
        self._answers.append(Answer(message_id, commands.Touch(message_id).encode()))
        self._note()

    def finish_unseen(self, message_id: bytes) -> None:
        """FIN a message that was given up: not a result of the handler."""
        command = commands.Finish(message_id).encode()
        self._answers.append(Answer(message_id, command, is_final=True))
        self._note()

    def give_back(self, batch: Batch, *, in_time: bool) -> list[bytes]:
        """Return messages to nsqd that no handler has seen; return the ids of those in flight.

        If it is not ``in_time`` for a REQ, nsqd takes them back by their timeout.
        """
        ids = [m.id for m in batch if self.in_flight.get(m.id) is m]
        for message_id in ids:
            del self.in_flight[message_id]
            command = commands.Requeue(message_id, 0).encode() if in_time else b""
            self._answers.append(Answer(message_id, command, is_final=True))
        self._note()
        return ids

    def _note(self) -> None:
        # in this order: `collect` clears the flag before it looks
        if not self._is_noted:
            self._is_noted = True
            self._user.answered(self)
        self._user.wake()

    # -- on the I/O thread: what nsqd sends -----------------------------------------------------

    def on_messages(self, messages: list[Message]) -> None:
        replaced = 0
        if most_attempts(messages) == 1:
            for message in messages:
                self.in_flight[message.id] = message
        else:
            messages = self._without_superseded(messages)
            replaced = self._replace(messages)
        self._unanswered += len(messages) - replaced
        if self._unanswered > MOST_BEYOND_RDY * self._most_ready:
            beyond = f"{self._unanswered} messages in flight where RDY was {self._most_ready}"
            self.connection.lose(ProtocolError(f"{self.nsqd}: {beyond} at most"))
            return
        self._user.received(self, Batch(self, messages), replaced)

    def _without_superseded(self, messages: list[Message]) -> list[Message]:
        """Keep the latest delivery of each message: one read may bring several."""
        latest = {message.id: message for message in messages}
        dropped = [m.id for m in messages if latest[m.id] is not m]
        again = latest.keys() & self.in_flight.keys()
        if dropped or again:
            self._user.redelivered(self, again, dropped)
        return list(latest.values()) if dropped else messages

    def _replace(self, messages: list[Message]) -> int:
        """Put messages in flight in the place of their earlier deliveries: return how many.

        One by one, as taking an earlier delivery out is what decides against its handler.
        """
        replaced = 0
        for message in messages:
            replaced += self.in_flight.pop(message.id, None) is not None
            self.in_flight[message.id] = message
        return replaced

    def on_response(self, data: bytes) -> None:
        if data == CLOSE_WAIT:
            self.saw_close_wait = True

    def on_server_error(self, error: ServerError) -> None:
        if error.fatal:
            self.connection.lose(error)
        else:
            self._user.answer_refused(error)

    def on_lost(self, error: NsqError) -> None:
        self._user.lost(self, error)

    # -- on the I/O thread: what the consumer sends ---------------------------------------------

    def collect(self) -> tuple[list[bytes], list[Answer]]:
        """Take the answers since the last time: ids that handlers finished, and the others.

        The commands go out with `send_answers`.
        """
        self._is_noted = False
        # other threads append meanwhile; counted first, so that a TOUCH stays before its FIN
        finished = self._finished
        count = len(finished)
        answers: list[Answer] = []
        if self._answers:
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
            self._outgoing += [answer.command for answer in answers]
            self._unanswered -= sum(answer.is_final for answer in answers)
        ids = finished[:count]
        if ids:
            del finished[:count]
            self._outgoing.append(commands.encode_finishes(ids))
            self._unanswered -= count
        return ids, answers

    def send_answers(self) -> None:
        """Write what was collected."""
        outgoing = self._outgoing
        if outgoing:
            self.connection.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
            outgoing.clear()

    def send_ready(self, count: int) -> None:
        """Write RDY, before the answers of this turn."""
        if not self._is_closing:
            self._most_ready = max(self._most_ready, count)
            self.connection.write(commands.Ready(count).encode())

    def send_close(self) -> None:
        """Write CLS, once: a second one is a fatal error."""
        if not self._is_closing:
            self._is_closing = True
            self.connection.write(commands.CLS)

    @property
    def is_drained(self) -> bool:
        """Tell whether every message is answered and every answer is sent."""
        return not (
            self._unanswered or self._answers or self._outgoing or self.connection.has_unsent
        )


def most_attempts(messages: list[Message]) -> int:
    """Return the greatest number of attempts. A single message is usual with many connections."""
    if len(messages) == 1:
        return messages[0].attempts
    return max([message.attempts for message in messages])
