"""Passwords: their hashes by scrypt, and checks that slow down guesses.

A hash is ``scrypt$16384$8$1$SALT$HASH``, in base64. Checking one takes a tenth of a second of CPU
time and 16 MB, on purpose. So a password that was right is remembered, as a keyed digest, until the
user's hash changes; the others are checked one at a time on another thread, so that nothing else
waits for guesses; and after some wrong ones both the address and the user have to wait. An unknown
user costs as much as a wrong password.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import os
import time
from collections.abc import Callable
from typing import TypeVar

COST, BLOCK, PARALLEL = 16384, 8, 1
PREFIX = f"scrypt${COST}${BLOCK}${PARALLEL}$"
FREE_FAILURES = 5
FREE_FAILURES_OF_USER = 20
"""More than of an address: guesses from many addresses must not lock out a user immediately."""
LONGEST_WAIT_S = 60.0
MAX_REMEMBERED = 10_000
MAX_PENDING = 16
"""Passwords that wait to be checked, about two seconds."""

Key = TypeVar("Key")
Value = TypeVar("Value")


def hash_password(password: str) -> str:
    """Return the hash of a password, with a new salt."""
    salt = os.urandom(16)
    return f"{PREFIX}{_base64(salt)}${_base64(_scrypt(password, salt))}"


def parse_hash(text: str) -> tuple[bytes, bytes]:
    """Return salt and hash. Raises ``ValueError``, also for a hash at another cost."""
    if not text.startswith(PREFIX):
        raise ValueError("it does not begin with " + PREFIX)
    salt, expected = map(base64.b64decode, text.removeprefix(PREFIX).split("$"))
    return salt, expected


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _scrypt(password: str, salt: bytes) -> bytes:
    data = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=salt, n=COST, r=BLOCK, p=PARALLEL, dklen=32)


def _matches(password: str, text: str) -> bool:
    salt, expected = parse_hash(text)
    return hmac.compare_digest(_scrypt(password, salt), expected)


class TooManyFailures(Exception):
    """This address or user must wait; the argument is the number of seconds."""


class GuessLimit:
    """Wrong passwords by origin. After ``free`` of them each wait is twice as long."""

    def __init__(self, free: int, clock: Callable[[], float]) -> None:
        self._free = free
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}  # count, and end of the wait

    def wait_s(self, origin: str) -> float:
        """Return how long an origin has to wait; not positive if it need not."""
        count, end_s = self._failures.get(origin, (0, 0.0))
        return end_s - self._clock() if count >= self._free else 0.0

    def add(self, origin: str) -> None:
        """Count a wrong password."""
        count = self._failures.pop(origin, (0, 0.0))[0] + 1
        wait_s = min(2.0 ** min(count - self._free, 62), LONGEST_WAIT_S)
        self._failures[origin] = count, self._clock() + wait_s
        _trim(self._failures)

    def forget(self, origin: str) -> None:
        """Forget the wrong passwords of an origin that gave a right one."""
        self._failures.pop(origin, None)


class PasswordChecker:
    """Checks passwords on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._nobody = hash_password(_base64(os.urandom(16)))
        self._key = os.urandom(32)
        self._remembered: dict[bytes, None] = {}
        self._address_limit = GuessLimit(FREE_FAILURES, clock)
        self._user_limit = GuessLimit(FREE_FAILURES_OF_USER, clock)
        self._lock = asyncio.Lock()
        self._pending = 0

    async def is_right(self, user: str, password: str, expected: str | None, address: str) -> bool:
        """Check a password that came from an address against the hash of the user, None for an
        unknown one. Raises `TooManyFailures`."""
        text = f"{user}\0{password}\0{expected}"
        digest = hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), "sha256")
        if digest in self._remembered:
            return True
        network = _network_of(address)
        self._refuse_guesses(network, user)
        if self._pending >= MAX_PENDING:
            raise TooManyFailures(1.0)
        self._pending += 1
        try:
            async with self._lock:  # many may come at the same time: each sees those before it
                if digest in self._remembered:
                    return True
                self._refuse_guesses(network, user)
                if not await asyncio.to_thread(_matches, password, expected or self._nobody):
                    self._address_limit.add(network)
                    self._user_limit.add(user)
                    return False
                self._address_limit.forget(network)
                self._user_limit.forget(user)
                self._remembered[digest] = None
                _trim(self._remembered)
                return True
        finally:
            self._pending -= 1

    def _refuse_guesses(self, network: str, user: str) -> None:
        wait_s = max(self._address_limit.wait_s(network), self._user_limit.wait_s(user))
        if wait_s > 0:
            raise TooManyFailures(wait_s)


def as_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a text as an address, None for a name. IPv4 within IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network_of(address: str) -> str:
    """Return the origin of a guess: one machine has a whole /64 of IPv6."""
    ip = as_ip(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((ip, 64), strict=False))
    return address


def _trim(table: dict[Key, Value]) -> None:
    while len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]
