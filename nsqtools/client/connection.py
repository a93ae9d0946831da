"""One negotiated connection to an nsqd: frames in, command bytes out.

Made by `handshake.open_connection`, used by one I/O thread. Writing has two stages. What `write`
takes is *pending*; `flush` joins it, compresses it once and makes it *committed*, and committed
bytes are never changed again: a shorter retry is an error to TLS, and a compressed byte left out
ruins the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nsqtools.errors import ConnectionLost, ProtocolError
from nsqtools.protocol.codecs import Codec
from nsqtools.protocol.frames import FrameBuffer
from nsqtools.protocol.identify import IdentifyReply
from nsqtools.transport.stream import Stream

M = TypeVar("M")
S = TypeVar("S")


class Connection:
    """A connection on which negotiation is done. ``reply`` is what nsqd granted."""

    def __init__(
        self, stream: Stream, reply: IdentifyReply, codec: Codec | None, frames: FrameBuffer
    ) -> None:
        self.address = stream.address
        self.reply = reply
        self._stream = stream
        self._codec = codec
        self._frames = frames
        self._pending: list[bytes] = []
        self._committed = b""
        self._offset = 0
        self.sent = 0  # bytes handed to the socket, to see progress by

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._stream.fileno()

    def read(
        self,
        make: Callable[[S, int, int, bytes, bytes], M],
        source: S,
        buffer: memoryview,
    ) -> tuple[list[M], list[tuple[int, bytes]]]:
        """Read once and take the complete frames: see `FrameBuffer.take`.

        Raises `ConnectionLost` at the end of the stream, `ProtocolError`, `TLSError`.
        """
        data = self._stream.receive_ready(buffer)
        if data == b"":
            raise ConnectionLost(f"{self.address} closed the connection")
        try:
            if data:
                # compressed bytes may decode to nothing yet, which is no end of the stream
                self._frames.feed(self._codec.decompress(data) if self._codec else data)
            return self._frames.take(make, source)
        except ProtocolError as exc:
            raise ProtocolError(f"{self.address}: {exc}", hint=exc.hint) from exc

    def write(self, command: bytes) -> None:
        """Queue a command; `flush` sends it."""
        self._pending.append(command)

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it; return whether all is gone.

        Raises `ConnectionLost` and `TLSError`.
        """
        while self._committed or self._pending:
            if not self._committed:
                data = b"".join(self._pending)
                self._pending.clear()
                self._committed = self._codec.compress(data) if self._codec else data
            sent = self._stream.send_ready(memoryview(self._committed)[self._offset :])
            if not sent:
                return False
            self.sent += sent
            self._offset += sent
            if self._offset == len(self._committed):
                self._committed = b""
                self._offset = 0
        return True

    @property
    def has_unsent(self) -> bool:
        """Tell whether bytes wait to be sent."""
        return bool(self._committed or self._pending)

    @property
    def has_pending(self) -> bool:
        """Tell whether bytes wait of which certainly none has reached the peer."""
        return bool(self._pending)

    def shutdown_write(self) -> None:
        """End our direction of the stream, after everything was flushed."""
        self._stream.shutdown_write()

    def close(self) -> None:
        """Close the socket. May be called again."""
        self._stream.close()
