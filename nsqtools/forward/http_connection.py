"""One HTTP connection, kept alive, with at most one request under way (on the pool's thread).

Traps. A server may close an idle connection just as a request is written to it: that is not a
failure of the endpoint, so the request is sent once more on a new connection if nothing of an
answer had come. A socket with TLS may hold bytes that the selector does not show.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from nsqtools.errors import ProtocolError
from nsqtools.forward.http_wire import Answer, AnswerReader

READ_SIZE = 64 << 10


class Broken(NamedTuple):
    """No answer. ``was_sent`` tells that the server may have acted on the request."""

    error: str
    was_sent: bool


Done = Callable[[Answer | Broken, bool], None]
"""Called with the end of a request, and with whether it was sent twice."""


class Request:
    __slots__ = ("deadline", "done", "is_resent", "payload")

    def __init__(self, payload: bytes, done: Done, deadline: float) -> None:
        self.payload = payload
        self.done = done
        self.deadline = deadline
        self.is_resent = False

    def end(self, result: Answer | Broken) -> None:
        self.done(result, self.is_resent)


class Place(Protocol):
    """The origin that a connection leads to, and what is done with it."""

    selector: selectors.BaseSelector
    busy: dict[Connection, None]
    name: str
    is_tls: bool

    def is_free(self, connection: Connection) -> None: ...
    def forget(self, connection: Connection) -> None: ...
    def send_afresh(self, request: Request) -> None: ...


class Connection:
    """One connection, with at most one request under way."""

    def __init__(self, place: Place, sock: socket.socket) -> None:
        self._place = place
        self._sock = sock
        self._reader = AnswerReader()
        self._rest = b""
        self._was_used = False
        self._is_tls = place.is_tls
        self.is_closed = False
        self.request: Request | None = None
        self._place.selector.register(sock, selectors.EVENT_READ, self)

    def send(self, request: Request) -> bool:
        """Begin a request. Returns False when the connection turned out to be closed: the request
        was not taken then."""
        try:
            sent = self._sock.send(request.payload)
        except _must_wait():
            sent = 0
        except OSError:
            self.close()
            return False
        self.request = request
        self._place.busy[self] = None
        self._rest = request.payload[sent:]
        if self._rest:
            self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        return True

    def on_ready(self, mask: int) -> None:
        if self.is_closed:
            return
        # an answer may come before the whole request was taken (413), and a reset after it
        if mask & selectors.EVENT_READ:
            self._read()
        if mask & selectors.EVENT_WRITE and self._rest and not self.is_closed:
            self._write()

    def _write(self) -> None:
        try:
            self._rest = self._rest[self._sock.send(self._rest) :]
        except _must_wait():
            return
        except OSError as exc:
            self._broke(exc.strerror or str(exc))
            return
        if not self._rest:
            self._watch(selectors.EVENT_READ)

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(READ_SIZE)
            except _must_wait():
                return
            except OSError as exc:
                self._broke(exc.strerror or str(exc))
                return
            if self.request is None:  # closed while idle, or an answer to nothing
                self.close()
                return
            try:
                answer = self._reader.feed(data)
            except ProtocolError as exc:
                self._broke(str(exc))
                return
            if answer is not None:
                self._answered(answer)
                return
            # what the selector will show waits: no answer without an end holds up the others
            if not (self._is_tls and self._sock.pending()):  # type: ignore[attr-defined]
                return

    def _answered(self, answer: Answer) -> None:
        request, self.request = self.request, None
        assert request is not None
        self._place.busy.pop(self, None)
        self._was_used = True
        if answer.keeps and not self._rest:
            self._place.is_free(self)
        else:
            self.close()
        request.end(answer)

    def _broke(self, reason: str) -> None:
        """The connection ended under a request."""
        request = self.request
        if request is None or not self._was_used or self._reader.has_begun:
            self.fail(reason)
            return
        self.request = None
        self.close()
        self._place.send_afresh(request)

    def fail(self, reason: str) -> None:
        """Give up the request under way, and the connection."""
        request, self.request = self.request, None
        self.close()
        if request is not None:
            request.end(Broken(f"{self._place.name}: {reason}", was_sent=True))

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._place.busy.pop(self, None)
        self._place.forget(self)
        self._place.selector.unregister(self._sock)
        self._sock.close()

    def _watch(self, events: int) -> None:
        self._place.selector.modify(self._sock, events, self)


def _must_wait() -> tuple[type[Exception], ...]:
    """What a non-blocking socket raises when it has to wait."""
    import ssl

    return BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError
