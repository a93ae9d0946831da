"""The sessions of browsers that have logged in.

A session is a random token in a cookie, for which this process keeps the ``Authorization`` header
that the form of the login amounts to. Each request is authenticated with it as if it had been sent,
so the next request of a removed user is refused. A session ends by the log out, after `IDLE_S`, and
with the process.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

COOKIE = "nsq_session"
IDLE_S = 12 * 3600.0  # a working day
MAX_SESSIONS = 10_000


class _Session(NamedTuple):
    authorization: str
    used_s: float


class Sessions:
    """The sessions of browsers, on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}  # the last one used is the last

    def begin(self, authorization: str) -> str:
        """Return the token of a new session. The least recently used of too many ends."""
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        self._sessions[token] = _Session(authorization, self._clock())
        return token

    def authorization(self, token: str) -> str:
        """Return the header of a session, "" if there is none."""
        session = self._sessions.pop(token, None)
        if session is None or self._clock() - session.used_s > IDLE_S:
            return ""
        self._sessions[token] = session._replace(used_s=self._clock())
        return session.authorization

    def end(self, token: str) -> None:
        """End a session."""
        self._sessions.pop(token, None)


def authorization_of(fields: Mapping[str, str]) -> str:
    """Return the header of basic authentication for the fields of the form."""
    pair = f"{fields.get('user', '')}:{fields.get('password', '')}".encode("utf-8", "replace")
    return f"Basic {base64.b64encode(pair).decode()}"
