"""The user that a client is, by its secret, its certificate or its address.

A secret is looked up as a token first, which costs one hash. Then it may be a JWT, and then
``USER:SECRET``. A client whose secret names nobody can still be an entry of the file without a
secret, because clients that are known by their address send any text.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nsqtools.authd.json_tokens import JSONTokens
from nsqtools.authd.passwords import PasswordChecker
from nsqtools.authd.users import Client, User, Users, hash_token, parse_users
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue, read_small, warn_of_exposure

log = logging.getLogger("nsqtools")

MAX_FILE_BYTES = 64 << 20


class Identity(NamedTuple):
    """A user, the way in which the client is known, and the seconds for which that holds."""

    user: User
    method: str
    valid_s: float = float("inf")


class _Loaded(NamedTuple):
    users: Users
    tokens: JSONTokens


class Authority:
    """The users in a file, which is read again when it has changed. A broken file is refused, and
    the users before it stay. Raises `ConfigurationError`.
    """

    def __init__(self, path: Path) -> None:
        warn_of_exposure(path)
        self.path = path
        self.rejection = ""  # why the file as it is now is refused
        self._renewed = ReloadedValue([str(path)], lambda: _load(path))
        self._loaded = self._renewed.get()
        self._passwords = PasswordChecker()

    @property
    def users(self) -> Users:
        """The users as they were read last."""
        return self._loaded.users

    def refresh(self) -> None:
        """Read the file if it has changed. Call it on any thread: a large file takes a second."""
        try:
            self._loaded = self._renewed.check()
            self.rejection = ""
        except ConfigurationError as exc:
            if str(exc) != self.rejection:
                log.warning("%s; using the previous content", exc)
            self.rejection = str(exc)

    async def identify(self, secret: str, client: Client) -> Identity | None:
        """Return who a client with this secret is. Raises `TooManyFailures`."""
        users, tokens = self._loaded
        if secret:
            for identity in _by_token(users, tokens, secret):
                if not identity.user.reason_to_refuse(client):
                    return identity
            claim = await self._by_name(users, secret, client)
            if claim is not None and not claim.user.reason_to_refuse(client):
                return claim
        for user in users.without_secret:
            if not user.reason_to_refuse(client):
                return Identity(user, "common_name" if user.common_name else "address")
        return None

    async def _by_name(self, users: Users, secret: str, client: Client) -> Identity | None:
        """Return the user of ``USER:TOKEN`` and ``USER:SECRET``. Raises `TooManyFailures`."""
        name, colon, word = secret.partition(":")
        if not colon:
            return None
        user = users.by_name.get(name)
        if user is not None and hash_token(word) in user.tokens:
            return Identity(user, "token")
        expected = (user.password or None) if user is not None else None
        is_right = await self._passwords.is_right(name, word, expected, client.address)
        return Identity(user, "password") if user is not None and is_right else None


def sent_secret(authorization: str) -> str:
    """Return the secret of an ``Authorization`` header, Bearer or Basic; "" without one."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode()
        except ValueError:
            return ""
    return ""


def _by_token(users: Users, tokens: JSONTokens, secret: str) -> Iterator[Identity]:
    for user in users.by_token.get(hash_token(secret), ()):
        yield Identity(user, "token")
    if subject := tokens.verify(secret):
        user_of_subject = users.by_name.get(subject.name)
        if user_of_subject is not None and user_of_subject.takes_jwt:
            yield Identity(user_of_subject, "jwt", subject.expires_s - time.time())


def _load(path: Path) -> _Loaded:
    users = load_users(path)
    return _Loaded(users, JSONTokens(users.issuers, str(path)))


def load_users(path: Path) -> Users:
    """Read a users file. Raises `ConfigurationError`."""
    return parse_users(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `ConfigurationError`."""
    try:
        return read_small(path, MAX_FILE_BYTES).decode()
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path} ({exc.strerror or exc})") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{path} is not text in UTF-8") from exc
    except ValueError as exc:
        raise ConfigurationError(f"cannot read {path}: {exc}") from exc
