"""A connection to an nsqd: negotiation, reading and writing on the I/O loop, and its loss.

Negotiation waits for name resolution, TCP, TLS and nsqd's answers. `open_connection` blocks
meanwhile, so it runs on other threads (`connecting`); `opening` does the same on the I/O thread
where no step can block. The order is strict, and each step reads its answer before the next
is sent: magic and IDENTIFY in one write, the reply, TLS and its OK, snappy or deflate and its OK,
AUTH if nsqd requires it, SUB. Nothing may be pipelined behind IDENTIFY, because nsqd discards it
when it upgrades the stream. Bytes behind the frame of the IDENTIFY reply belong to the decoder of
the compressed stream. TLS that was requested but is not offered is an error, because the secret
would follow in clear text. A secret is sent only to an nsqd that requires it: any other closes the
connection.

Then the connection's user, a subscription or a producer, attaches it to the I/O loop. It reads,
answers heartbeats, sends the writes of a turn at once, and detects a dead nsqd. The user gets
messages, responses, errors and, once, the loss.

Writing has two stages. A command passed to `write` is *pending*; `flush` joins and compresses
pending commands, which are *committed* then. Committed bytes never change: TLS requires a retry
with the same bytes, and a compressed byte left out ruins the stream.

A few compressed bytes can expand to gigabytes. They are expanded piece by piece
(`max_inflated_read`), one in each turn, and nothing is read from the socket meanwhile.

TCP does not report a peer that lost power. nsqd sends a heartbeat in every interval, so after two
intervals and a second of silence it is dead (pynsq's rule). `read_timeout` is the upper limit, but
never below one interval and a second. A peer that accepts no bytes for `write_timeout` while some
are pending is stuck.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import socket
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsqtools.client.connection_settings import current_secret
from nsqtools.client.io_loop import NO_BUFFER, LoopMember
from nsqtools.client.options import TLS_SETTINGS, ClientOptions
from nsqtools.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeadlineExceeded,
    NsqError,
    ProtocolError,
    RefusedError,
    ServerError,
    TLSError,
)
from nsqtools.http.http_api import HTTPAccess
from nsqtools.protocol import commands, frames
from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec
from nsqtools.protocol.commands import IdentifyReply, decode_identify_reply
from nsqtools.protocol.frames import HEARTBEAT, FrameBuffer
from nsqtools.protocol.names import Address, parse_address, parse_patterns
from nsqtools.transport.stream import (
    AtomicCalls,
    Deadline,
    RenewedContext,
    Stream,
    TLSOptions,
    connect,
    renewed_context,
)

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")

# Time for all steps of the negotiation. nsqd under load, TLS on a small machine and an auth server
# together take seconds, even where dial_timeout is set to less.
MIN_HANDSHAKE_S = 5.0
# Interval of `Connection.check_liveness`: the shortest heartbeat interval is a second.
LIVENESS_TICK_S = 1.0
# nsqd's default heartbeat interval: a connection that lasted this long works.
PROVEN_AFTER_S = 30.0
# Over HTTP. An nsqlookupd that drops packets must not delay a lookup for longer.
MAX_CONNECT_TIMEOUT_S = 2.0
# nsqd's default --min-output-buffer-timeout. Its default without this, 250 ms, delays lone
# messages.
QUICK_FLUSH_S = 0.025


class ConnectionUser(Protocol):
    """The callbacks of a connection, on the I/O thread.

    ``make_message`` builds each message: see `FrameBuffer.take`. Before that, ``received_at`` is
    set to the time of the last poll, after which nsqd sent the bytes.
    """

    received_at: float

    @property
    def make_message(self) -> Callable[[Any, int, int, bytes, bytes], Any]: ...

    def on_messages(self, messages: list[Any]) -> None: ...
    def on_response(self, data: bytes) -> None: ...
    def on_server_error(self, error: ServerError) -> None: ...
    def on_lost(self, error: NsqError) -> None: ...


T = TypeVar("T")
Steps = Generator[bytes, None, T]
"""Steps of a negotiation: a command to send, or ``b""`` to receive an answer."""


class Connection:
    """A connection to an nsqd. ``reply`` has the features that nsqd granted."""

    reply: IdentifyReply

    def __init__(self, stream: Stream, options: ClientOptions, *, is_announced: bool) -> None:
        self.address = stream.address
        self.nsqd = str(self.address)
        self.is_open = True
        self.has_received = False  # a message or a heartbeat
        self._is_announced = is_announced
        self._stream = stream
        self._options = options
        self._codec: StreamCodec | None = None
        limit = options.max_msg_size
        self._frames = FrameBuffer(limit and limit + frames.MIN_MESSAGE_SIZE + 4)
        self.pending: list[bytes] = []  # commands of which no byte can have reached the peer
        self._committed = b""
        self._offset = 0
        self._silence_limit_s = silence_limit_s(options)
        self._is_attached = False
        self._watches_writes = False
        self._is_shut_down = False
        self._has_more = False  # to expand or to report, without another read
        self._is_inflating = False  # a scheduled call will do it

    # -- negotiation ----------------------------------------------------------------------------

    def negotiate(self, subscribe: bytes, identify: bytes) -> None:
        """Take the steps of `negotiation`, blocking."""
        for command in self.negotiation(subscribe, identify):
            if command:
                self._stream.send_all(command, self.deadline)
            else:
                self._frames.feed(self._receive_blocking())
        self._stream.set_nonblocking()

    def negotiation(self, subscribe: bytes, identify: bytes) -> Steps[None]:
        """Identify, agree on the features of the options and, for a consumer, subscribe."""
        options = self._options
        self.deadline = Deadline(max(MIN_HANDSHAKE_S, options.dial_timeout_s))
        yield commands.MAGIC_V2 + commands.identify(identify)
        self.reply = decode_identify_reply((yield from self._answer()))
        if options.tls_v1:
            yield from self._upgrade_to_tls()
        yield from self._start_compression()
        if self.reply.auth_required:
            yield from self._authenticate()
        if subscribe:
            yield self._encode(subscribe)
            yield from self._expect_ok("SUB")

    def receive_answer(self, buffer: memoryview) -> None:
        """Receive an answer without waiting, in a `negotiation` without TLS or compression."""
        data = self._stream.receive_ready(buffer)
        if data == b"":
            raise ConnectionLost(f"{self.nsqd} closed the connection")
        self._frames.feed(data or b"")

    def _upgrade_to_tls(self) -> Steps[None]:
        if not self.reply.tls_v1:
            raise TLSError(
                f"{self.nsqd} does not offer TLS",
                hint="Start nsqd with --tls-cert and --tls-key. No secret was sent.",
            )
        if len(self._frames):
            raise ProtocolError("clear text after the TLS agreement")
        self._stream.start_tls(client_tls(self._options).get(), self.deadline)
        yield from self._expect_ok("the TLS handshake")

    def _start_compression(self) -> Steps[None]:
        for codec in ("snappy", "deflate"):
            if getattr(self.reply, codec) and not getattr(self._options, codec):
                raise ProtocolError(f"nsqd compresses with {codec}, which was not requested")
        if self.reply.snappy:
            self._codec = SnappyCodec()
        elif self.reply.deflate:
            self._codec = DeflateCodec(self.reply.deflate_level)
        else:
            return
        surplus, limit = self._frames.take_surplus(), self._options.max_inflated_read
        self._frames.feed(self._codec.decompress(surplus, limit))
        yield from self._expect_ok("the start of compression")

    def _authenticate(self) -> Steps[None]:
        secret = current_secret(self._options)
        if not secret:
            raise RefusedError(
                f"{self.nsqd} requires authentication",
                hint="Set auth_secret (nsq: --auth-secret-file or NSQ_AUTH_SECRET).",
            )
        if not self._options.tls_v1:
            self._check_exposure()
        # Bytes of NSQ_AUTH_SECRET that are not UTF-8 are surrogates here.
        yield self._encode(commands.auth(secret.encode("utf-8", "surrogateescape")))
        self.deadline = Deadline(_auth_limit_s(self._options))
        yield from self._answer()  # the identity, as JSON; a refusal raises

    def _check_exposure(self) -> None:
        """Refuse to send the secret without TLS, or warn that it is sent."""
        if self._options.auth_requires_tls:
            raise RefusedError(
                f"{self.nsqd} would get the auth secret in plain text",
                hint="Use TLS (nsq: --tls), or do without auth_requires_tls.",
            )
        if self._is_announced and not _exposed_to:  # one warning, as thousands may be announced
            _exposed_to.append(self.address)
            log.warning(
                "the auth secret goes in plain text to %s, which nsqlookupd announced; use TLS, or"
                " refuse this with auth_requires_tls",
                self.nsqd,
            )

    def _encode(self, command: bytes) -> bytes:
        return self._codec.compress(command) if self._codec else command

    def _receive_blocking(self) -> bytes:
        codec = self._codec
        data = b"" if codec and codec.has_more else self._stream.receive(self.deadline)
        return codec.decompress(data, self._options.max_inflated_read) if codec else data

    def _expect_ok(self, step: str) -> Steps[None]:
        answer = yield from self._answer()
        if answer != frames.OK:
            raise ProtocolError(f"{answer[:60]!r} instead of OK to {step}")

    def _answer(self) -> Steps[bytes]:
        """Wait for the next response other than a heartbeat."""
        while True:
            while (frame := self._frames.next_frame()) is None:
                yield b""
            frame_type, body = frame
            if frame_type == frames.ERROR:
                raise frames.decode_error(body, self.nsqd)
            if frame_type == frames.MESSAGE:
                raise ProtocolError("a message before SUB")
            if body != HEARTBEAT:
                return body
            yield self._encode(commands.NOP)

    def attach(self, loop: LoopMember, user: ConnectionUser) -> None:
        """Serve ``user`` on the I/O thread."""
        self._loop = loop
        self._user = user
        self._io_thread = loop.io_thread
        self._buffer = loop.io_thread.buffer
        self._opened_at = self._last_read = self._last_progress = loop.now()
        loop.register(self)  # this may raise
        self._is_attached = True
        self._has_more = self._codec is not None and self._codec.has_more

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._stream.fileno()

    # -- reading --------------------------------------------------------------------------------

    def on_readable(self, received: bytes = b"") -> None:
        """Hand the complete frames of one read to the user, or of bytes that were ``received``."""
        if not self.is_open or self._is_inflating:  # it may have been closed earlier in this turn
            return
        frame_buffer, user = self._frames, self._user
        try:
            data: bytes | None = received
            if not received:
                data = None if self._has_more else self._stream.receive_ready(self._buffer)
                if data == b"":
                    raise ConnectionLost(f"{self.nsqd} closed the connection")
            if self._codec is not None:
                # Compressed bytes may decode to nothing yet, which is not the end of the stream.
                data = self._codec.decompress(data or b"", self._options.max_inflated_read)
                self._has_more = self._codec.has_more
            self._last_read = self._io_thread.polled_at
            user.received_at = self._io_thread.poll_time
            messages, other_frames = frame_buffer.take(user.make_message, user, data or b"")
        except ProtocolError as exc:
            self.lose(ProtocolError(f"{self.nsqd}: {exc}", hint=exc.hint))
            return
        except NsqError as exc:
            self.lose(exc)
            return
        if self._has_more or frame_buffer.is_damaged:
            self._has_more = self._is_inflating = True
            self._loop.call_soon(self._inflate_more)
        if messages:
            self.has_received = True
            user.on_messages(messages)
        for frame_type, data in other_frames:
            if self.is_open:  # the user may close it after any frame
                self._on_frame(frame_type, data)

    # -- lending to a publishing thread -----------------------------------------------------------

    def lend(self) -> AtomicCalls | None:
        """Lend the idle connection to publishing threads; return None if that is impossible."""
        calls = self._stream.atomic_calls()
        if calls is None or self._codec is not None or self.has_unsent or len(self._frames):
            return None
        self._loop.lend(self)
        return calls

    def reclaim(
        self, command: bytes = b"", sent: Sequence[int] = (0,), received: Sequence[bytes] = ()
    ) -> None:
        """Serve the connection again, from where a publishing thread has got with a command.

        ``sent`` has the number of its bytes that were sent, and nothing if that is uncertain.
        """
        self._loop.reclaim(self)
        self._last_read = self._last_progress = self._loop.now()
        if not sent:
            self.lose(ConnectionLost(f"{self.nsqd}: a command may not have been sent"))
        elif command and not sent[0]:
            self.write(command)
        elif unsent := command[sent[0] :]:
            self._committed = unsent
            self._io_thread.unflushed.append((self, self._loop))
        if any(received):
            # Not together with the next read: an error is followed by the end of the stream.
            self.on_readable(received[0])
        self.on_readable()  # before the next command: nsqd may have closed the connection

    def _inflate_more(self) -> None:
        self._is_inflating = False
        self.on_readable()

    def _on_frame(self, frame_type: int, data: bytes) -> None:
        if data == HEARTBEAT:
            self.has_received = True
            # Unsent bytes will answer the heartbeat as well. Otherwise NOPs would pile up for a
            # peer that sends heartbeats but reads nothing.
            if not self.has_unsent:
                self.write(commands.NOP)
        elif frame_type == frames.ERROR:
            self._user.on_server_error(frames.decode_error(data, self.nsqd))
        else:
            self._user.on_response(data)

    # -- writing --------------------------------------------------------------------------------

    def write(self, command: bytes) -> None:
        """Queue a command, which is sent at the end of the turn."""
        if not self.pending:
            self._io_thread.unflushed.append((self, self._loop))
        self.pending.append(command)

    def flush(self) -> None:
        """Send queued bytes as far as the socket accepts them. The loop calls this."""
        if not self.is_open or self._is_shut_down:
            return
        try:
            is_done = self._send()
        except NsqError as exc:
            self.on_readable()  # nsqd's own error can often still be read
            self.lose(exc)
            return
        if is_done is self._watches_writes:
            self._watches_writes = not is_done
            self._loop.watch_writes(self, not is_done)

    def _send(self) -> bool:
        """Send; return whether everything is sent."""
        pending = self.pending
        while self._committed or pending:
            if not self._committed:
                data = pending[0] if len(pending) == 1 else b"".join(pending)
                pending.clear()
                self._committed = self._codec.compress(data) if self._codec else data
            unsent = (
                memoryview(self._committed)[self._offset :] if self._offset else self._committed
            )
            sent = self._stream.send_ready(unsent)
            if sent == len(unsent):
                self._committed = b""
                self._offset = 0
                if self._watches_writes:  # without a stall the time does not matter
                    self._last_progress = self._loop.now()
            else:
                self._offset += sent
                # The first incomplete send begins the stall: `_last_progress` may be long ago.
                if sent or not self._watches_writes:
                    self._last_progress = self._loop.now()
                if not sent:
                    return False
        return True

    @property
    def has_unsent(self) -> bool:
        """Return whether bytes wait to be sent."""
        return bool(self._committed or self.pending)

    def shutdown_write(self) -> None:
        """End our direction of the stream after a flush; nsqd's direction stays open."""
        self._is_shut_down = True
        self._stream.shutdown_write()

    # -- life -----------------------------------------------------------------------------------

    @property
    def is_proven(self) -> bool:
        """Return whether this connection proves that nsqd works.

        Acceptance is no proof: an nsqd that accepts connections and drops them must not reset the
        delays between attempts.
        """
        return self.has_received or self._loop.now() - self._opened_at > PROVEN_AFTER_S

    def check_liveness(self) -> None:
        """Close the connection if nsqd has been silent or accepted no bytes for too long."""
        if not self.is_open:
            return
        now = self._loop.now()
        if now - self._last_read > self._silence_limit_s:
            limit_s = self._silence_limit_s
            self.lose(DeadlineExceeded(f"{self.nsqd} was silent for {limit_s:.0f} s"))
        elif self._committed and now - self._last_progress > self._options.write_timeout_s:
            limit_s = self._options.write_timeout_s
            self.lose(DeadlineExceeded(f"{self.nsqd} accepted no bytes for {limit_s:.0f} s"))

    def lose(self, error: NsqError) -> None:
        """Close the connection and report its loss to the user, once."""
        if self.is_open:
            self.close()
            self._user.on_lost(error)

    def close(self) -> None:
        """Close the socket without a report. Repeated calls do nothing."""
        if self.is_open:
            self.is_open = False
            if self._is_attached:
                self._loop.unregister(self)
                self._buffer = NO_BUFFER
            self._stream.close()

    def close_copy(self) -> None:
        """Close a forked child's copy of the socket. The connection belongs to the parent."""
        self.is_open = False
        self._stream.close()


def silence_limit_s(options: ClientOptions) -> float:
    """Return the seconds of silence after which nsqd is dead; without heartbeats, infinity."""
    interval_s = options.heartbeat_interval_s
    if interval_s <= 0:
        return math.inf
    return max(interval_s + 1, min(2 * interval_s + 1, options.read_timeout_s))


# -- negotiation ----------------------------------------------------------------------------------


def max_attempt_s(options: ClientOptions) -> float:
    """Return the longest time of an attempt to connect, including AUTH if there is a secret."""
    auth_s = _auth_limit_s(options) if options.auth_secret or options.auth_secret_file else 0.0
    return options.dial_timeout_s + max(MIN_HANDSHAKE_S, options.dial_timeout_s) + auth_s


def _auth_limit_s(options: ClientOptions) -> float:
    # Meanwhile nsqd asks its auth servers one after the other. Each that hangs takes 5 s.
    return max(MIN_HANDSHAKE_S, options.read_timeout_s)


def tls_context(options: ClientOptions) -> ssl.SSLContext | None:
    """Return the TLS context of the options, or None without TLS.

    Logs a warning about a TLS setting without effect. Raises `ConfigurationError`.
    """
    if options.tls_v1:
        return client_tls(options).check()
    if ignored := [name for name in TLS_SETTINGS if getattr(options, name)]:
        log.warning(
            "%s has no effect without tls_v1 (nsq: --tls): nsqd gets plain text", ignored[0]
        )
    return None


def client_tls(options: ClientOptions) -> RenewedContext:
    """Return the TLS context of the options, which is rebuilt when its files change.

    Raises `ConfigurationError`.
    """
    context = options.ssl_context
    if context is not None:
        return RenewedContext((), lambda: context)
    return renewed_context(
        TLSOptions(
            ca_file=options.tls_root_ca_file,
            cert_file=options.tls_cert,
            key_file=options.tls_key,
            insecure_skip_verify=options.tls_insecure_skip_verify,
            min_version=options.tls_min_version,
            pins_sha256=options.tls_pin_sha256,
        )
    )


def http_access(
    options: ClientOptions,
    http_addresses: Iterable[str],
    address_map: Mapping[str, str] | None = None,
) -> HTTPAccess:
    """Return the settings of HTTP requests to these daemons and to those that they announce.

    Raises `ConfigurationError` for TLS files and mapped addresses that cannot be used.
    """
    address_map = address_map or {}
    uses_tls = any(text.startswith("https:") for text in (*http_addresses, *address_map.values()))
    return HTTPAccess(
        connect_timeout_s=min(MAX_CONNECT_TIMEOUT_S, options.lookupd_poll_timeout_s),
        timeout_s=options.lookupd_poll_timeout_s,
        max_body_bytes=options.max_http_body,
        max_nodes=options.max_discovered_nsqd,
        allow_announced=parse_patterns(options.allow_announced),
        auth_requires_tls=options.auth_requires_tls,
        tls=client_tls(options).check() if uses_tls else None,
        bearer=current_secret(options) if options.lookupd_authorization else "",
        address_map=address_map,
    )


def open_connection(
    address: Address,
    options: ClientOptions,
    subscribe: bytes = b"",
    *,
    is_announced: bool = False,
    check: Callable[[], None] | None = None,
) -> Connection:
    """Connect, negotiate and, for a consumer, subscribe.

    ``check`` is called when nsqd has accepted the connection, before anything is sent; its errors
    end the attempt. ``is_announced`` means that nsqlookupd named the address. Files of certificates
    and secrets are read again if they have changed.

    Raises `ConnectionFailed`, `RefusedError`, `ServerError` or `ProtocolError` with the address,
    and closes the socket.
    """

    def open_once(identify: bytes) -> Connection:
        stream = connect(address, Deadline(options.dial_timeout_s), options.local_addr)
        connection = Connection(stream, options, is_announced=is_announced)
        try:
            if check is not None:  # nsqd waits for the first command without sending heartbeats
                check()
            connection.negotiate(subscribe, identify)
        except BaseException as exc:
            connection.close()
            if isinstance(exc, ProtocolError):
                raise locate_protocol_error(exc, address) from exc
            raise
        return connection

    try:
        return open_once(identify_body(options))
    except ServerError as exc:
        if not refuses_buffer_timeout(exc):
            raise
        if options.output_buffer_timeout_s:
            raise ServerError(
                exc.code,
                f"{exc.text}: output_buffer_timeout is out of nsqd's bounds",
                fatal=True,
                where=str(address),
                hint="Do without -X output_buffer_timeout (in a program: output_buffer_timeout_s), "
                "or set it within nsqd's --min-output-buffer-timeout and the same with --max.",
            ) from exc
    _note_slow_buffer(address)
    return open_once(identify_body(options, leave_out="output_buffer_timeout"))


@functools.lru_cache(maxsize=1000)
def _note_slow_buffer(address: Address) -> None:
    log.info("%s does not allow output_buffer_timeout=25ms; using its own default", address)


def locate_protocol_error(error: ProtocolError, address: Address) -> ProtocolError:
    """Return the same error with the address of the peer."""
    return ProtocolError(f"{address}: {error}", hint=error.hint)


def refuses_buffer_timeout(error: NsqError) -> bool:
    """Return whether nsqd does not allow the output_buffer_timeout."""
    return isinstance(error, ServerError) and "output buffer timeout" in error.text


def require_one(nsqd_tcp_addresses: Sequence[str], timeout_s: float) -> None:
    """Check that one of the nsqd accepts a TCP connection.

    Raises the first `ConnectionFailed` if none does. Does nothing without addresses.
    """
    failure = None
    for address in nsqd_tcp_addresses:
        try:
            connect(parse_address(address), Deadline(timeout_s)).close()
            return
        except ConnectionFailed as error:
            failure = failure or error
    if failure is not None:
        raise failure


def identify_body(options: ClientOptions, *, leave_out: str = "") -> bytes:
    """Return the JSON body of IDENTIFY for the options, without the key ``leave_out``.

    nsqd refuses a value out of its bounds with a fatal E_BAD_BODY (it clamps only
    ``deflate_level``), so values that nsqd should decide are omitted.
    """
    hostname = socket.gethostname()
    wire: dict[str, object] = {
        "client_id": options.client_id or hostname.partition(".")[0],
        "hostname": options.hostname or hostname,
        "user_agent": options.user_agent,
        "feature_negotiation": True,
        "heartbeat_interval": _to_milliseconds(options.heartbeat_interval_s),
        "output_buffer_size": options.output_buffer_size,
        "output_buffer_timeout": _to_milliseconds(options.output_buffer_timeout_s or QUICK_FLUSH_S),
        "sample_rate": options.sample_rate or None,
        "msg_timeout": _to_milliseconds(options.msg_timeout_s) or None,
        "tls_v1": options.tls_v1,
        "snappy": options.snappy,
        "deflate": options.deflate,
        "deflate_level": options.deflate_level if options.deflate else None,
        "topology_region": options.topology_region,
        "topology_zone": options.topology_zone,
    }
    sent = {
        key: value for key, value in wire.items() if value not in (None, "") and key != leave_out
    }
    return json.dumps(sent, separators=(",", ":")).encode()


_exposed_to: list[Address] = []  # the nsqd of the one warning in this process


def _to_milliseconds(seconds: float) -> int:
    return -1 if seconds < 0 else round(seconds * 1000)  # -1: disabled
