"""`nsq top` on textual: its keys, its screens, and the threads that ask the cluster.

Samples, plans and signals from other threads are passed to the app through its queue (`Top.call`).
So only one thread changes the state, and the app answers a key even while a daemon is slow. The
threads are daemon threads, so quitting does not wait for an nsqd that hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from typing import Any, ClassVar, cast

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, MouseDown, Paste
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import OptionList, Static

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.render.output import cell_text
from nsqtools.cli.running.administering import format_plan, summarize_changes
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.top.screen import Drawn, draw, joined_to_fit, problem_page
from nsqtools.cli.top.view import VIEWS, TopView
from nsqtools.cluster.admin import Action, AdminPlan, TopicChange, apply
from nsqtools.cluster.sampling import Sampler, SampleScope
from nsqtools.errors import NsqError, OutputError
from nsqtools.protocol.text import escape_line

# Samples of a large cluster are spaced out until they take 5 % of a core, which nobody notices on a
# server, but never further apart than 5 s.
SHARE = 0.05
LONGEST_PACE_S = 5.0

RESTORE = (
    b"\x1b[<u\x1b[?2004l\x1b[?1006l\x1b[?1003l\x1b[?1000l\x1b[?1004l\x1b[?7h\x1b[?1049l\x1b[?25h"
)
MOUSE = "\x1b[?1000{0}\x1b[?1003{0}\x1b[?1006{0}"
HINTS = "|↑↓ select|⏎ open|Esc back|s sort|r reverse|/ filter|space freeze|Tab nsqd, consumers"
CHANGE_HINTS = "|p u pause|e empty|d delete|t tail|v view"
TYPING_HINT = "words or depth>1000  Enter keep  Esc clear"
READ_ONLY = "read-only: start nsq top with --allow-changes for p u e d t v"
ACTIONS = {"p": Action.PAUSE, "u": Action.UNPAUSE, "e": Action.EMPTY, "d": Action.DELETE}
HELP = """\
Keys
  ↑ ↓ j k, PgUp PgDn, Home End   select a line
  Enter, →                       open it: channels of a topic, topics of an nsqd and so on
  Esc, ←, Backspace              go back; at the beginning, clear the filter
  1 2 3, Tab                     all topics, all nsqd, all consumers
  !                              problems and remedies, as in nsq check
  n                              the selected topic or channel on each nsqd
  s S                            sort by the next column, by the previous one
  r                              reverse the order
  /                              filter by words and conditions: depth>1000 clients=0
  c                              choose the columns
  space                          freeze the screen; selecting still works
  m                              release the mouse to the terminal, or take it back
  Ctrl-Z, q                      suspend, quit

Changes (with --allow-changes; a plan is shown first)
  p u                            pause, unpause the selected topic or channel
  e d                            empty, delete it; type its name to confirm
  t                              tail the topic until Ctrl-C; its channels keep all messages
  v                              view some messages of a channel; each counts one more attempt

Columns, in addition to those of nsq stat --help
  waiting                        the depth of a topic and of all its channels together
  ready                          RDY of the consumer
  heap_mib                       memory in use by nsqd
  trend                          waiting at the last samples, scaled from least to greatest

A click selects a line, a second click opens it; a click on a heading sorts by it.
An nsqd that does not answer is named, with the time since; its queues count for 5 s.
Columns that do not fit are left out and named; a cut name ends with an ellipsis."""


class Output:
    """Standard output as the thread that writes for textual takes it.

    ``on_lost`` is called once if the terminal has vanished. Later writes go nowhere: textual waits
    for room in the queue of that thread, so it must not end.
    """

    def __init__(self, encoding: str, on_lost: Callable[[OSError], None]) -> None:
        self._encoding = encoding
        self._on_lost = on_lost
        self._is_lost = False

    def write(self, text: str) -> None:
        """Write a text, as far as the terminal is there."""
        data = text.encode(self._encoding, "replace")
        try:
            while data and not self._is_lost:
                data = data[os.write(1, data) :]
        except OSError as exc:
            self._is_lost = True
            self._on_lost(exc)

    def flush(self) -> None:
        """Do nothing: every write is complete."""


class Terminal(LinuxDriver):
    """Textual's driver on stdout; textual's own writes to stderr, which may be a log file.

    Textual suspends and resumes inside its signal handlers. A handler interrupts the main thread
    anywhere, also where it holds the lock of the output queue, and would wait for that lock
    forever. So the event loop does their work here.
    """

    def __init__(self, app: Top, **options: Any) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(app, **options)
        self._file = cast(TextIOWrapper, Output(app.encoding, app.end_with_terminal))
        app.write = self.write

    def _sigtstp_application(self, *_: object) -> None:
        self._call_on_loop(super()._sigtstp_application)

    def _sigcont_application(self, *_: object) -> None:
        # Before the first start there is nothing to resume.
        if self._writer_thread is not None:
            self._call_on_loop(super()._sigcont_application)

    def _call_on_loop(self, handle: Callable[[], None]) -> None:
        if self._auto_restart:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(handle)
        else:
            # While `nsq tail` has the screen, the loop waits for it.
            handle()

    def _get_terminal_size(self) -> tuple[int, int]:
        # For a terminal without a size textual assumes 24 lines here and 25 elsewhere, and would
        # lay out the screen again and again.
        return self._app.console.size

    def suspend_application_mode(self) -> None:
        super().suspend_application_mode()
        # None tells `resume_application_mode` that the terminal has its modes back.
        self.attrs_before = None

    def resume_application_mode(self) -> None:
        """Start again. After SIGSTOP the application was stopped without being suspended."""
        if self.attrs_before is not None:
            self.suspend_application_mode()
        super().resume_application_mode()

    def run_input_thread(self) -> None:
        """Continue after invalid UTF-8, which a terminal with another encoding sends."""
        while not self.exit_event.is_set():
            with suppress(UnicodeDecodeError):
                super().run_input_thread()


# -- the screens ----------------------------------------------------------------------------------


class Sheet(Screen[bool]):
    """A screen that handles all keys itself, one after the other.

    It has no focus and no bindings: textual would pass keys that were typed ahead to the widget
    that has the focus when it reads them, and ``/de`` in one read would delete a topic.
    """

    AUTO_FOCUS = ""

    def __init__(self, top: Top) -> None:
        super().__init__()
        self.top = top

    def press(self, key: str, character: str | None) -> None:
        """Handle a key."""

    @property
    def takes_text(self) -> bool:
        """Whether keys are entered as text."""
        return False

    def on_paste(self, event: Paste) -> None:
        if self.takes_text:
            for character in event.text.partition("\n")[0]:
                self.press(character, character)

    def on_key(self, event: Key) -> None:
        event.stop()
        # An earlier key may have opened another screen.
        screen = self.top.screen
        if isinstance(screen, Sheet):
            screen.press(event.key, event.character)


class Page(Sheet):
    """Lines to scroll through. The result is whether the user has confirmed."""

    closing: Sequence[str] = ("escape", "q", "left", "backspace", "enter", "question_mark")
    hint = "↑↓ scroll  Esc back"

    def __init__(self, top: Top, title: str, lines: Iterable[str] = ()) -> None:
        super().__init__(top)
        self._title = Static(escape_line(title), classes="title", markup=False)
        self._hint = Static(escape_line(self.hint), classes="hint", markup=False)
        self.pane = self._pane(lines)

    def _pane(self, lines: Iterable[str]) -> Widget:
        text = "\n".join(map(escape_line, lines))
        return VerticalScroll(Static(text, markup=False), can_focus=False)

    def compose(self) -> ComposeResult:
        yield from (self._title, self.pane, self._hint)

    def press(self, key: str, character: str | None) -> None:
        page = max(1, self.pane.size.height)
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}
        steps |= {"home": -sys.maxsize, "end": sys.maxsize}
        if key in self.closing:
            self.dismiss(False)
        elif key in steps:
            self.pane.scroll_relative(y=steps[key], animate=False, immediate=True, force=True)


class Confirmation(Page):
    """A plan, and the question whether to carry it out, with No as the default.

    A destructive plan is confirmed by typing ``word``, another one by y.
    """

    def __init__(self, top: Top, title: str, lines: Iterable[str], word: str) -> None:
        self._word, self._typed = word, ""
        self.hint = self._question() if word else "y go on  Esc do nothing"
        super().__init__(top, title, lines)
        self.closing = ("escape",) if word else ("escape", "n", "N", "q", "enter")

    @property
    def takes_text(self) -> bool:
        return bool(self._word)

    def _question(self) -> str:
        return f"type {self._word} and Enter to go on, Esc to do nothing: {self._typed}_"

    def press(self, key: str, character: str | None) -> None:
        if not self._word and key in ("y", "Y"):
            self.dismiss(True)
        elif self._word and key == "enter":
            if self._typed == self._word:
                self.dismiss(True)
        elif self._word and key == "backspace":
            self._type(self._typed[:-1])
        elif self._word and character and character.isprintable():
            self._type(self._typed + character)
        else:
            super().press(key, character)

    def _type(self, text: str) -> None:
        self._typed = text
        self._hint.update(escape_line(self._question()))


class ColumnChooser(Page):
    """The columns of a view, each shown or not; the first one, the name, is always."""

    closing = ("escape", "enter", "q", "c")
    hint = "↑↓ select  space show or hide  Enter done"

    def __init__(self, top: Top) -> None:
        self._names = list(VIEWS[top.view.kind].columns)[1:]
        super().__init__(top, "columns")

    def _pane(self, lines: Iterable[str]) -> Widget:
        self._options = OptionList(*map(self._prompt, self._names), markup=False, compact=True)
        self._options.highlighted, self._options.can_focus = 0, False
        return self._options

    def _prompt(self, name: str) -> str:
        return f"[{'x' if name in self.top.view.look.columns else ' '}] {name}"

    def press(self, key: str, character: str | None) -> None:
        if key == "space":
            self._switch()
        elif key in ("up", "k"):
            self._options.action_cursor_up()
        elif key in ("down", "j"):
            self._options.action_cursor_down()
        elif key in self.closing:
            self.dismiss(False)

    def _switch(self) -> None:
        number = self._options.highlighted or 0
        self.top.view.switch_column(self._names[number])
        self._options.replace_option_prompt_at_index(number, self._prompt(self._names[number]))

    def on_option_list_option_selected(self) -> None:
        self._switch()


class Rows(Widget):
    """The list, in lines that fill it."""

    drawn = Drawn([])

    def show(self, drawn: Drawn) -> None:
        """Show other lines; only what changed is written to the terminal."""
        before, self.drawn = self.drawn.rows, drawn
        for y, row in enumerate(drawn.rows):
            if before[y : y + 1] != [row]:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        rows = self.drawn.rows
        return Strip([Segment(rows[y].text, Style.parse(rows[y].style))] if y < len(rows) else ())


class ListScreen(Sheet):
    """The list of topics, channels, consumers or nsqd."""

    def __init__(self, top: Top) -> None:
        super().__init__(top)
        self.rows = Rows()
        self.notice = ""
        self._planned: TopicChange | None = None

    def compose(self) -> ComposeResult:
        yield self.rows

    @property
    def takes_text(self) -> bool:
        return self.top.view.is_typing

    def redraw(self) -> None:
        """Draw the view."""
        top, (width, height) = self.top, self.rows.size
        hints = f"? help|q quit{CHANGE_HINTS if top.allows_changes else ''}{HINTS}"
        hints = TYPING_HINT if top.view.is_typing else hints
        bottom = cell_text(self.notice) or joined_to_fit(hints.split("|"), width)
        self.rows.show(draw(top.view, width, height, bottom))
        top.ask_soon_if_needed()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    on_screen_resume = on_resize

    def on_mouse_down(self, event: MouseDown) -> None:
        drawn, view = self.rows.drawn, self.top.view
        number = event.screen_y - drawn.heading_row - 1
        if event.button != 1 or view.is_typing:
            return
        if number == -1:
            for name, begin, end in drawn.headings:
                if begin <= event.screen_x < end:
                    view.sort_by(name)
        elif 0 <= number < drawn.room and drawn.first_line + number < len(view.lines()):
            view.click(drawn.first_line + number)
        self._notify()

    def on_mouse_scroll_down(self) -> None:
        self.press("wheel down", None)

    def on_mouse_scroll_up(self) -> None:
        self.press("wheel up", None)

    def press(self, key: str, character: str | None) -> None:
        self.notice, self._planned = "", None
        if self.top.view.press(key, character):
            self._notify()
        elif key in ACTIONS or key in ("t", "v"):
            self._act(key)
        elif key == "c":
            self.top.push_screen(ColumnChooser(self.top))
        elif key in ("question_mark", "h"):
            self.top.push_screen(Page(self.top, "help", HELP.split("\n")))
        elif key == "exclamation_mark":
            self.top.push_screen(Page(self.top, "problems", problem_page(self.top.view.problems)))
        elif key == "m":
            self._notify(self.top.switch_mouse())
        elif key == "q":
            self.top.exit()

    def _notify(self, notice: str = "", planned: TopicChange | None = None) -> None:
        """Draw with a notice in the bottom line, and wait for the plan of this change only."""
        self.notice, self._planned = notice, planned
        self.redraw()

    # -- changes ----------------------------------------------------------------------------------

    def _act(self, key: str) -> None:
        target = self.top.view.target() if self.top.allows_changes else READ_ONLY
        if isinstance(target, str):
            self._notify(target)
            return
        topic, channel = target
        if key == "v" and not channel:
            self._notify("v shows messages of a channel: Enter opens the channels of the topic")
        elif key in ACTIONS:
            self._plan(TopicChange(action=ACTIONS[key], topic=topic, channel=channel))
        else:
            self.top.show_messages(topic, channel if key == "v" else "")

    def _plan(self, change: TopicChange) -> None:
        """Plan a change, and show the plan unless another key was pressed meanwhile."""
        top = self.top
        self._notify(f"planning: {_title(change)} ...", change)

        def work() -> None:
            with top.settings.open() as cluster:
                cluster.remember(top.sampler.answering)
                plan = change.plan(cluster)
            left_out = [f"left out: {failure.error}" for failure in plan.failures]
            lines = [*left_out, *plan.notes, *format_plan(plan.steps)]
            top.call(partial(ask, plan, lines))

        def ask(plan: AdminPlan, lines: Sequence[str]) -> None:
            if self._planned is change:
                page = Confirmation(top, _title(change), lines, change.word)
                top.push_screen(page, lambda agreed: self._carry_out(change, plan, bool(agreed)))

        top.begin(work, partial(self._report, change))

    def _carry_out(self, change: TopicChange, plan: AdminPlan, agreed: bool) -> None:
        def work() -> None:
            with self.top.settings.open() as cluster:
                outcomes = apply(cluster, plan)
            failed = [f"{step.text} failed: {error}" for step, error in outcomes if error]
            done = summarize_changes(step for step, error in outcomes if not error)
            self.top.call(partial(self._report, change, [*failed, *done]))
            self.top.sample_now.set()

        self._notify(f"{_title(change)} ..." if agreed else "")
        if agreed:
            self.top.begin(work, partial(self._report, change))

    def _report(self, change: TopicChange, lines: Sequence[str]) -> None:
        """Show the result in the bottom line, or on a page if it has several lines."""
        self._notify(lines[0] if len(lines) == 1 else "")
        if len(lines) != 1:
            self.top.push_screen(Page(self.top, _title(change), lines))


def _title(change: TopicChange) -> str:
    return f"{change.action.value} {change.subject}"


# -- the app --------------------------------------------------------------------------------------


class Top(App[Exception]):
    """One run of `nsq top`. `show_cluster` runs on the main thread; signals call `stop`, `restore`.

    ``spares_processor`` allows longer intervals than ``interval_s`` for a large cluster.
    """

    BINDINGS: ClassVar[list[Any]] = [
        Binding("ctrl+c", "signal('SIGINT')", show=False, priority=True),
        Binding("ctrl+backslash", "signal('SIGQUIT')", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    CSS = """
    * { scrollbar-size: 0 0; background: ansi_default; color: ansi_default; }
    Rows, VerticalScroll, OptionList { height: 1fr; }
    .title { text-style: reverse; height: 1; }
    .hint { text-style: bold; }
    OptionList > .option-list--option-highlighted {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    """
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False

    def __init__(
        self,
        settings: ClusterSettings,
        sampler: Sampler,
        view: TopView,
        interval_s: float,
        *,
        allows_changes: bool,
        spares_processor: bool,
        runtime: Runtime,
    ) -> None:
        super().__init__(driver_class=Terminal, ansi_color=True)
        self.set_reactive(App.theme, "ansi-dark")
        self.animation_level = "none"
        self.settings = settings
        self.view = view
        self.allows_changes = allows_changes
        self.encoding = runtime.stdout.encoding
        self.write: Callable[[str], None] = lambda _: None
        self.restore: Callable[[], None] = lambda: None
        self.sampler = sampler
        self._interval_s = interval_s
        self._spares_processor = spares_processor
        self._has_mouse = True
        self._sampled_scope: SampleScope | None = None
        self.sample_now = threading.Event()
        self._stopped = threading.Event()
        self._runtime = runtime
        # Cleared while `nsq tail` or `nsq peek` has the screen.
        self._shown = threading.Event()
        self._shown.set()

    def show_cluster(self) -> None:
        """Show the cluster until q is pressed or `stop` is called.

        Raises the errors of the first sample, before it takes the screen.
        """
        self.view.show(self.sampler.sample())
        if self._stopped.is_set():
            return
        stdin, stdout = self._runtime.stdin.fileno(), self._runtime.stdout.fileno()
        modes = termios.tcgetattr(stdin)

        def restore() -> None:
            os.write(stdout, RESTORE)
            termios.tcsetattr(stdin, termios.TCSANOW, modes)

        self.restore = restore
        error = self.run()
        self.stop()
        if error is not None:
            raise error

    def stop(self) -> None:
        """Make `show_cluster` end."""
        self._stopped.set()
        self.sample_now.set()
        self._shown.set()
        self.sampler.stop()
        self.call(self.exit)

    def end_with_terminal(self, error: OSError) -> None:
        """Make `show_cluster` end, because the terminal has vanished."""
        reason = error.strerror or str(error)
        self.call(partial(self.exit, OutputError(f"cannot write to the terminal ({reason})")))

    def call(self, call: Callable[[], object]) -> None:
        """Call a function on the thread of the app."""
        with suppress(RuntimeError):  # the app has ended
            self.call_later(call)

    def _handle_exception(self, error: Exception) -> None:
        """End with the error. Textual's own handler prints all local variables, also secrets."""
        self.exit(error)

    def get_default_screen(self) -> Screen[Any]:
        return ListScreen(self)

    def on_mount(self) -> None:
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        threading.Thread(target=self._watch, name="nsq-top", daemon=True).start()

    def action_signal(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def switch_mouse(self) -> str:
        """Release the mouse to the terminal, or take it back; return a notice."""
        self._has_mouse = not self._has_mouse
        self.write(MOUSE.format("h" if self._has_mouse else "l"))
        return "the mouse is " + ("ours" if self._has_mouse else "the terminal's: m takes it back")

    # -- the cluster ------------------------------------------------------------------------------

    def begin(self, work: Callable[[], None], fail: Callable[[list[str]], None]) -> None:
        """Run work that asks the cluster on a thread; ``fail`` gets the lines of an error."""

        def run() -> None:
            try:
                work()
            except NsqError as error:
                lines = [str(error), *([f"hint: {error.hint}"] if error.hint else [])]
                self.call(lambda: fail(lines))
            except Exception as error:
                self.call(partial(self.exit, error))

        threading.Thread(target=run, name="nsq-top-work", daemon=True).start()

    def show_messages(self, topic: str, channel: str) -> None:
        """Give the screen to a tail of a topic, or to a peek at a channel, until it ends."""
        from nsqtools.cli.top.messages import tail_or_peek

        self._shown.clear()
        with self.suspend():
            ended = tail_or_peek(self.settings, topic, channel, self._runtime)
        self._shown.set()
        if ended not in (None, signal.SIGINT):
            os.kill(os.getpid(), ended)

    def ask_soon_if_needed(self) -> None:
        """Sample at once if the view shows data, such as consumers, that is not asked for yet."""
        if self.view.sample_scope != self._sampled_scope:
            self.sample_now.set()

    def _watch(self) -> None:
        def show() -> None:
            self.view.show(sample)
            screen = self.screen
            if isinstance(screen, ListScreen):
                screen.redraw()

        pace_s = self._interval_s
        try:
            while self._shown.wait() and not self._stopped.is_set():
                began_s, used_s = time.monotonic(), time.process_time()
                self._sampled_scope = self.view.sample_scope
                sample = self.sampler.sample(self._sampled_scope)
                self.call(show)
                self.sample_now.wait(max(0.0, began_s + pace_s - time.monotonic()))
                if self._spares_processor:
                    fair_pace_s = (time.process_time() - used_s) / SHARE
                    pace_s = min(max(fair_pace_s, self._interval_s), LONGEST_PACE_S)
                self.sample_now.clear()
        except Exception as error:
            self.call(partial(self.exit, error))
