"""The demonstration: what the tool does, shown on an nsqd of its own that is gone afterwards.

Each step runs the real ``nsq`` as a process, says which command line it stands for, and checks its
own numbers. Nothing of the user's is touched: ports are free ones, files are temporary.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nsqtools.errors import NsqError

CLICKS = 5000
SHOWN = 3
PAGES = ("/", "/pricing", "/docs", "/docs/install", "/blog/2026/queues", "/login", "/cart")
AGENTS = ("Firefox/145.0", "Chrome/142.0", "Safari/26.1", "curl/8.16.0")


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the demonstration: why, the command line, and what came of it."""

    purpose: str
    command: str
    outcome: str


class DemoFailed(NsqError):
    """A step of the demonstration did not end as it should."""


def demonstrate(show: Callable[[Step], None]) -> None:
    """Run all steps, each told with ``show`` when it is done. Raises `DemoFailed`."""
    from nsqtools.server.embedded import EmbeddedNsqd

    clicks = list(click_events(CLICKS))
    with EmbeddedNsqd() as nsqd:
        show(Step("Run an nsqd of our own", "nsq nsqd", f"listens on {nsqd.tcp_address}"))
        place = ["-t", "clicks", "--nsqd-tcp-address", nsqd.tcp_address]
        consume = ["tail", *place, "-c", "demo", "--nsqd-http-address", nsqd.http_address]
        _run([*consume, "--create", "--for", "50ms"])  # the channel is there before the messages

        _, said = _run(["pub", *place], stdin=b"".join(clicks))
        _check(said.startswith(f"nsq: {CLICKS} confirmed, 0 rejected"), said)
        show(Step("Publish a log", "cat clicks.log | nsq pub -t clicks", said.strip()))

        first, _ = _run([*consume, "-n", str(SHOWN)])
        _check(first.count(b"\n") == SHOWN, f"{SHOWN} messages were asked for")
        show(Step("Look at some", f"nsq tail -t clicks -c demo -n {SHOWN}", first.decode().strip()))

        rest, _ = _run([*consume, "--json", "--exit-idle", "500ms"])
        bodies = [json.loads(line)["body"].encode() + b"\n" for line in rest.splitlines()]
        _check(
            sorted([*first.splitlines(keepends=True), *bodies]) == sorted(clicks),
            "every click must come out as it went in",
        )
        show(
            Step(
                "Take the rest as JSON",
                "nsq tail -t clicks -c demo --json --exit-idle 500ms",
                f"{len(bodies)} messages; with the {SHOWN} above, every click came out unchanged",
            )
        )


def click_events(count: int, seed: int = 1) -> Iterator[bytes]:
    """Make log lines of a web site, one JSON object each."""
    rng = random.Random(seed)
    for number in range(count):
        event = {
            "n": number,
            "page": rng.choice(PAGES),
            "user": rng.randrange(400),
            "ms": round(rng.lognormvariate(4, 0.8)),
            "agent": rng.choice(AGENTS),
        }
        yield json.dumps(event).encode() + b"\n"


def _run(arguments: list[str], stdin: bytes = b"") -> tuple[bytes, str]:
    """Run ``nsq`` and return its stdout and stderr. Raises `DemoFailed`."""
    done = subprocess.run(
        [sys.executable, "-m", "nsqtools", *arguments],
        input=stdin,
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode()
    _check(done.returncode == 0, f"nsq {arguments[0]} ended with status {done.returncode}: {said}")
    return done.stdout, said


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(f"the demonstration failed: {what}")
