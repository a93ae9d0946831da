"""Message bodies for measurements: text that compresses as log lines do, preceded by stamps.

A stamp is two numbers of 64 bits in the machine's own order, for both sides are on one machine: the
time, and a word that no other message of the run has. The sum of all words, modulo 2**64, is the
checksum by which what came is compared with what went. Pure.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

HEAD = struct.Struct("=QQ")
HEAD_SIZE = HEAD.size
MAX_TAG = 0xFFFF

POOL_SIZE = 1 << 20
KEPT_BATCHES = 32
KEPT_TAILS = 1024

_WORDS = [
    "GET",
    "POST",
    "200",
    "304",
    "/",
    "/pricing",
    "/docs/install",
    "/cart",
    "HTTP/1.1",
    "user",
    "session",
    "Firefox/145.0",
    "Chrome/142.0",
    "latency_ms",
    "region",
    "eu-west",
    "us-east",
]


class Bodies:
    """Makes bodies of ``low`` to ``high`` bytes, the same ones for the same ``seed``."""

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        self._low, self._high = size
        self._rng = random.Random(seed)
        self._pool = _text(self._rng, max(POOL_SIZE, 2 * self._high))
        self._batches: list[list[bytes]] = []
        self._tails: list[bytes] = []
        self._turn = 0

    def batch(self, count: int) -> list[bytes]:
        """``count`` bodies without a stamp. They repeat: making them is not measured."""
        if not self._batches or len(self._batches[0]) < count:
            self._batches = [
                [self._cut(self._size()) for _ in range(count)] for _ in range(KEPT_BATCHES)
            ]
        self._turn += 1
        bodies = self._batches[self._turn % KEPT_BATCHES]
        return bodies if len(bodies) == count else bodies[:count]

    def stamped(self, count: int, time_ns: int, first_word: int) -> list[bytes]:
        """``count`` bodies with the same time and words that count up from ``first_word``."""
        if not self._tails:
            self._tails = [self._cut(self._size() - HEAD_SIZE) for _ in range(KEPT_TAILS)]
        start, tails, pack = self._turn, self._tails, HEAD.pack
        self._turn += count
        return [
            pack(time_ns, first_word + i) + tails[(start + i) % KEPT_TAILS] for i in range(count)
        ]

    def _size(self) -> int:
        return self._rng.randint(self._low, self._high)

    def _cut(self, size: int) -> bytes:
        start = self._rng.randrange(len(self._pool) - size)
        return self._pool[start : start + size]


def first_word(tag: int, publisher: int) -> int:
    """The word of a publisher's first message; it has 2**32 of them."""
    return tag << 48 | publisher << 32


def read_stamps(bodies: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Times and words of bodies that all have a stamp."""
    numbers = memoryview(b"".join([body[:HEAD_SIZE] for body in bodies])).cast("Q")
    return numbers[0::2].tolist(), numbers[1::2].tolist()


def has_stamp(body: bytes, tag: int) -> bool:
    """Tell whether a body is one of the run with this tag."""
    return len(body) >= HEAD_SIZE and HEAD.unpack_from(body)[1] >> 48 == tag


def _text(rng: random.Random, size: int) -> bytes:
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(_WORDS) if rng.random() < 0.75 else str(rng.randrange(10**6))
        words.append(word)
        length += len(word) + 1
    return " ".join(words).encode()[:size]
