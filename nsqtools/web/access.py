"""Settings of `nsq web`, authentication, and the checks before a request is processed.

`refusal_reason` checks the origin of a request. Any web page can make a browser send requests, and
after DNS rebinding they even have the page's own host name. So the ``Host`` must be one of ours. A
change must not come from another site, which browsers report in ``Sec-Fetch-Site`` and ``Origin``
and programs do not send. Addresses and names without a dot cannot be rebound.

    await authenticate(request)  the user; "" for everyone if no users are configured

A secret of ``--users``, a password of ``--auth`` or a header of a trusted proxy identifies the
user. Scripts use HTTP basic authentication, and browsers log in by a form (`Sessions`). Headers
about user and address are trusted only from ``--trusted-proxy``, because others can forge them.
``--users`` is the file of `nsq authd`; that of ``--auth`` has a line ``USER:HASH`` for
each user, with hashes by scrypt:

    ann:scrypt$16384$8$1$SALT$HASH      base64, from `nsq web --print password`

It is read again after a change, so the next request of a removed user is refused.

Guesses are slow and have to wait: see `nsqtools.authd.passwords`.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsqtools.authd import users
from nsqtools.authd.authority import Authority, sent_secret
from nsqtools.authd.passwords import PasswordChecker, as_ip, parse_hash
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue, open_to_read, warn_of_exposure
from nsqtools.http.cross_site import cross_site_refusal, is_own_host
from nsqtools.http.listen import listen_host
from nsqtools.protocol.names import http_url

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger("nsqtools.web")

# The history needs a sample for each of its points, which are a minute apart.
LONGEST_REFRESH_S = 30.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """The settings of the console. ``base_path`` is "" or ``/x/y``. Raises `ConfigurationError`."""

    listen: str = "127.0.0.1:4171"
    base_path: str = ""
    allowed_hosts: tuple[str, ...] = ()
    refresh_s: float = 2.0
    allow_changes: bool = False
    show_messages: bool = False
    auth_file: Path | None = None
    users_file: Path | None = None
    acl_http_header: str = "X-Forwarded-User"
    admin_users: tuple[str, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    audit_log: Path | None = None
    notification_http_endpoint: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        listen_host(self.listen)
        if not 0.1 <= self.refresh_s <= LONGEST_REFRESH_S:
            raise ConfigurationError("--refresh must be 100ms to 30s")
        if self.notification_http_endpoint:
            http_url(self.notification_http_endpoint, 80)
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ConfigurationError("--listen-tls-cert and --listen-tls-key need each other")
        if self.auth_file is not None and self.users_file is not None:
            raise ConfigurationError("give either --auth or --users")
        # An unknown user has the name "".
        if "" in self.admin_users:
            raise ConfigurationError("--admin-user needs the name of a user")
        if self.allow_changes and not self.is_local and not self.has_users:
            raise ConfigurationError(
                f"--allow-changes on {self.listen} would let anyone in the network delete topics",
                hint="Give --users, --auth, or --admin-user with --trusted-proxy, or listen on"
                " 127.0.0.1.",
            )
        if self.admin_users and not self.has_users:
            raise ConfigurationError(
                "--admin-user lets nobody make changes without authentication",
                hint="Give --users, --auth, or --trusted-proxy for the proxy that names the user.",
            )

    @property
    def host(self) -> str:
        """The host to listen on."""
        return listen_host(self.listen)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or (
            (address := as_ip(self.host)) is not None and address.is_loopback
        )

    @property
    def has_login(self) -> bool:
        """Whether each user has to log in."""
        return self.auth_file is not None or self.users_file is not None

    @property
    def has_users(self) -> bool:
        """Whether users with permission for changes can be authenticated."""
        return self.has_login or bool(self.admin_users and self.trusted_proxies)


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
    """Parse networks and addresses. Raises `ConfigurationError`."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as exc:
        hint = "Use an address or 10.0.0.0/8."
        raise ConfigurationError(f"--trusted-proxy: {exc}", hint=hint) from None


MAX_USER = 256


class ConsoleUser(NamedTuple):
    """``name`` is "" for an unknown user. ``may_change`` is whether writes are allowed.

    ``entry`` is that of ``--users``, which limits what the user sees, reads and changes.
    """

    name: str = ""
    may_change: bool = False
    entry: users.User | None = None

    def may_change_queue(self, topic: str, channel: str = "") -> bool:
        """Return whether the user may change a topic, or a channel of it."""
        if self.entry is None or self.entry.grant_to_publish(topic):
            return self.may_change
        is_subscriber = channel and self.entry.grant_to_subscribe(topic, channel)
        return self.may_change and bool(is_subscriber)

    def may_read(self, topic: str, channel: str | None = None) -> bool:
        """Return whether the user may read messages of a topic, or those of a channel."""
        return self.entry is None or bool(self.entry.grant_to_subscribe(topic, channel))


class Identities:
    """Authentication of users, on one event loop."""

    def __init__(self, settings: WebSettings) -> None:
        self._settings = settings
        self._passwords = PasswordFile(settings.auth_file) if settings.auth_file else None
        self._authority = Authority(settings.users_file) if settings.users_file else None
        self._key = os.urandom(32)
        self.sessions = Sessions()

    def real_address(self, peer: str, forwarded: str) -> str:
        """Return the client's address: the peer, or the last one in X-Forwarded-For of no proxy."""
        address = peer
        for text in reversed(forwarded.split(",")):
            # The text may contain a port. An IPv6 address without brackets contains none.
            text = text.strip()
            previous = as_ip(text) or as_ip(re.sub(r"^\[?([^]]*?)\]?(:\d+)?$", r"\1", text))
            if previous is None or not self._is_proxy(address):
                break
            address = str(previous)
        return address

    async def authenticate(self, request: Request, authorization: str = "") -> ConsoleUser | None:
        """Return the user of a request, None if a login is needed. Raises `TooManyFailures`.

        ``authorization`` replaces the header of the request and that of its session.
        """
        settings, headers, name = self._settings, request.headers, ""
        authorization = (
            authorization
            or headers.get("authorization", "")
            or self.sessions.authorization(request.cookies.get(COOKIE, ""))
        )
        address = request.client.host if request.client else ""
        entry = None
        if self._is_proxy(request.scope["nsq.peer"]):
            name = _as_sent(headers.get(settings.acl_http_header.lower(), ""))[:MAX_USER]
        if self._authority is not None:
            if name:
                entry = self._authority.users.by_name.get(name)
            else:
                client = users.Client(address, tls=request.url.scheme == "https")
                secret = sent_secret(authorization)
                identity = await self._authority.identify(secret, client)
                entry = identity and identity.user
            if entry is None:
                return None
            name = entry.name
        elif not name and self._passwords is not None:
            credentials = basic_credentials(authorization)
            if credentials is None or not await self._passwords.is_right(*credentials, address):
                return None
            name = credentials[0]
        is_admin = not settings.admin_users or name in settings.admin_users
        return ConsoleUser(name, settings.allow_changes and is_admin, entry)

    def refresh(self) -> None:
        """Read the users file if it has changed. Call it on any thread: a large one takes time."""
        if self._authority is not None:
            self._authority.refresh()

    def token(self, user: ConsoleUser) -> str:
        """Return the token for the forms of a user."""
        return hmac.digest(self._key, f"csrf\0{user.name}".encode(), "sha256").hex()

    def is_token(self, user: ConsoleUser, text: str) -> bool:
        """Return whether ``text`` is the token of the user."""
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token(user).encode())

    def _is_proxy(self, text: str) -> bool:
        address = as_ip(text)
        return address is not None and any(
            address in trusted_proxy for trusted_proxy in self._settings.trusted_proxies
        )


def _as_sent(value: str) -> str:
    """Return the value of a header, which proxies send in UTF-8, and HTTP reads as Latin-1."""
    with suppress(UnicodeDecodeError):
        return value.encode("latin-1").decode()
    return value


# Default headers of every response.
HEADERS = {
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        b" connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self';"
        b" frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


def refusal_reason(method: str, headers: Mapping[str, str], names: Collection[str]) -> str:
    """Return the reason for refusing a request, "" to accept it."""
    host = headers.get("host", "")
    if not is_own_host(host, names):
        return f"the host {host[:80]!r} is not one of this console (--allowed-host)"
    return "this call comes from another site" if cross_site_refusal(method, headers, None) else ""


def basic_credentials(header: str) -> tuple[str, str] | None:
    """Return user and password of an ``Authorization`` header."""
    if header.partition(" ")[0].lower() != "basic":
        return None
    user, colon, password = sent_secret(header).partition(":")
    return (user, password) if colon else None


class Notices:
    """Log lines caused by clients, at most `MAX_NOTICES` a minute, so that they fill no disk."""

    def __init__(self) -> None:
        self._minute = self._count = 0

    def log(self, text: str) -> None:
        """Log a line, unless there were too many. Their number is logged in the next minute."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            if (omitted := self._count - MAX_NOTICES) > 0:
                log.warning("%d more refusals and logins failed", omitted)
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count <= MAX_NOTICES:
            log.warning("%s", text)


MAX_NOTICES = 200


class PasswordFile:
    """The users in a file, which is read again after a change. Raises `ConfigurationError`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        warn_of_exposure(path)
        self._hashes = ReloadedValue([str(path)], lambda: dict(_read(path)))
        self._passwords = PasswordChecker(clock)

    async def is_right(self, user: str, password: str, address: str) -> bool:
        """Check a password that came from an address. Raises `TooManyFailures`."""
        expected = self._hashes.get().get(user)
        return await self._passwords.is_right(user, password, expected, address)


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        with open_to_read(path) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not text in UTF-8") from None
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path} ({exc.strerror})") from exc
    hashes = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, _, text = line.strip().partition(":")
        try:
            parse_hash(text)
        except ValueError:
            raise ConfigurationError(
                f"{path}, line {number}: not USER:HASH",
                hint="nsq web --print password prints a line for this file.",
            ) from None
        hashes.append((user, text))
    if not hashes:
        raise ConfigurationError(f"{path} has no user")
    return hashes


# -- sessions -------------------------------------------------------------------------------------

# A session is a random token in a cookie, for which this process keeps the ``Authorization``
# header that the form of the login amounts to. Each request is authenticated with it as if it had
# been sent, so the next request of a removed user is refused. A session ends by the log out, after
# `IDLE_S`, and with the process.

COOKIE = "nsq_session"
IDLE_S = 12 * 3600.0  # a working day
MAX_SESSIONS = 10_000


class _Session(NamedTuple):
    authorization: str
    used_s: float


class Sessions:
    """The sessions of browsers, on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}  # the last one used is the last

    def begin(self, authorization: str) -> str:
        """Return the token of a new session. The least recently used of too many ends."""
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        self._sessions[token] = _Session(authorization, self._clock())
        return token

    def authorization(self, token: str) -> str:
        """Return the header of a session, "" if there is none."""
        session = self._sessions.pop(token, None)
        if session is None or self._clock() - session.used_s > IDLE_S:
            return ""
        self._sessions[token] = session._replace(used_s=self._clock())
        return session.authorization

    def end(self, token: str) -> None:
        """End a session."""
        self._sessions.pop(token, None)


def authorization_of(fields: Mapping[str, str]) -> str:
    """Return the header of basic authentication for the fields of the form."""
    pair = f"{fields.get('user', '')}:{fields.get('password', '')}".encode("utf-8", "replace")
    return f"Basic {base64.b64encode(pair).decode()}"
