"""Publishing on the thread that publishes, without the I/O thread.

A thread that publishes one message after the other would wake the I/O thread for each, and be
woken by it: three context switches a message, which cost more than the publish itself. So while
only one publish is under way, the I/O thread lends the connection. It does not watch the socket
then, and the publishing thread sends the command and reads the answer.

The I/O thread may take the connection back at any time: for a publish of another thread, a flush,
a stop. It must not wait for the publishing thread, which may stand still in the middle of an
exchange, because a signal handler has interrupted it and waits for the I/O thread. So no lock can
protect the connection. Instead:

1. Three rights exist once each: to send (the *permit*, of the connection), to read the answer, and
   to return the permit (of each exchange). A right is an item of a list or an iterator, and the
   first to take the item has the right.
2. A step of an exchange takes a right, uses the socket and keeps the result in *one call of C
   code*, `list.extend` of a `map`. Signal handlers run before or after such a call. Other threads
   may also run during its system call, which does not block. So a right that is taken and has no
   result yet is seen by other threads only, and for a moment only: `DirectPath.end` returns false.
3. To take the connection back, the I/O thread takes the right of the next step: the permit between
   two exchanges, the answer after a send, the return after the answer. The interrupted thread then
   finds that right taken, stops, and waits for the I/O thread, which continues from the results:
   the bytes that were sent and received.

Trap: this needs sockets whose methods are C code, and the GIL. Connections with TLS or compression,
gevent's sockets and free-threaded Pythons do not lend (`Stream.atomic_calls`).
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Literal

from nsqtools.client.publication import PendingPublication
from nsqtools.protocol.frames import OK_FRAME

# How long a thread waits for the answer itself. A longer wait costs more than waking the I/O
# thread, which applies the timeouts. It also bounds how long the thread sleeps after the I/O thread
# has taken the connection back and read the answer.
MAX_WAIT_MS = 5
# A larger command may not fit into the socket's buffer, and takes longer than a wake-up.
MAX_COMMAND_BYTES = 1 << 16
# nsqd sends nothing between an answer and a command that follows immediately, except for a
# heartbeat or the end of the connection, and to look for these would cost as much as sending.
CURRENT_S = 0.001
# Refusals after which `DirectPath.end` takes an exchange without a result. The system call would
# have ended long ago, so it failed, and a signal handler runs before its thread can note that.
MAX_REFUSALS = 100
# The arguments of ``recv`` and, together with the command, of ``send``: the number of bytes, as an
# answer has 10 and an error some hundred, and no flags.
READING = (1 << 12,)
PERMIT = (0,)
ANSWER = [OK_FRAME]

Attempt = Literal["not begun", "unanswered", "confirmed"]
"""How far a thread got with a publish.

If it has not begun, nothing was sent and the I/O thread has to publish it. If it is unanswered, the
I/O thread has to take the connection back and read on.
"""


class Exchange:
    """A command and its answer, with the results of each step and the rights to the next ones."""

    __slots__ = ("command", "publication", "reading", "received", "returning", "sent")

    def __init__(self, command: bytes, publication: PendingPublication) -> None:
        self.command = command
        self.publication = publication
        self.sent: list[int] = []  # the number of bytes, after the send
        self.received: list[bytes] = []  # the bytes, after the read
        self.reading = iter(READING)
        self.returning = iter(PERMIT)


class DirectPath:
    """A connection that is lent to publishing threads, until `end` has returned true."""

    def __init__(
        self, fileno: int, send: Callable[[bytes, int], int], receive: Callable[[int], bytes]
    ) -> None:
        self.exchanges = 0  # completed ones
        self.unfinished: Exchange | None = None  # set by `end`
        self._fileno = fileno
        self._poller = self._make_poller()  # of the thread that has the permit
        self._used_at = 0.0
        self._send, self._receive = send, receive
        self._permits = list(PERMIT)  # without an item while an exchange is under way
        self._under_way: list[Exchange] = []
        self._refusals = 0

    def publish(self, publication: PendingPublication) -> Attempt:
        """Publish and wait for the answer. Settles the publication if nsqd confirms it."""
        command = publication.encode()
        if not self._permits or len(command) > MAX_COMMAND_BYTES or self._has_event(publication):
            return "not begun"
        exchange = Exchange(command, publication)
        self._under_way.append(exchange)
        try:
            # The permit is the argument for the flags.
            permits = iter(self._permits.pop, None)
            exchange.sent.extend(map(self._send, (command,), permits))
        except IndexError:  # there was no permit
            self._under_way.remove(exchange)
            return "not begun"
        except OSError:  # no room, or the connection is broken, which the I/O thread finds out
            exchange.sent.append(0)
            return "unanswered"
        publication.is_submitted = True
        if exchange.sent[0] < len(command) or not self._poller.poll(MAX_WAIT_MS):
            return "unanswered"
        try:
            exchange.received.extend(map(self._receive, exchange.reading))
        except OSError:
            exchange.received.append(b"")
        if exchange.received != ANSWER:
            return "unanswered"
        publication.confirm()
        self.exchanges += 1
        self._permits.extend(exchange.returning)
        self._under_way.remove(exchange)
        return "confirmed"

    def _has_event(self, publication: PendingPublication) -> bool:
        """Return whether a heartbeat or the end of the connection waits for the I/O thread."""
        previous_at, self._used_at = self._used_at, publication.submitted_at
        is_current = self._used_at - previous_at <= CURRENT_S
        return not is_current and bool(self._make_poller().poll(0))

    def _make_poller(self) -> select.poll:
        poller = select.poll()
        poller.register(self._fileno, select.POLLIN)
        return poller

    def end(self) -> bool:
        """Take the connection back, and the exchange under way, if any, as ``unfinished``.

        Return False while a thread is within a system call, which ends soon.
        """
        if self._permits:
            try:
                self._permits.pop()
                return True
            except IndexError:
                pass  # a thread has just begun
        self._refusals += 1
        for exchange in list(self._under_way):
            may_read = exchange.sent and next(exchange.reading, None) is not None
            may_return = exchange.received and next(exchange.returning, None) is not None
            if may_read or may_return or self._refusals > MAX_REFUSALS:
                self.unfinished = exchange
                return True
        return False
