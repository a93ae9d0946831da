"""The loop of `nsq top`: one thread looks at the cluster, this one reads keys and draws.

Everything that happens - a look is taken, the window has another size, a signal asks to stop - is a
byte in a pipe, beside the keyboard in one ``select``.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
from types import FrameType

from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.top.keyboard import keys_at_once, parse_keys
from nsqtools.cli.top.screen import CHROME, draw
from nsqtools.cli.top.view import Level, TopView
from nsqtools.cluster.sampling import Sample, Sampler


class Top:
    """One run. `run` it on the main thread; `stop` it from any."""

    def __init__(self, runtime: Runtime, sampler: Sampler, interval_s: float) -> None:
        self._runtime = runtime
        self._sampler = sampler
        self._interval_s = interval_s
        self._view = TopView()
        self._looks: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        self._look_now = threading.Event()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stopped.set()
        self._wake()

    def run(self) -> None:
        """Show the cluster until q is pressed or `stop` is called.

        Raises what the first look raises, before the screen is taken.
        """
        self._view.show(self._sampler.sample())
        watcher = threading.Thread(target=self._watch, name="nsq-top", daemon=True)
        watcher.start()
        before = signal.signal(signal.SIGWINCH, self._on_resize)
        try:
            self._show()
        finally:
            signal.signal(signal.SIGWINCH, before)
            self._stopped.set()
            self._look_now.set()
            watcher.join()
            os.close(self._reader)
            os.close(self._writer)

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        stdin, stdout = self._runtime.stdin.fileno(), self._runtime.stdout.fileno()
        console = Console(
            file=self._runtime.stdout, force_terminal=True, no_color=not self._runtime.colour
        )
        unicode = (self._runtime.stdout.encoding or "").lower().startswith("utf")
        with (
            keys_at_once(stdin),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not (self._view.is_done or self._stopped.is_set()):
                size = os.get_terminal_size(stdout)
                console.size = size
                live.update(
                    draw(self._view, size.columns, size.lines, unicode=unicode), refresh=True
                )
                ready, _, _ = select.select([stdin, self._reader], [], [])
                if self._reader in ready:
                    os.read(self._reader, 1024)
                    self._take_looks()
                if stdin in ready:
                    self._read_keys(stdin, max(1, size.lines - CHROME))

    def _read_keys(self, stdin: int, page: int) -> None:
        data = os.read(stdin, 1024)
        if not data:  # the terminal is gone
            self._stopped.set()
        level = self._view.level
        for key in parse_keys(data):
            self._view.press(key, page)
        if self._view.level is not level:
            self._look_now.set()  # consumers are asked for only where they are shown

    def _take_looks(self) -> None:
        while not self._looks.empty():
            self._view.show(self._looks.get())

    def _watch(self) -> None:
        while True:
            self._look_now.wait(self._interval_s)
            self._look_now.clear()
            if self._stopped.is_set():
                return
            self._looks.put(self._sampler.sample(clients=self._view.level is Level.CLIENTS))
            self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"\0")
        except OSError:
            pass  # a signal that came while the run ended

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._wake()
