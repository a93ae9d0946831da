"""What the demonstration shows. Each step runs the real ``nsq``, and checks its own numbers.

It happens to click events of a web site, as its log would have them, the same every time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from nsqtools.demo.stage import DemoFailed, Stage

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
    """Log lines, one JSON object each, without newlines."""
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


CLICKS = 5000
SHOWN = 3
LOG = "clicks.log"
ARCHIVE = "archive"
SLICE = '"page": "/cart"'


class StoryWriter:
    """Writes the story, each line as soon as it is known."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout

    def announce(self, purpose: str, *commands: str) -> None:
        """What a step is for, and how it is typed."""
        lines = "".join(f"  $ {command}\n" for command in commands)
        self.write(f"{purpose}:\n{lines}")

    def tell(self, outcome: str) -> None:
        """What came of it."""
        lines = [f"    {line}".rstrip() for line in outcome.strip("\n").splitlines()]
        self.write("\n".join([*lines, "", ""]))

    def write(self, text: str) -> None:
        """Text as it is."""
        self._stdout.write(text)
        self._stdout.flush()


class Story:
    """The steps, on a stage. Raises `DemoFailed`, `DemoStopped`."""

    def __init__(self, stage: Stage, teller: StoryWriter) -> None:
        self._stage = stage
        self._teller = teller
        self._clicks = list(click_events(CLICKS))

    def run(self) -> None:
        """Everything but Spark, which is `spark.Pipeline`."""
        self._start()
        self._create()
        self._publish()
        self._tail()
        self._archive()
        self._read_back()
        self._look()
        self._replay()

    def _start(self) -> None:
        stage = self._stage
        register = ("nsqd", "--lookupd-tcp-address", stage.lookupd.tcp_address)
        self._teller.announce(
            "Start nsqlookupd, and an nsqd that registers with it",
            *(f"{stage.shown(*words)} &" for words in (("nsqlookupd",), register)),
        )
        addresses = f"nsqlookupd {stage.lookupd.http_address}, nsqd {stage.nsqd.tcp_address}"
        self._teller.tell(f"here on free ports: {addresses}")

    def _create(self) -> None:
        topic = ("topic", "create", "clicks")
        channels = ("channel", "create", "clicks", "live", "archive")
        self._announce("Create a topic and two channels, each gets every message", topic, channels)
        said = [self._stage.run(*command).err for command in (topic, channels)]
        self._teller.tell("".join(said))

    def _publish(self) -> None:
        (self._stage.directory / LOG).write_bytes(b"\n".join(self._clicks) + b"\n")
        command = ("pub", "-t", "clicks", f"@{LOG}")
        self._announce("Publish a log of clicks", command)
        said = self._stage.run(*command).err
        check(said.startswith(f"nsq: {CLICKS} confirmed, 0 rejected, 0 unknown, 0 unsent"), said)
        self._teller.tell(said)

    def _tail(self) -> None:
        command = ("tail", "-t", "clicks", "-c", "live", "-n", str(SHOWN))
        self._announce("See some of them", command)
        lines = self._stage.run(*command).lines
        check(len(lines) == SHOWN, f"{SHOWN} messages were asked for, and {len(lines)} came")
        check(set(lines) <= set(self._clicks), "a message came out that did not go in")
        self._teller.tell(text(lines))

    def _archive(self) -> None:
        lookupd = self._stage.lookupd.http_address
        command = (
            "to-file",
            "-t",
            "clicks",
            "-c",
            "archive",
            "--lookupd-http-address",
            lookupd,
            "--output-dir",
            ARCHIVE,
            "--gzip",
            "--until-empty",
        )
        self._announce("Archive all of them, from the nsqd that nsqlookupd names", command)
        said = self._stage.run(*command).err
        check(said.startswith(f"nsq: {CLICKS} messages, "), said)
        self._teller.tell(said)

    def _read_back(self) -> None:
        command = ("archive", "cat", ARCHIVE, "--bodies")
        self._announce("Read the archive back", command)
        lines = self._stage.run(*command).lines
        check(sorted(lines) == sorted(self._clicks), "the archive must have every click, once")
        self._teller.tell(f"{len(lines)} lines: every click, once and unchanged")

    def _look(self) -> None:
        command = ("stat", "--once")
        self._announce("Look at the queues", command)
        table = self._stage.run(*command, as_on_a_terminal=True).out.decode()
        depths = {channel: int(depth) for channel, depth in DEPTH.findall(table)}
        left = {"archive": 0, "live": CLICKS - SHOWN}
        check(depths == left, f"{left} should be left, and it is {depths}")
        self._teller.tell(table)

    def _replay(self) -> None:
        expected = [click for click in self._clicks if SLICE.encode() in click]
        replay = ("replay", ARCHIVE, "--topic", "carts", "--grep", SLICE)
        tail = ("tail", "-t", "carts", "-c", "live", "--until-empty")
        self._announce("Publish a part of the archive again, into a second topic", replay, tail)
        said = self._stage.run(*replay).err
        check(said.startswith(f"nsq: {len(expected)} confirmed, 0 rejected"), said)
        lines = self._stage.run(*tail).lines
        check(sorted(lines) == sorted(expected), f"{len(expected)} clicks should have come again")
        self._teller.tell(f"{said}{text(lines[:SHOWN])}\n... {len(lines)} messages")

    def _announce(self, purpose: str, *commands: Sequence[str]) -> None:
        self._teller.announce(purpose, *(self._stage.shown(*words) for words in commands))


DEPTH = re.compile(r"^clicks +(archive|live) +(\d+) ", re.MULTILINE)


def text(lines: Sequence[bytes]) -> str:
    """Lines of output as text."""
    return b"\n".join(lines).decode()


def check(holds: bool, what: str) -> None:
    """Raise `DemoFailed` unless it holds."""
    if not holds:
        raise DemoFailed(f"the demonstration failed: {what}")
