"""The demonstration: daemons on free ports, an empty directory, and the real ``nsq``, step by step.

Commands run in the directory and find the daemons through the environment, so that the command line
that runs is the one that is shown, but for the addresses in it: those are shown as the usual ones.
Nothing of the user's settings reaches them. Each step checks its own numbers. The events are clicks
of a web site, as its log would have them, the same every time.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TextIO

from nsqtools.errors import NsqError
from nsqtools.server.embedded import EmbeddedNsqd, EmbeddedNsqlookupd

TIMEOUT_S = 60.0


class DemoFailed(NsqError):
    """A step of the demonstration did not end as it should."""


class Ended(NamedTuple):
    """What a command wrote."""

    out: bytes
    err: str


@dataclass
class Leaving:
    """What a signal asks for: ``status`` is the exit status, ``process`` the command that runs.

    Trap: an exception of a signal handler may keep a lock for ever that was just to be released.
    """

    status: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def ask(self, number: int) -> None:
        """End the command, in the handler: `DemoStage.run` raises then."""
        self.status = 128 + number
        if self.process is not None:
            self.process.kill()


@contextmanager
def demo_stage(environ: Mapping[str, str], leaving: Leaving) -> Iterator[DemoStage]:
    """Daemons and a directory; everything is gone when it is left."""
    with (
        TemporaryDirectory(prefix="nsq-demo-", ignore_cleanup_errors=True) as directory,
        EmbeddedNsqlookupd() as lookupd,
        EmbeddedNsqd(lookupd_tcp_address=(lookupd.tcp_address,)) as nsqd,
    ):
        yield DemoStage(Path(directory), lookupd, nsqd, leaving, environ)


class DemoStage:
    """Where commands run: in ``directory``, beside the daemons."""

    def __init__(
        self,
        directory: Path,
        lookupd: EmbeddedNsqlookupd,
        nsqd: EmbeddedNsqd,
        leaving: Leaving,
        environ: Mapping[str, str],
    ) -> None:
        self.directory, self.lookupd, self.nsqd = directory, lookupd, nsqd
        self._leaving = leaving
        self._environ = self._environment(environ)
        self._usual = {
            lookupd.tcp_address: "127.0.0.1:4160",
            lookupd.http_address: "127.0.0.1:4161",
            nsqd.tcp_address: "127.0.0.1:4150",
            nsqd.http_address: "127.0.0.1:4151",
        }

    def shown(self, *arguments: str) -> str:
        """The command line as a person would type it where the daemons have the usual ports."""
        words = [self._usual.get(word, word) for word in arguments]
        return f"nsq {shlex.join(words)}"

    def run(self, *arguments: str) -> Ended:
        """Run ``nsq`` to its end.

        Raises `DemoFailed` when it fails or takes too long, ``SystemExit`` when a signal came.
        """
        failed = f"the demonstration failed: {self.shown(*arguments)}"
        process = self._leaving.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nsqtools", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.directory,
            env=self._environ,
            start_new_session=True,  # ^C is for us, who then end it
        )
        with process:
            if self._leaving.status is not None:  # while it was being started, or before
                process.kill()
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DemoFailed(f"{failed} took over {TIMEOUT_S:g} s") from None
        if self._leaving.status is not None:
            raise SystemExit(self._leaving.status)
        said, status = err.decode(errors="replace"), process.returncode
        if status != 0:
            raise DemoFailed(f"{failed} ended with status {status}: {said.strip()}")
        return Ended(out, said)

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        environ = {k: v for k, v in given.items() if not k.startswith("NSQ_")}
        for name in ("TMPDIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            environ[name] = str(self.directory / f".{name.lower()}")
            os.mkdir(environ[name])
        paths = [str(Path(__file__).parents[2]), *filter(None, [environ.get("PYTHONPATH")])]
        return environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "NO_COLOR": "1",
            "NSQ_NSQD_TCP_ADDRESS": self.nsqd.tcp_address,
            "NSQ_NSQD_HTTP_ADDRESS": self.nsqd.http_address,
        }


PAGES = {"/": 30, "/docs": 22, "/docs/install": 12, "/pricing": 12, "/blog/2026/queues": 10}
PAGES |= {"/login": 8, "/cart": 6}
"""Each page with how often it is seen, in percent."""

AGENTS = ("Firefox/145.0", "Chrome/142.0", "Safari/26.1", "curl/8.16.0")


def click_events(count: int) -> Iterator[bytes]:
    """Log lines, one JSON object each, without newlines."""
    rng = random.Random(1)
    for number in range(count):
        event = {
            "n": number,
            "page": rng.choices(list(PAGES), list(PAGES.values()))[0],
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


class Story:
    """The steps, on a stage, each written as soon as it is known. Raises `DemoFailed`."""

    def __init__(self, stage: DemoStage, stdout: TextIO) -> None:
        self._stage = stage
        self._stdout = stdout
        self._clicks = list(click_events(CLICKS))

    def write(self, text: str) -> None:
        """Text as it is."""
        self._stdout.write(text)
        self._stdout.flush()

    def announce(self, purpose: str, *commands: str) -> None:
        """What a step is for, and how it is typed."""
        lines = "".join(f"  $ {command}\n" for command in commands)
        self.write(f"{purpose}:\n{lines}")

    def tell(self, outcome: str) -> None:
        """What came of it."""
        lines = [f"    {line}".rstrip() for line in outcome.strip("\n").splitlines()]
        self.write("\n".join([*lines, "", ""]))

    def do(self, purpose: str, *commands: Sequence[str]) -> list[Ended]:
        """Announce commands and run them."""
        self.announce(purpose, *(self._stage.shown(*words) for words in commands))
        return [self._stage.run(*words) for words in commands]

    def run(self) -> None:
        """All of them."""
        stage, clicks = self._stage, self._clicks
        register = ("nsqd", "--lookupd-tcp-address", stage.lookupd.tcp_address)
        self.announce(
            "Start nsqlookupd, and an nsqd that registers with it",
            *(f"{stage.shown(*words)} &" for words in (("nsqlookupd",), register)),
        )
        addresses = f"nsqlookupd {stage.lookupd.http_address}, nsqd {stage.nsqd.tcp_address}"
        self.tell(f"here on free ports: {addresses}")

        topic = ("topic", "create", "clicks")
        channels = ("channel", "create", "clicks", "live", "archive")
        done = self.do("Create a topic and two channels, each gets every message", topic, channels)
        self.tell("".join(each.err for each in done))

        (stage.directory / LOG).write_bytes(b"\n".join(clicks) + b"\n")
        [published] = self.do("Publish a log of clicks", ("pub", "-t", "clicks", f"@{LOG}"))
        said = published.err
        check(said.startswith(f"nsq: {CLICKS} confirmed, 0 rejected, 0 unknown, 0 unsent"), said)
        self.tell(said)

        tail = ("tail", "-t", "clicks", "-c", "live", "-n", str(SHOWN))
        lines = self.do("See some of them", tail)[0].out.splitlines()
        check(len(lines) == SHOWN, f"{SHOWN} messages were asked for, and {len(lines)} came")
        check(set(lines) <= set(clicks), "a message came out that did not go in")
        self.tell(b"\n".join(lines).decode())

        to_file = ["to-file", "-t", "clicks", "-c", "archive"]
        to_file += ["--lookupd-http-address", stage.lookupd.http_address]
        to_file += ["--output-dir", ARCHIVE, "--gzip", "--until-empty"]
        purpose = "Archive all of them, from the nsqd that nsqlookupd names"
        said = self.do(purpose, to_file)[0].err
        check(said.startswith(f"nsq: {CLICKS} messages, "), said)
        self.tell(said)

        [archived] = self.do("Read the archive back", ("archive", "cat", ARCHIVE, "--bodies"))
        lines = archived.out.splitlines()
        check(sorted(lines) == sorted(clicks), "the archive must have every click, once")
        self.tell(f"{len(lines)} lines: every click, once and unchanged")

        table = self.do("Look at the queues", ("stat", "--once", "-o", "table"))[0].out.decode()
        depths = {channel: int(depth) for channel, depth in DEPTH.findall(table)}
        left = {"archive": 0, "live": CLICKS - SHOWN}
        check(depths == left, f"{left} should be left, and it is {depths}")
        self.tell(table)

        expected = [click for click in clicks if SLICE.encode() in click]
        replay = ("replay", ARCHIVE, "--topic", "carts", "--grep", SLICE)
        again = ("tail", "-t", "carts", "-c", "live", "--until-empty")
        purpose = "Publish a part of the archive again, into a second topic"
        replayed, tailed = self.do(purpose, replay, again)
        said, lines = replayed.err, tailed.out.splitlines()
        check(said.startswith(f"nsq: {len(expected)} confirmed, 0 rejected"), said)
        check(sorted(lines) == sorted(expected), f"{len(expected)} clicks should have come again")
        first = b"\n".join(lines[:SHOWN]).decode()
        self.tell(f"{said}{first}\n... {len(lines)} messages")


DEPTH = re.compile(r"^clicks +(archive|live) +(\d+) ", re.MULTILINE)


def check(holds: bool, what: str) -> None:
    """Raise `DemoFailed` unless it holds."""
    if not holds:
        raise DemoFailed(f"the demonstration failed: {what}")
