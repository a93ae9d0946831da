"""The file of ``--auth``: a line ``USER:HASH`` for each user, with hashes by scrypt.

    ann:scrypt$16384$8$1$SALT$HASH      base64, made by `nsq web --print password`

Checking a password takes a tenth of a second of CPU time and 16 MB, on purpose. So one that was
right is remembered, as a keyed digest, and after some wrong ones an address has to wait: nobody can
keep the server busy with guesses. An unknown user costs as much as a wrong password.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import threading
import time
from binascii import Error as Base64Error
from pathlib import Path

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import open_to_read

COST, BLOCK, PARALLEL = 16384, 8, 1
MAX_MEMORY = 64 << 20
MAX_USERS = 10_000
FREE_FAILURES = 5
LONGEST_WAIT_S = 60.0
MAX_REMEMBERED = 10_000


def hash_password(password: str) -> str:
    """Return what stands after the colon in the file."""
    salt = os.urandom(16)
    made = _scrypt(password, salt, COST, BLOCK, PARALLEL)
    return "$".join(("scrypt", str(COST), str(BLOCK), str(PARALLEL), _text(salt), _text(made)))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=cost, r=block, p=parallel, maxmem=MAX_MEMORY, dklen=32
    )


class TooManyFailures(Exception):
    """Nothing is checked for this address for ``wait_s`` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


class PasswordFile:
    """The users in a file, read once. Thread-safe. Raises `ConfigurationError`."""

    def __init__(self, path: Path) -> None:
        self._hashes = dict(_read(path))
        self._nobody = hash_password(_text(os.urandom(16)))
        self._key = os.urandom(32)
        self._known: dict[bytes, None] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # count, and when checked again
        self._lock = threading.Lock()
        self._checking = threading.Lock()

    def is_right(self, user: str, password: str, address: str) -> bool:
        """Check a password that came from an address. Raises `TooManyFailures`."""
        digest = hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")
        with self._lock:
            if digest in self._known:
                return True
            count, again_s = self._failures.get(address, (0, 0.0))
            wait_s = again_s - time.monotonic()
            if count >= FREE_FAILURES and wait_s > 0:
                raise TooManyFailures(wait_s)
        with self._checking:  # one at a time, whatever the number of requests
            is_right = _matches(password, self._hashes.get(user, self._nobody))
        is_right = is_right and user in self._hashes
        with self._lock:
            if is_right:
                self._failures.pop(address, None)
                self._known[digest] = None
                _trim(self._known)
            else:
                count = self._failures.pop(address, (0, 0.0))[0] + 1
                wait_s = min(2.0 ** (count - FREE_FAILURES), LONGEST_WAIT_S)
                self._failures[address] = count, time.monotonic() + wait_s
                _trim(self._failures)
        return is_right


def _trim(table: dict[str, tuple[int, float]] | dict[bytes, None]) -> None:
    while len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]  # type: ignore[arg-type]


def _matches(password: str, text: str) -> bool:
    cost, block, parallel, salt, expected = _parts(text)
    return hmac.compare_digest(_scrypt(password, salt, cost, block, parallel), expected)


def _parts(text: str) -> tuple[int, int, int, bytes, bytes]:
    """Read a hash. Raises ``ValueError``."""
    kind, cost, block, parallel, salt, expected = text.split("$")
    numbers = int(cost), int(block), int(parallel)
    if kind != "scrypt" or numbers[0] * numbers[1] * 128 * numbers[2] > MAX_MEMORY // 2:
        raise ValueError
    return *numbers, base64.b64decode(salt), base64.b64decode(expected)


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        with open_to_read(path) as file:
            lines = file.read().decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not text in UTF-8") from None
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path} ({exc.strerror})") from exc
    users = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, _, text = line.strip().partition(":")
        try:
            _matches("", text)
        except (ValueError, Base64Error):
            raise ConfigurationError(
                f"{path}, line {number}: not USER:HASH",
                hint="nsq web --print password makes a line for this file.",
            ) from None
        users.append((user, text))
    if not users or len(users) > MAX_USERS:
        raise ConfigurationError(f"{path} has {len(users)} users, and 1 to {MAX_USERS} are wanted")
    return users
