"""How daemons are reached over HTTP: the one value for all that asks them.

It opens the clients, so that TLS, the bearer token, the address map and the timeouts hold for every
question. The token goes to nsqlookupd alone: an nsqd is only as trustworthy as the announcement
that led to it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nsqtools.errors import RefusedError
from nsqtools.http.http_api import MAX_BODY_BYTES
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.http.nsqlookupd_http import MAX_NODES, NsqlookupdHTTPClient
from nsqtools.protocol.names import NSQD_HTTP_PORT, Address, http_url, parse_address

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class HTTPAccess:
    """Timeouts are seconds, and ``timeout_s`` is for a whole exchange. ``max_nodes`` is how many of
    the nsqd that an nsqlookupd announces are believed, and ``allow_announced`` where they may be
    (patterns; none: anywhere). ``tls`` is needed for https addresses only.

    ``address_map`` is announced -> reachable, each with or without a port; an ``http(s)://`` URL on
    the right is for HTTP only. Raises `ConfigurationError` for an address that cannot be used.
    """

    connect_timeout_s: float = 2.0
    timeout_s: float = 5.0
    max_body_bytes: int = MAX_BODY_BYTES
    max_nodes: int = MAX_NODES
    allow_announced: tuple[str, ...] = ()
    auth_requires_tls: bool = False
    tls: ssl.SSLContext | None = None
    bearer: str = field(default="", repr=False)
    address_map: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in self.address_map.values():  # now, not when nsqlookupd announces it
            if "://" in text:
                http_url(text, NSQD_HTTP_PORT)
            else:
                parse_address(text)

    def nsqd(self, url: str) -> NsqdHTTPClient:
        """Return the client for one nsqd, to be closed."""
        return NsqdHTTPClient(
            url,
            connect_timeout_s=self.connect_timeout_s,
            timeout_s=self.timeout_s,
            max_body_bytes=self.max_body_bytes,
            tls=self.tls,
        )

    def nsqlookupd(self, url: str) -> NsqlookupdHTTPClient:
        """Return the client for one nsqlookupd, to be closed.

        Raises `RefusedError` where the secret must not go there in plain text.
        """
        if self.bearer and not url.startswith("https:"):
            if self.auth_requires_tls:
                raise RefusedError(
                    f"{url} would get the auth secret in plain text",
                    hint="Give an https:// address, or do without auth_requires_tls.",
                )
            _warn_of_plain_text(url)
        return NsqlookupdHTTPClient(
            url,
            connect_timeout_s=self.connect_timeout_s,
            timeout_s=self.timeout_s,
            max_body_bytes=self.max_body_bytes,
            max_nodes=self.max_nodes,
            allow_announced=self.allow_announced,
            tls=self.tls,
            bearer=self.bearer,
        )

    def reachable(self, announced: Address) -> Address:
        """Return where to connect to over TCP for an announced address."""
        mapped = self._mapped(announced)
        return announced if "://" in mapped else parse_address(mapped, announced.port)

    def url_of(self, announced: Address) -> str:
        """Return the base URL for an announced HTTP address."""
        mapped = self._mapped(announced)
        return http_url(mapped if "://" in mapped else str(self.reachable(announced)), 0)

    def _mapped(self, announced: Address) -> str:
        name = str(announced)
        return self.address_map.get(name) or self.address_map.get(announced.host) or name


@functools.cache
def _warn_of_plain_text(url: str) -> None:
    log.warning(
        "the auth secret goes to %s in plain text; give an https:// address, or refuse this with"
        " auth_requires_tls",
        url,
    )
