"""AUTH: ask the auth servers for the permissions of a secret, and cache the answer for its TTL.

The secret is sent under two names: nsqd 1.3 sends ``secret``, and its documentation describes
``auth_secret``. The patterns of an answer have Go's syntax: see `go_regexp`.
"""

from __future__ import annotations

import json
import random
import ssl
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import httpx

from nsqtools.errors import NsqError
from nsqtools.files.durable import adding_path_to_errors
from nsqtools.protocol.frames import RESPONSE, RequestError, encode_frame
from nsqtools.protocol.go_regexp import Matcher, compile_go_regexp
from nsqtools.protocol.names import shown_url
from nsqtools.protocol.requests import CommandLine, read_sized_body
from nsqtools.protocol.text import INT64, go_json, quote
from nsqtools.server.client_connection import ClientConnection, Pause
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.http_get import http_get
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.nsqd_queues import NsqdQueues

_PERMISSIONS = {"subscribe", "publish"}
# Results of `AuthState.allows` to cache for a client: each PUB needs one.
_CACHED_NAMES = 1000


class AuthFailed(Exception):
    """No auth server returned a valid answer. The text is for the log only."""


class AuthGrant(NamedTuple):
    """One entry of an answer, with patterns that match anywhere in a name."""

    topic: Matcher
    channels: tuple[Matcher, ...]
    permissions: frozenset[str]


@dataclass(frozen=True, slots=True)
class AuthState:
    """The answer of an auth server, valid until ``expires_s``."""

    identity: str
    identity_url: str
    authorizations: tuple[AuthGrant, ...]
    expires_s: float  # on the clock of time.monotonic()
    _answers: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False, compare=False)

    def allows(self, topic: str, channel: str) -> bool:
        """Return whether any grant allows consuming a channel, or publishing if it is ``""``."""
        answer = self._answers.get((topic, channel))
        if answer is None:
            permission = "subscribe" if channel else "publish"
            answer = any(
                permission in permissions
                and matches_topic(topic)
                and any(matches_channel(channel) for matches_channel in channels)
                for matches_topic, channels, permissions in self.authorizations
            )
            if len(self._answers) < _CACHED_NAMES:
                self._answers[topic, channel] = answer
        return answer


class AuthServers:
    """The servers of ``--auth-http-address``, tried one after the other from a random one on.

    Raises ``OSError`` for ``--tls-root-ca-file``.
    """

    def __init__(self, options: NsqdOptions, log: DaemonLog) -> None:
        self._addresses = options.auth_http_address
        self._options = options
        with adding_path_to_errors(Path(options.tls_root_ca_file)):
            self._tls = ssl.create_default_context(cafile=options.tls_root_ca_file or None)
        self._log = log

    async def ask(self, query: str) -> AuthState:
        """Return the permissions of a secret. Raises `AuthFailed` without a valid answer."""
        start = random.randrange(len(self._addresses))
        for address in (*self._addresses[start:], *self._addresses[:start]):
            try:
                base = address if "://" in address else f"http://{address}/auth"
                return decode_answer(await http_get(f"{base}?{query}", self._options, self._tls))
            except (NsqError, AuthFailed, httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
                reason = str(exc) or "timeout"
                self._log.error(f"failed auth request to {shown_url(address)} - {reason}")
        raise AuthFailed("Unable to access auth server")


def decode_answer(body: bytes) -> AuthState:
    """Read an auth server's answer. Raises `AuthFailed`."""
    try:
        # As in Go, invalid UTF-8 becomes U+FFFD and keys match in any case. json.loads would accept
        # UTF-16 and a byte order mark in bytes.
        text = body.decode("utf-8", "replace")
        answer = json.loads(
            text, object_hook=lambda entry: {key.lower(): value for key, value in entry.items()}
        )
        ttl_s = answer["ttl"]
        if type(ttl_s) is not int or ttl_s <= 0 or ttl_s not in INT64:
            raise AuthFailed(f"invalid TTL {ttl_s}")
        return AuthState(
            _value(answer, "identity", ""),
            _value(answer, "identity_url", ""),
            tuple(map(_authorization, _value(answer, "authorizations", []))),
            time.monotonic() + ttl_s,
        )
    except Exception as exc:  # any kind: JSON of any shape, depth and size, and any pattern
        raise AuthFailed(f"invalid answer ({exc})") from exc


def _authorization(entry: dict[str, Any]) -> AuthGrant:
    permissions = frozenset(_value(entry, "permissions", []))
    if not permissions <= _PERMISSIONS:
        raise AuthFailed(f"unknown permission in {sorted(permissions)}")
    return AuthGrant(
        compile_pattern("topic", _value(entry, "topic", "")),
        tuple(compile_pattern("channel", pattern) for pattern in _value(entry, "channels", [])),
        permissions,
    )


def compile_pattern(kind: str, pattern: str) -> Matcher:
    """Compile a pattern of names. Raises `AuthFailed` for a pattern that `go_regexp` refuses."""
    try:
        return compile_go_regexp(pattern)
    except ValueError as exc:
        raise AuthFailed(f"unable to compile {kind} {pattern!r} - {exc}") from exc


def _value(entry: dict[str, Any], key: str, empty: Any) -> Any:
    """Return a value that has the type of ``empty``: a text is not a list of patterns."""
    value = entry.get(key)
    if not isinstance(value, type(empty) | None):
        raise AuthFailed(f"{key} is not a {type(empty).__name__}")
    return value or empty


@dataclass(slots=True)
class ClientAuthorization:
    """``servers`` is None when this nsqd does not ask for secrets; then everything is allowed."""

    connection: ClientConnection
    nsqd: NsqdQueues
    servers: AuthServers | None
    state: AuthState | None = None
    query: str = field(default="", repr=False)  # what auth servers learn of the client

    def authenticate(self, request: CommandLine) -> int:
        """Run AUTH. Raises `RequestError` or `Pause`."""
        if len(request.words) != 1:
            raise RequestError("E_INVALID", "AUTH invalid number of parameters")
        secret, position = read_sized_body(request, "AUTH", self.nsqd.options.max_body_size)
        if self.state and self.state.authorizations:
            raise RequestError("E_INVALID", "AUTH already set")
        if self.servers is None:
            raise RequestError("E_AUTH_DISABLED", "AUTH disabled")
        tls = self.connection.tls
        parameters = {  # in alphabetical order, as Go sends them
            "auth_secret": secret,
            "common_name": tls.common_name if tls else "",
            "remote_ip": self.connection.remote_ip,
            "secret": secret,
            "tls": "true" if tls else "false",
        }
        self.query = urlencode(parameters)
        raise Pause(position, partial(self._authenticate, self.servers))

    async def _authenticate(self, servers: AuthServers) -> None:
        state = await self._ask(servers)
        if not state.authorizations:
            raise RequestError("E_UNAUTHORIZED", "AUTH no authorizations found")
        reply = {
            "identity": state.identity,
            "identity_url": state.identity_url,
            "permission_count": len(state.authorizations),
        }
        self.connection.send(encode_frame(RESPONSE, go_json(reply)))

    async def _ask(self, servers: AuthServers) -> AuthState:
        try:
            self.state = await servers.ask(self.query)
        except AuthFailed as exc:
            # The reason goes to the log only, because it can describe the auth server.
            client = self.connection.remote_address
            self.nsqd.log.warn(f"PROTOCOL(V2): [{client}] AUTH failed {exc}")
            raise RequestError("E_AUTH_FAILED", "AUTH failed") from exc
        return self.state

    def check(self, command: str, topic: str, channel: str, start: int) -> None:
        """Raise `RequestError` if the client may not consume a channel, or publish if it is ``""``.

        Raises `Pause` when the answer has expired. The command that began at ``start`` is then
        executed again.
        """
        if self.servers is None:
            return
        if not (self.state and self.state.authorizations):
            raise RequestError("E_AUTH_FIRST", f"AUTH required before {command}")
        if time.monotonic() > self.state.expires_s:
            raise Pause(start, partial(self._ask, self.servers))
        if not self.state.allows(topic, channel):
            names = quote(topic.encode()) + b" " + quote(channel.encode())
            raise RequestError("E_UNAUTHORIZED", f"AUTH failed for {command} on ".encode() + names)
