"""One TCP client: input and output through TLS and compression, without a task per client.

The first four bytes select a *protocol*, which executes the received bytes command by command.
Answers are collected until all received commands are executed, so a thousand commands in one read
are answered with one write.

A protocol can interrupt the execution with two exceptions: `Incomplete` (it needs more bytes) and
`Pause` (a slow operation, such as a request to an auth server, must finish first). During a pause
nothing is read.

All clients share the loop, so a client may execute commands for at most two milliseconds of one
iteration (`LoopMeter.share_ends_s`). The remaining input is executed in a later iteration, and
nothing more is read until then. Compressed input is decoded in small pieces, because 30 KB can
decode to 30 MB of commands.

A connection may send heartbeats at an interval, regardless of other output. At each heartbeat a
client is disconnected when it has not completed a command for two intervals, unless a pause delays
it, or when it has not read its output for one interval.

Traps:

- After a fatal error the client may still be sending. Closing a socket with unread input destroys
  the error frame. So the connection is half closed, and input is discarded for `_DRAIN_S`.
- Nothing is read from a client that does not read its answers.
- A client can disconnect at any point, and the exception must affect this client only. A channel
  calls `flush` while it delivers to many consumers. So `flush` raises nothing, and a failed write
  closes the connection in the next iteration of the loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic
from typing import cast

from nsqtools.http.listen import client_of, read_in_pieces
from nsqtools.http.loop_meter import meter_of
from nsqtools.protocol.codecs import StreamCodec
from nsqtools.protocol.frames import RequestError
from nsqtools.protocol.requests import Incomplete, LineTooLong
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.negotiation import HANDSHAKE_S, HandshakeFailed, TLSLayer


class Pause(Exception):
    """Await ``until()``, then continue with the command at ``position``."""

    def __init__(self, position: int, until: Callable[[], Awaitable[object]]) -> None:
        super().__init__(position)
        self.position = position
        self.until = until


class ConnectionProtocol(ABC):
    """The commands of a connection."""

    @abstractmethod
    def execute(self, data: bytes, position: int) -> int:
        """Execute one command and return the position after it.

        May raise `RequestError`, `Incomplete`, `LineTooLong` or `Pause`.
        """

    @abstractmethod
    def encode_error(self, error: RequestError) -> bytes:
        """Return the error as a frame of this protocol."""

    @abstractmethod
    def closed(self) -> None:
        """Clean up. Called once, when the connection ends."""

    def execute_run(self, data: bytes, position: int) -> int:
        """Execute consecutive frequent commands, and return the position after them.

        Raises nothing, and returns ``position`` for any other input.
        """
        return position

    @property
    def is_waiting(self) -> bool:
        """Whether an executed command has not been answered yet."""
        return False

    def tls_is_up(self) -> None:  # noqa: B027 - a protocol without TLS needs none
        """Continue after the handshake of `ClientConnection.start_tls`."""

    def on_writable(self) -> None:  # noqa: B027 - a protocol that only answers needs none
        """Continue to deliver: the client has read its output."""


_DRAIN_S = 1.0  # a client needs one round trip to read the error and close
_CLOSE_S = 30.0  # after which a client that reads nothing loses its output
_DECODED_BYTES = 1 << 16  # decompressed in one step
_MAGIC_LENGTH = 4
_QUICK_BYTES = 4096  # executed before clients that wait for a share: at most 0.3 ms


class ClientConnection(asyncio.Protocol):
    """A client of either daemon.

    ``protocols`` maps the magic to the protocol; any other magic is answered with ``refusal``.
    """

    def __init__(
        self,
        protocols: Mapping[bytes, Callable[[ClientConnection], ConnectionProtocol]],
        refusal: bytes,
        connections: set[ClientConnection],
        log: DaemonLog,
    ) -> None:
        self.remote_ip = ""
        self.remote_address = ""
        self.tls: TLSLayer | None = None
        self.is_stuck = False  # True while the client does not read its output
        self._stuck_at_s = 0.0
        self._last_command_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._protocols = protocols
        self._refusal = refusal
        self._connections = connections
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._meter = meter_of(self._loop)
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._protocol: ConnectionProtocol | None = None
        self._codec: StreamCodec | None = None
        self._chunks: list[bytes] = []
        self._length = 0
        self._needed = _MAGIC_LENGTH
        self._error_if_truncated: RequestError | None = None
        self._pause: asyncio.Task[None] | None = None
        self._received: deque[bytes] = deque()  # not decoded yet
        self._is_scheduled = False  # whether the loop will execute received commands soon
        self._has_ended = False  # whether the client has closed its side
        self._out: list[bytes] = []
        self._flush_due = False
        self._out_size = 0
        self._is_closed = False
        self._is_logged = False  # whether the reason of the end is in the log
        self._drain_timer: asyncio.TimerHandle | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        read_in_pieces(transport)
        if (client := client_of(transport)) is not None:
            self.remote_ip, self.remote_address = client.host, str(client)
        self._connections.add(self)
        self._log.info(f"TCP: new client({self.remote_address})")

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        # Most clients wait for each answer, so most reads are one frequent command.
        if len(data) <= _QUICK_BYTES and self._protocol is not None and self._is_idle():
            position = self._protocol.execute_run(data, 0)
            if position:
                self._last_command_s = monotonic()  # the clock of loop.time()
                self.flush()
                data = data[position:]
                if not data:
                    return
        self._received.append(data)
        if self._is_scheduled or self._pause is not None or self.is_stuck:
            self._update_reading()
        elif self._meter.is_used_up:
            self._schedule()
            self._update_reading()
        else:
            self._process_input()

    def eof_received(self) -> bool:
        if self._is_closed:
            return False  # asyncio closes the transport when its output is written
        self._has_ended = True
        self._close_if_done()
        return not self._is_closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._end()
        self._protocol = None  # break the reference cycle, so that no garbage collection is needed
        self._log.info(f"TCP: client({self.remote_address}) closed")

    def pause_writing(self) -> None:
        self.is_stuck = True
        self._stuck_at_s = monotonic()
        self._update_reading()

    def resume_writing(self) -> None:
        self.is_stuck = False
        if self._protocol is not None and not self._is_closed:
            self._protocol.on_writable()
        self._schedule()

    def _is_idle(self) -> bool:
        is_busy = self._length or self._received or self._out or self._is_scheduled or self._pause
        return not (is_busy or self.is_stuck or self.tls is not None or self._codec is not None)

    def _update_reading(self) -> None:
        if self.is_stuck or self._pause is not None or self._received:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    # input

    def _schedule(self) -> None:
        """Process the input in a later iteration of the loop."""
        if not (self._is_scheduled or self._is_closed):
            self._is_scheduled = True
            self._meter.soon(self._process_input, self._loop)

    def _process_input(self) -> None:
        """Decode and execute the received bytes, for the client's share of this iteration."""
        self._is_scheduled = False
        until_s = self._meter.share_ends_s()
        try:
            while not (self._is_closed or self._pause or self.is_stuck):
                if self._length >= self._needed and self._length:
                    self._execute_received(until_s)
                elif not self._decode():
                    break
                if self._loop.time() >= until_s:
                    self._schedule()
                    break
            if not self._is_closed:
                self._update_reading()
                self._close_if_done()
        except Exception as exc:  # for example a RecursionError of nested JSON
            self._log_end(exc)
            self.close()

    def _log_end(self, exc: Exception) -> None:
        """Log the reason of the end, once: closing can raise the same exception again."""
        if not self._is_logged:
            self._is_logged = True
            self._log.error(f"client({self.remote_address}) - {str(exc) or repr(exc)}")

    def _close_if_done(self) -> None:
        is_busy = self._is_scheduled or self._pause or self._received or self.is_stuck
        if self._has_ended and not (is_busy or (self._protocol and self._protocol.is_waiting)):
            self.close_inactive()

    def _decode(self) -> bool:
        """Decrypt and decompress a piece of the input; return False when there is none."""
        data = b""
        if self._codec is None or not self._codec.has_more:
            if self.tls is not None and self.tls.failure is not None:
                raise self.tls.failure
            if not self._received:
                return False
            data = self._received.popleft()
            if self.tls is not None:
                data = self._decrypt(self.tls, data)
        if self._codec is not None and not self._is_closed:
            data = self._codec.decompress(data, _DECODED_BYTES)
        if data:
            self._chunks.append(data)
            self._length += len(data)
        return True

    def _execute_received(self, until_s: float) -> None:
        """Execute the complete commands until a time."""
        data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        position = 0
        if self._protocol is None:
            magic = data[:_MAGIC_LENGTH]
            text = magic.decode("ascii", "backslashreplace")
            self._log.info(f"CLIENT({self.remote_address}): desired protocol magic {text!r}")
            make = self._protocols.get(magic)
            if make is None:
                self._log.error(f"client({self.remote_address}) bad protocol magic {text!r}")
                self._close_with_error(self._refusal)
                return
            self._protocol = make(self)
            position = _MAGIC_LENGTH
        position = self._execute(self._protocol, data, position, until_s)
        if self._is_closed:
            return
        remaining = data[position:]
        self._chunks = [remaining] if remaining else []
        self._length = len(remaining)
        if self._flush_due:
            self.flush()

    def _execute(
        self, protocol: ConnectionProtocol, data: bytes, position: int, until_s: float
    ) -> int:
        end = len(data)
        now_s = self._loop.time
        has_executed = False
        self._needed = 1
        self._error_if_truncated = None
        try:
            while position < end and not self._is_closed:
                position = protocol.execute(data, position)
                has_executed = True
                if now_s() >= until_s:
                    break
        except Incomplete as incomplete:
            position = incomplete.position
            self._needed = incomplete.needed
            self._error_if_truncated = incomplete.error
        except Pause as pause:
            position = pause.position
            self._pause = self._loop.create_task(self._wait(pause.until))
            self._update_reading()
        except RequestError as error:
            self.refuse(error)
        except LineTooLong:
            self._log.error(f"client({self.remote_address}) - line too long")
            self.close()
        if has_executed and not self._is_closed:
            self._last_command_s = monotonic()
        return position

    async def _wait(self, until: Callable[[], Awaitable[object]]) -> None:
        refusal: RequestError | None = None
        try:
            await until()
        except RequestError as error:
            refusal = error
        except Exception as exc:
            self._log_end(exc)
            self.abort()
        self._pause = None
        self._last_command_s = monotonic()
        if refusal is not None:
            self.refuse(refusal)
        elif not self._is_closed:
            self.flush()
            self._schedule()

    # output

    def send(self, data: bytes) -> None:
        """Queue an answer, to be written after the received commands or by `flush`."""
        self._flush_due = True
        self._out.append(data)
        self._out_size += len(data)

    def answer(self, data: bytes) -> None:
        """Queue an answer to an earlier command. Answers of one iteration share a write."""
        if self._is_closed:
            return
        if not self._flush_due:
            self._loop.call_soon(self._flush_answers)
        self.send(data)

    def _flush_answers(self) -> None:
        if not self._is_closed:
            self.flush()
            self._close_if_done()

    def refuse(self, error: RequestError) -> None:
        """Answer a command with a fatal error."""
        if self._protocol is not None and not self._is_closed:
            text = error.data.decode("utf-8", "backslashreplace")
            self._log.error(f"[{self.remote_address}] - {text}")
            self._close_with_error(self._protocol.encode_error(error))

    def buffer(self, frames: Iterable[bytes], size: int) -> int:
        """Queue frames for the next `flush`; return the number of queued bytes."""
        self._out.extend(frames)
        self._out_size += size
        return self._out_size

    def flush(self) -> None:
        """Write the queued frames, after a TLS handshake that is in progress.

        Raises nothing: a connection whose write fails is aborted.
        """
        if not self._out or (self.tls is not None and not self.tls.is_ready):
            return
        data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
        self._out.clear()
        self._out_size = 0
        self._flush_due = False
        if self._transport.is_closing():
            return
        try:
            if self._codec is not None:
                data = self._codec.compress(data)
            if self.tls is not None:
                data = self.tls.encrypt(data)
            self._transport.write(data)
        except Exception as exc:  # for example from TLS after a damaged record
            self.fail(exc)

    def beat(self, interval_s: float, heartbeat: bytes) -> None:
        """Send a heartbeat at an interval from now on, 0 for none, and check the client."""
        if self._beat is not None:
            self._beat.cancel()
        self._last_command_s = monotonic()
        self._schedule_beat(interval_s, heartbeat)

    def _schedule_beat(self, interval_s: float, heartbeat: bytes) -> None:
        self._beat = None
        if interval_s and not self._is_closed:
            self._beat = self._loop.call_later(interval_s, self._on_beat, interval_s, heartbeat)

    def _on_beat(self, interval_s: float, heartbeat: bytes) -> None:
        now_s = self._loop.time()
        # A pause is a delay of the daemon, so it does not count against the client.
        if self.is_stuck and now_s >= self._stuck_at_s + interval_s:
            self.abort()
        elif self._pause is None and now_s >= self._last_command_s + 2 * interval_s:
            self.close_inactive()
        else:
            self.send(heartbeat)
            self.flush()
        self._schedule_beat(interval_s, heartbeat)

    # layers

    def start_tls(self, tls: TLSLayer) -> None:
        """Begin a TLS handshake, after which `ConnectionProtocol.tls_is_up` is called."""
        self.flush()
        self.tls = tls
        self._handshake_timer = self._loop.call_later(HANDSHAKE_S, self._handshake_failed)

    def _decrypt(self, tls: TLSLayer, data: bytes) -> bytes:
        try:
            plain = tls.decrypt(data)
        except HandshakeFailed as exc:
            self._transport.write(tls.pending())
            self._handshake_failed(str(exc))
            return b""
        self._transport.write(tls.pending())
        self._has_ended |= tls.has_ended
        if tls.is_ready and self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None
            if self._protocol is not None:
                self._protocol.tls_is_up()
        self.flush()
        return plain

    def _handshake_failed(self, reason: str = "i/o timeout") -> None:
        self.tls = None  # send the error in plain text, as nsqd does
        self.refuse(RequestError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}"))

    def start_compression(self, codec: StreamCodec) -> None:
        """Compress both directions from now on."""
        self.flush()
        self._codec = codec

    # the end

    def close_inactive(self) -> None:
        """Close a client that is silent or has ended; refuse a command that is truncated."""
        if self._error_if_truncated is not None:
            self.refuse(self._error_if_truncated)
        else:
            self.close()

    def close(self) -> None:
        """Write the queued frames and close; abort if the client does not read them in time."""
        if not self._is_closed:
            self.flush()
            self._drain_timer = self._loop.call_later(_CLOSE_S, self._transport.abort)
        self._transport.close()
        self._end()

    def fail(self, exc: Exception) -> None:
        """Log the reason, and close in the next iteration without writing the queued frames."""
        self._log_end(exc)
        self._transport.abort()

    def abort(self) -> None:
        """Close immediately without writing the queued frames."""
        self._transport.abort()
        self._end()

    def _close_with_error(self, frame: bytes) -> None:
        self.send(frame)
        self.flush()
        self._chunks.clear()
        self._drain_timer = self._loop.call_later(_DRAIN_S, self._transport.abort)
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self._transport.abort()
        self._end()

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._received.clear()
        self.beat(0, b"")
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        if self._protocol is not None:
            self._protocol.closed()
