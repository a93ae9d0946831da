"""Calls that a web page made a browser send: the API has no passwords, so these are refused. Pure.

A page of any site can POST to a port of the machine that shows it, and after DNS rebinding it can
call the API under the page's own name. Browsers say so: ``Sec-Fetch-Site`` and ``Origin`` of a
state-changing call name the page, and ``Host`` is a name that is not ours. Programs send neither of
the first two. The host is looked at only when nobody but this machine can connect, and only DNS
names with a dot are foreign: an address cannot be rebound, and names such as ``nsqd`` are those of
containers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = ("same-origin", "none")
_LOCAL = re.compile(r"[^.]*|\d+\.\d+\.\d+\.\d+|\[.*\]|(.*\.)?localhost\.?", re.IGNORECASE)


class ForeignCalls:
    """``names`` are those of this host; None lets every ``Host`` pass."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else {name.lower() for name in names}

    def is_own_host(self, host: str) -> bool:
        """Return whether a ``Host`` header names this daemon."""
        if self._names is None:
            return True
        name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
        return _LOCAL.fullmatch(name) is not None or name.lower() in self._names

    def refusal(self, method: str, headers: Mapping[str, str]) -> str:
        """Return the code to refuse a call with, ``""`` when it may pass."""
        if method in _SAFE_METHODS:
            return ""
        host = headers.get("host", "")
        if not self.is_own_host(host):
            return "FOREIGN_HOST"
        if headers.get("sec-fetch-site", "none").lower() not in _OWN_SITES:
            return "FOREIGN_ORIGIN"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "FOREIGN_ORIGIN"
        return ""
