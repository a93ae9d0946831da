"""The producer's side on the I/O thread: one connection, and the publishes outstanding on it.

nsqd executes the commands of a connection in order and answers each, so an OK belongs to the oldest
command outstanding. When nsqd answers with an error it leaves its loop: the oldest was rejected and
the commands behind it were certainly not executed (measured: 20,000 behind a bad one, 0 stored).
When the connection breaks without an answer, what had been handed to the socket is unknown.

It connects when there is something to publish, at once when a connection that worked was lost, and
after a failure not again before a delay that doubles from 0.1 to 8 seconds and is not shorter than
the failed try was long: inside it a publish fails at once instead of waiting for one connect
timeout after the other.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from nsqtools.client.connection import Connection
from nsqtools.client.connector import connect_in_background
from nsqtools.client.io_loop import IOLoop
from nsqtools.client.liveness import TICK_S, find_dead
from nsqtools.client.options import ClientOptions
from nsqtools.client.publication import Publication
from nsqtools.client.reconnect import RetryDelays
from nsqtools.errors import (
    DeadlineExceeded,
    NsqError,
    ProtocolError,
    PublishError,
    PublishNotSent,
    PublishRejected,
    PublishUnknown,
    ServerError,
)
from nsqtools.protocol import commands
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.error_codes import decode_error
from nsqtools.protocol.frames import ERROR, HEARTBEAT, OK
from nsqtools.transport.stream import READ_SIZE

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")

RECONNECT_BASE_S = 0.1
RECONNECT_MAX_S = 8.0


class ProducerIO:
    """Owns the loop and the connection of one producer.

    ``on_room`` is called on the I/O thread whenever publications have settled.
    """

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        tls: ssl.SSLContext | None,
        on_room: Callable[[list[Publication]], None],
    ) -> None:
        self.address = address
        self.loop = IOLoop(f"nsq-producer-{address}", self._each_turn, self._at_end)
        self._options = options
        self._tls = tls
        self._on_room = on_room
        self._delays = RetryDelays(RECONNECT_BASE_S, RECONNECT_MAX_S)
        self._tried_at = 0.0
        self._not_before = 0.0
        self._last_error: NsqError | None = None
        self._connection: Connection | None = None
        self._is_connecting = False
        self._is_stopping = False
        self._watches_writes = False
        self._waiting: collections.deque[Publication] = collections.deque()
        self._outstanding: collections.deque[Publication] = collections.deque()
        self._unwritten: list[Publication] = []  # of the outstanding: no byte is at the socket yet
        self._settled: list[Publication] = []
        self._read_buffer = memoryview(bytearray(READ_SIZE // 16))
        self._has_answered = False
        self._last_answer = 0.0  # to a publish: heartbeats go on when nsqd's disk hangs
        self._last_read = 0.0
        self._last_progress = 0.0

    def start(self) -> None:
        """Start the thread (from any thread)."""
        self.loop.call_soon(self._watch)
        self.loop.start()

    # -- publishing -----------------------------------------------------------------------------

    def submit(self, publication: Publication) -> None:
        """Take a publication over."""
        if self._is_stopping:
            self._settle(publication, PublishNotSent(f"{self.address}: the producer has stopped"))
            self._report_settled()  # there may be no turn any more
        elif self._connection is not None:
            self._write(publication)
        elif self.loop.now() >= self._not_before:
            self._waiting.append(publication)
            self.connect()
        else:
            self._settle(publication, self._not_sent(self._last_error))

    def connect(self) -> None:
        """Connect, unless connected or connecting."""
        if not self._is_connecting and self._connection is None:
            self._is_connecting = True
            self._tried_at = self.loop.now()
            connect_in_background(
                self.loop, self.address, self._options, self._tls, None, self._connected
            )

    def _write(self, publication: Publication) -> None:
        assert self._connection is not None
        self._connection.write(publication.command)
        self._outstanding.append(publication)
        self._unwritten.append(publication)

    def _connected(self, address: Address, result: Connection | NsqError) -> None:
        self._is_connecting = False
        if isinstance(result, NsqError):
            self._failed(result, spent_s=self.loop.now() - self._tried_at)
            self._settle_all(self._waiting, lambda: self._not_sent(result))
            return
        if self._is_stopping and not self._waiting:
            result.close()
            return
        self._connection = result
        self._has_answered = False
        self._last_answer = self._last_read = self._last_progress = self.loop.now()
        self.loop.register(self)
        log.info("connected to %s (nsqd %s)", address, result.reply.version or "before 0.2.19")
        while self._waiting:
            self._write(self._waiting.popleft())

    def _failed(self, error: NsqError, *, spent_s: float = 0.0) -> None:
        self._last_error = error
        delay_s = max(self._delays.next_delay_s(), spent_s)
        self._not_before = self.loop.now() + delay_s
        log.info("%s; not tried again for %.1f s", error, delay_s)

    # -- the connection -------------------------------------------------------------------------

    def fileno(self) -> int:
        assert self._connection is not None
        return self._connection.fileno()

    def on_readable(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            _, others = connection.read(_refuse_message, self, self._read_buffer)
        except NsqError as exc:
            self._lost(exc)
            return
        self._last_read = self.loop.now()
        for frame_type, data in others:
            self._has_answered = True
            if frame_type == ERROR:
                self._on_error(decode_error(data, str(self.address)))
                return
            if data == HEARTBEAT:
                connection.write(commands.NOP)
            elif data == OK and self._outstanding:
                self._delays.reset()
                self._last_answer = self._last_read
                self._settle(self._outstanding.popleft(), None)
            else:
                self._lost(ProtocolError(f"{self.address}: unexpected answer {data[:60]!r}"))
                return

    def on_writable(self) -> None:
        """Nothing to do here: the turn ends in a flush."""

    def _on_error(self, error: ServerError) -> None:
        if self._outstanding:
            rejected = self._outstanding.popleft()
            self._settle(
                rejected, PublishRejected(f"not published: {error}", cause=error, hint=error.hint)
            )
        # what came behind it was not executed
        self._settle_all(self._outstanding, lambda: self._not_sent(error))
        self._disconnect(error)

    def _lost(self, error: NsqError) -> None:
        unwritten = set(map(id, self._unwritten))
        for publication in self._outstanding:
            outcome: PublishError = (
                self._not_sent(error)
                if id(publication) in unwritten
                else PublishUnknown(f"not confirmed: {error}", hint=_UNKNOWN_HINT)
            )
            self._settle(publication, outcome)
        self._outstanding.clear()
        self._disconnect(error)

    def _disconnect(self, error: NsqError) -> None:
        if self._connection is None:
            return
        self.loop.unregister(self)
        self._connection.close()
        self._connection = None
        self._watches_writes = False
        self._unwritten.clear()
        if self._has_answered:
            log.info("%s", error)
        else:  # it accepts and dies: as bad as one that refuses
            self._failed(error)

    def _each_turn(self) -> None:
        self._flush()
        self._report_settled()
        if self._is_stopping and not self._waiting and not self._outstanding:
            self.loop.stop()

    def _flush(self) -> None:
        connection = self._connection
        if connection is None or not connection.has_unsent:
            return
        before = connection.sent
        try:
            done = connection.flush()
        except NsqError as exc:
            # nsqd's own reason is often there to be read although sending fails
            self.on_readable()
            if self._connection is not None:
                self._lost(exc)
            return
        if not connection.has_pending:
            self._unwritten.clear()
        if connection.sent != before:
            self._last_progress = self.loop.now()
        if done is self._watches_writes:
            self._watches_writes = not done
            self.loop.watch_writes(self, not done)

    def _watch(self) -> None:
        options, now = self._options, self.loop.now()
        while self._waiting and now - self._waiting[0].submitted_at > options.publish_timeout_s:
            late = DeadlineExceeded(f"cannot connect to {self.address} in time")
            self._settle(self._waiting.popleft(), self._not_sent(late))
        connection = self._connection
        if connection is not None:
            stalled_s = now - self._last_progress if connection.has_unsent else 0
            dead = find_dead(str(self.address), now - self._last_read, stalled_s, options)
            if dead is None and self._outstanding:
                waited_s = now - max(self._outstanding[0].submitted_at, self._last_answer)
                if waited_s > options.publish_timeout_s:
                    dead = DeadlineExceeded(
                        f"{self.address}: no answer to a publish for {waited_s:.0f} s"
                    )
            if dead is not None:
                self._lost(dead)
        self.loop.call_later(min(TICK_S, options.publish_timeout_s / 4), self._watch)

    # -- outcomes -------------------------------------------------------------------------------

    def _settle(self, publication: Publication, error: PublishError | None) -> None:
        try:
            publication.settle(error)
        except Exception:
            log.exception("on_settled failed")
        self._settled.append(publication)

    def _report_settled(self) -> None:
        if self._settled:
            settled, self._settled = self._settled, []
            self._on_room(settled)

    def _settle_all(
        self, publications: collections.deque[Publication], error: Callable[[], PublishError]
    ) -> None:
        while publications:
            self._settle(publications.popleft(), error())

    def _not_sent(self, cause: NsqError | None) -> PublishNotSent:
        error = PublishNotSent(f"not published: {cause}", hint=cause.hint if cause else "")
        if cause is not None:
            error.__cause__ = cause
            error.category = cause.category
        return error

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """End when every publication has settled."""
        self._is_stopping = True

    def abort(self) -> None:
        """Settle everything now and end."""
        self._is_stopping = True
        stopped = DeadlineExceeded(f"{self.address}: stopped before the answer")
        self._settle_all(self._waiting, lambda: self._not_sent(stopped))
        self._lost(stopped)

    def _at_end(self) -> None:
        """Nothing will happen any more, because of a stop or a defect: let nobody wait for it."""
        self.abort()
        self._report_settled()


def _refuse_message(
    producer: ProducerIO, timestamp_ns: int, attempts: int, id: bytes, body: bytes
) -> NoReturn:
    raise ProtocolError("a message on a connection without SUB")


_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
