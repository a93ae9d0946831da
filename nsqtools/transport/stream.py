"""A TCP stream to one peer, plain or TLS: the only code that touches sockets.

It has two lives. While a connection is negotiated the calls block, each under a `Deadline`. Then
`set_nonblocking` hands it to an I/O thread, which uses `receive_ready` and `send_ready` only.

Traps. A TLS socket belongs to one thread at a time: OpenSSL forbids reading in one thread while
another writes. An SSL write that must be retried has to be retried with the same bytes, so what
`send_ready` was offered may not be shortened or reordered. ``select`` does not see bytes that TLS
has decrypted and not yet given out, so `receive_ready` reads until the socket has no more. A client
certificate that TLS 1.3 refuses shows at the first read, not in the handshake.

TLS: settings to an ``ssl.SSLContext``, with errors that name the file at fault. Verification and
host name check are on unless switched off together. ``PROTOCOL_TLS_CLIENT`` alone trusts nothing,
so the system's certificates are loaded when no CA file is given. Less than TLS 1.2 is not spoken:
every nsqd has that, and the lower names, which are go-nsq's, mean it.

A pinned certificate is checked at the end of the handshake, by the socket itself: so it holds for
whatever uses the context. With verification off, pins are all that is verified.

Certificates are rotated while programs run. `RenewedContext` builds the context again when a file
that it came from has changed, and is asked at each connection.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import itertools
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    DeadlineExceeded,
    NsqError,
    TLSError,
)
from nsqtools.files.opening import Renewed, warn_of_exposure
from nsqtools.protocol.names import Address, parse_address

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class TLSOptions:
    """Paths are of PEM files; "" means not given."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_verify: bool = False
    min_version: str = "tls1.2"
    pins_sha256: str = ""


def parse_pins(text: str) -> frozenset[str]:
    """Read fingerprints, separated by blanks or commas, as ``openssl x509 -fingerprint -sha256``
    prints them or in plain hexadecimal. Raises `ConfigurationError`."""
    pins = frozenset(pin.replace(":", "").lower() for pin in text.replace(",", " ").split())
    for pin in pins:
        if not re.fullmatch("[0-9a-f]{64}", pin):
            raise ConfigurationError(
                f"invalid SHA-256 fingerprint {pin!r}",
                hint="Print one with: openssl x509 -in CERT -noout -fingerprint -sha256",
            )
    return pins


def make_context(options: TLSOptions) -> ssl.SSLContext:
    """Build the client context. Raises `ConfigurationError` for files that cannot be used."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif options.ca_file:
        _load("CA file", options.ca_file, lambda: context.load_verify_locations(options.ca_file))
    else:
        context.load_default_certs()
    if options.cert_file:
        warn_of_exposure(Path(options.key_file or options.cert_file))
        files = options.cert_file, options.key_file
        # an encrypted key must fail, not ask on the terminal
        load = functools.partial(context.load_cert_chain, *files, password=lambda: b"")
        _load("client certificate and key", " and ".join(files), load)
    is_1_3 = options.min_version == "tls1.3"
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if is_1_3 else ssl.TLSVersion.TLSv1_2
    if pins := parse_pins(options.pins_sha256):
        context.sslsocket_class = _pinned_socket(pins)
    return context


RenewedContext = Renewed["ssl.SSLContext"]
"""A context, and the files it was built from."""


@functools.lru_cache(maxsize=64)
def renewed_context(options: TLSOptions) -> RenewedContext:
    """Return the client context of these options, shared by all who connect with them.

    Raises `ConfigurationError` for files that cannot be used.
    """
    files = (options.ca_file, options.cert_file, options.key_file)
    return RenewedContext(files, lambda: make_context(options))


def _pinned_socket(pins: frozenset[str]) -> type[ssl.SSLSocket]:
    import ssl
    from hashlib import sha256

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            found = sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
            if found not in pins:
                what = f"the certificate with SHA-256 {found}"
                error = ssl.SSLCertVerificationError(1, f"{what} is not pinned")
                error.verify_message = f"its SHA-256 is {found}, which is not pinned"
                raise error

    return PinnedSocket


def _load(what: str, path: str, load: Callable[[], None]) -> None:
    import ssl

    try:
        load()
    except ssl.SSLError as exc:
        reason = exc.reason or "not PEM"
        raise ConfigurationError(
            f"cannot use the {what} {path} ({reason})",
            hint="Give unencrypted PEM files; certificate and key must belong together.",
        ) from exc
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read the {what} {path} ({exc.strerror})", hint="Check the path and its mode."
        ) from exc


READ_SIZE = 1 << 18  # what one turn takes from a connection at most, so that others get theirs
STAGGER_S = 0.25  # between the attempts to reach the addresses of one name

_IPAddress = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]  # of getaddrinfo


class Deadline:
    """``seconds`` from now. Several steps share one deadline, so their timeouts do not add up."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())


class Stream:
    """A connected stream. Made by `connect`; close it with `close`."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address = address
        self._socket = sock
        self._is_tls = False

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._socket.fileno()

    # -- blocking, while negotiating ------------------------------------------------------------

    def receive(self, deadline: Deadline) -> bytes:
        """Wait for bytes. Raises `ConnectionLost` at the end of the stream, `DeadlineExceeded`."""
        with self._mapped("waiting for an answer", deadline):
            data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionLost(f"{self.address} closed the connection")
        return data

    def send_all(self, data: bytes, deadline: Deadline) -> None:
        """Send everything. Raises `ConnectionLost`, `DeadlineExceeded`."""
        with self._mapped("sending", deadline):
            self._socket.sendall(data)

    def start_tls(self, context: ssl.SSLContext, deadline: Deadline) -> None:
        """Do the TLS handshake. Raises `TLSError`, `ConnectionLost`, `DeadlineExceeded`."""
        with self._mapped("in the TLS handshake", deadline):
            self._socket = context.wrap_socket(self._socket, server_hostname=self.address.host)
        self._is_tls = True

    @contextlib.contextmanager
    def _mapped(self, doing: str, deadline: Deadline) -> Iterator[None]:
        try:
            if not (left_s := deadline.remaining_s()):  # a peer may send without end
                raise TimeoutError
            self._socket.settimeout(left_s)
            yield
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{self.address}: no answer in time, {doing}") from exc
        except OSError as exc:
            raise _map(exc, self.address) from exc

    def _would_block(self, exc: OSError) -> bool:
        if not self._is_tls:
            return False
        import ssl

        return isinstance(exc, ssl.SSLWantReadError | ssl.SSLWantWriteError)

    # -- non-blocking, on the I/O thread --------------------------------------------------------

    def set_nonblocking(self) -> None:
        """From here on only `receive_ready` and `send_ready` may be used."""
        self._socket.setblocking(False)

    def receive_ready(self, buffer: memoryview) -> bytes | None:
        """Return what can be read now, None when that is nothing. ``b""`` is the end of the stream.

        ``buffer`` is scratch space of the calling thread; it bounds what is returned, to a TLS
        record. Raises `ConnectionLost` and `TLSError`.
        """
        if not self._is_tls:  # once for each message where every connection has RDY 1
            try:
                return bytes(buffer[: self._socket.recv_into(buffer)])
            except BlockingIOError:
                return None
            except OSError as exc:
                raise _map(exc, self.address) from exc
        filled = 0
        while filled < len(buffer):
            try:
                received = self._socket.recv_into(buffer[filled:])
            except BlockingIOError:
                break
            except OSError as exc:
                if filled or self._would_block(exc):
                    break  # hand out what came before a failure; the next call reports it
                raise _map(exc, self.address) from exc
            if not received:
                return bytes(buffer[:filled])
            filled += received
        if not filled:
            return None
        data = bytes(buffer[:filled])
        if filled == len(buffer):  # no selector reports what TLS has decrypted already
            pending: int = self._socket.pending()  # type: ignore[attr-defined]
            data += self._socket.recv(pending) if pending else b""
        return data

    def send_ready(self, data: memoryview | bytes) -> int:
        """Send what the socket takes now and return how many bytes that was, possibly 0.

        The bytes not taken must be offered again unchanged. Raises `ConnectionLost`.
        """
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            if self._would_block(exc):
                return 0
            raise _map(exc, self.address) from exc

    def shutdown_write(self) -> None:
        """End our direction of the stream; what the peer still sends can be read."""
        with contextlib.suppress(OSError):  # it may have gone first
            # not SSLSocket's own, which would end the decryption of what still comes
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. May be called again."""
        self._socket.close()


def connect(address: Address, deadline: Deadline, local_address: str = "") -> Stream:
    """Connect to the first IP address of a name that answers, within one deadline.

    A new address is tried when one fails, and every `STAGGER_S` while none has answered (RFC 8305):
    an address that drops packets costs that long, not the deadline. Raises `ConnectionFailed` or
    `DeadlineExceeded`, with the address and the system's reason.
    """
    source = parse_address(local_address, 0) if local_address else None
    found = _resolve(address, deadline)
    try:
        sock = _connect_first(found, source, deadline)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"cannot connect to {address} (timed out)",
            hint="Check the address, and that a firewall does not drop the packets.",
        ) from exc
    except OSError as exc:
        raise ConnectionFailed(
            f"cannot connect to {address} ({_reason(exc)})",
            hint="Is nsqd running there? Its TCP port is usually 4150.",
        ) from exc
    return Stream(sock, address)


def look_up(address: Address, deadline: Deadline) -> list[_IPAddress]:
    """Return the IP addresses of a name, as the system orders them.

    The system's resolver knows no deadline, so it asks on a thread, which ends when it does. Raises
    ``OSError``, ``TimeoutError`` of them, and ``ValueError`` for what is no host name.
    """
    from concurrent.futures import Future

    ask = functools.partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
    with contextlib.suppress(OSError):  # a name
        return list(ask(flags=socket.AI_NUMERICHOST))
    answer: Future[list[_IPAddress]] = Future()

    def wait_for_name_server() -> None:
        try:
            answer.set_result(list(ask()))
        except OSError as exc:
            answer.set_exception(exc)

    try:
        threading.Thread(target=wait_for_name_server, name="nsq-look-up", daemon=True).start()
        return answer.result(deadline.remaining_s())
    except TimeoutError:
        raise TimeoutError("the name server does not answer") from None
    except RuntimeError as exc:
        raise OSError(errno.EAGAIN, str(exc)) from exc


def _resolve(address: Address, deadline: Deadline) -> list[_IPAddress]:
    """Return the IP addresses of a name, IPv6 and IPv4 in turn."""
    try:
        found = look_up(address, deadline)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"cannot connect to {address} ({exc})",
            hint="Check the host name, and the name servers of this machine.",
        ) from exc
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a host name"
        hint = "Check the host name."
        raise ConnectionFailed(f"cannot connect to {address} ({reason})", hint=hint) from exc
    families: dict[int, list[_IPAddress]] = {}
    for each in found:
        families.setdefault(each[0], []).append(each)
    turns = itertools.zip_longest(*families.values())
    return [each for turn in turns for each in turn if each]


def _connect_first(
    addresses: list[_IPAddress], source: Address | None, deadline: Deadline
) -> socket.socket:
    """Return the first socket that connects. Raises `OSError`."""
    untried = collections.deque(addresses)
    failure: OSError | None = None
    next_try = Deadline(0)
    with selectors.DefaultSelector() as selector:
        pending = selector.get_map()
        try:
            while (untried or pending) and deadline.remaining_s():
                if untried and not (pending and next_try.remaining_s()):
                    next_try = Deadline(STAGGER_S)
                    try:
                        sock = _begin_connecting(untried.popleft(), source)
                    except OSError as exc:
                        failure = exc
                        continue
                    selector.register(sock, selectors.EVENT_WRITE, sock)
                stagger_s = next_try.remaining_s() if untried else math.inf
                for key, _ in selector.select(min(deadline.remaining_s(), stagger_s)):
                    tried: socket.socket = selector.unregister(key.data).data
                    code = tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not code:
                        return tried
                    tried.close()
                    failure = OSError(code, os.strerror(code))
            raise TimeoutError if pending or failure is None else failure
        finally:
            for key in pending.values():
                key.data.close()


def _begin_connecting(address: _IPAddress, source: Address | None) -> socket.socket:
    family, kind, protocol, _, target = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if source is not None:
            sock.bind(source)
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def _reason(exc: OSError) -> str:
    return (exc.strerror or str(exc) or type(exc).__name__).lower()


_OWN_CERTIFICATE = (
    "nsqd may require a client certificate: set tls_cert and tls_key (nsq: --tls-cert, --tls-key)."
)


def _map(exc: OSError, address: Address) -> NsqError:
    import ssl

    if isinstance(exc, ssl.SSLCertVerificationError):
        return TLSError(
            f"{address}: the certificate is not acceptable ({exc.verify_message})",
            hint="Set tls_root_ca_file (nsq: --tls-ca-file) to its CA, and connect by a name or IP"
            " address that is in the certificate.",
        )
    if isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionLost(f"{address}: the TLS connection ended")
    if isinstance(exc, ssl.SSLError):
        reason = (exc.reason or str(exc)).lower().replace("_", " ")
        is_ours = re.search("certificate required|bad certificate|handshake failure", reason)
        hint = _OWN_CERTIFICATE if is_ours else ""
        return TLSError(f"{address}: TLS failed ({reason})", hint=hint)
    return ConnectionLost(f"{address}: {_reason(exc)}")
