"""The connection of a producer to one nsqd, on the I/O thread, and the commands outstanding on it.

nsqd executes the commands of a connection in order and answers each, so an OK belongs to the oldest
command outstanding. When nsqd answers with an error it stops reading: the oldest was rejected and
the commands after it were certainly not executed (measured: 20,000 after a bad one, 0 stored).
When the connection breaks without an answer, what had been handed to the socket is unknown.

It connects when it is asked to and may: at once when a connection that worked was lost, and after a
failure only when a delay has passed that doubles from 0.1 to 8 seconds and is at least as long as
the failed attempt took. Within the delay a publish must not wait for one connect timeout after
another.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import NoReturn, Protocol

from nsqtools.client.connection import Connection
from nsqtools.client.handshake import open_in_background
from nsqtools.client.io_loop import LoopMember
from nsqtools.client.options import ClientOptions
from nsqtools.client.publication import Publication
from nsqtools.client.reconnect import RetryDelays
from nsqtools.errors import DeadlineExceeded, NsqError, ProtocolError, ServerError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.frames import OK
from nsqtools.transport.stream import READ_SIZE

log = logging.getLogger("nsqtools")

RECONNECT_BASE_S = 0.1
RECONNECT_MAX_S = 8.0

READ_BUFFER = memoryview(bytearray(READ_SIZE // 16))  # of the one I/O thread


class LinkUser(Protocol):
    """What a link reports, on the I/O thread."""

    def confirmed(self, publications: list[Publication]) -> None: ...
    def rejected(
        self, link: ProducerLink, publications: list[Publication], error: ServerError
    ) -> None: ...
    def not_sent(self, publications: list[Publication], error: NsqError) -> None: ...
    def unknown(self, publications: list[Publication], error: NsqError) -> None: ...
    def link_changed(self) -> None: ...


# A command without its answer yet, the publications that it carries, and when it was sent. A plain
# tuple: there is one for each publish.
Outstanding = tuple[bytes, list[Publication], float]


class ProducerLink:
    """One nsqd that a producer publishes to."""

    received_at = 0.0  # of `ConnectionUser`; there are no messages here

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        loop: LoopMember,
        user: LinkUser,
        *,
        is_announced: bool = False,
    ) -> None:
        self.address = address
        self.is_announced = is_announced  # by nsqlookupd; whether it still is, `is_listed` tells
        self.is_listed = True
        self.connection: Connection | None = None
        self.outstanding: collections.deque[Outstanding] = collections.deque()
        self.is_connecting = False
        self.tried_at = 0.0
        self.not_before = 0.0  # the next attempt to connect
        self.last_error: NsqError | None = None
        self._options = options
        self._loop = loop
        self._user = user
        self._delays = RetryDelays(RECONNECT_BASE_S, RECONNECT_MAX_S)
        self._is_closed = False
        self._has_answered = False
        self._last_answer = 0.0  # to a publish: heartbeats go on when nsqd's disk hangs

    # -- connecting -----------------------------------------------------------------------------

    def connect_if_due(self, now: float) -> None:
        """Begin to connect, unless connected, connecting, or within the delay after a failure."""
        may = self.connection is None and not self.is_connecting and self.is_listed
        if may and now >= self.not_before:
            self.is_connecting = True
            self.tried_at = now
            open_in_background(
                self.address,
                self._options,
                None,
                self._opened,
                is_announced=self.is_announced,
            )

    @property
    def has_failed(self) -> bool:
        """Tell whether it was connected, or tried, and is not."""
        return self.connection is None and self.last_error is not None

    def _opened(self, result: Connection | NsqError) -> None:  # on the connecting thread
        self._loop.call_soon(lambda: self._connected(result))

    def _connected(self, result: Connection | NsqError) -> None:
        self.is_connecting = False
        if isinstance(result, NsqError):
            self.delay_next(result, spent_s=self._loop.now() - self.tried_at)
        elif self._is_closed:
            result.close()
        else:
            self.connection = result
            self.last_error = None
            self._has_answered = False
            self._last_answer = self._loop.now()
            result.attach(self._loop, self, READ_BUFFER)
            version = result.reply.version or "before 0.2.19"
            log.info("connected to %s (nsqd %s)", self.address, version)
        self._user.link_changed()

    def delay_next(self, error: NsqError, *, spent_s: float = 0.0) -> None:
        """Connect again after a delay only."""
        self.last_error = error
        delay_s = max(self._delays.next_delay_s(), spent_s)
        self.not_before = self._loop.now() + delay_s
        log.info("%s; next attempt in %.1f s at the earliest", error, delay_s)

    # -- publishing -----------------------------------------------------------------------------

    def send(self, command: bytes, publications: list[Publication]) -> None:
        """Send a command on the connection, which there must be."""
        assert self.connection is not None
        for publication in publications:
            publication.is_written = True
        self.connection.write(command)
        self.outstanding.append((command, publications, self._loop.now()))

    def check(self, now: float) -> None:
        """Give the connection up when it is dead, or a publish was not answered in time."""
        if self.connection is not None:
            self.connection.check_liveness()
        if self.connection is not None and self.outstanding:
            waited_s = now - max(self.outstanding[0][2], self._last_answer)
            if waited_s > self._options.publish_timeout_s:
                self.lose(
                    DeadlineExceeded(f"{self.address}: no answer to a publish for {waited_s:.0f} s")
                )

    def lose(self, error: NsqError) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.lose(error)

    def close(self, error: NsqError) -> None:
        """Close for good."""
        self._is_closed = True
        self.lose(error)

    # -- the connection -------------------------------------------------------------------------

    @property
    def make_message(self) -> Callable[..., NoReturn]:
        return _refuse_message

    def on_messages(self, messages: list[NoReturn]) -> None:
        """Never called: `make_message` refuses the first."""

    def on_response(self, data: bytes) -> None:
        self._has_answered = True
        if data == OK and self.outstanding:
            self._delays.reset()
            self._last_answer = self._loop.now()
            _, publications, _ = self.outstanding.popleft()
            self._user.confirmed(publications)
        else:
            self.lose(ProtocolError(f"{self.address}: unexpected answer {data[:60]!r}"))

    def on_server_error(self, error: ServerError) -> None:
        self._has_answered = True
        rejected = self.outstanding.popleft()[1] if self.outstanding else []
        not_executed = [each for _, publications, _ in self.outstanding for each in publications]
        self.outstanding.clear()
        self.lose(error)
        self._user.rejected(self, rejected, error)
        self._user.not_sent(not_executed, error)

    def on_lost(self, error: NsqError) -> None:
        """Report what was outstanding, by whether its bytes may have reached nsqd."""
        connection, self.connection = self.connection, None
        assert connection is not None
        untouched = set(map(id, connection.untouched))
        not_sent: list[Publication] = []
        unknown: list[Publication] = []
        for command, publications, _ in self.outstanding:
            (not_sent if id(command) in untouched else unknown).extend(publications)
        self.outstanding.clear()
        if self._has_answered or connection.has_received:
            self.last_error = error
            log.info("%s", error)
        else:  # it accepts and dies: as bad as one that refuses
            self.delay_next(error)
        self._user.unknown(unknown, error)
        self._user.not_sent(not_sent, error)
        self._user.link_changed()


def _refuse_message(
    link: ProducerLink, timestamp_ns: int, attempts: int, id: bytes, body: bytes
) -> NoReturn:
    raise ProtocolError("a message on a connection without SUB")
