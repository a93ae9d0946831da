"""What `nsq web` is configured with, checked."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsqtools.errors import ConfigurationError
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
                f"--allow-changes on {self.listen} would let everybody delete topics",
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
