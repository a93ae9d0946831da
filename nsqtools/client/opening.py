"""Connect to an nsqd on the I/O thread, for steps that need no thread of their own.

The socket calls of a thread release the interpreter's lock, and wait up to 5 ms for it while a
handler computes. With eight threads, a thousand connections that were opened under load cost 2 ms
of CPU each. On the I/O thread they cost a fifth of that, and none waits for another that hangs.

What may block stays on the threads of `thread_pool`: the name of a host, the handshake of TLS, the
file of a secret, and a check before SUB. So do compressed streams, of which a few bytes may expand
to many.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqtools.client.connection import Connection, locate_protocol_error
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.errors import DeadlineExceeded, NsqError, ProtocolError
from nsqtools.protocol.names import Address
from nsqtools.transport.stream import Deadline, begin_connecting, connect_error


def can_open_on_loop(options: ClientOptions) -> bool:
    """Return whether no step after the look-up of a name can block."""
    return not (options.tls_v1 or options.snappy or options.deflate or options.auth_secret_file)


class Opening:
    """One attempt to connect, negotiate and, for a consumer, subscribe.

    ``done`` gets the connection or the error, unless `close` is called first. All methods run on
    the I/O thread.
    """

    def __init__(
        self,
        loop: LoopMember,
        address: Address,
        options: ClientOptions,
        commands: tuple[bytes, bytes],
        *,
        is_announced: bool,
        done: Callable[[Connection | NsqError], None],
    ) -> None:
        """``commands`` are SUB, or nothing, and the body of IDENTIFY.

        Raises as `begin_connecting`.
        """
        self._loop = loop
        self._address = address
        self._stream = begin_connecting(address, options.local_addr)
        self._connection = Connection(self._stream, options, is_announced=is_announced)
        self._steps = self._connection.negotiation(*commands)
        self._done = done
        self._deadline = Deadline(options.dial_timeout_s)
        self._is_over = False
        self._is_connected = False
        self._unsent = b""
        self._timer: Timer | None = None
        loop.register(self, writes=True)
        self._watch_deadline()

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Continue when the socket is connected or has room to write."""
        self._continue()

    def on_readable(self) -> None:
        """Continue with an answer, or with the failure to connect."""
        self._continue(has_answer=self._is_connected)

    def _continue(self, *, has_answer: bool = False) -> None:
        if self._is_over:  # earlier in this turn
            return
        try:
            if not self._is_connected:
                self._stream.finish_connecting()
                self._is_connected = True
                self._loop.watch_writes(self, False)
            elif has_answer:
                self._connection.receive_answer(self._loop.io_thread.buffer)
            is_done = self._take_steps()
        except ProtocolError as exc:
            self._fail(locate_protocol_error(exc, self._address))
        except NsqError as exc:
            self._fail(exc)
        else:
            if is_done:
                self._detach()
                self._done(self._connection)

    def _take_steps(self) -> bool:
        """Send what can be sent before the next answer; return whether the connection is ready."""
        was_stalled = bool(self._unsent)
        is_done = False
        while True:
            if self._unsent:
                self._unsent = self._unsent[self._stream.send_ready(self._unsent) :]
            if self._unsent or is_done:
                break
            command = next(self._steps, None)
            is_done = command is None
            if not command:
                break
            self._unsent = command
        if was_stalled is not bool(self._unsent):
            self._loop.watch_writes(self, not was_stalled)
        return is_done

    def _watch_deadline(self) -> None:
        deadline = self._connection.deadline if self._is_connected else self._deadline
        if left_s := deadline.remaining_s():
            self._timer = self._loop.call_later(left_s, self._watch_deadline)
        elif self._is_connected:
            text = f"{self._address}: no answer in time, waiting for an answer"
            self._fail(DeadlineExceeded(text))
        else:
            self._fail(connect_error(TimeoutError(), self._address))

    def _fail(self, error: NsqError) -> None:
        self.close()
        self._done(error)

    def _detach(self) -> None:
        self._is_over = True
        self._loop.unregister(self)
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """End the attempt without a result. Repeated calls do nothing."""
        if not self._is_over:
            self._detach()
            self._connection.close()

    def close_copy(self) -> None:
        """Close a forked child's copy of the socket. The attempt belongs to the parent."""
        self._is_over = True
        self._connection.close_copy()
