"""How `nsq web` is configured, and who may ask it for what, before anything is done.

`refusal` looks at where a call comes from. A page of any site can make a browser send a call, and
after DNS rebinding under a name of its own: so the ``Host`` has to be one of ours, and what changes
something must not come from another site, which browsers say in ``Sec-Fetch-Site`` and ``Origin``.
Programs send neither. An address, and a name without a dot, cannot be rebound.

    authenticate(headers, peer)  the user; "" for everyone where no users are configured

A user is known by a password of ``--auth``, or by the header that a trusted proxy sets. HTTP's
basic authentication is used, which browsers and scripts know; there is no session to keep, steal or
lose. A header is believed only from the addresses of ``--trusted-proxy``, as others could write it.
The file of ``--auth`` has a line ``USER:HASH`` for each user, with hashes by scrypt:

    ann:scrypt$16384$8$1$SALT$HASH      base64, made by `nsq web --print password`

Checking a password takes a tenth of a second of CPU time and 16 MB, on purpose. So one that was
right is remembered, as a keyed digest, and after some wrong ones an address has to wait: no one can
keep the server busy with guesses. An unknown user costs as much as a wrong password.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import os
import re
import socket
import threading
import time
from binascii import Error as Base64Error
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import open_to_read
from nsqtools.protocol.names import http_url

DEFAULT_LISTEN = "127.0.0.1:4171"
DEFAULT_REFRESH_S = 2.0
LONGEST_REFRESH_S = 30.0
"""The history has points for every minute."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """The settings. ``base_path`` is "" or ``/x/y``; raises `ConfigurationError`."""

    listen: str = DEFAULT_LISTEN
    base_path: str = ""
    allowed_hosts: tuple[str, ...] = ()
    refresh_s: float = DEFAULT_REFRESH_S
    allow_changes: bool = False
    show_messages: bool = False
    auth_file: Path | None = None
    acl_http_header: str = "X-Forwarded-User"
    admin_users: tuple[str, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    audit_log: Path | None = None
    notification_http_endpoint: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        _, port = split_listen(self.listen)
        if not 0.1 <= self.refresh_s <= LONGEST_REFRESH_S:
            raise ConfigurationError("--refresh must be 100ms to 30s")
        if self.notification_http_endpoint:
            http_url(self.notification_http_endpoint, port or 80)
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ConfigurationError("--listen-tls-cert and --listen-tls-key need each other")
        if self.allow_changes and not self.is_local and not self.knows_users:
            raise ConfigurationError(
                f"--allow-changes on {self.listen} would let anyone who reaches it delete topics",
                hint="Give --auth, or --admin-user with --trusted-proxy, or listen on 127.0.0.1.",
            )

    @property
    def host(self) -> str:
        """The host to listen on."""
        return split_listen(self.listen)[0]

    @property
    def port(self) -> int:
        """The port to listen on; 0 takes any free one."""
        return split_listen(self.listen)[1]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or (
            (address := as_ip(self.host)) is not None and address.is_loopback
        )

    @property
    def knows_users(self) -> bool:
        """Whether users that may change something are known by name."""
        return self.auth_file is not None or bool(self.admin_users and self.trusted_proxies)


def split_listen(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``:PORT``, which is every interface."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port[:6]) > 65535:
        raise ConfigurationError(f"invalid address {text!r}", hint="Use HOST:PORT.")
    return host.strip("[]"), int(port)


def clean_base_path(text: str) -> str:
    """Return a base path as ``/x/y``, "" for the root. Raises `ConfigurationError`."""
    parts = [part for part in text.split("/") if part]
    if any(
        part in (".", "..") or not part.isascii() or set(part) & set("?#%\\ \"'<>")
        for part in parts
    ):
        raise ConfigurationError(f"invalid base path {text!r}", hint="Use a path such as /nsq.")
    return "".join(f"/{part}" for part in parts)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Read networks and addresses. Raises `ConfigurationError`."""
    networks = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ConfigurationError(
                f"invalid network {text!r}", hint="Use an address or 10.0.0.0/8."
            ) from None
    return tuple(networks)


def as_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is, None for a name. One of IPv4 in IPv6 is that of IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def own_names(settings: WebSettings) -> frozenset[str]:
    """Return the names that the console answers to, besides addresses and names without a dot."""
    return frozenset(
        name.lower() for name in (settings.host, socket.gethostname(), *settings.allowed_hosts)
    )


MAX_USER = 256


@dataclass(frozen=True, slots=True)
class User:
    """``name`` is "" for an unknown user. ``may_change`` is whether writes are allowed."""

    name: str = ""
    may_change: bool = False


class Identities:
    """Tells users apart. Thread-safe."""

    def __init__(self, settings: WebSettings) -> None:
        self._settings = settings
        self._passwords = PasswordFile(settings.auth_file) if settings.auth_file else None
        self._key = os.urandom(32)

    def authenticate(self, headers: Mapping[str, str], peer: str) -> User | None:
        """Return the user who asks from the address ``peer``, None where a login is needed.

        Checking a password takes time. Raises `TooManyFailures`.
        """
        name = self._of_proxy(headers, peer)
        if not name and self._passwords is not None:
            given = basic_credentials(headers.get("authorization", ""))
            if given is None or not self._passwords.is_right(*given, peer):
                return None
            name = given[0]
        return User(name, self._may_change(name))

    def token(self, user: User) -> str:
        """Return the token that a form of this user has to carry."""
        return hmac.digest(self._key, f"csrf\0{user.name}".encode(), "sha256").hex()

    def is_token(self, user: User, text: str) -> bool:
        """Tell whether a form carries the token of the user."""
        given = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        expected = hashlib.sha256(self.token(user).encode()).digest()
        return hmac.compare_digest(given, expected)

    def _may_change(self, name: str) -> bool:
        settings = self._settings
        if not settings.allow_changes:
            return False
        return not settings.admin_users or name in settings.admin_users

    def _of_proxy(self, headers: Mapping[str, str], peer: str) -> str:
        address = as_ip(peer)
        if address is None or not any(address in each for each in self._settings.trusted_proxies):
            return ""
        return headers.get(self._settings.acl_http_header.lower(), "")[:MAX_USER]


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer that does not have another value of its own."""


def refusal(method: str, headers: Mapping[str, str], names: Collection[str]) -> str:
    """Return why a call is refused, in words, "" when it may pass. ``names`` are lower case."""
    host = headers.get("host", "")
    if not is_own_host(host, names):
        return f"the host {host[:80]!r} is not one of this console (--allowed-host)"
    if method in SAFE_METHODS:
        return ""
    site = headers.get("sec-fetch-site")
    if site is not None and site.lower() not in ("same-origin", "none"):
        return "this call comes from another site"
    origin = headers.get("origin")
    if site is None and origin is not None and origin.partition("://")[2].lower() != host.lower():
        return "this call comes from another site"
    return ""


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Tell whether a ``Host`` header means this console."""
    name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
    name = name.lower().rstrip(".")
    if not name:
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name or name.endswith(".localhost") or name in names
    return True


def basic_credentials(header: str) -> tuple[str, str] | None:
    """Return user and password of an ``Authorization`` header."""
    kind, _, encoded = header.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return (user, password) if colon else None


COST, BLOCK, PARALLEL = 16384, 8, 1
MAX_MEMORY = 64 << 20
MAX_USERS = 10_000
FREE_FAILURES = 5
LONGEST_WAIT_S = 60.0
MAX_REMEMBERED = 10_000


def hash_password(password: str) -> str:
    """Return what is after the colon in the file."""
    salt = os.urandom(16)
    made = _scrypt(password, salt, COST, BLOCK, PARALLEL)
    return "$".join(("scrypt", str(COST), str(BLOCK), str(PARALLEL), _text(salt), _text(made)))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=cost, r=block, p=parallel, maxmem=MAX_MEMORY, dklen=32
    )


class TooManyFailures(Exception):
    """Nothing is checked for this address for ``wait_s`` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


class PasswordFile:
    """The users in a file, read once. Thread-safe. Raises `ConfigurationError`."""

    def __init__(self, path: Path) -> None:
        self._hashes = dict(_read(path))
        self._nobody = hash_password(_text(os.urandom(16)))
        self._key = os.urandom(32)
        self._known: dict[bytes, None] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # count, and when checked again
        self._lock = threading.Lock()
        self._checking = threading.Lock()

    def is_right(self, user: str, password: str, address: str) -> bool:
        """Check a password that came from an address. Raises `TooManyFailures`."""
        digest = hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")
        with self._lock:
            if digest in self._known:
                return True
            count, again_s = self._failures.get(address, (0, 0.0))
            wait_s = again_s - time.monotonic()
            if count >= FREE_FAILURES and wait_s > 0:
                raise TooManyFailures(wait_s)
        with self._checking:  # one at a time, whatever the number of requests
            is_right = _matches(password, self._hashes.get(user, self._nobody))
        is_right = is_right and user in self._hashes
        with self._lock:
            if is_right:
                self._failures.pop(address, None)
                self._known[digest] = None
                _trim(self._known)
            else:
                count = self._failures.pop(address, (0, 0.0))[0] + 1
                wait_s = min(2.0 ** (count - FREE_FAILURES), LONGEST_WAIT_S)
                self._failures[address] = count, time.monotonic() + wait_s
                _trim(self._failures)
        return is_right


def _trim(table: dict[str, tuple[int, float]] | dict[bytes, None]) -> None:
    while len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]  # type: ignore[arg-type]


def _matches(password: str, text: str) -> bool:
    cost, block, parallel, salt, expected = _parts(text)
    return hmac.compare_digest(_scrypt(password, salt, cost, block, parallel), expected)


def _parts(text: str) -> tuple[int, int, int, bytes, bytes]:
    """Read a hash. Raises ``ValueError``."""
    kind, cost, block, parallel, salt, expected = text.split("$")
    numbers = int(cost), int(block), int(parallel)
    if kind != "scrypt" or numbers[0] * numbers[1] * 128 * numbers[2] > MAX_MEMORY // 2:
        raise ValueError
    return *numbers, base64.b64decode(salt), base64.b64decode(expected)


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        with open_to_read(path) as file:
            lines = file.read().decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not text in UTF-8") from None
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path} ({exc.strerror})") from exc
    users = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, _, text = line.strip().partition(":")
        try:
            _matches("", text)
        except (ValueError, Base64Error):
            raise ConfigurationError(
                f"{path}, line {number}: not USER:HASH",
                hint="nsq web --print password makes a line for this file.",
            ) from None
        users.append((user, text))
    if not users or len(users) > MAX_USERS:
        raise ConfigurationError(f"{path} has {len(users)} users, and 1 to {MAX_USERS} are wanted")
    return users
