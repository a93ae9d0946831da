"""The loop of `nsq top`: it reads keys and draws; the cluster is looked at on other threads.

Everything that happens - a sample, a plan, messages, another size of the window, a signal - is a
call that waits in a queue and a byte in a pipe, beside the keyboard in one ``select``. So the state
is touched on this thread only, and a key is answered however long a daemon takes.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.top.console import (
    CarryOut,
    Change,
    CloseMessages,
    Console,
    Messages,
    Quit,
    Request,
    SwitchMouse,
)
from nsqtools.cli.top.keyboard import KeyReader
from nsqtools.cli.top.overlays import MessagePane
from nsqtools.cli.top.screen import draw
from nsqtools.cli.top.terminal import Terminal
from nsqtools.cluster.sampling import Question, Sampler
from nsqtools.errors import NsqError

if TYPE_CHECKING:
    from nsqtools.cli.top.changes import Planned
    from nsqtools.cli.top.messages import MessageSource

Call = Callable[[], None]

ESCAPE_WAIT_S = 0.05
"""After this time alone, an escape is the key and not the start of a sequence."""
SHARE = 0.05
LONGEST_PACE_S = 5.0
"""A sample waits until those of `nsq top` take this share of a core, but not longer."""
LEAST_FRAME_S = 0.05
"""Between two frames that no key asked for: a busy tail does not draw without end."""


class Top:
    """One run. `run` it on the main thread; `stop` and `restore` are for signals.

    ``spares_processor``: samples of a large cluster are taken less often than every ``interval_s``.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: ClusterSettings,
        sampler: Sampler,
        console: Console,
        interval_s: float,
        *,
        spares_processor: bool,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._sampler = sampler
        self._console = console
        self._interval_s = interval_s
        self._spares_processor = spares_processor
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._sample_now = threading.Event()
        self._stopped = threading.Event()
        self._keys = KeyReader()
        self._planned: Planned | None = None
        self._messages: MessageSource | None = None
        self._terminal: Terminal | None = None
        self._drawn_s = 0.0
        self._pace_s = interval_s
        self._asked: Question | None = None

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stopped.set()
        self._sampler.stop()
        self._wake()

    def restore(self) -> None:
        """Give the terminal back at once."""
        if self._terminal is not None:
            self._terminal.leave()

    def run(self) -> None:
        """Show the cluster until q is pressed or `stop` is called.

        Raises what the first sample raises, before the screen is taken.
        """
        self._console.view.show(self._sampler.sample())
        if self._stopped.is_set():
            return
        stdin, stdout = self._runtime.stdin.fileno(), self._runtime.stdout.fileno()
        self._terminal = Terminal(stdin, stdout, colour=self._runtime.colour)
        handlers = {signal.SIGWINCH: self._on_resize, signal.SIGTSTP: self._on_suspend}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        threading.Thread(target=self._watch, name="nsq-top", daemon=True).start()
        try:
            with self._terminal:
                self._show(stdin)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._stopped.set()
            self._sample_now.set()
            if self._messages is not None:
                self._messages.stop()
                self._messages.join()

    # -- the screen -------------------------------------------------------------------------------

    def _show(self, stdin: int) -> None:
        is_due = True
        while not self._stopped.is_set():
            if is_due:
                self._draw()
            wait_s = ESCAPE_WAIT_S if self._keys.is_waiting else None
            ready, _, _ = select.select([stdin, self._reader], [], [], wait_s)
            keys = self._keys.flush() if not ready else []
            if stdin in ready:
                data = _read(stdin)
                if not data:  # the terminal is gone
                    return
                keys += self._keys.feed(data)
            for key in keys:
                self._see_to(self._console.press(key))
            is_due = bool(keys)
            if self._reader in ready:
                if not keys:  # a key is answered at once, a busy tail need not be
                    self._pause()
                is_due |= self._take_calls()

    def _pause(self) -> None:
        early_s = self._drawn_s + LEAST_FRAME_S - time.monotonic()
        if early_s > 0:
            select.select([self._runtime.stdin.fileno()], [], [], early_s)

    def _draw(self) -> None:
        assert self._terminal is not None
        columns, lines = self._terminal.size
        unicode = (self._runtime.stdout.encoding or "").lower().startswith("utf")
        self._terminal.draw(draw(self._console, columns, lines, unicode=unicode))
        self._drawn_s = time.monotonic()

    def _take_calls(self) -> bool:
        """Do what waits in the queue; return whether there is something new to draw."""
        os.read(self._reader, 4096)
        is_due = False
        while not self._calls.empty():
            self._calls.get()()
            is_due = True
        return is_due

    def _see_to(self, request: Request | None) -> None:
        match request:
            case Quit():
                self._stopped.set()
            case SwitchMouse():
                assert self._terminal is not None
                self._terminal.switch_mouse()
                whose = "ours" if self._terminal.has_mouse else "the terminal's: m takes it back"
                self._console.notice = f"the mouse is {whose}"
            case Change():
                self._plan(request)
            case CarryOut():
                self._carry_out(request)
            case Messages():
                self._open(request)
            case CloseMessages() if self._messages is not None:
                self._messages.stop()
                self._messages = None
        if self._console.view.question != self._asked:
            self._sample_now.set()  # consumers are asked for only where they are shown

    # -- the cluster ------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._stopped.is_set():
                began_s, used_s = time.monotonic(), time.process_time()
                self._asked = self._console.view.question
                sample = self._sampler.sample(self._asked)
                self._call(lambda sample=sample: self._console.view.show(sample))  # type: ignore[misc]
                wait_s = began_s + self._pace_s - time.monotonic()
                self._sample_now.wait(max(0.0, wait_s))
                if self._spares_processor:
                    wanted_s = (time.process_time() - used_s) / SHARE
                    self._pace_s = min(max(wanted_s, self._interval_s), LONGEST_PACE_S)
                self._sample_now.clear()
        except Exception as error:
            self._call(lambda error=error: _raise(error))  # type: ignore[misc]

    def _plan(self, change: Change) -> None:
        from nsqtools.cli.top.changes import Planned

        planned = self._planned = Planned(self._settings, change)

        def work() -> None:
            lines = planned.plan()
            self._call(lambda: self._console.ask(change, lines))

        self._work(change, work)

    def _carry_out(self, request: CarryOut) -> None:
        planned = self._planned
        if planned is None or planned.change != request.change:
            return

        def work() -> None:
            lines = planned.carry_out()
            self._call(lambda: self._console.report(request.change.title, lines))
            self._sample_now.set()

        self._work(request.change, work)

    def _work(self, change: Change, work: Callable[[], None]) -> None:
        """Do something that asks the cluster, beside everything else."""

        from nsqtools.cli.top.changes import explained

        def run() -> None:
            try:
                work()
            except NsqError as error:
                lines = explained(error)
                self._call(lambda: self._console.report(change.title, lines))
            except Exception as error:
                self._call(lambda error=error: _raise(error))  # type: ignore[misc]

        threading.Thread(target=run, name="nsq-top-change", daemon=True).start()

    def _open(self, request: Messages) -> None:
        from nsqtools.cli.top.messages import MessageSource

        pane = self._console.overlay
        assert isinstance(pane, MessagePane)

        self._messages = MessageSource(
            self._settings, request, _Pane(pane, self._console, self._call)
        )
        self._messages.start()

    # -- what wakes the loop ----------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        self._calls.put(call)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"\0")
        except OSError:
            pass  # it is awake

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._call(self._forget)

    def _forget(self) -> None:
        assert self._terminal is not None
        self._terminal.forget()

    def _on_suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._call(self._suspend)

    def _suspend(self) -> None:
        """Give the terminal back, stop as ^Z does, and take it again when we are continued."""
        assert self._terminal is not None
        self._terminal.leave()
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self._terminal.enter()


class _Pane:
    """The pane as the thread of the messages sees it: every call is made by the loop."""

    def __init__(self, pane: MessagePane, console: Console, call: Callable[[Call], None]) -> None:
        self._pane = pane
        self._console = console
        self._call = call

    def show(self, lines: Sequence[str]) -> None:
        self._call(lambda: self._pane.add(lines))

    def tell(self, text: str) -> None:
        self._call(lambda: setattr(self._pane, "state", text))

    def fail(self, error: NsqError) -> None:
        from nsqtools.cli.top.changes import explained

        self._call(lambda: self._console.replace(self._pane, explained(error)))


def _read(stdin: int) -> bytes:
    """What was typed; nothing where the terminal has hung up."""
    try:
        return os.read(stdin, 4096)
    except OSError:
        return b""


def _raise(error: Exception) -> None:
    raise error
