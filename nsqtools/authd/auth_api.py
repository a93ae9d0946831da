"""``/auth`` over HTTP, which nsqd requests for each client, as its documentation describes.

    GET  /auth?remote_ip=...&tls=true&secret=...&common_name=...
    POST /auth   with the same as a form

The secret may be called ``auth_secret``, too: nsqd sends the first name and documents the second.
The answer is that of a user, or 401. nsqd remembers an answer for its ``ttl``, so a change of the
users file acts within that time.

Traps: the query has the secret, so a request must not be logged as others are. And Go's nsqd takes
403 for a server that requires TLS: it asks again by https, at a port that it expects in the body,
and writes the URL with the secret to its log when that fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl, quote

from nsqtools.authd.authority import Audit, Authority, Identity
from nsqtools.authd.passwords import TooManyFailures
from nsqtools.authd.users import Client
from nsqtools.http.http_server import (
    Handlers,
    HTTPApi,
    HTTPRefusal,
    Request,
    Response,
    json_response,
    metrics_response,
    plain_response,
)
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

MAX_FORM_BYTES = 1 << 16
MAX_FORM_FIELDS = 50
MAX_COMMON_NAME = 256
NOT_AUTHORIZED = "NOT_AUTHORIZED"


class AnswerSettings(NamedTuple):
    """Fields of each answer to nsqd; ``{user}`` in the URL is replaced by the name of the user."""

    ttl_s: int = 300
    identity_url: str = ""


class ErrorLog:
    """The log of an API whose requests have secrets: it has only errors."""

    def info(self, text: str) -> None:
        """Log nothing: the audit log has a line without the secret."""

    def error(self, text: str) -> None:
        """Log a handler that raised an unexpected exception."""
        log.error("%s", text)


def make_api(handlers: Handlers) -> HTTPApi:
    """Return an API that reads forms and logs no requests."""
    posts = (handler for (method, _), handler in handlers.items() if method == "POST")
    return HTTPApi(handlers, ErrorLog(), dict.fromkeys(posts, MAX_FORM_BYTES))


class AuthApi:
    """The handlers of /auth, /ping, /health and /metrics."""

    def __init__(self, authority: Authority, audit: Audit, settings: AnswerSettings) -> None:
        self._authority = authority
        self._audit = audit
        self._settings = settings

    def handlers(self) -> Handlers:
        """Return the routes."""
        return {
            ("GET", "/auth"): self._auth,
            ("POST", "/auth"): self._auth,
            ("GET", "/ping"): lambda request: plain_response("OK"),
            ("GET", "/health"): lambda request: self._health(),
            ("GET", "/metrics"): lambda request: metrics_response(self._metrics()),
        }

    async def _auth(self, request: Request) -> Response:
        fields = _fields(request)
        client = Client(
            fields.get("remote_ip", ""),
            fields.get("tls") == "true",
            fields.get("common_name", "")[:MAX_COMMON_NAME],
        )
        secret = fields.get("secret") or fields.get("auth_secret", "")
        identity = await identified(self._authority, self._audit, request, "auth", secret, client)
        ttl_s = max(1, math.floor(min(self._settings.ttl_s, identity.valid_s)))
        name = identity.user.name
        return json_response(
            {
                "ttl": ttl_s,
                "identity": name,
                "identity_url": self._settings.identity_url.replace("{user}", quote(name, safe="")),
                "authorizations": [grant.as_authorization() for grant in identity.user.grants],
            }
        )

    def _health(self) -> Response:
        if self._authority.rejection:
            return plain_response(f"{self._authority.rejection}\n", 503)
        return plain_response("OK\n")

    def _metrics(self) -> Iterable[Metric]:
        users = len(self._authority.users.by_name)
        is_current = int(not self._authority.rejection)
        yield metric_of("nsq_authd_users", "Users in the file.", [({}, users)])
        yield metric_of(
            "nsq_authd_users_file_current",
            "1, or 0 while the file is refused and an older version of it serves.",
            [({}, is_current)],
        )
        yield from self._audit.metrics()


async def identified(
    authority: Authority, audit: Audit, request: Request, kind: str, secret: str, client: Client
) -> Identity:
    """Return who a client is, and record that. Raises `HTTPRefusal`."""
    peer = str(request.client or "")
    try:
        identity = await authority.identify(secret, client)
    except TooManyFailures:
        audit.record(kind, "limited", client, None, peer)
        raise HTTPRefusal(429, "TOO_MANY_FAILURES") from None
    audit.record(kind, "allowed" if identity else "refused", client, identity, peer)
    if identity is None:
        raise HTTPRefusal(401, NOT_AUTHORIZED)
    return identity


def _fields(request: Request) -> dict[str, str]:
    """Return the parameters of the query and of a form, which is stronger."""
    fields = request.query()
    if request.body is None:
        raise HTTPRefusal(413, "BODY_TOO_LARGE")
    if request.body:
        try:
            pairs = parse_qsl(
                request.body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS
            )
        except ValueError:
            raise HTTPRefusal(400, "INVALID_REQUEST") from None
        fields |= dict(reversed(pairs))  # the first of each name, as in a query
    return fields
