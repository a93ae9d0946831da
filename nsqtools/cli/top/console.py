"""What is on the screen of `nsq top`, and what every key and click does. Pure.

Keys change the list or what lies over it. What a key cannot do here - ask the cluster for a plan,
carry one out, fetch messages - is the `Request` that `press` returns; the loop sees to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsqtools.cli.top.columns import VIEWS, Kind
from nsqtools.cli.top.help_page import HELP
from nsqtools.cli.top.keyboard import Click, Key
from nsqtools.cli.top.overlays import ColumnChooser, Confirmation, MessagePane, Outcome, Page
from nsqtools.cli.top.view import TopView
from nsqtools.cluster.admin import Action
from nsqtools.protocol.names import is_valid_name

READ_ONLY = "read-only: start nsq top with --allow-changes for p u e d t v"
WHEEL_LINES = 3

ACTIONS = {"p": Action.PAUSE, "u": Action.UNPAUSE, "e": Action.EMPTY, "d": Action.DELETE}
VIEW_KEYS = {"1": Kind.TOPICS, "2": Kind.NODES, "3": Kind.CONSUMERS}
ORDER = tuple(VIEW_KEYS.values())


class Quit(NamedTuple):
    """End."""


class Change(NamedTuple):
    """Plan a change of a topic, or of a channel, and show the plan."""

    action: Action
    topic: str
    channel: str

    @property
    def word(self) -> str:
        """What is typed to agree to it; "" where y is enough."""
        return (self.channel or self.topic) if self.action.is_destructive else ""

    @property
    def title(self) -> str:
        what = f"channel {self.topic}/{self.channel}" if self.channel else f"topic {self.topic}"
        return f"{self.action.value} {what}"


class CarryOut(NamedTuple):
    """Carry out the plan that was shown."""

    change: Change


class Messages(NamedTuple):
    """Show messages: those that arrive in a topic, or some of a channel (``is_peek``)."""

    topic: str
    channel: str
    is_peek: bool


class CloseMessages(NamedTuple):
    """Stop showing messages."""


class SwitchMouse(NamedTuple):
    """Leave the mouse to the terminal, or take it."""


Request = Quit | Change | CarryOut | Messages | CloseMessages | SwitchMouse


class Heading(NamedTuple):
    """Where the heading of a column is on the screen."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are on the screen that was drawn last."""

    heading_row: int = -1
    list_row: int = -1
    first_line: int = 0
    room: int = 1
    headings: tuple[Heading, ...] = ()


class Console:
    """The screen: the list, and what lies over it."""

    def __init__(self, view: TopView, *, allows_changes: bool) -> None:
        self.view = view
        self.allows_changes = allows_changes
        self.overlay: Page | None = None
        self.is_typing = False
        self.notice = ""
        self.layout = Layout()
        self._change: Change | None = None
        self._before_typing = ""

    # -- what the loop says ----------------------------------------------------------------------

    def ask(self, change: Change, plan: Sequence[str]) -> None:
        """Show a plan, unless one went on to something else meanwhile."""
        if self._change == change and self.overlay is None:
            self.notice = ""
            self.overlay = Confirmation(change.title, plan, change.word)

    def report(self, title: str, lines: Sequence[str]) -> None:
        """Say how something ended: in the bottom line, or on a page where that is too little."""
        self._change = None
        if len(lines) == 1 and self.overlay is None:
            self.notice = lines[0]
        elif self.overlay is None:
            self.overlay = Page(title, lines)

    def replace(self, page: Page, lines: Sequence[str]) -> None:
        """Show lines in place of a page, if it is still there."""
        if self.overlay is page:
            self.overlay = Page(page.title, lines)

    # -- keys -------------------------------------------------------------------------------------

    def press(self, key: Key) -> Request | None:
        """A key or a click. Returns what is to be done about it."""
        if self.overlay is not None:
            return self._press_overlay(self.overlay, key)
        if self.is_typing:
            self._type(key)
            return None
        self.notice = ""
        if isinstance(key, Click):
            self._click(key)
            return None
        if key == "q":
            return Quit()
        if key == "m":
            return SwitchMouse()
        if key in ACTIONS or key in ("t", "v"):
            return self._act(key)
        self._change = None
        self._press_list(key)
        return None

    def _press_overlay(self, overlay: Page, key: Key) -> Request | None:
        outcome = overlay.press(key, self.layout.room)
        if isinstance(overlay, ColumnChooser):
            self.view.set_columns(overlay.shown)
        if outcome is Outcome.STAY:
            return None
        self.overlay = None
        if isinstance(overlay, MessagePane):
            return CloseMessages()
        change, self._change = self._change, None
        if outcome is Outcome.AGREE and change is not None:
            self.notice = f"{change.title} ..."
            return CarryOut(change)
        return None

    def _press_list(self, key: str) -> None:
        view, page = self.view, self.layout.room
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        steps |= {"wheel up": -WHEEL_LINES, "wheel down": WHEEL_LINES}
        if key in steps:
            view.move(steps[key])
        elif key == "home":
            view.select(0)
        elif key == "end":
            view.select(len(view.lines()) - 1)
        elif key in VIEW_KEYS:
            view.go_to(VIEW_KEYS[key])
        elif key in ("tab", "back tab"):
            here = ORDER.index(view.kind) if view.kind in ORDER else 0
            view.go_to(ORDER[(here + (1 if key == "tab" else -1)) % len(ORDER)])
        elif key in ("enter", "right"):
            view.go_down()
        elif key in ("escape", "backspace", "left"):
            view.go_up()
        elif key == "n":
            view.go_to_nodes()
        elif key in ("s", "S"):
            view.sort_next(1 if key == "s" else -1)
        elif key == "r":
            view.reverse()
        elif key == " ":
            view.freeze()
        elif key == "/":
            self.is_typing, self._before_typing = True, view.look.filter
        elif key == "c":
            names = [*VIEWS[view.kind].columns]
            self.overlay = ColumnChooser(names, view.look.columns)
        elif key in ("?", "h"):
            self.overlay = Page("help", HELP)

    def _type(self, key: Key) -> None:
        text = self.view.look.filter
        if key == "enter":
            self.is_typing = False
        elif key == "escape":
            self.is_typing = False
            self.view.set_filter("")
        elif key == "backspace":
            self.view.set_filter(text[:-1])
        elif isinstance(key, str) and len(key) == 1:
            self.view.set_filter(text + key)

    def _click(self, click: Click) -> None:
        layout, view = self.layout, self.view
        if click.row == layout.heading_row:
            for heading in layout.headings:
                if heading.begin <= click.column < heading.end:
                    view.sort_by(heading.name)
            return
        number = layout.first_line + click.row - layout.list_row
        if not 0 <= click.row - layout.list_row < layout.room or number >= len(view.lines()):
            return
        was_selected = view.selected == view.lines()[number].key
        view.select(number)
        if was_selected:
            view.go_down()

    # -- changes ----------------------------------------------------------------------------------

    def _act(self, key: str) -> Request | None:
        if not self.allows_changes:
            self.notice = READ_ONLY
            return None
        target = self._target()
        if isinstance(target, str):
            self.notice = target
            return None
        topic, channel = target
        if key == "v" and not channel:
            self.notice = "v shows messages of a channel: Enter opens the channels of the topic"
            return None
        if key in ("t", "v"):
            what = f"{topic}/{channel}" if key == "v" else topic
            self.overlay = MessagePane(
                f"{'peek' if key == 'v' else 'tail'} {what}", folds=key == "v"
            )
            return Messages(topic, channel, is_peek=key == "v")
        self._change = Change(ACTIONS[key], topic, channel)
        self.notice = f"planning: {self._change.title} ..."
        return self._change

    def _target(self) -> tuple[str, str] | str:
        """The topic and channel of the selected line, or why there is none."""
        view, scope = self.view, self.view.scope
        line = view.selected_line()
        if view.kind is Kind.CHANNELS and line is not None:
            target = scope.topic, line.key
        elif view.kind is Kind.TOPICS and line is not None:
            target = line.key, ""
        else:
            return "select a topic or a channel for this"
        if scope.node:
            return f"this changes every nsqd: go to the topics of all (1), not of {scope.node}"
        if not all(is_valid_name(name) for name in filter(None, target)):
            return "this is not a name that NSQ allows: nothing can be done with it"
        return target
