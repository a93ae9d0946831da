"""What is sent to an HTTP endpoint: URL, headers and body, from one message or from several.

Each request says which messages it carries, so that a receiver can recognize one that comes twice
(NSQ delivers at least once): ``Idempotency-Key``, and the topic, id, attempts and time of a single
message. A signature follows Standard Webhooks (``webhook-id``, ``webhook-timestamp``,
``webhook-signature``): HMAC-SHA256 over id, time and body; libraries in every language verify it.

Secrets are read again when their files have changed, before the next request: tokens expire.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from nsqtools.errors import ConfigurationError
from nsqtools.files.renewed import Renewed
from nsqtools.forward.http_pool import Origin
from nsqtools.forward.http_wire import encode_request, header_value, is_header_name
from nsqtools.forward.modes import BatchForm
from nsqtools.forward.parcel import Parcel
from nsqtools.records.template import compile_template

Encoder = Callable[..., bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A URL; what follows the host may be a template. Raises `ConfigurationError`.

    ``is_given`` is False for what a redirect names: no template, and nothing is kept for it.
    """

    url: str
    origin: Origin = field(init=False)
    host: bytes = field(init=False)
    target: bytes = field(init=False)
    template: Encoder | None = field(init=False)
    allows_private: bool = True
    is_given: bool = True

    def __post_init__(self) -> None:
        base, path = _split(self.url)
        try:
            parts = urlsplit(base)
            port = parts.port
        except ValueError as exc:
            raise ConfigurationError(f"{self.url!r} is not a URL: {exc}") from None
        is_tls = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"{self.url!r} is not the URL of an endpoint",
                hint="Begin it with http:// or https://.",
            )
        if parts.username is not None:
            raise ConfigurationError(
                f"the URL for {parts.hostname} has a password in it, where others can see it",
                hint="Give --basic-auth-file.",
            )
        if not self.url.isascii() or any(c <= " " for c in self.url):
            raise ConfigurationError(f"{self.url!r} has characters that a URL must not have")
        path = path.partition("#")[0]
        origin = Origin(
            parts.hostname,
            port if port is not None else 443 if is_tls else 80,
            is_tls,
            self.allows_private,
        )
        object.__setattr__(self, "origin", origin)
        object.__setattr__(self, "host", parts.netloc.encode())
        object.__setattr__(self, "target", _encoded(path.encode()))
        template = None
        if "{" in path and self.is_given:
            try:
                template = compile_template(path)
            except ValueError as exc:
                raise ConfigurationError(f"{self.url!r}: {exc}") from None
        object.__setattr__(self, "template", template)

    def __str__(self) -> str:
        return self.url.partition("?")[0]


def _split(url: str) -> tuple[str, str]:
    """Part a URL where the name of the host ends, which a query may do as well as a path."""
    begin = url.find("//") + 2
    end = min((at for at in (url.find(mark, begin) for mark in "/?#") if at >= 0), default=len(url))
    path = url[end:]
    return url[:end], path if path.startswith("/") else "/" + path


@dataclass(frozen=True, slots=True)
class Header:
    """``Name: TEMPLATE``."""

    name: str
    encode: Encoder


def parse_header(text: str) -> Header:
    """Read ``Name: TEMPLATE``. Raises `ConfigurationError`."""
    name, colon, template = text.partition(":")
    name, template = name.strip(), template.strip()
    if not (colon and template and is_header_name(name)):
        raise ConfigurationError(
            f"{text!r} is not a header", hint="For example --header 'X-Topic: {topic}'."
        )
    if name.lower() in ("content-length", "transfer-encoding", "connection", "host"):
        raise ConfigurationError(f"the header {name} cannot be set")
    try:
        return Header(name, compile_template(template))
    except ValueError as exc:
        raise ConfigurationError(f"--header {text!r}: {exc}") from None


class RequestSecrets(NamedTuple):
    """``authorization`` is the header's value; ``key`` signs."""

    authorization: bytes = b""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What requests look like. ``has_metadata`` adds headers about the message."""

    is_get: bool = False
    content_type: str = "application/octet-stream"
    user_agent: str = "nsq_to_http"
    headers: Sequence[Header] = ()
    secrets: Renewed[RequestSecrets] | None = None
    has_metadata: bool = True
    batch: BatchForm | None = None


class RequestBuilder:
    """Makes requests of parcels."""

    def __init__(self, settings: RequestSettings) -> None:
        self._settings = settings
        self._given = {header.name.lower() for header in settings.headers}
        self._secrets = RequestSecrets()
        self._heads: dict[Endpoint, bytes] = {}
        self._shared = self._shared_headers()
        self._headers = [
            (b"%b: " % header.name.encode(), header.encode) for header in settings.headers
        ]
        self._has_key = settings.has_metadata and "idempotency-key" not in self._given

    def _shared_headers(self) -> bytes:
        settings = self._settings
        shared = [b"User-Agent: %b\r\n" % settings.user_agent.encode()]
        if not settings.is_get:
            shared.append(b"Content-Type: %b\r\n" % settings.content_type.encode())
        if self._secrets.authorization:
            shared.append(b"Authorization: %b\r\n" % self._secrets.authorization)
        return b"".join(
            line for line in shared if line.partition(b":")[0].decode().lower() not in self._given
        )

    def _renew(self, secrets: RequestSecrets) -> None:
        self._secrets = secrets
        self._heads.clear()
        self._shared = self._shared_headers()

    def build(self, endpoint: Endpoint, parcels: Sequence[Parcel]) -> bytes:
        """Return the request for some parcels. Raises ``ValueError`` for a body that cannot be in a
        batch."""
        settings = self._settings
        if settings.secrets is not None and (now := settings.secrets.get()) is not self._secrets:
            self._renew(now)
        body = self._body(parcels)
        parcel = parcels[0]
        headers = []
        if self._has_key or self._secrets.key:
            identity = identity_of(parcels)
            if self._has_key:
                headers.append(b"Idempotency-Key: %b\r\n" % identity)
            if self._secrets.key:
                headers.append(self._signature(identity, body))
        messages = parcel.messages
        if settings.has_metadata and len(parcels) == 1 and len(parcel) == 1:
            message = messages[0]
            headers.append(
                b"X-Nsq-Topic: %b\r\nX-Nsq-Message-Id: %b\r\nX-Nsq-Attempts: %d\r\n"
                b"X-Nsq-Timestamp: %d\r\n"
                % (messages.topic.encode(), message.id, message.attempts, message.timestamp_ns)
            )
        for name, encode in self._headers:
            value = header_value(encode(messages.topic, messages.nsqd, messages[:1]))
            if value:
                headers.append(b"%b%b\r\n" % (name, value))
        return encode_request(
            self._head(endpoint, parcel), headers, None if settings.is_get else body
        )

    def _head(self, endpoint: Endpoint, parcel: Parcel) -> bytes:
        head = self._heads.get(endpoint)
        if head is None:
            verb = b"GET" if self._settings.is_get else b"POST"
            target = b"%b" if endpoint.template else endpoint.target
            head = b"%b " % verb + target + b" HTTP/1.1\r\nHost: %b\r\n" % endpoint.host
            head += self._shared
            if endpoint.is_given:
                self._heads[endpoint] = head
        if endpoint.template is None:
            return head
        messages = parcel.messages
        first = Renamed(messages[0], parcel.bodies[0])
        target = endpoint.template(messages.topic, messages.nsqd, [first])
        before, _, after = head.partition(b" %b ")
        return b"%b %b %b" % (before, _encoded(target), after)

    def _body(self, parcels: Sequence[Parcel]) -> bytes:
        form = self._settings.batch
        if form is None:
            return parcels[0].bodies[0]
        bodies = [body for parcel in parcels for body in parcel.bodies]
        if form is BatchForm.JSON:
            for body in bodies:
                json.loads(body)
            return b"[" + b",".join(bodies) + b"]"
        return b"".join(_one_line(body) + b"\n" for body in bodies)

    def _signature(self, identity: bytes, body: bytes) -> bytes:
        now = b"%d" % time.time()
        signed = hmac.new(self._secrets.key, b"%b.%b.%b" % (identity, now, body), hashlib.sha256)
        return b"webhook-id: %b\r\nwebhook-timestamp: %b\r\nwebhook-signature: v1,%b\r\n" % (
            identity,
            now,
            base64.b64encode(signed.digest()),
        )


class Renamed:
    """A message with the body that is sent, for templates."""

    __slots__ = ("attempts", "body", "id", "timestamp_ns")

    def __init__(self, message: object, body: bytes) -> None:
        self.attempts: int = message.attempts  # type: ignore[attr-defined]
        self.id: bytes = message.id  # type: ignore[attr-defined]
        self.timestamp_ns: int = message.timestamp_ns  # type: ignore[attr-defined]
        self.body = body


def identity_of(parcels: Sequence[Parcel]) -> bytes:
    """Return what identifies the messages of a request, the same each time that it is sent."""
    parcel = parcels[0]
    if len(parcels) == 1 and len(parcel) == 1:
        messages = parcel.messages
        return f"{messages.topic}/{messages.nsqd}/".encode() + messages[0].id
    digest = hashlib.sha256()
    for parcel in parcels:
        for message in parcel.messages:
            digest.update(parcel.messages.nsqd.encode() + b"/" + message.id)
    return b"%b/batch/%b" % (parcel.messages.topic.encode(), digest.hexdigest()[:32].encode())


def _one_line(body: bytes) -> bytes:
    """A body as a line: JSON may have line ends between its values only."""
    if b"\n" in body or b"\r" in body:
        json.loads(body)
        return body.replace(b"\r", b" ").replace(b"\n", b" ")
    return body


_NOT_IN_URL = re.compile(rb"[^\x21-\x7e]|[\"<>\\^`{|}]")


def _encoded(target: bytes) -> bytes:
    """A target without what no URL has: nothing of a message ends the first line of a request."""
    return _NOT_IN_URL.sub(lambda found: b"%%%02X" % found[0][0], target)
