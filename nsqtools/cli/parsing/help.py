"""Help pages: their content as plain data, and their layout in ANSI text.

A page is the same on a terminal and on a pipe, except for the colors. Nothing here imports
typer: `main` lays out the page of ``nsq --help`` from the registry alone, and `render` is the same
for the pages that `describe` makes of typer's commands. Their parameters are read by their plain
attributes (names, help, default, panel) rather than through typer's own help methods, whose wording
changes between versions. A daemon is a raw command (see `registry`): the server reads its
arguments, in Go's syntax.
"""

from __future__ import annotations

import os
import sys

from nsqtools.cli.registry import PANELS, ROOT_EXAMPLES, ROOT_HELP, ROOT_OPTIONS, Command, Group

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TextIO

    from typer.core import TyperCommand

    from nsqtools.server.go_flags import Flag

Row = tuple[str, str]

INDENT = "  "
WIDEST_LABEL = 32

BOLD = "\x1b[1m"
CYAN = "\x1b[36m"
RESET = "\x1b[0m"
WIDEST = 100

BRIEF_LINES = 40
BRIEF_WIDTH = 80
MOST_LINES = 2  # of an option whose help can be cut
OPTIONS_PAGE = "nsq-options(7)"
ADDRESS = "HOST:PORT"  # the word for a value
CLIENT_OPTIONS = ("consumer_opt", "producer_opt")
CONNECTION_OPTIONS = frozenset(
    {
        *("tls_ca_file", "tls_cert", "tls_key", "tls_insecure", "tls_min_version"),
        *("tls_pin_sha256", "snappy", "deflate", "deflate_level", "auth_secret_file"),
        *("auth_requires_tls", "lookupd_authorization", "allow_announced"),
    }
)
"""Options that every command with a connection takes, and most people set once, in the
configuration file. nsq-options(7) describes them; the page of a command only refers to it."""
SEE_CONNECTION_OPTIONS = "Connection options: man nsq-options"
FOLDED = {"TLS, compression, secret": "--tls, --snappy, ...", "Logging": "-q, -v, --debug, ..."}
"""Panels that are a line of ``-h``, which names some of their options."""


class HelpPage:
    """A command or group: usage, description, titled lists of rows, examples, reference."""

    def __init__(
        self,
        usage: str,
        description: str,
        sections: Mapping[str, Sequence[Row]],
        examples: Sequence[str] = (),
        reference: str = "",
    ):
        self.usage = usage
        self.description = description
        self.sections = sections
        self.examples = examples
        self.reference = reference


def wants_color(environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Tell whether to color: a non-empty NO_COLOR wins, then FORCE_COLOR, then the terminal."""
    is_capable = is_tty and environ.get("TERM") != "dumb"
    return not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or is_capable)


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that ``stream`` is, and `WIDEST` where it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDEST
    except OSError:
        return WIDEST


def root_page() -> HelpPage:
    """The page of ``nsq --help``."""
    sections = {panel: rows_of(commands) for panel, commands in PANELS.items()}
    usage = "nsq COMMAND [OPTIONS]"
    return HelpPage(usage, ROOT_HELP, {**sections, "Options": ROOT_OPTIONS}, ROOT_EXAMPLES)


def group_page(path: str, group: Group) -> HelpPage:
    """The page of a group of commands, made from the registry: no command is imported."""
    sections = {"Commands": rows_of(group.commands)}
    return HelpPage(f"{path} COMMAND [OPTIONS]", group.help, sections, group.examples)


def rows_of(commands: Mapping[str, Command | Group]) -> list[Row]:
    """Each with its help."""
    return [(name, each.help) for name, each in commands.items()]


def rendered_for_stdout(page: HelpPage) -> str:
    """Lay a page out for this process's stdout, be that a terminal or a pipe."""
    return render(
        page,
        color=wants_color(os.environ, is_tty=sys.stdout.isatty()),
        width=terminal_width(sys.stdout),
    )


def render(page: HelpPage, *, color: bool, width: int) -> str:
    """Lay a page out in at most ``width`` columns, and at most 100; it ends with a newline."""
    width, paint = min(width, WIDEST), _painting(color)
    labels = [label for rows in page.sections.values() for label, _ in rows]
    label_width = min(max(map(len, labels), default=0), WIDEST_LABEL)
    lines = [f"{paint(BOLD, 'Usage:')} {page.usage}", "", *_paragraphs(page.description, width)]
    for title, rows in page.sections.items():
        lines += ["", paint(BOLD, f"{title}:")]
        for label, text in rows:
            lines += _row(label, text, label_width, width, paint(CYAN, label))
    if page.examples:
        lines += ["", paint(BOLD, "Examples:")]
        lines += _examples(page, width)
    if page.reference:
        lines += ["", page.reference]
    return "\n".join(lines) + "\n"


def _painting(color: bool) -> Callable[[str, str], str]:
    return lambda style, text: f"{style}{text}{RESET}" if color else text


def _row(label: str, text: str, label_width: int, width: int, painted: str) -> list[str]:
    """A label and its text beside it; a label too long for its column has a line of its own."""
    margin = " " * (len(INDENT) * 2 + label_width)
    first, *rest = _wrap(text, width - len(margin)) or [""]
    if len(label) > label_width:
        return [INDENT + painted, margin + first, *(margin + line for line in rest)]
    gap = " " * (label_width - len(label) + len(INDENT))
    head = (INDENT + painted + gap + first).rstrip()
    return [head, *(margin + line for line in rest)]


def _examples(page: HelpPage, width: int) -> list[str]:
    """The command lines; what a backslash continues is one."""
    whole = "\n".join(page.examples).replace(" \\\n", " ").splitlines()
    return [line for example in whole for line in _example(example, width)]


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


# -- pages of commands --------------------------------------------------------------------------

EXAMPLES = "Examples:"


def describe(command: TyperCommand, ctx: Any) -> HelpPage:
    """The help page of ``command``, whose docstring ends with a block of examples."""
    from inspect import cleandoc

    description, _, examples = cleandoc(command.help or "").partition(EXAMPLES)
    sections: dict[str, list[Row]] = {}
    usage = [ctx.command_path, "[OPTIONS]"]
    parameters: list[Any] = command.get_params(ctx)
    shown = [each for each in parameters if each.name not in CONNECTION_OPTIONS]
    reference = SEE_CONNECTION_OPTIONS if len(shown) < len(parameters) else ""
    for parameter in shown:
        row = (label(parameter), _text(parameter))
        if parameter.param_type_name == "argument":
            usage.append(row[0])
            sections.setdefault("Arguments", []).append(row)
        elif not parameter.hidden:
            sections.setdefault(parameter.rich_help_panel or "Options", []).append(row)
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return HelpPage(" ".join(usage), description, sections, lines, reference)


def label(parameter: Any) -> str:
    """The parameter as it is typed: ``-t, --topic TOPIC``, ``--tls / --no-tls``, ``[TEXT...]``."""
    if parameter.param_type_name == "argument":
        word = metavar(parameter) + ("..." if parameter.nargs == -1 else "")
        return word if parameter.required else f"[{word}]"
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    return names if parameter.is_flag or parameter.count else f"{names} {metavar(parameter)}"


def metavar(parameter: Any) -> str:
    """The word for the value, or the few values there are."""
    return str(parameter.metavar or "|".join(choices(parameter)) or parameter.name.upper())


def choices(parameter: Any) -> tuple[str, ...]:
    """The values that an enum allows; none for any other type."""
    from enum import Enum

    from nsqtools.cli.parsing.binding import annotation_of  # imports typer

    kind = annotation_of(parameter)
    members = kind if isinstance(kind, type) and issubclass(kind, Enum) else ()
    return tuple(str(member.value) for member in members)


def render_brief(command: TyperCommand, ctx: Any, *, color: bool, width: int) -> str:
    """What most people need, in at most `BRIEF_LINES` lines: examples, then options.

    Options come in the order of the page: as many as fit, first of all the required ones and those
    of the examples, then addresses and those that have a letter. Those in `FOLDED` are a line each.
    """
    page, width, paint = describe(command, ctx), min(width, BRIEF_WIDTH), _painting(color)
    used = {word.partition("=")[0] for example in page.examples for word in example.split()}
    ranked: list[tuple[int, int, Row]] = []
    folded: dict[str, Row] = {}
    parameters: list[Any] = command.get_params(ctx)
    for place, each in enumerate(parameters):
        if each.name in CLIENT_OPTIONS:
            folded[each.name] = (label(each), f"Options of the client: {OPTIONS_PAGE}.")
        elif each.rich_help_panel in FOLDED:
            names = FOLDED[each.rich_help_panel]
            folded[each.rich_help_panel] = (names, f"{each.rich_help_panel}: {OPTIONS_PAGE}.")
        elif not each.hidden and each.name != "help" and each.name not in CONNECTION_OPTIONS:
            is_usual = any(len(name) == 2 for name in each.opts) or each.metavar == ADDRESS
            is_argument = each.param_type_name == "argument"
            is_needed = is_argument or each.required or used.intersection(each.opts)
            rank = 0 if is_needed else 1 if is_usual else 2
            ranked.append((rank, place, (label(each), _first_sentence(each))))

    lines = [f"{paint(BOLD, 'Usage:')} {page.usage}", ""]
    lines += _wrap(page.description.partition("\n\n")[0], width)
    lines += ["", paint(BOLD, "Examples:"), *_examples(page, width), "", paint(BOLD, "Options:")]
    label_width = min(max((len(row[0]) for _, _, row in ranked), default=0), WIDEST_LABEL)

    def laid_out(row: Row) -> list[str]:
        name, text = row
        lines = _row(name, text, label_width, width, paint(CYAN, name))
        if len(lines) > MOST_LINES and "; " in text:
            text = text.partition("; ")[0]
            text += "]" if "[" in text else "."
            lines = _row(name, text, label_width, width, paint(CYAN, name))
        return lines

    last = [line for row in folded.values() for line in laid_out(row)]
    last += ["", "--help: all options"]
    shown: dict[int, list[str]] = {}
    room = BRIEF_LINES - len(lines) - len(last)
    for _, place, row in sorted(ranked):
        if len(found := laid_out(row)) <= room:
            shown[place] = found
            room -= len(found)
    lines += [line for place in sorted(shown) for line in shown[place]]
    return "\n".join([*lines, *last]) + "\n"


def _first_sentence(parameter: Any) -> str:
    text = (parameter.help or "").partition(". ")[0].removesuffix(".")
    kept = [note for note in notes(parameter) if note.startswith(("default", "required"))]
    return f"{text}. [{'; '.join(kept)}]" if kept else f"{text}."


def notes(parameter: Any) -> list[str]:
    """What follows the help of a parameter in brackets."""
    noted = []
    if parameter.envvar:
        noted.append(f"env: {parameter.envvar}")
    if isinstance(parameter.show_default, str):  # said by the command: its default is None
        noted.append(f"default: {parameter.show_default}")
    elif parameter.default not in (None, False, "", 0, []) and parameter.show_default:
        noted.append(f"default: {_plain(parameter.default)}")
    if parameter.required:
        noted.append("required")
    if getattr(parameter, "multiple", False):
        noted.append("repeatable")
    return noted


def _text(parameter: Any) -> str:
    text, noted = parameter.help or "", notes(parameter)
    return f"{text} [{'; '.join(noted)}]" if noted else text


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(getattr(value, "value", value))  # of an enum


SYNTAX = (
    "The flags are those of the real one, with one dash or two. A bool takes its value after an "
    "equals sign: -verbose=false. SIGINT and SIGTERM end it, with everything on disk."
)


def daemon_page(program: str, summary: str, flags: Mapping[str, Flag]) -> HelpPage:
    """The page of ``nsq PROGRAM --help``; ``-help`` prints Go's own."""
    from nsqtools.server.go_flags import entries

    # a help that names the host name tells the default itself, and that differs between machines
    rows = [
        (head, flag.help if "hostname" in flag.help else text)
        for flag, (head, text) in zip(flags.values(), entries(flags), strict=True)
    ]
    return HelpPage(
        f"nsq {program} [-flag VALUE | -flag=VALUE]...",
        f"{summary}\n\n{SYNTAX}",
        {"Flags": rows},
        [f"nsq {program} -tcp-address=127.0.0.1:0 -http-address=127.0.0.1:0"],
    )
