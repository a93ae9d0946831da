"""What the demonstration shows. Each step runs the real ``nsq``, and checks its own numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsqtools.services.demo.clicks import click_events
from nsqtools.services.demo.stage import DemoFailed, Stage

CLICKS = 5000
SHOWN = 3
LOG = "clicks.log"
ARCHIVE = "archive"
SLICE = '"page": "/cart"'


@dataclass(frozen=True, slots=True)
class Step:
    """One step: why, the command lines, and what came of them."""

    purpose: str
    commands: Sequence[str]
    outcome: str


class Story:
    """Tells each step with ``show`` when it is done. Raises `DemoFailed`, `DemoStopped`."""

    def __init__(self, stage: Stage, show: Callable[[Step], None]) -> None:
        self._stage = stage
        self._show = show
        self._clicks = list(click_events(CLICKS))

    def run(self) -> None:
        """Everything but Spark."""
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
        register = stage.shown("nsqd", "--lookupd-tcp-address", stage.lookupd.tcp_address)
        self._show(
            Step(
                "Start nsqlookupd, and an nsqd that registers with it",
                [f"{stage.shown('nsqlookupd')} &", f"{register} &"],
                f"here on free ports: nsqlookupd {stage.lookupd.http_address}, "
                f"nsqd {stage.nsqd.tcp_address}",
            )
        )

    def _create(self) -> None:
        commands = [
            ("topic", "create", "clicks"),
            ("channel", "create", "clicks", "live", "archive"),
        ]
        said = [self._stage.run(*command).err.strip() for command in commands]
        self._show(
            Step(
                "Create a topic and two channels, each of which gets every message",
                [self._stage.shown(*command) for command in commands],
                "\n".join(filter(None, said)),
            )
        )

    def _publish(self) -> None:
        (self._stage.directory / LOG).write_bytes(b"\n".join(self._clicks) + b"\n")
        command = ("pub", "-t", "clicks", LOG)
        said = self._stage.run(*command).err.strip()
        check(said.startswith(f"nsq: {CLICKS} confirmed, 0 rejected, 0 unknown, 0 unsent"), said)
        self._show(Step("Publish a log of clicks", [self._stage.shown(*command)], said))

    def _tail(self) -> None:
        command = ("tail", "-t", "clicks", "-c", "live", "-n", str(SHOWN))
        lines = self._stage.run(*command).lines
        check(len(lines) == SHOWN, f"{SHOWN} messages were asked for, and {len(lines)} came")
        check(set(lines) <= set(self._clicks), "a message came out that did not go in")
        self._show(Step("See some of them", [self._stage.shown(*command)], text(lines)))

    def _archive(self) -> None:
        lookupd = self._stage.lookupd.http_address
        command = (
            *("to-file", "-t", "clicks", "-c", "archive", "--lookupd-http-address", lookupd),
            *("--output-dir", ARCHIVE, "--gzip", "--until-empty"),
        )
        said = self._stage.run(*command).err.strip()
        check(said.startswith(f"nsq: {CLICKS} messages, "), said)
        purpose = "Archive all of them, from the nsqd that nsqlookupd names"
        self._show(Step(purpose, [self._stage.shown(*command)], said))

    def _read_back(self) -> None:
        command = ("archive", "cat", ARCHIVE, "--bodies")
        lines = self._stage.run(*command).lines
        check(sorted(lines) == sorted(self._clicks), "the archive must have every click, once")
        outcome = f"{len(lines)} lines: every click, once and unchanged"
        self._show(Step("Read the archive back", [self._stage.shown(*command)], outcome))

    def _look(self) -> None:
        command = ("stat", "--once")
        table = self._stage.run(*command, as_on_a_terminal=True).out.decode()
        depths = {channel: int(depth) for channel, depth in DEPTH.findall(table)}
        left = {"archive": 0, "live": CLICKS - SHOWN}
        check(depths == left, f"{left} should be left, and it is {depths}")
        self._show(Step("Look at the queues", [self._stage.shown(*command)], table.rstrip()))

    def _replay(self) -> None:
        expected = [click for click in self._clicks if SLICE.encode() in click]
        replay = ("replay", ARCHIVE, "--topic", "carts", "--grep", SLICE)
        tail = ("tail", "-t", "carts", "-c", "live", "--exit-idle", "300ms")
        said = self._stage.run(*replay).err.strip()
        check(said.startswith(f"nsq: {len(expected)} confirmed, 0 rejected"), said)
        lines = self._stage.run(*tail).lines
        check(sorted(lines) == sorted(expected), f"{len(expected)} clicks should have come again")
        outcome = f"{said}\n{text(lines[:SHOWN])}\n... {len(lines)} messages"
        commands = [self._stage.shown(*replay), self._stage.shown(*tail)]
        self._show(Step("Publish a part of the archive again", commands, outcome))


DEPTH = re.compile(r"^clicks +(archive|live) +(\d+) ", re.MULTILINE)


def text(lines: Sequence[bytes]) -> str:
    """Lines of output as text."""
    return b"\n".join(lines).decode()


def check(holds: bool, what: str) -> None:
    """Raise `DemoFailed` unless it holds."""
    if not holds:
        raise DemoFailed(f"the demonstration failed: {what}")
