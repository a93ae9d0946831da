"""Refuse requests that a web page of another site made a browser send. Pure.

The API has no passwords. A page of any site can POST to a port of the machine that shows it, and
after DNS rebinding it can call the API under the page's own name. Browsers reveal both:
``Sec-Fetch-Site`` and ``Origin`` of a state-changing request name the page, and ``Host`` is not a
name of this machine. Programs send neither of the first two headers.

``Host`` is checked only when only this machine can connect, and only DNS names with a dot count as
foreign: an address cannot be rebound, and names such as ``nsqd`` are those of containers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = ("same-origin", "none")


def cross_site_refusal(
    method: str, headers: Mapping[str, str], names: Collection[str] | None
) -> str:
    """Return the code for refusing a request that a foreign web page sent, or ``""``.

    ``names`` are the names of this host; None accepts every ``Host``. A request of HTTP/1.0
    without ``Host`` is accepted as well.
    """
    if method in _SAFE_METHODS:
        return ""
    host = headers.get("host", "")
    if host and names is not None and not is_own_host(host, names):
        return "FOREIGN_HOST"
    origin = headers.get("origin", f"//{host}").partition("//")[2]
    site = headers.get("sec-fetch-site")
    # Only programs and old browsers send no Sec-Fetch-Site.
    is_own = origin.lower() == host.lower() if site is None else site.lower() in _OWN_SITES
    return "" if is_own else "FOREIGN_ORIGIN"


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return whether a ``Host`` header means this machine.

    Addresses, names without a dot and the host's own ``names`` do.
    """
    name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
    name = name.lower().rstrip(".")
    return bool(name) and (_is_local(name) or name in map(str.lower, names))


@lru_cache(256)
def _is_local(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
