"""The connection of a producer, on the I/O thread, and the publishes outstanding on it.

nsqd executes the commands of a connection in order and answers each, so an OK belongs to the oldest
command outstanding. When nsqd answers with an error it stops reading: the oldest was rejected and
the commands after it were certainly not executed (measured: 20,000 after a bad one, 0 stored).
When the connection breaks without an answer, what had been handed to the socket is unknown.

It connects when there is something to publish: at once when a connection that worked was lost, and
after a failure only when a delay has passed that doubles from 0.1 to 8 seconds and is at least as
long as the failed attempt took. Within the delay a publish fails at once instead of waiting for one
connect timeout after another.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from nsqtools.client.connection import LIVENESS_TICK_S, Connection
from nsqtools.client.handshake import open_in_background
from nsqtools.client.io_loop import IOLoop
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
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.frames import OK
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
        self._waiting: collections.deque[Publication] = collections.deque()
        self._outstanding: collections.deque[Publication] = collections.deque()
        self._settled: list[Publication] = []
        self._read_buffer = memoryview(bytearray(READ_SIZE // 16))
        self.received_at = 0.0
        self._has_answered = False
        self._last_answer = 0.0  # to a publish: heartbeats go on when nsqd's disk hangs

    def start(self) -> None:
        """Start the thread (from any thread)."""
        self.loop.call_soon(self._watch)
        self.loop.start()

    # -- publishing -----------------------------------------------------------------------------

    def submit(self, publication: Publication) -> None:
        """Publish, or settle the publication with the reason why not."""
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
            open_in_background(self.address, self._options, self._tls, None, self._opened)

    def _opened(self, result: Connection | NsqError) -> None:  # on the connecting thread
        self.loop.call_soon(lambda: self._connected(result))

    def _write(self, publication: Publication) -> None:
        assert self._connection is not None
        self._connection.write(publication.command)
        self._outstanding.append(publication)

    def _connected(self, result: Connection | NsqError) -> None:
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
        self._last_answer = self.loop.now()
        result.attach(self.loop, self, self._read_buffer)
        log.info("connected to %s (nsqd %s)", self.address, result.reply.version or "before 0.2.19")
        while self._waiting:
            self._write(self._waiting.popleft())

    def _failed(self, error: NsqError, *, spent_s: float = 0.0) -> None:
        self._last_error = error
        delay_s = max(self._delays.next_delay_s(), spent_s)
        self._not_before = self.loop.now() + delay_s
        log.info("%s; next attempt in %.1f s at the earliest", error, delay_s)

    # -- the connection -------------------------------------------------------------------------

    @property
    def make_message(self) -> Callable[..., NoReturn]:
        return _refuse_message

    def on_messages(self, messages: list[NoReturn]) -> None:
        """Never called: `make_message` refuses the first."""

    def on_response(self, data: bytes) -> None:
        self._has_answered = True
        if data == OK and self._outstanding:
            self._delays.reset()
            self._last_answer = self.loop.now()
            self._settle(self._outstanding.popleft(), None)
        elif self._connection is not None:
            self._connection.lose(ProtocolError(f"{self.address}: unexpected answer {data[:60]!r}"))

    def on_server_error(self, error: ServerError) -> None:
        self._has_answered = True
        if self._outstanding:
            rejected = self._outstanding.popleft()
            self._settle(
                rejected, PublishRejected(f"not published: {error}", cause=error, hint=error.hint)
            )
        # what came after it was not executed
        self._settle_all(self._outstanding, lambda: self._not_sent(error))
        if self._connection is not None:
            self._connection.lose(error)

    def on_lost(self, error: NsqError) -> None:
        """Settle what was outstanding, by whether its bytes may have reached nsqd."""
        connection, self._connection = self._connection, None
        assert connection is not None
        untouched = set(map(id, connection.untouched))
        for publication in self._outstanding:
            outcome: PublishError = (
                self._not_sent(error)
                if id(publication.command) in untouched
                else PublishUnknown(f"not confirmed: {error}", hint=_UNKNOWN_HINT)
            )
            self._settle(publication, outcome)
        self._outstanding.clear()
        if self._has_answered or connection.has_received:
            log.info("%s", error)
        else:  # it accepts and dies: as bad as one that refuses
            self._failed(error)
        self.loop.wake()  # the turn may be past the point where the outcomes are reported

    def _each_turn(self) -> None:
        self._report_settled()
        if self._is_stopping and not self._waiting and not self._outstanding:
            self.loop.stop()

    def _watch(self) -> None:
        options, now = self._options, self.loop.now()
        while self._waiting and now - self._waiting[0].submitted_at > options.publish_timeout_s:
            late = DeadlineExceeded(f"cannot connect to {self.address} in time")
            self._settle(self._waiting.popleft(), self._not_sent(late))
        if self._connection is not None:
            self._connection.check_liveness()
        if self._connection is not None and self._outstanding:
            waited_s = now - max(self._outstanding[0].submitted_at, self._last_answer)
            if waited_s > options.publish_timeout_s:
                self._connection.lose(
                    DeadlineExceeded(f"{self.address}: no answer to a publish for {waited_s:.0f} s")
                )
        self.loop.call_later(min(LIVENESS_TICK_S, options.publish_timeout_s / 4), self._watch)

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
        if self._connection is not None:
            self._connection.lose(stopped)

    def _at_end(self) -> None:
        """The loop has ended, by a stop or a defect: release everybody who waits."""
        self.abort()
        self._report_settled()


def _refuse_message(
    producer: ProducerIO, timestamp_ns: int, attempts: int, id: bytes, body: bytes
) -> NoReturn:
    raise ProtocolError("a message on a connection without SUB")


_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
