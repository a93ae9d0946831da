"""``nsq top`` without a terminal: textual's pilot presses the keys.

sample_of  ``sample_of({"a:1": {"clicks": 5}})``: an nsqd whose topic has this depth
open_top   ``top = open_top(nsqd)``; then ``top.press("enter")`` and ``top.wait_for("clicks")``.
           Between two calls nothing of the app runs.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from plugins.http_api import Nsqd
from plugins.screens import Waiting
from plugins.waiting import wait_for_threads
from textual.events import Key, MouseScrollDown, MouseScrollUp, Paste
from textual.pilot import Pilot

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.top.app import Top
from nsqtools.cli.top.view import TopView
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.queue_rows import NodeReport, rows_of_topic, totals
from nsqtools.cluster.sampling import NodeState, Question, Sample, SampleFilter, Sampler
from nsqtools.protocol.stats import read_stats


def _sample_of(nodes: dict[str, dict[str, int]], *, silent: str = "") -> Sample:
    """Nodes with topics of these depths."""
    states = []
    for address, depths in nodes.items():
        topics = [
            {"topic_name": name, "depth": depth, "channels": []} for name, depth in depths.items()
        ]
        report = NodeReport(address, 0.0, read_stats({"topics": topics, "health": "OK"}))
        rows = [row for topic in report.stats.topics or () for row in rows_of_topic(address, topic)]
        states.append(NodeState(address, rows, [], health="OK"))
    if silent:
        states.append(NodeState(silent, [], [], silent_s=72.0, error="connection refused"))
    rows = [row for state in states for row in state.rows]
    return Sample(0, rows, totals(rows), (), (), tuple(states))


class PilotedTop(Waiting):
    """`nsq top` on a screen of a given size."""

    def __init__(self, app: Top, columns: int, lines: int) -> None:
        self.app = app
        self._runner = asyncio.Runner()
        self._test = app.run_test(size=(columns, lines))
        self.pilot: Pilot[Any] = self._runner.run(self._test.__aenter__())

    @property
    def lines(self) -> list[str]:
        """The screen as it is, without the blanks at the ends."""
        return [each.text.rstrip() for each in self.app.screen._compositor.render_strips()]

    def press(self, *keys: str) -> None:
        """Press keys, by the names that textual gives them."""
        self._runner.run(self.pilot.press(*keys))

    def type(self, text: str) -> None:
        """Press the keys of a text faster than they are looked at."""

        async def type_() -> None:
            names = {"/": "slash", "?": "question_mark", " ": "space", ">": "greater_than_sign"}
            for character in text:
                key = "enter" if character == "\r" else names.get(character, character)
                self.app.post_message(Key(key, character))
            await self.pilot.pause()

        self._runner.run(type_())

    def paste(self, text: str) -> None:
        self.app.post_message(Paste(text))
        self._runner.run(self.pilot.pause())

    def click(self, column: int, line: int) -> None:
        self._runner.run(self.pilot.mouse_down(offset=(column, line)))

    def wheel(self, step: int) -> None:
        """Turn the wheel of the mouse: down, or up where negative."""
        kind = MouseScrollDown if step > 0 else MouseScrollUp
        event = kind(None, 2, 4, 0, step, 0, False, False, False, screen_x=2, screen_y=4)
        self.app.post_message(event)
        self._runner.run(self.pilot.pause())

    def go_on(self) -> None:
        self._runner.run(asyncio.sleep(0.01))

    def close(self) -> None:
        """End it; a bug of the app is raised."""
        self.app.exit(self.app.return_value)
        self.app.stop()
        self._runner.run(self._test.__aexit__(None, None, None))
        self._runner.close()
        wait_for_threads("nsq-top", "nsq-sample")  # they use the cluster
        if self.app.return_value is not None:
            raise self.app.return_value


OpenTop = Callable[..., PilotedTop]


@pytest.fixture
def sample_of() -> Callable[..., Sample]:
    return _sample_of


@pytest.fixture
def open_top() -> Iterator[OpenTop]:
    opened: list[PilotedTop] = []
    clusters = ExitStack()

    def open_(
        nsqd: Nsqd, *, width: int = 80, allows_changes: bool = True, **start: Any
    ) -> PilotedTop:
        where = ConnectionSettings((), nsqd_http_addresses=(nsqd.http_address,))
        settings = ClusterSettings(where)
        cluster = clusters.enter_context(settings.open())
        sampler = Sampler(cluster, SampleFilter(), interval_s=0.1)
        view = TopView(**start)
        view.show(sampler.sample(Question()))
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        changes = {"allows_changes": allows_changes, "spares_processor": False}
        app = Top(settings, sampler, view, 0.1, **changes, runtime=Runtime(out, out, {}))
        opened.append(PilotedTop(app, width, 24))
        return opened[-1]

    yield open_
    with clusters:
        for each in opened:
            each.close()
