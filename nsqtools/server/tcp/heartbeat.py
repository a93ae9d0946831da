"""The clocks of one connection to nsqd: heartbeats out, and deadlines for silent clients.

Every interval a heartbeat goes out, whatever else is sent. A client that has not completed a
command for two intervals is dropped, and so is one that has not taken its output for one.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from time import monotonic


class Heartbeat:
    """Runs from `start` to `stop`; ``interval_s`` 0 means no heartbeats and no deadlines."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        send: Callable[[], None],
        give_up: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        self.interval_s = 0.0
        self._loop = loop
        self._send = send
        self._give_up = give_up
        self._abort = abort
        self._last_command_s = 0.0
        self._beat: TimerHandle | None = None
        self._silence: TimerHandle | None = None
        self._stuck: TimerHandle | None = None

    def start(self, interval_s: float) -> None:
        """Start, or restart with another interval."""
        self.stop()
        self.interval_s = interval_s
        if interval_s:
            self._beat = self._loop.call_later(interval_s, self._on_beat)
            self.command_done()
            self._silence = self._loop.call_at(self._deadline_s, self._on_silence)

    @property
    def _deadline_s(self) -> float:
        return self._last_command_s + 2 * self.interval_s

    def command_done(self) -> None:
        """The client has completed a command."""
        self._last_command_s = monotonic()  # the clock of the loop

    def output_stuck(self) -> None:
        """The client does not take its output."""
        if self.interval_s and self._stuck is None:
            self._stuck = self._loop.call_later(self.interval_s, self._abort)

    def output_flows(self) -> None:
        """The client takes its output again."""
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in (self._beat, self._silence, self._stuck):
            if timer is not None:
                timer.cancel()
        self._beat = self._silence = self._stuck = None

    def _on_beat(self) -> None:
        self._beat = self._loop.call_later(self.interval_s, self._on_beat)
        self._send()

    def _on_silence(self) -> None:
        if self._loop.time() < self._deadline_s:
            self._silence = self._loop.call_at(self._deadline_s, self._on_silence)
        else:
            self._give_up()
