"""Who may ask the console for what, before anything is done. Pure.

`refusal` looks at where a call comes from. A page of any site can make a browser send a call, and
after DNS rebinding under a name of its own: so the ``Host`` has to be one of ours, and what changes
something must not come from another site, which browsers say in ``Sec-Fetch-Site`` and ``Origin``.
Programs send neither. An address, and a name without a dot, cannot be rebound.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Collection, Mapping

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
