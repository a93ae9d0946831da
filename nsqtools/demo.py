"""The demonstration: daemons on free ports, an empty directory, and the real ``nsq``, step by step.

Commands run in the directory and find the daemons through environment variables. So the command
line that runs is the one on the screen, except that addresses are shown with the default ports. The
user's own settings have no effect. Each step checks its own numbers. The events are clicks on a web
site, the same in every run.
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

# Each command takes about a second on an idle machine. This bounds a hang.
TIMEOUT_S = 60.0


class DemoFailed(NsqError):
    """A step of the demonstration had an unexpected result."""


class CommandOutput(NamedTuple):
    """The standard output and standard error of a command."""

    out: bytes
    err: str


@dataclass
class StopRequest:
    """Set by a signal: ``status`` is the exit status, ``process`` the running command.

    Trap: the signal handler must not raise. If it interrupts the release of a lock, the lock stays
    taken forever.
    """

    status: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def on_signal(self, number: int) -> None:
        """Kill the command. `DemoStage.run` then raises ``SystemExit``."""
        self.status = 128 + number
        if self.process is not None:
            self.process.kill()


@contextmanager
def demo_stage(environ: Mapping[str, str], stop_request: StopRequest) -> Iterator[DemoStage]:
    """Start the daemons in a new directory; stop and remove everything at the end."""
    with (
        TemporaryDirectory(prefix="nsq-demo-", ignore_cleanup_errors=True) as directory,
        EmbeddedNsqlookupd() as lookupd,
        EmbeddedNsqd(lookupd_tcp_address=(lookupd.tcp_address,)) as nsqd,
    ):
        yield DemoStage(Path(directory), lookupd, nsqd, stop_request, environ)


class DemoStage:
    """Runs commands in ``directory``, against the daemons."""

    def __init__(
        self,
        directory: Path,
        lookupd: EmbeddedNsqlookupd,
        nsqd: EmbeddedNsqd,
        stop_request: StopRequest,
        environ: Mapping[str, str],
    ) -> None:
        self.directory, self.lookupd, self.nsqd = directory, lookupd, nsqd
        self._stop_request = stop_request
        self._environ = self._environment(environ)
        self._default_addresses = {
            lookupd.tcp_address: "127.0.0.1:4160",
            lookupd.http_address: "127.0.0.1:4161",
            nsqd.tcp_address: "127.0.0.1:4150",
            nsqd.http_address: "127.0.0.1:4151",
        }

    def command_line(self, *arguments: str) -> str:
        """Return the command line as typed where the daemons have their default ports."""
        words = [self._default_addresses.get(word, word) for word in arguments]
        return f"nsq {shlex.join(words)}"

    def run(self, *arguments: str) -> CommandOutput:
        """Run ``nsq`` to its end.

        Raises `DemoFailed` when it fails or takes too long, ``SystemExit`` after a signal.
        """
        problem = f"the demonstration failed: {self.command_line(*arguments)}"
        process = self._stop_request.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nsqtools", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.directory,
            env=self._environ,
            # ^C in the terminal would reach the command as well. Only this process gets it, and
            # kills the command, so that the command prints nothing about the interrupt.
            start_new_session=True,
        )
        with process:
            # A signal before the assignment above found no process to kill.
            if self._stop_request.status is not None:
                process.kill()
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DemoFailed(f"{problem} took over {TIMEOUT_S:g} s") from None
        if self._stop_request.status is not None:
            raise SystemExit(self._stop_request.status)
        stderr, status = err.decode(errors="replace"), process.returncode
        if status != 0:
            raise DemoFailed(f"{problem} ended with status {status}: {stderr.strip()}")
        return CommandOutput(out, stderr)

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        environ = {k: v for k, v in inherited.items() if not k.startswith("NSQ_")}
        for name in ("TMPDIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            environ[name] = str(self.directory / f".{name.lower()}")
            os.mkdir(environ[name])
        paths = [str(Path(__file__).parents[1]), *filter(None, [environ.get("PYTHONPATH")])]
        return environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "NO_COLOR": "1",
            "NSQ_NSQD_TCP_ADDRESS": self.nsqd.tcp_address,
            "NSQ_NSQD_HTTP_ADDRESS": self.nsqd.http_address,
        }


PAGES = {"/": 30, "/docs": 22, "/docs/install": 12, "/pricing": 12, "/blog/2026/queues": 10}
PAGES |= {"/login": 8, "/cart": 6}
"""The share of each page in the clicks, in percent."""

AGENTS = ("Firefox/145.0", "Chrome/142.0", "Safari/26.1", "curl/8.16.0")


def click_events(count: int) -> Iterator[bytes]:
    """Yield log lines, one JSON object each, without newlines."""
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
    """The steps of the demonstration. Each result is printed immediately. Raises `DemoFailed`."""

    def __init__(self, stage: DemoStage, stdout: TextIO) -> None:
        self._stage = stage
        self._stdout = stdout
        self._clicks = list(click_events(CLICKS))

    def write(self, text: str) -> None:
        """Print text without changes."""
        self._stdout.write(text)
        self._stdout.flush()

    def announce(self, purpose: str, *commands: str) -> None:
        """Print the purpose of a step and its command lines."""
        lines = "".join(f"  $ {command}\n" for command in commands)
        self.write(f"{purpose}:\n{lines}")

    def print_result(self, outcome: str) -> None:
        """Print the result of a step, indented."""
        lines = [f"    {line}".rstrip() for line in outcome.strip("\n").splitlines()]
        self.write("\n".join([*lines, "", ""]))

    def run_step(self, purpose: str, *commands: Sequence[str]) -> list[CommandOutput]:
        """Announce commands and run them."""
        self.announce(purpose, *(self._stage.command_line(*words) for words in commands))
        return [self._stage.run(*words) for words in commands]

    def run(self) -> None:
        """Run all steps."""
        stage, clicks = self._stage, self._clicks
        register = ("nsqd", "--lookupd-tcp-address", stage.lookupd.tcp_address)
        self.announce(
            "Start nsqlookupd, and an nsqd that registers with it",
            *(f"{stage.command_line(*words)} &" for words in (("nsqlookupd",), register)),
        )
        addresses = f"nsqlookupd {stage.lookupd.http_address}, nsqd {stage.nsqd.tcp_address}"
        self.print_result(f"here on free ports: {addresses}")

        topic = ("topic", "create", "clicks")
        channels = ("channel", "create", "clicks", "live", "archive")
        purpose = "Create a topic and two channels, each gets every message"
        outputs = self.run_step(purpose, topic, channels)
        self.print_result("".join(output.err for output in outputs))

        (stage.directory / LOG).write_bytes(b"\n".join(clicks) + b"\n")
        purpose = "Publish a log of clicks"
        summary = self.run_step(purpose, ("pub", "-t", "clicks", f"@{LOG}"))[0].err
        confirmed = f"nsq: {CLICKS} confirmed, 0 rejected, 0 unknown, 0 unsent"
        check_step(summary.startswith(confirmed), summary)
        self.print_result(summary)

        tail = ("tail", "-t", "clicks", "-c", "live", "-n", str(SHOWN))
        lines = self.run_step("See some of them", tail)[0].out.splitlines()
        check_step(len(lines) == SHOWN, f"{SHOWN} messages were requested, {len(lines)} arrived")
        check_step(set(lines) <= set(clicks), "a message arrived that was not published")
        self.print_result(b"\n".join(lines).decode())

        to_file = ["to-file", "-t", "clicks", "-c", "archive"]
        to_file += ["--lookupd-http-address", stage.lookupd.http_address]
        to_file += ["--output-dir", ARCHIVE, "--gzip", "--until-empty"]
        purpose = "Archive all of them, from the nsqd that nsqlookupd names"
        summary = self.run_step(purpose, to_file)[0].err
        check_step(summary.startswith(f"nsq: {CLICKS} messages, "), summary)
        self.print_result(summary)

        cat = ("archive", "cat", ARCHIVE, "--bodies")
        lines = self.run_step("Read the archive back", cat)[0].out.splitlines()
        check_step(sorted(lines) == sorted(clicks), "the archive must have every click, once")
        self.print_result(f"{len(lines)} lines: every click, once and unchanged")

        stat = ("stat", "--once", "-o", "table")
        table = self.run_step("Look at the queues", stat)[0].out.decode()
        depths = {channel: int(depth) for channel, depth in DEPTH.findall(table)}
        expected_depths = {"archive": 0, "live": CLICKS - SHOWN}
        check_step(depths == expected_depths, f"the depths should be {expected_depths}: {depths}")
        self.print_result(table)

        carts = [click for click in clicks if SLICE.encode() in click]
        replay = ("replay", ARCHIVE, "--topic", "carts", "--grep", SLICE)
        tail_carts = ("tail", "-t", "carts", "-c", "live", "--until-empty")
        purpose = "Publish a part of the archive again, into a second topic"
        replayed, tailed = self.run_step(purpose, replay, tail_carts)
        summary, lines = replayed.err, tailed.out.splitlines()
        check_step(summary.startswith(f"nsq: {len(carts)} confirmed, 0 rejected"), summary)
        check_step(sorted(lines) == sorted(carts), f"{len(carts)} clicks should have arrived again")
        first = b"\n".join(lines[:SHOWN]).decode()
        self.print_result(f"{summary}{first}\n... {len(lines)} messages")


DEPTH = re.compile(r"^clicks +(archive|live) +(\d+) ", re.MULTILINE)


def check_step(is_true: bool, problem: str) -> None:
    """Raise `DemoFailed` with the problem unless ``is_true``."""
    if not is_true:
        raise DemoFailed(f"the demonstration failed: {problem}")
