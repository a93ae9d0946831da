"""Negotiation: from an address to a connection that can publish or is subscribed. Blocking.

The order is strict and every step reads its answer before the next is sent: magic and IDENTIFY in
one write, the reply, TLS and its OK, snappy or deflate and its OK, AUTH when nsqd requires it, SUB.
Nothing may be pipelined after IDENTIFY: nsqd discards it when the stream is upgraded. What came
with the IDENTIFY reply beyond its frame belongs to the decoder of the compressed stream.

TLS that was requested and is not offered is an error, because the secret would follow in clear
text. A secret is sent only to an nsqd that requires it: any other closes the connection.

Name resolution, TCP, TLS and negotiation all block, so a client connects in the `background`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nsqtools.client.background import run_in_background
from nsqtools.client.connection import Connection
from nsqtools.client.connection_settings import current_secret
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConnectionFailed, NsqError, ProtocolError, RefusedError, TLSError
from nsqtools.protocol import commands
from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec
from nsqtools.protocol.error_codes import decode_error
from nsqtools.protocol.frames import ERROR, HEARTBEAT, MESSAGE, OK, FrameBuffer
from nsqtools.protocol.identify import (
    DISABLED,
    IdentifyReply,
    IdentifyRequest,
    decode_identify_reply,
)
from nsqtools.protocol.message import MIN_MESSAGE_SIZE
from nsqtools.protocol.names import Address, parse_address
from nsqtools.transport.stream import Deadline, Stream, connect
from nsqtools.transport.tls import RenewedContext, TLSOptions, renewed_context

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")

MIN_HANDSHAKE_S = 5.0


def longest_try_s(options: ClientOptions) -> float:
    """Return how many seconds connecting to one address may take."""
    return options.dial_timeout_s + max(MIN_HANDSHAKE_S, options.dial_timeout_s)


def tls_context(options: ClientOptions) -> ssl.SSLContext | None:
    """Return the TLS context of the options, or None without TLS. Raises `ConfigurationError`."""
    return client_tls_context(options) if options.tls_v1 else None


def client_tls_context(options: ClientOptions) -> ssl.SSLContext:
    """Return the TLS context of the options, for https too. Raises `ConfigurationError`."""
    return client_tls(options).check()


def client_tls(options: ClientOptions) -> RenewedContext:
    """Return what has the TLS context of the options, as its files are at each connection.

    Raises `ConfigurationError`.
    """
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


def open_connection(
    address: Address,
    options: ClientOptions,
    tls: ssl.SSLContext | None,
    subscribe: commands.Subscribe | None = None,
    *,
    is_announced: bool = False,
) -> Connection:
    """Connect, negotiate and, for a consumer, subscribe.

    ``is_announced``: nsqlookupd named the address, the user did not.
    Raises `ConnectionFailed`, `RefusedError`, `ServerError` or `ProtocolError`, each naming the
    address; the socket is closed then.
    """
    stream = connect(address, Deadline(options.dial_timeout_s), options.local_addr)
    try:
        deadline = Deadline(max(MIN_HANDSHAKE_S, options.dial_timeout_s))
        handshake = _Handshake(stream, options, deadline, is_announced=is_announced)
        connection = handshake.run(tls, subscribe)
        stream.set_nonblocking()
    except ProtocolError as exc:
        stream.close()
        raise ProtocolError(f"{address}: {exc}", hint=exc.hint) from exc
    except BaseException:
        stream.close()
        raise
    return connection


def open_in_background(
    address: Address,
    options: ClientOptions,
    subscribe: commands.Subscribe | None,
    done: Callable[[Connection | NsqError], None],
    *,
    is_announced: bool = False,
) -> None:
    """Do `open_connection` on another thread, which calls ``done`` with the outcome.

    Certificates and secret are those that their files hold now. Where no thread can be started
    ``done`` is called at once.
    """

    def connect() -> bool:
        result: Connection | NsqError
        try:
            tls = client_tls(options).get() if options.tls_v1 else None
            result = open_connection(address, options, tls, subscribe, is_announced=is_announced)
        except NsqError as exc:
            result = exc
        except Exception as exc:  # a defect must not leave the address connecting for ever
            log.exception("connecting to %s failed", address)
            result = ConnectionFailed(f"cannot connect to {address} ({exc!r})")
        done(result)
        return isinstance(result, Connection)

    try:
        run_in_background(address, connect, options.connect_threads)
    except RuntimeError as exc:  # no threads are left; or Python 3.12 ends, which allows no new one
        done(ConnectionFailed(f"cannot connect to {address} ({exc})"))


def require_one(nsqd_tcp_addresses: Sequence[str], timeout_s: float) -> None:
    """Connect to one nsqd, and leave at once without subscribing.

    Raises the first `ConnectionFailed` if none answers; without addresses nothing.
    """
    failures = []
    for address in nsqd_tcp_addresses:
        try:
            connect(parse_address(address), Deadline(timeout_s)).close()
        except ConnectionFailed as error:
            failures.append(error)
        else:
            return
    if failures:
        raise failures[0]


def identify_request(options: ClientOptions) -> IdentifyRequest:
    """Return the IDENTIFY that the options ask for."""
    return IdentifyRequest(
        client_id=options.reported_client_id,
        hostname=options.reported_hostname,
        user_agent=options.user_agent,
        heartbeat_interval_ms=_milliseconds(options.heartbeat_interval_s),
        output_buffer_size=options.output_buffer_size,
        output_buffer_timeout_ms=_milliseconds(options.output_buffer_timeout_s),
        sample_rate=options.sample_rate or None,
        msg_timeout_ms=_milliseconds(options.msg_timeout_s) or None,
        tls_v1=options.tls_v1,
        snappy=options.snappy,
        deflate=options.deflate,
        deflate_level=options.deflate_level,
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
    )


_exposed_to: list[Address] = []  # the first one


def _warn_of_plain_text(address: Address) -> None:
    """Say once that secrets go out in plain text: thousands of addresses may be announced."""
    if not _exposed_to:
        _exposed_to.append(address)
        log.warning(
            "the auth secret goes in plain text to %s, which nsqlookupd announced; use TLS, or"
            " refuse this with auth_requires_tls",
            address,
        )


def _milliseconds(seconds: float) -> int:
    return DISABLED if seconds < 0 else round(seconds * 1000)


class _Handshake:
    def __init__(
        self, stream: Stream, options: ClientOptions, deadline: Deadline, *, is_announced: bool
    ) -> None:
        self._is_announced = is_announced
        self._stream = stream
        self._options = options
        self._deadline = deadline
        self._codec: StreamCodec | None = None
        limit = options.max_msg_size
        self._frames = FrameBuffer(limit and limit + MIN_MESSAGE_SIZE + 4)
        self._max_inflated = options.max_inflated_read

    def run(self, tls: ssl.SSLContext | None, subscribe: commands.Subscribe | None) -> Connection:
        request = commands.Identify(identify_request(self._options).encode())
        self._send(commands.MAGIC_V2 + request.encode())
        reply = decode_identify_reply(self._answer())
        self._upgrade_to_tls(tls, reply)
        self._start_compression(reply)
        if reply.auth_required:
            self._authenticate()
        if subscribe is not None:
            self._send(subscribe.encode())
            self._expect_ok("SUB")
        return Connection(self._stream, reply, self._codec, self._frames, self._options)

    def _upgrade_to_tls(self, tls: ssl.SSLContext | None, reply: IdentifyReply) -> None:
        if tls is None:
            return
        if not reply.tls_v1:
            raise TLSError(
                f"{self._stream.address} does not offer TLS",
                hint="Start nsqd with --tls-cert and --tls-key. No secret was sent.",
            )
        if len(self._frames):
            raise ProtocolError("clear text after the TLS agreement")
        self._stream.start_tls(tls, self._deadline)
        self._expect_ok("the TLS handshake")

    def _start_compression(self, reply: IdentifyReply) -> None:
        for codec in ("snappy", "deflate"):
            if getattr(reply, codec) and not getattr(self._options, codec):
                raise ProtocolError(f"nsqd compresses with {codec}, which was not asked for")
        if reply.snappy:
            self._codec = SnappyCodec()
        elif reply.deflate:
            self._codec = DeflateCodec(reply.deflate_level)
        else:
            return
        self._frames.feed(self._codec.decompress(self._frames.take_surplus(), self._max_inflated))
        self._expect_ok("the start of compression")

    def _authenticate(self) -> None:
        secret = current_secret(self._options)
        if not secret:
            raise RefusedError(
                f"{self._stream.address} requires authentication",
                hint="Set auth_secret (nsq: --auth-secret-file or NSQ_AUTH_SECRET).",
            )
        if not self._options.tls_v1:
            self._expose_secret()
        self._send(commands.Auth(secret.encode()).encode())
        self._answer()  # the identity, as JSON; a refusal raises

    def _expose_secret(self) -> None:
        """Refuse to send the secret without TLS, or say that it is done."""
        address = self._stream.address
        if self._options.auth_requires_tls:
            raise RefusedError(
                f"{address} would get the auth secret in plain text",
                hint="Use TLS (nsq: --tls), or do without auth_requires_tls.",
            )
        if self._is_announced:
            _warn_of_plain_text(address)

    def _send(self, data: bytes) -> None:
        encoded = self._codec.compress(data) if self._codec else data
        self._stream.send_all(encoded, self._deadline)

    def _receive(self) -> bytes:
        codec = self._codec
        data = b"" if codec and codec.has_more else self._stream.receive(self._deadline)
        return codec.decompress(data, self._max_inflated) if codec else data

    def _expect_ok(self, after: str) -> None:
        answer = self._answer()
        if answer != OK:
            raise ProtocolError(f"{answer[:60]!r} instead of OK to {after}")

    def _answer(self) -> bytes:
        """Wait for the next response other than a heartbeat."""
        while True:
            while (frame := self._frames.next_frame()) is None:
                self._frames.feed(self._receive())
            frame_type, body = frame
            if frame_type == ERROR:
                raise decode_error(body, str(self._stream.address))
            if frame_type == MESSAGE:
                raise ProtocolError("a message before SUB")
            if body != HEARTBEAT:
                return body
            self._send(commands.NOP)
