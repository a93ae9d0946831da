"""One negotiated connection to an nsqd: frames in, command bytes out, heartbeats, end of life.

Made by `handshake.open_connection` and attached to an I/O loop by its user, a subscription or a
producer. From then on the connection reads, answers heartbeats, sends what a turn has written in
one go, and notices when nsqd is dead. The user gets messages, responses, errors and, once, the
loss.

Writing has two stages. What `write` takes is *pending*; `flush` joins it, compresses it once and
makes it *committed*, and committed bytes never change: a shorter retry is an error to TLS, and a
compressed byte left out ruins the stream.

A few compressed bytes can be gigabytes: they are expanded piece by piece (`max_inflated_read`),
one in a turn, and nothing is read from the socket meanwhile.

TCP does not report a peer that lost power. nsqd sends a heartbeat every interval, so silence for
two of them and a second more means that nobody is there (pynsq's rule; `read_timeout` is the
ceiling, but one heartbeat must have had time to come). And a peer that takes no bytes for
`write_timeout` while some wait is stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nsqtools.client.io_loop import LoopMember
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConnectionLost, DeadlineExceeded, NsqError, ProtocolError, ServerError
from nsqtools.protocol.codecs import StreamCodec
from nsqtools.protocol.commands import NOP
from nsqtools.protocol.error_codes import decode_error
from nsqtools.protocol.frames import ERROR, HEARTBEAT, FrameBuffer
from nsqtools.protocol.identify import IdentifyReply
from nsqtools.transport.stream import Stream

LIVENESS_TICK_S = 1.0  # how often it is worth calling `Connection.check_liveness`
PROVEN_AFTER_S = 30.0


class ConnectionUser(Protocol):
    """What a connection reports, on the I/O thread.

    ``make_message`` builds each message: see `FrameBuffer.take`. ``received_at`` is set before:
    the time after which nsqd sent what is being read.
    """

    received_at: float

    @property
    def make_message(self) -> Callable[[Any, int, int, bytes, bytes], Any]: ...

    def on_messages(self, messages: list[Any]) -> None: ...
    def on_response(self, data: bytes) -> None: ...
    def on_server_error(self, error: ServerError) -> None: ...
    def on_lost(self, error: NsqError) -> None: ...


class Connection:
    """A connection on which negotiation is done. ``reply`` is what nsqd granted."""

    def __init__(
        self,
        stream: Stream,
        reply: IdentifyReply,
        codec: StreamCodec | None,
        frames: FrameBuffer,
        options: ClientOptions,
    ) -> None:
        self.address = stream.address
        self.nsqd = str(stream.address)
        self.reply = reply
        self.is_open = True
        self.has_received = False  # a message or a heartbeat
        self._stream = stream
        self._codec = codec
        self._frames = frames
        self._options = options
        self._pending: list[bytes] = []
        self._committed = b""
        self._offset = 0
        self._loop: LoopMember | None = None
        self._watches_writes = False
        self._is_shut_down = False
        self._is_inflating = False  # a call is due that expands more of what was read

    def attach(self, loop: LoopMember, user: ConnectionUser, buffer: memoryview) -> None:
        """Serve ``user`` on the I/O thread. ``buffer`` is scratch space of that thread."""
        self._loop = loop
        self._user = user
        self._buffer = buffer
        self._opened_at = self._last_read = self._last_progress = loop.now()
        loop.register(self)

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._stream.fileno()

    # -- reading --------------------------------------------------------------------------------

    def on_readable(self) -> None:
        """Read once and hand the complete frames to the user."""
        if not self.is_open or self._is_inflating:  # it may have been closed earlier in this turn
            return
        try:
            messages, others = self._read()
        except NsqError as exc:
            self.lose(exc)
            return
        if messages:
            self.has_received = True
            self._user.on_messages(messages)
        for frame_type, data in others:
            if self.is_open:  # the user may close it over any frame
                self._on_frame(frame_type, data)

    def _inflate_more(self) -> None:
        self._is_inflating = False
        self.on_readable()

    def _on_frame(self, frame_type: int, data: bytes) -> None:
        if data == HEARTBEAT:
            self.has_received = True
            self.write(NOP)
        elif frame_type == ERROR:
            self._user.on_server_error(decode_error(data, self.nsqd))
        else:
            self._user.on_response(data)

    def _read(self) -> tuple[list[Any], list[tuple[int, bytes]]]:
        assert self._loop is not None
        codec = self._codec
        try:
            has_more = codec is not None and codec.has_more
            data = None if has_more else self._stream.receive_ready(self._buffer)
            if data == b"":
                raise ConnectionLost(f"{self.nsqd} closed the connection")
            self._last_read = self._loop.now()
            self._user.received_at = self._loop.bytes_since
            if codec is not None:
                # compressed bytes may decode to nothing yet, which is not the end of the stream
                self._frames.feed(codec.decompress(data or b"", self._options.max_inflated_read))
                if codec.has_more:
                    self._is_inflating = True
                    self._loop.call_soon(self._inflate_more)
                data = b""
            return self._frames.take(self._user.make_message, self._user, data or b"")
        except ProtocolError as exc:
            raise ProtocolError(f"{self.nsqd}: {exc}", hint=exc.hint) from exc

    # -- writing --------------------------------------------------------------------------------

    def write(self, command: bytes) -> None:
        """Queue a command; it is sent at the end of the loop's turn."""
        if not self._pending and self._loop is not None:
            self._loop.flush_soon(self)
        self._pending.append(command)

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it. The loop calls this."""
        if not self.is_open or self._is_shut_down or self._loop is None:
            return
        try:
            is_done = self._send()
        except NsqError as exc:
            self.on_readable()  # nsqd's own reason is often still there to be read
            self.lose(exc)
            return
        if is_done is self._watches_writes:
            self._watches_writes = not is_done
            self._loop.watch_writes(self, not is_done)

    def _send(self) -> bool:
        """Send; return whether everything is sent."""
        assert self._loop is not None
        pending = self._pending
        while self._committed or pending:
            if not self._committed:
                data = pending[0] if len(pending) == 1 else b"".join(pending)
                pending.clear()
                self._committed = self._codec.compress(data) if self._codec else data
            rest = memoryview(self._committed)[self._offset :] if self._offset else self._committed
            sent = self._stream.send_ready(rest)
            if sent == len(rest):
                self._committed = b""
                self._offset = 0
                if self._watches_writes:  # else nothing has stalled, as usual
                    self._last_progress = self._loop.now()
            else:
                self._offset += sent
                if sent or not self._watches_writes:  # a stall begins now, not with the last bytes
                    self._last_progress = self._loop.now()
                if not sent:
                    return False
        return True

    @property
    def has_unsent(self) -> bool:
        """Tell whether bytes wait to be sent."""
        return bool(self._committed or self._pending)

    @property
    def is_jammed(self) -> bool:
        """Tell whether the socket did not take everything."""
        return self._watches_writes

    @property
    def untouched(self) -> list[bytes]:
        """The commands of which certainly no byte has reached the peer."""
        return list(self._pending)

    def shutdown_write(self) -> None:
        """End our direction, after everything was flushed; what nsqd still sends is read."""
        self._is_shut_down = True
        self._stream.shutdown_write()

    # -- life -----------------------------------------------------------------------------------

    @property
    def is_proven(self) -> bool:
        """Tell whether this connection shows that the address is good.

        Being accepted does not: an nsqd that accepts and dies at once must not reset the delays
        between tries.
        """
        if self.has_received or self._loop is None:
            return self.has_received
        return self._loop.now() - self._opened_at > PROVEN_AFTER_S

    def check_liveness(self) -> None:
        """Give the connection up when nsqd is silent or takes no bytes for too long."""
        if not self.is_open or self._loop is None:
            return
        now, options = self._loop.now(), self._options
        limit_s = silence_limit_s(options)
        if limit_s is not None and now - self._last_read > limit_s:
            self.lose(DeadlineExceeded(f"{self.nsqd} was silent for {limit_s:.0f} s"))
        elif self._committed and now - self._last_progress > options.write_timeout_s:
            self.lose(
                DeadlineExceeded(f"{self.nsqd} took no bytes for {options.write_timeout_s:.0f} s")
            )

    def lose(self, error: NsqError) -> None:
        """Close the connection and report its loss to the user, once."""
        if self.is_open:
            self.close()
            self._user.on_lost(error)

    def close(self) -> None:
        """Close the socket without a report. May be called again."""
        if self.is_open:
            self.is_open = False
            if self._loop is not None:
                self._loop.unregister(self)
            self._stream.close()

    def close_copy(self) -> None:
        """In a forked child: close its copy of the socket. The connection is the parent's."""
        self.is_open = False
        self._stream.close()


def silence_limit_s(options: ClientOptions) -> float | None:
    """Return after how many seconds of silence nsqd is dead, None without heartbeats."""
    interval_s = options.heartbeat_interval_s
    if interval_s <= 0:
        return None
    return max(interval_s + 1, min(2 * interval_s + 1, options.read_timeout_s))
