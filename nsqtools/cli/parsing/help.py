"""Help pages: their content as plain data, and their layout in ANSI text.

A page is the same on a terminal and on a pipe, except for the colours. Nothing here knows typer:
`main` lays out the page of ``nsq --help`` from the registry alone, the typer tree makes pages of
its commands in `describe`, and both call `render`, so the two cannot differ.
"""

from __future__ import annotations

import os
import sys

from nsqtools.cli.registry import COMMANDS, ROOT_EXAMPLES, ROOT_HELP, ROOT_OPTIONS, Command, Group

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

Row = tuple[str, str]

INDENT = "  "
WIDEST_LABEL = 32

BOLD = "\x1b[1m"
CYAN = "\x1b[36m"
RESET = "\x1b[0m"
WIDEST = 100


class HelpPage:
    """A command or group explained: usage, description, titled lists of rows, examples."""

    __slots__ = ("description", "examples", "sections", "usage")

    def __init__(
        self,
        usage: str,
        description: str,
        sections: Mapping[str, Sequence[Row]],
        examples: Sequence[str] = (),
    ):
        self.usage = usage
        self.description = description
        self.sections = sections
        self.examples = examples


def wants_colour(environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Tell whether to colour: a non-empty NO_COLOR wins, then FORCE_COLOR, then the terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_tty and environ.get("TERM") != "dumb"


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that ``stream`` is, and `WIDEST` where it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDEST
    except OSError:
        return WIDEST


def root_page() -> HelpPage:
    """The page of ``nsq --help``."""
    page = group_page("nsq", Group(ROOT_HELP, COMMANDS, panel=""))
    page.sections = {**page.sections, "Options": ROOT_OPTIONS}
    page.examples = ROOT_EXAMPLES
    return page


def group_page(path: str, group: Group) -> HelpPage:
    """The page of a group of commands, made from the registry: no command is imported."""
    sections: dict[str, list[Row]] = {}
    for name, command in group.commands.items():
        if isinstance(command, Command) and command.hidden:
            continue
        sections.setdefault(command.panel, []).append((name, command.help))
    return HelpPage(f"{path} COMMAND [OPTIONS]", group.help, sections, group.examples)


def rendered_for_stdout(page: HelpPage) -> str:
    """Lay a page out for this process's stdout, be that a terminal or a pipe."""
    return render(
        page,
        colour=wants_colour(os.environ, is_tty=sys.stdout.isatty()),
        width=terminal_width(sys.stdout),
    )


def render(page: HelpPage, *, colour: bool, width: int) -> str:
    """Lay a page out in at most ``width`` columns, and at most 100; it ends with a newline."""
    width = min(width, WIDEST)

    def paint(style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if colour else text

    labels = [label for rows in page.sections.values() for label, _ in rows]
    label_width = min(max(map(len, labels), default=0), WIDEST_LABEL)
    lines = [f"{paint(BOLD, 'Usage:')} {page.usage}", "", *_paragraphs(page.description, width)]
    for title, rows in page.sections.items():
        lines += ["", paint(BOLD, f"{title}:")]
        for label, text in rows:
            lines += _row(label, text, label_width, width, paint(CYAN, label))
    if page.examples:
        lines += ["", paint(BOLD, "Examples:")]
        for example in page.examples:
            lines += _example(example, width)
    return "\n".join(lines) + "\n"


def _row(label: str, text: str, label_width: int, width: int, painted: str) -> list[str]:
    """A label and its text beside it; a label too long for its column has a line of its own."""
    margin = " " * (len(INDENT) * 2 + label_width)
    first, *rest = _wrap(text, width - len(margin)) or [""]
    if len(label) > label_width:
        return [INDENT + painted, margin + first, *(margin + line for line in rest)]
    gap = " " * (label_width - len(label) + len(INDENT))
    head = (INDENT + painted + gap + first).rstrip()
    return [head, *(margin + line for line in rest)]


def _example(command: str, width: int) -> list[str]:
    """A command line; what is too wide continues after a backslash, as a shell reads it."""
    lines = [INDENT + command]
    while len(line := lines[-1]) > width:
        ends = [at for at in range(width - 1) if _may_end(line, at)]
        if not ends:
            break
        lines[-1:] = [line[: ends[-1]] + " \\", INDENT * 3 + line[ends[-1] :].lstrip()]
    return lines


def _may_end(line: str, at: int) -> bool:
    """Tell whether an option, a pipe or a redirection begins there, outside of quotes."""
    begins = line[at : at + 2] in (" -", " |", " >") and bool(line[:at].strip())
    return begins and line.count("'", 0, at) % 2 == line.count('"', 0, at) % 2 == 0


def _paragraphs(text: str, width: int) -> list[str]:
    """Wrap paragraphs; lines that are indented stay as they are."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        kept = any(line.startswith(" ") for line in paragraph.splitlines())
        lines += ["", *(paragraph.splitlines() if kept else _wrap(paragraph, width))]
    return lines[1:]


def _wrap(text: str, width: int) -> list[str]:
    """Break text into lines at spaces. (The textwrap module would load re and double the cost.)"""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
