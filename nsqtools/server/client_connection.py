"""One TCP client: bytes in, bytes out, through TLS and compression, with no task per client.

What a read brought goes command by command to the *protocol* that the first four bytes chose. Its
answers collect until the read is done: a thousand commands in one read are answered in one write.

A protocol can interrupt a read in two ways: `Incomplete` (more bytes are needed) and `Pause`
(something slow, such as an auth server, has to answer first: nothing is read meanwhile).

The loop serves all clients, so a client has it for a *turn* of at most two milliseconds
(`LoopMeter.share_ends_s`): what was not run by then waits for its next turn, and more is not read
meanwhile. Compressed bytes are decoded a little at a time: 30 KB can decode to 30 MB of commands.

A connection may have a beat. Each time a heartbeat goes out, whatever else is sent. A client that
has not completed a command for two intervals, and is not kept waiting by a *pause*, is dropped
then, and so is one that has not taken its output for one.

Traps: after a fatal error the client may still be sending; closing with unread input would destroy
the error frame, so the connection is half closed and drained for a moment. A client that does not
read its answers is not read from either.

Trap: a client can die at any point, and an exception then concerns this client only. `flush` is
called by the channel that deals messages out to many: it raises nothing, and what it cannot write
ends the connection in the next step of the loop.
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
    """Nothing continues before ``until()`` is done; then the command at ``position`` is run."""

    def __init__(self, position: int, until: Callable[[], Awaitable[object]]) -> None:
        super().__init__(position)
        self.position = position
        self.until = until


class ConnectionProtocol(ABC):
    """A protocol on a connection."""

    @abstractmethod
    def execute(self, data: bytes, position: int) -> int:
        """Run one command and return the position after it.

        May raise `RequestError`, `Incomplete`, `LineTooLong` or `Pause`.
        """

    @abstractmethod
    def encode_error(self, error: RequestError) -> bytes:
        """Return the error as this protocol sends it."""

    @abstractmethod
    def closed(self) -> None:
        """The connection is over; called once."""

    def quick(self, data: bytes) -> bytes | None:
        """Run a read that is one frequent command, and return the answer; None if it is not.

        The answer is ``b""`` when it comes later. Called only when nothing is queued in either
        direction, without TLS and compression.
        """
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether a command that was run is to be answered later."""
        return False

    def tls_is_up(self) -> None:  # noqa: B027 - a protocol without TLS needs none
        """The handshake is done that was to come (`ClientConnection.start_tls`)."""

    def on_writable(self) -> None:  # noqa: B027 - a protocol that only answers needs none
        """The client reads again."""


_DRAIN_S = 1.0
_CLOSE_S = 30.0
_DECODED_BYTES = 1 << 16  # at a time
_MAGIC_LENGTH = 4


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
        self.is_stuck = False  # the client does not read
        self._stuck_at_s = 0.0
        self._last_command_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._protocols = protocols
        self._refusal = refusal
        self._connections = connections
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._meter = meter_of(self._loop)
        self._transport = cast(asyncio.Transport, None)  # until connection_made
        self._protocol: ConnectionProtocol | None = None
        self._codec: StreamCodec | None = None
        self._chunks: list[bytes] = []
        self._length = 0
        self._wanted = _MAGIC_LENGTH
        self._error_if_truncated: RequestError | None = None
        self._pause: asyncio.Task[None] | None = None
        self._received: deque[bytes] = deque()  # not decoded yet
        self._has_turn = False  # soon, to go on with what was received
        self._has_ended = False  # the client sends no more
        self._out: list[bytes] = []
        self._flush_due = False
        self._out_size = 0
        self._is_over = False
        self._is_reported = False  # why it is being closed
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
        if self._is_over:
            return
        if self._is_idle() and self._protocol is not None:
            answer = self._protocol.quick(data)
            if answer is not None:
                self._last_command_s = monotonic()  # the clock of the loop
                if answer:
                    self._transport.write(answer)
                return
        self._received.append(data)
        if self._has_turn or self._pause is not None or self.is_stuck:
            self._update_reading()
        elif self._meter.is_used_up:
            self._go_on()
            self._update_reading()
        else:
            self._take_turn()

    def eof_received(self) -> bool:
        if self._is_over:
            return False  # asyncio closes when the rest is written
        self._has_ended = True
        self._give_up_if_done()
        return not self._is_over

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._end()
        self._protocol = None  # which has this one: nothing is left to the garbage collection
        self._log.info(f"TCP: client({self.remote_address}) closed")

    def pause_writing(self) -> None:
        self.is_stuck = True
        self._stuck_at_s = monotonic()
        self._update_reading()

    def resume_writing(self) -> None:
        self.is_stuck = False
        if self._protocol is not None and not self._is_over:
            self._protocol.on_writable()
        self._go_on()

    def _is_idle(self) -> bool:
        waits = self._length or self._received or self._out or self._has_turn or self._pause
        return not (waits or self.is_stuck or self.tls is not None or self._codec is not None)

    def _update_reading(self) -> None:
        if self.is_stuck or self._pause is not None or self._received:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    # input

    def _go_on(self) -> None:
        """Have a turn soon, if none is due: something that kept the client waiting is over."""
        if not (self._has_turn or self._is_over):
            self._has_turn = True
            self._meter.soon(self._take_turn, self._loop)

    def _take_turn(self) -> None:
        """Decode and run what was received until the turn is over."""
        self._has_turn = False
        until_s = self._meter.share_ends_s()
        try:
            while not (self._is_over or self._pause or self.is_stuck):
                if self._length >= self._wanted and self._length:
                    self._run(until_s)
                elif not self._decode():
                    break
                if self._loop.time() >= until_s:
                    self._go_on()
                    break
            if not self._is_over:
                self._update_reading()
                self._give_up_if_done()
        except Exception as exc:  # such as a RecursionError of JSON
            self._report(exc)
            self.close()

    def _report(self, exc: Exception) -> None:
        """Say why the client is being closed, once: ending it can raise the same again."""
        if not self._is_reported:
            self._is_reported = True
            self._log.error(f"client({self.remote_address}) - {str(exc) or repr(exc)}")

    def _give_up_if_done(self) -> None:
        is_busy = self._has_turn or self._pause or self._received or self.is_stuck
        if self._has_ended and not (is_busy or (self._protocol and self._protocol.is_waiting)):
            self.give_up()

    def _decode(self) -> bool:
        """Take some of what was received through the layers; return False when there is none."""
        data = b""
        if self._codec is None or not self._codec.has_more:
            if self.tls is not None and self.tls.failure is not None:
                raise self.tls.failure
            if not self._received:
                return False
            data = self._received.popleft()
            if self.tls is not None:
                data = self._through_tls(self.tls, data)
        if self._codec is not None and not self._is_over:
            data = self._codec.decompress(data, _DECODED_BYTES)
        if data:
            self._chunks.append(data)
            self._length += len(data)
        return True

    def _run(self, until_s: float) -> None:
        """Run the commands that are there, until the turn is over."""
        data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        position = 0
        if self._protocol is None:
            magic = data[:_MAGIC_LENGTH]
            shown = magic.decode("ascii", "backslashreplace")
            self._log.info(f"CLIENT({self.remote_address}): desired protocol magic {shown!r}")
            make = self._protocols.get(magic)
            if make is None:
                self._log.error(f"client({self.remote_address}) bad protocol magic {shown!r}")
                self._hang_up(self._refusal)
                return
            self._protocol = make(self)
            position = _MAGIC_LENGTH
        position = self._execute(self._protocol, data, position, until_s)
        if self._is_over:
            return
        rest = data[position:]
        self._chunks = [rest] if rest else []
        self._length = len(rest)
        if self._flush_due:
            self.flush()

    def _execute(
        self, protocol: ConnectionProtocol, data: bytes, position: int, until_s: float
    ) -> int:
        end = len(data)
        now_s = self._loop.time
        any_done = False
        self._wanted = 1
        self._error_if_truncated = None
        try:
            while position < end and not self._is_over:
                position = protocol.execute(data, position)
                any_done = True
                if now_s() >= until_s:
                    break
        except Incomplete as more:
            position = more.position
            self._wanted = more.needed
            self._error_if_truncated = more.error
        except Pause as pause:
            position = pause.position
            self._pause = self._loop.create_task(self._wait(pause.until))
            self._update_reading()
        except RequestError as error:
            self.refuse(error)
        except LineTooLong:
            self._log.error(f"client({self.remote_address}) - line too long")
            self.close()
        if any_done and not self._is_over:
            self._last_command_s = monotonic()
        return position

    async def _wait(self, until: Callable[[], Awaitable[object]]) -> None:
        refusal: RequestError | None = None
        try:
            await until()
        except RequestError as error:
            refusal = error
        except Exception as exc:
            self._report(exc)
            self.abort()
        self._pause = None
        self._last_command_s = monotonic()
        if refusal is not None:
            self.refuse(refusal)
        elif not self._is_over:
            self.flush()
            self._go_on()

    # output

    def send(self, data: bytes) -> None:
        """Queue an answer for the write at the end of this read, or for `flush`."""
        self._flush_due = True
        self._out.append(data)
        self._out_size += len(data)

    def answer(self, data: bytes) -> None:
        """Queue an answer to a command of an earlier read; many such are one write."""
        if self._is_over:
            return
        if not self._flush_due:
            self._loop.call_soon(self._flush_answers)
        self.send(data)

    def _flush_answers(self) -> None:
        if not self._is_over:
            self.flush()
            self._give_up_if_done()

    def refuse(self, error: RequestError) -> None:
        """Answer a command, of this or an earlier read, with a fatal error."""
        if self._protocol is not None and not self._is_over:
            text = error.data.decode("utf-8", "backslashreplace")
            self._log.error(f"[{self.remote_address}] - {text}")
            self._hang_up(self._protocol.encode_error(error))

    def buffer(self, frames: Iterable[bytes], size: int) -> int:
        """Queue frames for the next `flush` and return how many bytes are queued now."""
        self._out.extend(frames)
        self._out_size += size
        return self._out_size

    def flush(self) -> None:
        """Write what is queued, unless a TLS handshake is under way: then it waits for its end.

        Raises nothing: a connection that cannot take it is aborted.
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
        except Exception as exc:  # such as that of TLS after a broken record
            self.fail(exc)

    def beat(self, interval_s: float, heartbeat: bytes) -> None:
        """Send a heartbeat every interval from now on, 0 for none, to a client that is there."""
        if self._beat is not None:
            self._beat.cancel()
        self._last_command_s = monotonic()
        self._beat_later(interval_s, heartbeat)

    def _beat_later(self, interval_s: float, heartbeat: bytes) -> None:
        self._beat = None
        if interval_s and not self._is_over:
            self._beat = self._loop.call_later(interval_s, self._on_beat, interval_s, heartbeat)

    def _on_beat(self, interval_s: float, heartbeat: bytes) -> None:
        now_s = self._loop.time()
        if self.is_stuck and now_s >= self._stuck_at_s + interval_s:
            self.abort()
        elif self._pause is None and now_s >= self._last_command_s + 2 * interval_s:
            self.give_up()
        else:
            self.send(heartbeat)
            self.flush()
        self._beat_later(interval_s, heartbeat)

    # layers

    def start_tls(self, tls: TLSLayer) -> None:
        """Expect a TLS handshake next; the protocol hears when it is done."""
        self.flush()
        self.tls = tls
        self._handshake_timer = self._loop.call_later(HANDSHAKE_S, self._handshake_failed)

    def _through_tls(self, tls: TLSLayer, data: bytes) -> bytes:
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
        self.tls = None  # the error goes out in plain text, as nsqd sends it
        self.refuse(RequestError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}"))

    def start_compression(self, codec: StreamCodec) -> None:
        """Compress from here on, in both directions."""
        self.flush()
        self._codec = codec

    # the end

    def give_up(self) -> None:
        """Close a client that is silent or has ended: a command that was cut off is refused."""
        if self._error_if_truncated is not None:
            self.refuse(self._error_if_truncated)
        else:
            self.close()

    def close(self) -> None:
        """Write what is queued and close, after a while also if the client reads nothing."""
        if not self._is_over:
            self.flush()
            self._drain_timer = self._loop.call_later(_CLOSE_S, self._transport.abort)
        self._transport.close()
        self._end()

    def fail(self, exc: Exception) -> None:
        """Say why, and close without writing what is queued, in the next step of the loop."""
        self._report(exc)
        self._transport.abort()

    def abort(self) -> None:
        """Close without writing what is queued."""
        self._transport.abort()
        self._end()

    def _hang_up(self, last_words: bytes) -> None:
        self.send(last_words)
        self.flush()
        self._chunks.clear()
        self._drain_timer = self._loop.call_later(_DRAIN_S, self._transport.abort)
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self._transport.abort()
        self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._pause is not None:
            self._pause.cancel()
        self._received.clear()
        self.beat(0, b"")
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        if self._protocol is not None:
            self._protocol.closed()
