"""Listening sockets for Go's addresses, and the certificates of HTTPS servers.

An address is ``host:port``, ``:port``, or the path of a unix socket.

Trap: asyncio disables Nagle's algorithm only for sockets that name their protocol, and the sockets
of `socket.create_server` do not. An answer in two writes would then take 40 ms. `listen` therefore
disables it, and accepted sockets inherit that. They inherit SO_KEEPALIVE as well, without which a
peer whose machine died would stay connected forever.

Trap: at each wake-up asyncio accepts up to ``backlog`` connections. Without free descriptors each
of these fails, prints a traceback, and is retried a second later. So asyncio gets a small number,
the socket keeps the large one, and `report_errors` logs a repeated error once a minute.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from ssl import SSLContext
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue, warn_of_exposure
from nsqtools.protocol.names import Address

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 8
_READ_BYTES = 1 << 16
_REPORT_S = 60.0
_HANDSHAKE_S = 10.0
_EVERYWHERE = ("", "0.0.0.0", "::")


def listen(address: str) -> socket.socket:
    """Bind and listen. Raises `ConfigurationError` with nsqd's text.

    ``0.0.0.0`` listens on IPv6, too, as Go does. A path may have colons where it has slashes.
    """
    host, colon, port = address.rpartition(":")
    try:
        if not colon or "/" in address:
            return _listen_unix(address)
        if port and (not port.isdecimal() or int(port[:6]) > 65535):
            raise _refusal(address, f": address {port}: invalid port")
        return _listen_tcp(host.strip("[]"), int(port or 0))
    except (socket.gaierror, UnicodeError) as exc:  # an unknown or invalid name
        raise _refusal(address, f": lookup {host}: no such host") from exc
    except OSError as exc:
        reason = os.strerror(exc.errno).lower() if exc.errno else str(exc)
        raise _refusal(address, f" {address}: bind: {reason}") from exc


def _listen_tcp(host: str, port: int) -> socket.socket:
    is_open = host in _EVERYWHERE and socket.has_dualstack_ipv6()
    name = "::" if is_open else host or None
    infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # AF_INET sorts first: Go prefers IPv4 as well.
    family, _, _, _, address = min(infos)
    listener = socket.create_server(
        address, family=family, dualstack_ipv6=is_open, backlog=_BACKLOG
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return listener


def listen_host(text: str) -> str:
    """Return the host of ``HOST:PORT``, "" of ``:PORT``: every interface.

    Raises `ConfigurationError`, also for the path of a unix socket, which `listen` accepts.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port[:6]) > 65535:
        raise ConfigurationError(f"invalid address {text!r}", hint="Use HOST:PORT.")
    return host.strip("[]")


def is_open_to_all(address: str) -> bool:
    """Return whether listening on an address opens it on all interfaces."""
    host, colon, _ = address.rpartition(":")
    return bool(colon) and host.strip("[]") in _EVERYWHERE


def _refusal(address: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"listen ({address}) failed - listen tcp{what}",
        hint="Is another one running? Port 0 takes any free port.",
    )


def _listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def real_address(listener: socket.socket | None) -> str:
    """Return ``host:port`` with the port that was chosen, the path of a unix socket, or ""."""
    name = listener.getsockname() if listener is not None else ""
    if isinstance(name, str):
        return name
    return str(Address(*name[:2]))


def real_port(listener: socket.socket | None) -> int:
    """Return the port, -1 for a unix socket and for None."""
    name = listener.getsockname() if listener is not None else ""
    return -1 if isinstance(name, str) else int(name[1])


async def accept(
    listener: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
    tls_context: SSLContext | None = None,
) -> asyncio.Server:
    """Start serving on a listening socket, in the running loop."""
    server = await asyncio.get_running_loop().create_server(
        make_protocol,
        sock=listener,
        backlog=_ACCEPTED_AT_ONCE,
        ssl=tls_context,
        ssl_handshake_timeout=_HANDSHAKE_S if tls_context else None,
    )
    listener.listen(_BACKLOG)
    return server


def stop_listening(server: asyncio.Server) -> None:
    """Shut down and close the listening sockets of a server.

    A child that another thread starts has copies of them until its exec. Without the shutdown the
    copies would keep accepting clients, and a restart would fail because the address is in use.
    """
    for listener in server.sockets:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    server.close()


def client_of(transport: asyncio.BaseTransport) -> Address | None:
    """Return the address of a client, None on a unix socket; plain IPv4 also on a [::] socket."""
    peer = transport.get_extra_info("peername")
    return Address(peer[0].removeprefix("::ffff:"), peer[1]) if isinstance(peer, tuple) else None


def read_in_pieces(transport: asyncio.BaseTransport) -> None:
    """Limit each read of a connection to 64 KiB.

    asyncio reads up to 256 KiB. The allocator maps and unmaps memory of that size for each read,
    which takes ten times as long as a short read itself.
    """
    if hasattr(transport, "max_size"):
        transport.max_size = _READ_BYTES


def report_errors(loop: asyncio.AbstractEventLoop, error: Callable[[str], object]) -> None:
    """Log the errors that asyncio reports, and a repeated error once a minute."""
    last_s: dict[str, float] = {}

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        text, now_s = str(context.get("message")), loop.time()
        if now_s - last_s.get(text, -_REPORT_S) < _REPORT_S:
            return
        last_s[text] = now_s
        if len(last_s) > _ACCEPTED_AT_ONCE:
            del last_s[next(iter(last_s))]
        exc = context.get("exception")
        error(f"{text} - {exc}" if exc else text)

    loop.set_exception_handler(report)


# -- TLS ------------------------------------------------------------------------------------------


def server_certificate(
    cert: Path, key: Path, client_ca: Path | None = None
) -> ReloadedValue[ssl.SSLContext]:
    """Return the TLS context of a server; ask for it to have its new connections use new files.

    The context is always the same one. With ``client_ca`` a client may have a certificate, which
    this CA must have issued. Raises `ConfigurationError`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # TLS 1.3 has its own
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as exc:
            raise ConfigurationError(f"cannot use {client_ca} ({exc.strerror or exc})") from exc
        context.verify_mode = ssl.CERT_OPTIONAL
    files = str(cert), str(key)
    warn_of_exposure(key)

    def load() -> ssl.SSLContext:
        try:
            # first into another one: half a pair must not be served
            for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                target.load_cert_chain(*files, password=lambda: b"")  # must fail, not ask
        except OSError as exc:
            raise ConfigurationError(
                f"cannot use {cert} with {key} ({exc.strerror or exc})",
                hint="Check --listen-tls-cert and --listen-tls-key.",
            ) from exc
        return context

    return ReloadedValue(files, load)


def common_name_of(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name in what ``getpeercert`` returned, "" without a certificate."""
    subject = (certificate or {}).get("subject", ())
    names = dict(pair for part in subject for pair in part)
    return str(names.get("commonName", ""))
