"""A connection to an nsqd: from its address, through negotiation, to its loss.

Negotiation (`open_connection`) blocks: name resolution, TCP, TLS and all that is said, so a client
connects on other threads (`connecting`). The order is strict and every step reads its answer before
the next is sent: magic and IDENTIFY in one write, the reply, TLS and its OK, snappy or deflate and
its OK, AUTH when nsqd requires it, SUB. Nothing may be pipelined after IDENTIFY: nsqd discards it
when the stream is upgraded. What came with the IDENTIFY reply beyond its frame belongs to the
decoder of the compressed stream. TLS that was requested and is not offered is an error, because the
secret would follow in clear text. A secret is sent only to an nsqd that requires it: any other
closes the connection.

Then the connection is attached to an I/O loop by its user, a subscription or a producer: it reads,
answers heartbeats, sends what a turn has written in one go, and notices when nsqd is dead. The user
gets messages, responses, errors and, once, the loss.

Writing has two stages. What `write` takes is *pending*; `flush` joins it, compresses it once and
makes it *committed*, and committed bytes never change: a shorter retry is an error to TLS, and a
compressed byte left out ruins the stream.

A few compressed bytes can be gigabytes: they are expanded piece by piece (`max_inflated_read`), one
in a turn, and nothing is read from the socket meanwhile.

TCP does not report a peer that lost power. nsqd sends a heartbeat every interval, so silence for
two of them and a second more means that nothing is there (pynsq's rule; `read_timeout` is the
ceiling, but one heartbeat must have had time to come). And a peer that takes no bytes for
`write_timeout` while some wait is stuck.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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

MIN_HANDSHAKE_S = 5.0
LIVENESS_TICK_S = 1.0  # how often it is worth calling `Connection.check_liveness`
PROVEN_AFTER_S = 30.0
MAX_CONNECT_TIMEOUT_S = 2.0  # over HTTP
QUICK_FLUSH_S = 0.025  # nsqd's default --min-output-buffer-timeout; its own default is 250 ms


class ConnectionUser(Protocol):
    """What a connection reports, on the I/O thread.

    ``make_message`` builds each message: see `FrameBuffer.take`. ``received_at`` is set before: the
    time after which nsqd sent what is being read.
    """

    received_at: float

    @property
    def make_message(self) -> Callable[[Any, int, int, bytes, bytes], Any]: ...

    def on_messages(self, messages: list[Any]) -> None: ...
    def on_response(self, data: bytes) -> None: ...
    def on_server_error(self, error: ServerError) -> None: ...
    def on_lost(self, error: NsqError) -> None: ...


class Connection:
    """A connection to an nsqd, which `open_connection` makes. ``reply`` is what nsqd granted."""

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
        self.pending: list[bytes] = []  # commands of which certainly no byte has reached the peer
        self._committed = b""
        self._offset = 0
        self._is_attached = False
        self._watches_writes = False
        self._is_shut_down = False
        self._is_inflating = False  # a call is due that expands more of what was read

    # -- negotiation, which blocks ----------------------------------------------------------------

    def negotiate(self, subscribe: bytes, identify: bytes) -> None:
        """Say who we are, agree on what the options ask for and, for a consumer, subscribe."""
        options = self._options
        self._deadline = Deadline(max(MIN_HANDSHAKE_S, options.dial_timeout_s))
        self._say(commands.MAGIC_V2 + commands.identify(identify))
        reply = self.reply = decode_identify_reply(self._answer())
        if options.tls_v1:
            self._upgrade_to_tls()
        self._start_compression()
        if reply.auth_required:
            self._authenticate()
        if subscribe:
            self._say(subscribe)
            self._expect_ok("SUB")
        self._stream.set_nonblocking()

    def _upgrade_to_tls(self) -> None:
        if not self.reply.tls_v1:
            raise TLSError(
                f"{self.nsqd} does not offer TLS",
                hint="Start nsqd with --tls-cert and --tls-key. No secret was sent.",
            )
        if len(self._frames):
            raise ProtocolError("clear text after the TLS agreement")
        self._stream.start_tls(client_tls(self._options).get(), self._deadline)
        self._expect_ok("the TLS handshake")

    def _start_compression(self) -> None:
        for codec in ("snappy", "deflate"):
            if getattr(self.reply, codec) and not getattr(self._options, codec):
                raise ProtocolError(f"nsqd compresses with {codec}, which was not asked for")
        if self.reply.snappy:
            self._codec = SnappyCodec()
        elif self.reply.deflate:
            self._codec = DeflateCodec(self.reply.deflate_level)
        else:
            return
        surplus, limit = self._frames.take_surplus(), self._options.max_inflated_read
        self._frames.feed(self._codec.decompress(surplus, limit))
        self._expect_ok("the start of compression")

    def _authenticate(self) -> None:
        secret = current_secret(self._options)
        if not secret:
            raise RefusedError(
                f"{self.nsqd} requires authentication",
                hint="Set auth_secret (nsq: --auth-secret-file or NSQ_AUTH_SECRET).",
            )
        if not self._options.tls_v1:
            self._expose_secret()
        self._say(commands.auth(secret.encode()))
        self._deadline = Deadline(_auth_limit_s(self._options))
        self._answer()  # the identity, as JSON; a refusal raises

    def _expose_secret(self) -> None:
        """Refuse to send the secret without TLS, or say that it is done."""
        if self._options.auth_requires_tls:
            raise RefusedError(
                f"{self.nsqd} would get the auth secret in plain text",
                hint="Use TLS (nsq: --tls), or do without auth_requires_tls.",
            )
        if self._is_announced and not _exposed_to:  # thousands may be announced
            _exposed_to.append(self.address)
            log.warning(
                "the auth secret goes in plain text to %s, which nsqlookupd announced; use TLS, or"
                " refuse this with auth_requires_tls",
                self.nsqd,
            )

    def _say(self, data: bytes) -> None:
        encoded = self._codec.compress(data) if self._codec else data
        self._stream.send_all(encoded, self._deadline)

    def _hear(self) -> bytes:
        codec = self._codec
        data = b"" if codec and codec.has_more else self._stream.receive(self._deadline)
        return codec.decompress(data, self._options.max_inflated_read) if codec else data

    def _expect_ok(self, after: str) -> None:
        answer = self._answer()
        if answer != frames.OK:
            raise ProtocolError(f"{answer[:60]!r} instead of OK to {after}")

    def _answer(self) -> bytes:
        """Wait for the next response other than a heartbeat."""
        while True:
            while (frame := self._frames.next_frame()) is None:
                self._frames.feed(self._hear())
            frame_type, body = frame
            if frame_type == frames.ERROR:
                raise frames.decode_error(body, self.nsqd)
            if frame_type == frames.MESSAGE:
                raise ProtocolError("a message before SUB")
            if body != HEARTBEAT:
                return body
            self._say(commands.NOP)

    def attach(self, loop: LoopMember, user: ConnectionUser) -> None:
        """Serve ``user`` on the I/O thread."""
        self._loop = loop
        self._user = user
        self._buffer = loop.own.buffer
        self._opened_at = self._last_read = self._last_progress = loop.now()
        loop.register(self)  # which may fail
        self._is_attached = True

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
            if not self.has_unsent:  # what waits answers it; a peer that takes little may send many
                self.write(commands.NOP)
        elif frame_type == frames.ERROR:
            self._user.on_server_error(frames.decode_error(data, self.nsqd))
        else:
            self._user.on_response(data)

    def _read(self) -> tuple[list[Any], list[tuple[int, bytes]]]:
        codec = self._codec
        try:
            has_more = self._frames.is_damaged or (codec is not None and codec.has_more)
            data = None if has_more else self._stream.receive_ready(self._buffer)
            if data == b"":
                raise ConnectionLost(f"{self.nsqd} closed the connection")
            self._last_read = self._loop.now()
            self._user.received_at = self._loop.own.poll_time
            if codec is not None:
                # compressed bytes may decode to nothing yet, which is not the end of the stream
                self._frames.feed(codec.decompress(data or b"", self._options.max_inflated_read))
                data = b""
            received = self._frames.take(self._user.make_message, self._user, data or b"")
            if self._frames.is_damaged or (codec is not None and codec.has_more):
                self._is_inflating = True
                self._loop.call_soon(self._inflate_more)
            return received
        except ProtocolError as exc:
            raise ProtocolError(f"{self.nsqd}: {exc}", hint=exc.hint) from exc

    # -- writing --------------------------------------------------------------------------------

    def write(self, command: bytes) -> None:
        """Queue a command; it is sent at the end of the loop's turn."""
        if not self.pending:
            self._loop.flush_soon(self)
        self.pending.append(command)

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it. The loop calls this."""
        if not self.is_open or self._is_shut_down:
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
        pending = self.pending
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
        return bool(self._committed or self.pending)

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
        return self.has_received or self._loop.now() - self._opened_at > PROVEN_AFTER_S

    def check_liveness(self) -> None:
        """Give the connection up when nsqd is silent or takes no bytes for too long."""
        if not self.is_open:
            return
        now, options = self._loop.now(), self._options
        limit_s = silence_limit_s(options)
        if limit_s is not None and now - self._last_read > limit_s:
            self.lose(DeadlineExceeded(f"{self.nsqd} was silent for {limit_s:.0f} s"))
        elif self._committed and now - self._last_progress > options.write_timeout_s:
            limit_s = options.write_timeout_s
            self.lose(DeadlineExceeded(f"{self.nsqd} took no bytes for {limit_s:.0f} s"))

    def lose(self, error: NsqError) -> None:
        """Close the connection and report its loss to the user, once."""
        if self.is_open:
            self.close()
            self._user.on_lost(error)

    def close(self) -> None:
        """Close the socket without a report. May be called again."""
        if self.is_open:
            self.is_open = False
            if self._is_attached:
                self._loop.unregister(self)
                self._buffer = NO_BUFFER
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


# -- negotiation ----------------------------------------------------------------------------------


def max_attempt_s(options: ClientOptions) -> float:
    """Return how many seconds connecting to one address may take, with AUTH if it is possible."""
    auth_s = _auth_limit_s(options) if options.auth_secret or options.auth_secret_file else 0.0
    return options.dial_timeout_s + max(MIN_HANDSHAKE_S, options.dial_timeout_s) + auth_s


def _auth_limit_s(options: ClientOptions) -> float:
    """nsqd asks its auth servers meanwhile, one after the other, 5 s each that hangs."""
    return max(MIN_HANDSHAKE_S, options.read_timeout_s)


def tls_context(options: ClientOptions) -> ssl.SSLContext | None:
    """Return the TLS context of the options, or None without TLS.

    Settings of TLS without effect are named in the log. Raises `ConfigurationError`.
    """
    if options.tls_v1:
        return client_tls(options).check()
    if given := [name for name in TLS_SETTINGS if getattr(options, name)]:
        log.warning("%s is set, but nsqd is sent plain text: set tls_v1 (nsq: --tls)", given[0])
    return None


def client_tls(options: ClientOptions) -> RenewedContext:
    """Return what has the TLS context of the options, as its files are at each connection.

    Raises `ConfigurationError`.
    """
    own = options.ssl_context
    if own is not None:
        return RenewedContext((), lambda: own)
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
    """Return how the client options ask daemons at these addresses, and those they announce.

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
    look: Callable[[], None] | None = None,
) -> Connection:
    """Connect, negotiate and, for a consumer, subscribe.

    ``look`` is called when nsqd has taken the connection, before anything is sent.

    ``is_announced``: nsqlookupd named the address, the user did not. Certificates and secret are
    those that their files hold now. Raises `ConnectionFailed`, `RefusedError`, `ServerError` or
    `ProtocolError`, each naming the address; the socket is closed then.
    """
    try:
        return _open(address, options, subscribe, identify_body(options), is_announced, look)
    except ServerError as exc:
        if "output buffer timeout" not in exc.text:
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
    identify = identify_body(options, leave_out="output_buffer_timeout")
    return _open(address, options, subscribe, identify, is_announced, look)


@functools.lru_cache(maxsize=1000)
def _note_slow_buffer(address: Address) -> None:
    log.info("%s does not allow output_buffer_timeout=25ms; using its own default", address)


def _open(
    address: Address,
    options: ClientOptions,
    subscribe: bytes,
    identify: bytes,
    is_announced: bool,
    look: Callable[[], None] | None,
) -> Connection:
    stream = connect(address, Deadline(options.dial_timeout_s), options.local_addr)
    connection = Connection(stream, options, is_announced=is_announced)
    try:
        if look is not None:  # nsqd waits for the first command without heartbeats
            look()
        connection.negotiate(subscribe, identify)
    except BaseException as exc:
        connection.close()
        if isinstance(exc, ProtocolError):
            raise ProtocolError(f"{address}: {exc}", hint=exc.hint) from exc
        raise
    return connection


def require_one(nsqd_tcp_addresses: Sequence[str], timeout_s: float) -> None:
    """Connect to one nsqd, and leave at once without subscribing.

    Raises the first `ConnectionFailed` if none answers; without addresses nothing.
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
    """Return the JSON of the IDENTIFY that the options ask for, but one value to ``leave_out``.

    nsqd refuses a value out of its bounds with a fatal E_BAD_BODY (only ``deflate_level`` is
    clamped), so what nsqd should decide is left out.
    """
    hostname = socket.gethostname()
    wire: dict[str, object] = {
        "client_id": options.client_id or hostname.partition(".")[0],
        "hostname": options.hostname or hostname,
        "user_agent": options.user_agent,
        "feature_negotiation": True,
        "heartbeat_interval": _milliseconds(options.heartbeat_interval_s),
        "output_buffer_size": options.output_buffer_size,
        "output_buffer_timeout": _milliseconds(options.output_buffer_timeout_s or QUICK_FLUSH_S),
        "sample_rate": options.sample_rate or None,
        "msg_timeout": _milliseconds(options.msg_timeout_s) or None,
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


_exposed_to: list[Address] = []  # the first one


def _milliseconds(seconds: float) -> int:
    return -1 if seconds < 0 else round(seconds * 1000)  # -1: disabled
