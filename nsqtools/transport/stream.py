"""A TCP stream to one peer, plain or TLS: the only client code that touches sockets.

A stream has two phases. During negotiation its calls block, each with a `Deadline`. Then
`set_nonblocking` hands it to an I/O thread, which uses only `receive_ready` and `send_ready`.

Traps. A TLS socket belongs to one thread at a time: OpenSSL forbids reading in one thread while
another writes. A short SSL write must be retried with the same bytes, so data offered to
`send_ready` may not be shortened or reordered. ``select`` does not report bytes that TLS has
decrypted and buffered, so `receive_ready` reads until the socket has no more. A client certificate
that TLS 1.3 refuses shows at the first read, not in the handshake.

TLS settings become an ``ssl.SSLContext``, with errors that name the file at fault. Verification and
the host name check can only be disabled together. ``PROTOCOL_TLS_CLIENT`` alone trusts nothing, so
the system's certificates are loaded when no CA file is given. The lowest version is TLS 1.2, which
every nsqd has; go-nsq's lower names mean it as well.

A pinned certificate is checked at the end of the handshake by the socket itself, so that the check
holds for all users of the context. With verification off, pins are the only check.

Certificates are rotated while programs run. `RenewedContext` is asked at each connection, and
builds the context again when one of its files has changed.
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
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    DeadlineExceeded,
    NsqError,
    TLSError,
)
from nsqtools.files.opening import ReloadedValue, warn_of_exposure
from nsqtools.protocol.names import Address, parse_address

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class TLSOptions:
    """TLS settings. Paths are of PEM files; "" means not set."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_verify: bool = False
    min_version: str = "tls1.2"
    pins_sha256: str = ""


def parse_pins(text: str) -> frozenset[str]:
    """Parse SHA-256 fingerprints that are separated by blanks or commas.

    They are plain hexadecimal, or as ``openssl x509 -fingerprint -sha256`` prints them. Raises
    `ConfigurationError`.
    """
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
        _load_file(
            "CA file", options.ca_file, lambda: context.load_verify_locations(options.ca_file)
        )
    else:
        context.load_default_certs()
    if options.cert_file:
        warn_of_exposure(Path(options.key_file or options.cert_file))
        files = options.cert_file, options.key_file
        # With a password callback an encrypted key fails instead of asking on the terminal.
        load = functools.partial(context.load_cert_chain, *files, password=lambda: b"")
        _load_file("client certificate and key", " and ".join(files), load)
    is_1_3 = options.min_version == "tls1.3"
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if is_1_3 else ssl.TLSVersion.TLSv1_2
    if pins := parse_pins(options.pins_sha256):
        context.sslsocket_class = _pinned_socket(pins)
    return context


RenewedContext = ReloadedValue["ssl.SSLContext"]
"""A context that is built again when its files change."""


@functools.lru_cache(maxsize=64)
def renewed_context(options: TLSOptions) -> RenewedContext:
    """Return the client context of these options, shared by all connections that use them.

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
            fingerprint = sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
            if fingerprint not in pins:
                text = f"the certificate with SHA-256 {fingerprint} is not pinned"
                error = ssl.SSLCertVerificationError(1, text)
                error.verify_message = f"its SHA-256 is {fingerprint}, which is not pinned"
                raise error

    return PinnedSocket


def _load_file(description: str, path: str, load: Callable[[], None]) -> None:
    import ssl

    try:
        load()
    except ssl.SSLError as exc:
        reason = exc.reason or "not PEM"
        raise ConfigurationError(
            f"cannot use the {description} {path} ({reason})",
            hint="Give unencrypted PEM files; certificate and key must belong together.",
        ) from exc
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read the {description} {path} ({exc.strerror})",
            hint="Check the path and its mode.",
        ) from exc


# Most bytes that a loop iteration reads from one connection, so that all connections are served:
# 256 KiB are read and parsed in about a millisecond.
SOCKET_READ_SIZE = 1 << 18
# Delay between the attempts to reach the addresses of one name: the default of RFC 8305.
STAGGER_S = 0.25

_IPAddress = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]  # of getaddrinfo


class Deadline:
    """A time in ``seconds`` from now that several steps share, so that timeouts do not add up."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())


class AtomicCalls(NamedTuple):
    """The descriptor of a socket and its ``send`` and ``recv``."""

    fileno: int
    send: Callable[[bytes, int], int]
    receive: Callable[[int], bytes]


class Stream:
    """A connected stream, which `connect` makes and `close` ends."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address = address
        self._socket = sock
        self._is_tls = False

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._socket.fileno()

    def finish_connecting(self) -> None:
        """Check a stream of `begin_connecting` that is writable. Raises as `connect` does."""
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            error = OSError(code, os.strerror(code))
            raise connect_error(error, self.address) from error

    # -- blocking, during negotiation -----------------------------------------------------------

    def receive(self, deadline: Deadline) -> bytes:
        """Wait for bytes. Raises `ConnectionLost` at the end of the stream, `DeadlineExceeded`."""
        with self._translating_errors("waiting for an answer", deadline):
            data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionLost(f"{self.address} closed the connection")
        return data

    def send_all(self, data: bytes, deadline: Deadline) -> None:
        """Send everything. Raises `ConnectionLost`, `DeadlineExceeded`."""
        with self._translating_errors("sending", deadline):
            self._socket.sendall(data)

    def start_tls(self, context: ssl.SSLContext, deadline: Deadline) -> None:
        """Do the TLS handshake. Raises `TLSError`, `ConnectionLost`, `DeadlineExceeded`."""
        with self._translating_errors("in the TLS handshake", deadline):
            self._socket = context.wrap_socket(self._socket, server_hostname=self.address.host)
        self._is_tls = True

    @contextlib.contextmanager
    def _translating_errors(self, activity: str, deadline: Deadline) -> Iterator[None]:
        try:
            # A peer that sends without end would otherwise never exceed the deadline.
            if not (left_s := deadline.remaining_s()):
                raise TimeoutError
            self._socket.settimeout(left_s)
            yield
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{self.address}: no answer in time, {activity}") from exc
        except OSError as exc:
            raise _translate(exc, self.address) from exc

    def _would_block(self, exc: OSError) -> bool:
        if not self._is_tls:
            return False
        import ssl

        return isinstance(exc, ssl.SSLWantReadError | ssl.SSLWantWriteError)

    # -- non-blocking, on the I/O thread --------------------------------------------------------

    def set_nonblocking(self) -> None:
        """End the blocking phase: only `receive_ready` and `send_ready` may follow."""
        self._socket.setblocking(False)

    def receive_ready(self, buffer: memoryview) -> bytes | None:
        """Return the bytes that can be read now, None without any, or ``b""`` at the end.

        ``buffer`` is scratch space of the calling thread. Its size bounds the result, except for
        the rest of a TLS record. Raises `ConnectionLost` and `TLSError`.
        """
        if not self._is_tls:  # short, as it runs for every message if each connection has RDY 1
            try:
                return bytes(buffer[: self._socket.recv_into(buffer)])
            except BlockingIOError:
                return None
            except OSError as exc:
                raise _translate(exc, self.address) from exc
        filled = 0
        while filled < len(buffer):
            try:
                received = self._socket.recv_into(buffer[filled:])
            except BlockingIOError:
                break
            except OSError as exc:
                if filled or self._would_block(exc):
                    break  # return the bytes that came before a failure, which the next call raises
                raise _translate(exc, self.address) from exc
            if not received:
                return bytes(buffer[:filled])
            filled += received
        if not filled:
            return None
        data = bytes(buffer[:filled])
        if filled == len(buffer):  # no selector reports bytes that TLS has buffered
            pending: int = self._socket.pending()  # type: ignore[attr-defined]
            data += self._socket.recv(pending) if pending else b""
        return data

    def send_ready(self, data: memoryview | bytes) -> int:
        """Send as many bytes as the socket accepts now; return their number, possibly 0.

        The other bytes must be offered again unchanged. Raises `ConnectionLost`.
        """
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            if self._would_block(exc):
                return 0
            raise _translate(exc, self.address) from exc

    def atomic_calls(self) -> AtomicCalls | None:
        """Return the calls of the socket, or None if they are not C code under the GIL.

        No signal handler or greenlet runs within C code that does not block.
        """
        calls = self._socket.send, self._socket.recv
        has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        is_c_code = all(isinstance(call, BuiltinMethodType) for call in calls)
        return AtomicCalls(self.fileno(), *calls) if has_gil and is_c_code else None

    def shutdown_write(self) -> None:
        """End our direction of the stream. The peer's direction can still be read."""
        with contextlib.suppress(OSError):  # the peer may have closed the connection
            # SSLSocket.shutdown would end decryption, and with it the other direction.
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Repeated calls do nothing."""
        self._socket.close()


def connect(address: Address, deadline: Deadline, local_address: str = "") -> Stream:
    """Connect to the first IP address of a name that answers.

    The next address is tried when one fails, and every `STAGGER_S` while none has answered (RFC
    8305), so an address that drops packets costs only that time. Raises `ConnectionFailed` or
    `DeadlineExceeded`, with the address and the system's reason.
    """
    source = parse_address(local_address, 0) if local_address else None
    ip_addresses = _resolve(address, deadline)
    try:
        sock = _connect_first(ip_addresses, source, deadline)
    except OSError as exc:
        raise connect_error(exc, address) from exc
    return Stream(sock, address)


def begin_connecting(address: Address, local_address: str = "") -> Stream:
    """Begin to connect to an IP address without waiting.

    The stream is non-blocking. When it is writable, call its `finish_connecting`. Raises
    ``LookupError`` for the name of a host, ``UnicodeError`` for a malformed one, and errors as
    `connect` does.
    """
    source = parse_address(local_address, 0) if local_address else None
    ip_address = _look_up_numeric(address)[0]
    try:
        return Stream(_begin_connecting(ip_address, source), address)
    except OSError as exc:
        raise connect_error(exc, address) from exc


def connect_error(exc: OSError, address: Address) -> ConnectionFailed:
    """Return the error to raise for an address that cannot be connected to."""
    if isinstance(exc, TimeoutError):
        return DeadlineExceeded(
            f"cannot connect to {address} (timed out)",
            hint="Check the address, and that a firewall does not drop the packets.",
        )
    if isinstance(exc, _LocalAddressError):
        return ConnectionFailed(
            f"cannot connect to {address} from {exc.filename} ({_reason(exc)})",
            hint="local_addr must be an address of this machine; without a port, any is used.",
        )
    return ConnectionFailed(
        f"cannot connect to {address} ({_reason(exc)})",
        hint="Is nsqd running there? Its TCP port is usually 4150.",
    )


def _look_up_numeric(address: Address) -> list[_IPAddress]:
    """Return an IP address as the system represents it, and nothing for a name."""
    with contextlib.suppress(OSError):
        numeric = socket.AI_NUMERICHOST
        return list(socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=numeric))
    return []


def look_up(address: Address, deadline: Deadline) -> list[_IPAddress]:
    """Return the IP addresses of a name in the order of the system.

    The system's resolver has no timeout, so it runs on a thread that may outlive the deadline.
    Raises ``OSError``, including ``TimeoutError``, and ``ValueError`` for a malformed name.
    """
    from concurrent.futures import Future

    if ip_addresses := _look_up_numeric(address):
        return ip_addresses
    answer: Future[list[_IPAddress]] = Future()

    def wait_for_name_server() -> None:
        try:
            answer.set_result(list(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)))
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
    """Return the IP addresses of a name, alternating between IPv6 and IPv4."""
    try:
        ip_addresses = look_up(address, deadline)
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
    for ip_address in ip_addresses:
        families.setdefault(ip_address[0], []).append(ip_address)
    pairs = itertools.zip_longest(*families.values())
    return [ip_address for pair in pairs for ip_address in pair if ip_address]


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
                    candidate: socket.socket = selector.unregister(key.data).data
                    code = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not code:
                        return candidate
                    candidate.close()
                    failure = OSError(code, os.strerror(code))
            raise TimeoutError if pending or failure is None else failure
        finally:
            for key in pending.values():
                key.data.close()


class _LocalAddressError(OSError):
    """The local address cannot be bound; ``filename`` is its host."""


def _begin_connecting(address: _IPAddress, source: Address | None) -> socket.socket:
    family, kind, protocol, _, target = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if source is not None:
            _bind(sock, source)
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(sock: socket.socket, source: Address) -> None:
    try:
        sock.bind(source)
    except OSError as exc:
        raise _LocalAddressError(exc.errno, exc.strerror, source.host) from exc


def _reason(exc: OSError) -> str:
    return (exc.strerror or str(exc) or type(exc).__name__).lower()


_CLIENT_CERTIFICATE_HINT = (
    "nsqd may require a client certificate: set tls_cert and tls_key (nsq: --tls-cert, --tls-key)."
)


def _translate(exc: OSError, address: Address) -> NsqError:
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
        # Alerts of nsqd about our certificate, not errors of ours about nsqd's.
        is_alert = re.search("certificate required|bad certificate|handshake failure", reason)
        hint = _CLIENT_CERTIFICATE_HINT if is_alert else ""
        return TLSError(f"{address}: TLS failed ({reason})", hint=hint)
    return ConnectionLost(f"{address}: {_reason(exc)}")
