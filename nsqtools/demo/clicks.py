"""Click events of a web site, as its log would have them. Pure, and the same every time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

PAGES = {
    "/": 30,
    "/docs": 22,
    "/docs/install": 12,
    "/pricing": 12,
    "/blog/2026/queues": 10,
    "/login": 8,
    "/cart": 6,
}
"""Each page with how often it is seen, in percent."""

AGENTS = ("Firefox/145.0", "Chrome/142.0", "Safari/26.1", "curl/8.16.0")


def click_events(count: int, seed: int = 1) -> Iterator[bytes]:
    """So many log lines, one JSON object each, without newlines."""
    rng = random.Random(seed)
    pages, weights = list(PAGES), list(PAGES.values())
    for number in range(count):
        event = {
            "n": number,
            "page": rng.choices(pages, weights)[0],
            "user": rng.randrange(400),
            "ms": round(rng.lognormvariate(4, 0.8)),
            "agent": rng.choice(AGENTS),
        }
        yield json.dumps(event).encode()
