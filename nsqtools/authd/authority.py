"""The user that a client is, by its secret, its certificate or its address.

A secret is looked up as a token first, which costs one hash. Then it may be a JWT, and then
``USER:SECRET``. A client whose secret names nobody can still be an entry of the file without a
secret, because clients that are known by their address send any text. Such a text may look like
``USER:SECRET``, so the limit of guesses does not keep that client out. It holds until the end of
the limit, because the secret of another user is not checked before.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nsqtools.authd.passwords import PasswordChecker, TooManyFailures
from nsqtools.authd.users import Client, Issuer, User, Users, hash_token, parse_users
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import append_whole
from nsqtools.files.opening import ReloadedValue, open_to_append, read_small, warn_of_exposure
from nsqtools.records.prometheus import Metric, metric_of

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
        limit: TooManyFailures | None = None
        if secret:
            for identity in _by_token(users, tokens, secret):
                if not identity.user.reason_to_refuse(client):
                    return identity
            try:
                claim = await self._by_name(users, secret, client)
            except TooManyFailures as exc:
                claim, limit = None, exc
            if claim is not None and not claim.user.reason_to_refuse(client):
                return claim
        valid_s = limit.args[0] if limit else float("inf")
        for user in users.without_secret:
            if not user.reason_to_refuse(client):
                method = "common_name" if user.common_name else "address"
                return Identity(user, method, valid_s)
        if limit is not None:
            raise limit
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
    users = parse_users(read_text_file(path), str(path))
    if not users.by_name:  # also while a program truncates the file to write it again
        raise ConfigurationError(f"{path} has no user", hint="nsq authd hash --new USER makes one.")
    return users


def read_text_file(path: Path) -> str:
    """Return the text of a file, without a byte order mark. Raises `ConfigurationError`."""
    try:
        return read_small(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path} ({exc.strerror or exc})") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{path} is not text in UTF-8") from exc
    except ValueError as exc:
        raise ConfigurationError(f"cannot read {path}: {exc}") from exc


# -- JSON Web Tokens ------------------------------------------------------------------------------

# The key of an issuer decides the algorithm, never the token: RS256 for RSA, ES256 for P-256,
# EdDSA for Ed25519 and Ed448. A token needs ``exp``, ``aud``, ``iss`` and the claim with the user.

LEEWAY_S = 10.0
"""The clocks of two machines that are synchronized differ by less."""

MIN_RSA_BITS = 2048
"""RFC 7518, section 3.3."""


class Subject(NamedTuple):
    """The user that a token names, until ``expires_s`` since 1970."""

    name: str
    expires_s: float


class _Key(NamedTuple):
    issuer: Issuer
    key: Any
    algorithm: str


class JSONTokens:
    """Verifies the tokens of some issuers. Raises `ConfigurationError` for a key, with its line in
    the file called ``file_name``."""

    def __init__(self, issuers: Sequence[Issuer], file_name: str) -> None:
        self._keys = [_load_key(issuer, file_name) for issuer in issuers]

    def verify(self, token: str) -> Subject | None:
        """Return the user that a valid token names, None for any other text."""
        if not self._keys or token.count(".") != 2:
            return None
        import jwt

        for issuer, key, algorithm in self._keys:
            try:
                claims = jwt.decode(
                    token,
                    key,
                    algorithms=[algorithm],
                    audience=issuer.audience,
                    issuer=issuer.issuer,
                    leeway=LEEWAY_S,
                    options={"require": ["exp", "aud", "iss", issuer.claim]},
                )
                name, expires_s = claims[issuer.claim], float(claims["exp"])
            except (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
                continue  # each part may be any JSON
            if isinstance(name, str):
                return Subject(name, expires_s)
        return None


def _load_key(issuer: Issuer, file_name: str) -> _Key:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    where = f"{file_name}, line {issuer.line}: jwt {issuer.issuer}"
    try:
        key = load_pem_public_key(issuer.key.encode())
    except (ValueError, UnsupportedAlgorithm):
        hint = "Give the public key of the issuer, which begins with -----BEGIN PUBLIC KEY-----."
        raise ConfigurationError(f"{where}: key is no public key in PEM", hint=hint) from None
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < MIN_RSA_BITS:
            raise ConfigurationError(f"{where}: the RSA key has fewer than {MIN_RSA_BITS} bits")
        return _Key(issuer, key, "RS256")
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return _Key(issuer, key, "ES256")
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return _Key(issuer, key, "EdDSA")
    raise ConfigurationError(f"{where}: key must be RSA, P-256, Ed25519 or Ed448")


# -- the record of decisions ----------------------------------------------------------------------

# Neither has a secret, nor a text that could be one: a refused client has the name of a user only
# if the file has that user.

REPORT_S = 60.0  # a full disk is reported once a minute


class AuditFile:
    """A file of one JSON document a line, or none for None. Thread-safe.

    It is opened for each line, so it may be renamed meanwhile. Raises `OutputError` when it cannot
    be written, also at once.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            self._append(path, "")

    def write(self, **fields: Any) -> None:
        """Append a document of the time and these fields."""
        if self._path is not None:
            document = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
            self._append(self._path, json.dumps(document) + "\n")

    @staticmethod
    def _append(path: Path, line: str) -> None:
        try:
            with open_to_append(path) as file:
                append_whole(file.fileno(), line.encode(), is_durable=False)
        except OSError as exc:
            raise OutputError(f"cannot write the audit log {path} ({exc.strerror})") from exc


class Audit:
    """Records decisions. Raises `OutputError` for a file that cannot be written at the start."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = AuditFile(path)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._reported_s = -REPORT_S

    def record(
        self, request: str, result: str, client: Client, identity: Identity | None, peer: str
    ) -> None:
        """Record the decision about a request that ``peer``, an nsqd or a client, has sent."""
        self._counts[request, result] += 1
        try:
            self._file.write(
                request=request,
                result=result,
                user=identity and identity.user.name,
                method=identity and identity.method,
                remote=client.address,
                common_name=client.common_name or None,
                tls=client.tls,
                peer=peer,
            )
        except OutputError as exc:  # an nsqd without its auth server would refuse all clients
            now_s = time.monotonic()
            if now_s - self._reported_s >= REPORT_S:
                self._reported_s = now_s
                log.error("%s", exc)

    def metrics(self) -> Iterator[Metric]:
        """Return the counts for Prometheus."""
        yield metric_of(
            "nsq_authd_requests_total",
            "Requests by what was asked for and what was decided.",
            [
                ({"request": request, "result": result}, count)
                for (request, result), count in sorted(self._counts.items())
            ],
        )
