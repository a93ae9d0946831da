"""Build requests for HTTP endpoints: URL, headers and body, from one or several messages.

NSQ delivers at least once, so each request identifies its messages and a receiver can detect
duplicates: ``Idempotency-Key``, and the topic, id, attempts and time of a single message. The
signature follows Standard Webhooks (``webhook-id``, ``webhook-timestamp``, ``webhook-signature``):
HMAC-SHA256 over id, time and body. Libraries in every language verify it.

Secrets are read again after their files have changed, because tokens expire.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from nsqtools import __version__
from nsqtools.client.message import Batch, Message
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue
from nsqtools.forward import BatchForm
from nsqtools.forward.parcel import Parcel, as_sent
from nsqtools.protocol.names import Address
from nsqtools.records.template import compile_template, has_fields

BodyEncoder = Callable[..., bytes]

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]+")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers that libcurl adds by default; an empty value removes them.
_UNASKED = (b"Accept:", b"Content-Type:", b"Expect:")
_SECRET = (b"authorization:", b"cookie:", b"proxy-authorization:")


class HttpRequest(NamedTuple):
    """A request; without a body it is a GET.

    ``headers`` are lines, ``name`` is that of the endpoint in messages, and ``allows_private`` is
    whether its address may be on a private network.
    """

    url: str
    headers: list[bytes]
    body: bytes | None
    name: str
    allows_private: bool


class Endpoint:
    """A URL whose path and query may be a template. Raises `ConfigurationError`.

    ``is_given`` is False for the target of a redirect, which has no template. ``has_secrets`` is
    whether its requests contain credentials, which another host must not receive. With ``is_get``
    only the URL and the headers describe a message; ``has_fields`` is whether the URL does.
    """

    def __init__(
        self,
        url: str,
        *,
        allows_private: bool = True,
        is_given: bool = True,
        is_get: bool = False,
    ) -> None:
        self.url = url
        self.allows_private = allows_private
        self.has_secrets = is_given
        base, path = split_url(url)
        try:
            parts = urlsplit(base)
            port = parts.port
        except ValueError as exc:
            raise ConfigurationError(f"{url!r} is not a URL: {exc}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"{url!r} is not the URL of an endpoint", hint="Begin it with http:// or https://."
            )
        if parts.username is not None:
            raise ConfigurationError(
                f"the URL for {parts.hostname} has a password in it, where others can see it",
                hint="Give --basic-auth-file.",
            )
        if not url.isascii() or any(c <= " " for c in url):
            raise ConfigurationError(f"{url!r} has characters that a URL must not have")
        path = path.partition("#")[0]
        port = port if port is not None else 443 if parts.scheme == "https" else 80
        self.origin = parts.scheme, Address(parts.hostname, port)
        self.name = str(self.origin[1])
        self.base = base
        self.target = _encoded(path.encode())
        self.template: BodyEncoder | None = None
        self.has_fields = is_given and has_fields(path)
        self._may_climb = _climbs(self.target) or ":raw}" in path
        if is_get and (verb := _VERB.search(path)):
            meant = url.replace(verb[0], "{body:url}")
            raise ConfigurationError(
                f"{url!r} has {verb[0]}, which is not replaced",
                hint=f"For the body write {{body:url}}: --get '{meant}'.",
            )
        if "{" in path and is_given:
            try:  # in a GET without {body}, a missing field must not be replaced by nothing
                is_strict = is_get and "{body" not in path
                self.template = compile_template(path, is_url=True, is_strict=is_strict)
            except ValueError as exc:
                raise ConfigurationError(f"{url!r}: {exc}") from None

    def target_of(self, message: Message, body: bytes) -> str:
        """Return path and query for a message and the body to send.

        Raises ``ValueError`` if the message results in no valid URL.
        """
        if self.template is None:
            return self.target
        sent = as_sent(message, body)
        target = _encoded(self.template(message.topic, message.nsqd, [sent]))
        if not self._may_climb and _climbs(target):
            raise ValueError(f"a field of it is a step in the path: {target}")
        return target

    def __str__(self) -> str:
        return self.url.partition("?")[0]


def split_url(url: str) -> tuple[str, str]:
    """Split a URL after the host, where a path, a query or a fragment begins."""
    begin = url.find("//") + 2
    end = min((at for at in (url.find(mark, begin) for mark in "/?#") if at >= 0), default=len(url))
    path = url[end:]
    return url[:end], path if path.startswith("/") else "/" + path


Header = tuple[str, BodyEncoder]
"""The name of a header, and the encoder of the template of its value."""


def parse_header(text: str) -> Header:
    """Read ``Name: TEMPLATE``. Raises `ConfigurationError`."""
    name, colon, template = text.partition(":")
    name, template = name.strip(), template.strip()
    if not (colon and template and _TOKEN.fullmatch(name)):
        raise ConfigurationError(
            f"{text!r} is not a header", hint="For example --header 'X-Topic: {topic}'."
        )
    if name.lower() in ("content-length", "transfer-encoding", "connection", "host"):
        raise ConfigurationError(f"the header {name} cannot be set")
    try:
        return name, compile_template(template)
    except ValueError as exc:
        raise ConfigurationError(f"--header {text!r}: {exc}") from None


class RequestSecrets(NamedTuple):
    """``authorization`` is the header's value; ``key`` signs."""

    authorization: bytes = b""
    key: bytes = b""


class RequestBuilder:
    """Build requests from parcels.

    Without a ``content_type`` they are GETs. ``has_metadata`` adds headers about the message, and
    ``batch`` is the format of several messages.
    """

    def __init__(
        self,
        *,
        content_type: str | None,
        headers: Sequence[Header] = (),
        secrets: ReloadedValue[RequestSecrets] | None = None,
        has_metadata: bool = True,
        batch: BatchForm | None = None,
    ) -> None:
        self.batch = batch
        self._content_type = content_type
        self._has_metadata = has_metadata
        self._renewed = secrets
        self._secrets = RequestSecrets()
        self._given = {name.lower() for name, _ in headers}
        self._headers = [(b"%b: " % name.encode(), encode) for name, encode in headers]
        self._has_key = has_metadata and "idempotency-key" not in self._given
        self._shared = self._shared_headers()

    def _shared_headers(self) -> list[bytes]:
        shared = {"user-agent": b"User-Agent: nsqtools/%b" % __version__.encode()}
        if self._content_type is not None:
            value = _CONTROL.sub(b" ", self._content_type.encode(errors="surrogateescape"))
            shared["content-type"] = b"Content-Type: " + value
        if self._secrets.authorization:
            shared["authorization"] = b"Authorization: %b" % self._secrets.authorization
        return [*_UNASKED, *(line for name, line in shared.items() if name not in self._given)]

    def build(self, endpoint: Endpoint, parcels: Sequence[Parcel]) -> HttpRequest:
        """Return the request for these parcels.

        Raises ``ValueError`` for a body that does not fit the format of the batch or the URL.
        """
        if self._renewed is not None and (now := self._renewed.get()) is not self._secrets:
            self._secrets = now
            self._shared = self._shared_headers()
        body = self._body(parcels)
        parcel = parcels[0]
        messages = parcel.messages
        try:
            target = endpoint.target_of(messages[0], parcel.bodies[0])
        except ValueError as exc:
            raise ValueError(f"no URL can be made of its body ({exc})") from None
        headers = self._shared.copy()
        is_single = len(parcels) == 1 and len(messages) == 1
        if self._has_key or self._secrets.key:
            identity = _identity(messages) if is_single else _identity_of_batch(parcels)
            if self._has_key:
                headers.append(b"Idempotency-Key: %b" % identity)
            if self._secrets.key:
                headers += self._signature(identity, body)
        if self._has_metadata and is_single:
            message = messages[0]
            headers += (
                b"X-Nsq-Topic: %b" % messages.topic.encode(),
                b"X-Nsq-Message-Id: %b" % _CONTROL.sub(b" ", message.id),
                b"X-Nsq-Attempts: %d" % message.attempts,
                b"X-Nsq-Timestamp: %d" % message.timestamp_ns,
            )
        for name, encode in self._headers:
            value = encode(messages.topic, messages.nsqd, messages[:1])
            if value := _CONTROL.sub(b" ", value).strip():  # a line break would begin a header
                headers.append(name + value)
        if not endpoint.has_secrets:
            headers = [header for header in headers if not header.lower().startswith(_SECRET)]
        return HttpRequest(
            endpoint.base + target,
            headers,
            None if self._content_type is None else body,
            endpoint.name,
            endpoint.allows_private,
        )

    def request_key(self, message: Message, body: bytes, endpoints: Iterable[Endpoint]) -> Hashable:
        """Return the URLs and templated headers of a message, which a batch must share."""
        topic, nsqd = message.topic, message.nsqd
        targets = []
        for endpoint in endpoints:
            try:
                if endpoint.template is not None:
                    targets.append(endpoint.target_of(message, body))
            except ValueError as exc:  # in a batch of its own, which `build` refuses
                targets.append(str(exc))
        return (*targets, *(encode(topic, nsqd, [message]) for _, encode in self._headers))

    def _body(self, parcels: Sequence[Parcel]) -> bytes:
        if self.batch is None:
            return parcels[0].bodies[0]
        bodies = [body for parcel in parcels for body in parcel.bodies]
        try:
            if self.batch is BatchForm.JSON:
                for body in bodies:  # decoded, because json.loads accepts UTF-16 and a BOM in bytes
                    json.loads(body.decode())
                return b"[" + b",".join(bodies) + b"]"
            return b"".join(_one_line(body) + b"\n" for body in bodies)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"not JSON, in a batch of JSON ({exc})") from None

    def _signature(self, identity: bytes, body: bytes) -> tuple[bytes, ...]:
        now = b"%d" % time.time()
        signed = hmac.new(self._secrets.key, b"%b.%b.%b" % (identity, now, body), hashlib.sha256)
        return (
            b"webhook-id: %b" % identity,
            b"webhook-timestamp: %b" % now,
            b"webhook-signature: v1,%b" % base64.b64encode(signed.digest()),
        )


def _identity(messages: Batch) -> bytes:
    """Return the identity of a single message, the same for every delivery."""
    place = f"{messages.topic}/{messages.nsqd}/".encode()
    return place + _CONTROL.sub(b" ", messages[0].id)


def _identity_of_batch(parcels: Sequence[Parcel]) -> bytes:
    digest = hashlib.sha256()
    for parcel in parcels:
        for message in parcel.messages:
            digest.update(parcel.messages.nsqd.encode() + b"/" + message.id)
    topic = parcels[0].messages.topic.encode()
    return b"%b/batch/%b" % (topic, digest.hexdigest()[:32].encode())


def _one_line(body: bytes) -> bytes:
    """Return a body as one line; in JSON, line breaks occur only between tokens."""
    if b"\n" in body or b"\r" in body:
        json.loads(body.decode())
        return body.replace(b"\r", b" ").replace(b"\n", b" ")
    return body


def _climbs(target: str) -> bool:
    """Return whether a path has a segment of dots, which leads to another folder."""
    return not {".", ".."}.isdisjoint(target.partition("?")[0].split("/"))


# The verb of printf that nsq_to_http replaces: a percent sign that begins no URL escape.
_VERB = re.compile(r"%(?![0-9A-Fa-f]{2})[-+# 0-9.]*[A-Za-z]")
_NOT_IN_URL = re.compile(rb"[^\x21-\x7e]|[\"#<>\\^`{|}]")


def _encoded(target: bytes) -> str:
    """Percent-encode invalid bytes, so that no message can end the request line."""
    return _NOT_IN_URL.sub(lambda match: b"%%%02X" % match[0][0], target).decode()
