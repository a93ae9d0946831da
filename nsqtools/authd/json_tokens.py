"""JSON Web Tokens of other issuers (RFC 7519), verified by PyJWT.

The key of an issuer decides the algorithm, never the token: RS256 for RSA, ES256 for P-256, EdDSA
for Ed25519 and Ed448. A token needs ``exp``, ``aud``, ``iss`` and the claim with the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nsqtools.authd.users import Issuer
from nsqtools.errors import ConfigurationError

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
            except (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError):
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
