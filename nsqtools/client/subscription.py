"""One connection of a consumer, on the I/O thread: messages in, answers out.

Handler threads only append to ``_finished`` and ``_answers`` and wake the loop (the methods of
`message.Answers`); everything else here runs on the I/O thread. In one turn the answers are
collected, RDY changes are put in front of them (nsqd would send one message more between a FIN and
the RDY 0 behind it), and all of it leaves in one write.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from nsqtools.client.connection import Connection
from nsqtools.client.message import MAX_REQUEUE_DELAY_S, Batch, Message
from nsqtools.errors import NsqError
from nsqtools.protocol import commands
from nsqtools.protocol.error_codes import decode_error
from nsqtools.protocol.frames import CLOSE_WAIT, ERROR, HEARTBEAT

if TYPE_CHECKING:
    from nsqtools.client.consumer_io import ConsumerIO

FLUSH_INTERVAL_S = 0.001  # of a handler that answers messages one by one and fast


class Subscription:
    """A subscribed connection. ``in_flight`` maps the ids of unanswered messages to them."""

    def __init__(self, owner: ConsumerIO, connection: Connection, now: float) -> None:
        self.topic = owner.topic
        self.nsqd = str(connection.address)
        self.connection = connection
        self.in_flight: dict[bytes, Message] = {}
        self.is_open = True
        self.is_proven = False
        self.is_closing = False  # CLS has been sent
        self.saw_close_wait = False
        self.is_shut_down = False
        self.opened_at = now
        self.last_read = now
        self.last_progress = now  # of writing
        self._owner = owner
        self._now = owner.loop.now
        self._finished: list[bytes] = []
        self._answers: collections.deque[_Answer] = collections.deque()
        self._outgoing: list[bytes] = []
        self._watches_writes = False
        self._next_wake = 0.0

    @property
    def msg_timeout_s(self) -> float:
        return self.connection.reply.msg_timeout / 1000

    # -- from handler threads -------------------------------------------------------------------

    def finish(self, message_id: bytes) -> None:
        """Queue a FIN. Fast ones are left to gather for a moment, unless none is to come."""
        self._finished.append(message_id)
        now = self._now()
        if now >= self._next_wake or not self.in_flight:
            self._next_wake = now + FLUSH_INTERVAL_S
            self._owner.loop.wake()

    def finish_many(self, ids: list[bytes]) -> None:
        """Queue FINs that belong together."""
        self._finished += ids
        self._owner.loop.wake()

    def requeue(
        self, message_id: bytes, delay_s: float | None, attempts: int, backoff: bool
    ) -> None:
        if delay_s is None:
            delay_s = self._owner.requeue_delay_s(attempts)
        delay_ms = round(min(delay_s, MAX_REQUEUE_DELAY_S) * 1000)
        command = commands.Requeue(message_id, delay_ms).encode()
        self._queue(_Answer(command, is_final=True, is_failure=backoff))

    def touch(self, message_id: bytes) -> None:
        self._queue(_Answer(commands.Touch(message_id).encode()))

    def finish_unseen(self, message_id: bytes) -> None:
        """FIN a message that was given up: no result of the handler."""
        command = commands.Finish(message_id).encode()
        self._queue(_Answer(command, is_final=True, is_result=False))

    def _queue(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._owner.loop.wake()

    # -- on the I/O thread ----------------------------------------------------------------------

    def fileno(self) -> int:
        return self.connection.fileno()

    def on_readable(self) -> None:
        if not self.is_open:  # closed earlier in this turn
            return
        try:
            messages, others = self.connection.read(Message, self, self._owner.read_buffer)
        except NsqError as exc:
            self._owner.lost(self, exc)
            return
        self.last_read = self._owner.loop.now()
        if messages:
            self._receive(messages)
        for frame_type, data in others:
            if frame_type == ERROR:
                error = decode_error(data, self.nsqd)
                if error.fatal:
                    self._owner.lost(self, error)
                    return
                self._owner.answer_failed(error)
            elif data == HEARTBEAT:
                self._outgoing.append(commands.NOP)
                self.prove()
            elif data == CLOSE_WAIT:
                self.saw_close_wait = True

    def on_writable(self) -> None:
        if self.is_open:
            self.flush()

    def _receive(self, messages: list[Message]) -> None:
        self.prove()
        most_attempts = max([message.attempts for message in messages])
        redelivered = 0
        if most_attempts == 1:
            self.in_flight.update({message.id: message for message in messages})
        else:
            redelivered = self._replace(messages)
        self._owner.received(self, Batch(self, messages), redelivered, most_attempts)

    def _replace(self, messages: list[Message]) -> int:
        """Take messages in flight, and the place of their earlier deliveries: return how many.

        One by one, as taking an earlier delivery out is what decides against its handler.
        """
        replaced = 0
        for message in messages:
            replaced += self.in_flight.pop(message.id, None) is not None
            self.in_flight[message.id] = message
        return replaced

    def prove(self) -> None:
        """The connection has shown that its address is good."""
        if not self.is_proven:
            self.is_proven = True
            self._owner.proven(self)

    def collect(self) -> None:
        """Turn the answers that gathered since the last turn into commands."""
        # other threads append meanwhile; counted first, so that a TOUCH stays before its FIN
        count = len(self._finished)
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            self._outgoing.append(answer.command)
            if answer.is_final:
                self._owner.answered(self, answer.is_result, answer.is_failure)
        if count:
            ids = self._finished[:count]
            del self._finished[:count]
            self._outgoing.append(commands.encode_finishes(ids))
            self._owner.finished(self, count)

    @property
    def awaits_answers(self) -> bool:
        """Tell whether messages are unanswered, or answers were not collected yet.

        ``in_flight`` would not do: a handler takes a message out before it queues the answer.
        """
        return self._owner.rdy[self].in_flight > 0

    def send_ready(self, count: int) -> None:
        """Put RDY in front of what this turn sends."""
        if self.is_open and not self.is_closing:
            self.connection.write(commands.Ready(count).encode())

    def send_close(self) -> None:
        """Send CLS, once: a second one is a fatal error."""
        if not self.is_closing:
            self.is_closing = True
            self.connection.write(commands.CLS)

    def shut_down(self) -> None:
        """End our direction, after everything was flushed; what nsqd still sends is read."""
        self.is_shut_down = True
        self.connection.shutdown_write()

    def flush(self) -> None:
        """Send what the turn has queued."""
        if self.is_shut_down:
            return
        connection = self.connection
        if self._outgoing:
            connection.write(b"".join(self._outgoing))
            self._outgoing.clear()
        elif not connection.has_unsent:
            return
        before = connection.sent
        try:
            done = connection.flush()
        except NsqError as exc:
            self._flush_failed(exc)
            return
        if done or connection.sent != before:
            self.last_progress = self._owner.loop.now()
        if done is self._watches_writes:
            self._watches_writes = not done
            self._owner.loop.watch_writes(self, not done)

    def _flush_failed(self, exc: NsqError) -> None:
        """Report the loss, with nsqd's own reason if its error frame is still to be read."""
        self.on_readable()
        if self.is_open:
            self._owner.lost(self, exc)

    @property
    def is_drained(self) -> bool:
        """Tell whether every message is answered and every answer is sent."""
        return not (
            self.awaits_answers or self._answers or self._outgoing or self.connection.has_unsent
        )


class _Answer:
    """A REQ or TOUCH, or a FIN without result, on its way to the I/O thread."""

    __slots__ = ("command", "is_failure", "is_final", "is_result")

    def __init__(
        self,
        command: bytes,
        *,
        is_final: bool = False,
        is_result: bool = True,
        is_failure: bool = False,
    ) -> None:
        self.command = command
        self.is_final = is_final
        self.is_result = is_result
        self.is_failure = is_failure
