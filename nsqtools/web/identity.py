"""Who asks: by a password of ``--auth``, or by the header that a trusted proxy sets.

    authenticate(headers, peer)  the user; "" for anybody where no users are configured

HTTP's basic authentication is used, which browsers and scripts know; there is no session to keep,
steal or lose. A header is believed only from the addresses of ``--trusted-proxy``: anybody else
could write it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass

from nsqtools.web.guard import basic_credentials
from nsqtools.web.passwords import PasswordFile
from nsqtools.web.settings import WebSettings, as_ip

MAX_USER = 256


@dataclass(frozen=True, slots=True)
class User:
    """``name`` is "" for somebody unknown. ``may_change`` is whether writes are allowed."""

    name: str = ""
    may_change: bool = False


class Identities:
    """Tells users apart. Thread-safe."""

    def __init__(self, settings: WebSettings) -> None:
        self._settings = settings
        self._passwords = PasswordFile(settings.auth_file) if settings.auth_file else None
        self._key = os.urandom(32)

    def authenticate(self, headers: Mapping[str, str], peer: str) -> User | None:
        """Return the user who asks from the address ``peer``, None for one who has to log in.

        Checking a password takes time. Raises `TooManyFailures`.
        """
        name = self._of_proxy(headers, peer)
        if not name and self._passwords is not None:
            given = basic_credentials(headers.get("authorization", ""))
            if given is None or not self._passwords.is_right(*given, peer):
                return None
            name = given[0]
        return User(name, self._may_change(name))

    def token(self, user: User) -> str:
        """Return the token that a form of this user has to carry."""
        return hmac.digest(self._key, f"csrf\0{user.name}".encode(), "sha256").hex()

    def is_token(self, user: User, text: str) -> bool:
        """Tell whether a form carries the token of the user."""
        given = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        expected = hashlib.sha256(self.token(user).encode()).digest()
        return hmac.compare_digest(given, expected)

    def _may_change(self, name: str) -> bool:
        settings = self._settings
        if not settings.allow_changes:
            return False
        return not settings.admin_users or name in settings.admin_users

    def _of_proxy(self, headers: Mapping[str, str], peer: str) -> str:
        address = as_ip(peer)
        if address is None or not any(address in each for each in self._settings.trusted_proxies):
            return ""
        return headers.get(self._settings.acl_http_header.lower(), "")[:MAX_USER]
