"""Help pages: their content as plain data, and their layout in ANSI text.

A page is the same on a terminal and in a pipe, except for the colors. This module does not import
typer: `main` renders the page of ``nsq --help`` from the registry alone. `render_page` also renders
the pages that `help_page_of` builds from typer's commands. It reads plain attributes of the
parameters (names, help, default, panel) instead of calling typer's help methods, whose wording
changes between versions. A daemon is a raw command (see `registry`): the server parses its
arguments in Go's syntax.
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

HelpRow = tuple[str, str]

INDENT = "  "
MAX_LABEL_WIDTH = 32

BOLD = "\x1b[1m"
CYAN = "\x1b[36m"
RESET = "\x1b[0m"
MAX_WIDTH = 100

MAX_BRIEF_LINES = 40
MAX_BRIEF_WIDTH = 80
# In brief help, an option that needs more lines loses the part behind its first semicolon.
MAX_OPTION_LINES = 2
OPTIONS_PAGE = "nsq-options(7)"
ADDRESS = "HOST:PORT"  # the metavar of an address
CLIENT_OPTIONS = ("consumer_opt", "producer_opt")
# Options of every command with a connection. Most people set them once, in the configuration file.
# nsq-options(7) describes them, and the page of a command refers to it.
CONNECTION_OPTIONS = frozenset(
    {"tls_ca_file", "tls_cert", "tls_key", "tls_insecure", "tls_min_version", "tls_pin_sha256"}
    | {"snappy", "deflate", "deflate_level"}
    | {"auth_secret_file", "auth_requires_tls", "lookupd_authorization", "allow_announced"}
)
SEE_CONNECTION_OPTIONS = "Connection options: man nsq-options"
# Panels that ``-h`` shows as one line, which names a few of their options.
FOLDED_PANELS = {
    "TLS, compression, secret": "--tls, --snappy, ...",
    "Logging": "-q, -v, --debug, ...",
}


class HelpPage:
    """The help of a command or group. ``sections`` are lists of rows by title."""

    def __init__(
        self,
        usage: str,
        description: str,
        sections: Mapping[str, Sequence[HelpRow]],
        examples: Sequence[str] = (),
        reference: str = "",
    ):
        self.usage = usage
        self.description = description
        self.sections = sections
        self.examples = examples
        self.reference = reference


def wants_color(environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Return whether to color: NO_COLOR takes precedence, then FORCE_COLOR, then the terminal."""
    is_capable = is_tty and environ.get("TERM") != "dumb"
    return not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or is_capable)


def terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal, `MAX_WIDTH` if ``stream`` is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or MAX_WIDTH
    except OSError:
        return MAX_WIDTH


def root_page() -> HelpPage:
    """Return the page of ``nsq --help``."""
    sections = {panel: rows_of(commands) for panel, commands in PANELS.items()}
    usage = "nsq COMMAND [OPTIONS]"
    return HelpPage(usage, ROOT_HELP, {**sections, "Options": ROOT_OPTIONS}, ROOT_EXAMPLES)


def group_page(path: str, group: Group) -> HelpPage:
    """Return the page of a group from the registry, without importing its commands."""
    sections = {"Commands": rows_of(group.commands)}
    return HelpPage(f"{path} COMMAND [OPTIONS]", group.help, sections, group.examples)


def rows_of(commands: Mapping[str, Command | Group]) -> list[HelpRow]:
    """Return the names of commands with their help."""
    return [(name, command.help) for name, command in commands.items()]


def render_for_stdout(page: HelpPage) -> str:
    """Render a page for the stdout of this process, a terminal or a pipe."""
    return render_page(
        page,
        color=wants_color(os.environ, is_tty=sys.stdout.isatty()),
        width=terminal_width(sys.stdout),
    )


def render_page(page: HelpPage, *, color: bool, width: int) -> str:
    """Render a page in at most ``width`` columns, and at most `MAX_WIDTH`."""
    width, paint = min(width, MAX_WIDTH), _painter(color)
    labels = [label for rows in page.sections.values() for label, _ in rows]
    label_width = min(max(map(len, labels), default=0), MAX_LABEL_WIDTH)
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


def _painter(color: bool) -> Callable[[str, str], str]:
    return lambda style, text: f"{style}{text}{RESET}" if color else text


def _row(label: str, text: str, label_width: int, width: int, colored_label: str) -> list[str]:
    """Return a label and its text in two columns. A label that is too long has a separate line."""
    margin = " " * (len(INDENT) * 2 + label_width)
    first, *others = [margin + line for line in _wrap(text, width - len(margin)) or [""]]
    if len(label) > label_width:
        return [INDENT + colored_label, first, *others]
    gap = " " * (label_width - len(label) + len(INDENT))
    return [(INDENT + colored_label + gap + first.removeprefix(margin)).rstrip(), *others]


def _examples(page: HelpPage, width: int) -> list[str]:
    """Return the lines of the examples, each joined to one command line and wrapped."""
    commands = "\n".join(page.examples).replace(" \\\n", " ").splitlines()
    return [line for command in commands for line in _wrap_command(command, width)]


def _wrap_command(command: str, width: int) -> list[str]:
    """Break a command line that is too wide with backslashes, as a shell reads it."""
    lines = [INDENT + command]
    while len(line := lines[-1]) > width:
        breaks = [at for at in range(width - 1) if _can_break(line, at)]
        if not breaks:
            break
        lines[-1:] = [line[: breaks[-1]] + " \\", INDENT * 3 + line[breaks[-1] :].lstrip()]
    return lines


def _can_break(line: str, at: int) -> bool:
    """Return whether an option, a pipe or a redirection begins at ``at``, outside of quotes."""
    begins = line[at : at + 2] in (" -", " |", " >") and bool(line[:at].strip())
    return begins and line.count("'", 0, at) % 2 == line.count('"', 0, at) % 2 == 0


def _paragraphs(text: str, width: int) -> list[str]:
    """Wrap paragraphs, except those with indented lines."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        is_literal = any(line.startswith(" ") for line in paragraph.splitlines())
        lines += ["", *(paragraph.splitlines() if is_literal else _wrap(paragraph, width))]
    return lines[1:]


def _wrap(text: str, width: int) -> list[str]:
    """Break text into lines at spaces. The textwrap module would load re and double the time."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


# -- pages of commands --------------------------------------------------------------------------

EXAMPLES = "Examples:"


def help_page_of(command: TyperCommand, ctx: Any) -> HelpPage:
    """Return the help page of ``command``, whose docstring ends with a block of examples."""
    from inspect import cleandoc

    description, _, examples = cleandoc(command.help or "").partition(EXAMPLES)
    sections: dict[str, list[HelpRow]] = {}
    usage = [ctx.command_path, "[OPTIONS]"]
    parameters: list[Any] = command.get_params(ctx)
    listed = [option for option in parameters if option.name not in CONNECTION_OPTIONS]
    reference = SEE_CONNECTION_OPTIONS if len(listed) < len(parameters) else ""
    for parameter in listed:
        row = (label(parameter), _help_text(parameter))
        if parameter.param_type_name == "argument":
            usage.append(row[0])
            sections.setdefault("Arguments", []).append(row)
        elif not parameter.hidden:
            sections.setdefault(parameter.rich_help_panel or "Options", []).append(row)
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return HelpPage(" ".join(usage), description, sections, lines, reference)


def label(parameter: Any) -> str:
    """Format a parameter: ``-t, --topic TOPIC``, ``--tls / --no-tls``, ``[TEXT...]``."""
    if parameter.param_type_name == "argument":
        word = metavar(parameter) + ("..." if parameter.nargs == -1 else "")
        return word if parameter.required else f"[{word}]"
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    return names if parameter.is_flag or parameter.count else f"{names} {metavar(parameter)}"


def metavar(parameter: Any) -> str:
    """Return the metavar of a parameter, or its choices."""
    # This module imports typer.
    from nsqtools.cli.parsing.binding import choices_of

    return str(parameter.metavar or "|".join(choices_of(parameter)) or parameter.name.upper())


def render_brief(command: TyperCommand, ctx: Any, *, color: bool, width: int) -> str:
    """Render the page of ``-h``: examples, then options, in at most `MAX_BRIEF_LINES` lines.

    The options that fit are shown in the order of the full page. Required options and options of
    the examples have priority, then addresses and options with a letter. Each panel in
    `FOLDED_PANELS` is one line.
    """
    page, width, paint = help_page_of(command, ctx), min(width, MAX_BRIEF_WIDTH), _painter(color)
    in_examples = {word.partition("=")[0] for example in page.examples for word in example.split()}
    ranked: list[tuple[int, int, HelpRow]] = []
    folded: dict[str, HelpRow] = {}
    parameters: list[Any] = command.get_params(ctx)
    for index, option in enumerate(parameters):
        panel = option.rich_help_panel
        if option.name in CLIENT_OPTIONS:
            folded[option.name] = (label(option), f"Options of the client: {OPTIONS_PAGE}.")
        elif panel in FOLDED_PANELS:
            folded[panel] = (FOLDED_PANELS[panel], f"{panel}: {OPTIONS_PAGE}.")
        elif not option.hidden and option.name != "help" and option.name not in CONNECTION_OPTIONS:
            is_common = any(len(name) == 2 for name in option.opts) or option.metavar == ADDRESS
            is_argument = option.param_type_name == "argument"
            is_needed = is_argument or option.required or in_examples.intersection(option.opts)
            rank = 0 if is_needed else 1 if is_common else 2
            ranked.append((rank, index, (label(option), _first_sentence(option))))

    lines = [f"{paint(BOLD, 'Usage:')} {page.usage}", ""]
    lines += _wrap(page.description.partition("\n\n")[0], width)
    lines += ["", paint(BOLD, "Examples:"), *_examples(page, width), "", paint(BOLD, "Options:")]
    label_width = min(max((len(row[0]) for _, _, row in ranked), default=0), MAX_LABEL_WIDTH)

    def format_row(row: HelpRow) -> list[str]:
        name, text = row
        lines = _row(name, text, label_width, width, paint(CYAN, name))
        if len(lines) > MAX_OPTION_LINES and "; " in text:
            text = text.partition("; ")[0]
            text += "]" if "[" in text else "."
            lines = _row(name, text, label_width, width, paint(CYAN, name))
        return lines

    footer = [line for row in folded.values() for line in format_row(row)]
    footer += ["", "--help: all options"]
    rows: dict[int, list[str]] = {}
    room = MAX_BRIEF_LINES - len(lines) - len(footer)
    for _, index, row in sorted(ranked):
        if len(row_lines := format_row(row)) <= room:
            rows[index] = row_lines
            room -= len(row_lines)
    lines += [line for index in sorted(rows) for line in rows[index]]
    return "\n".join([*lines, *footer]) + "\n"


def _first_sentence(parameter: Any) -> str:
    text = (parameter.help or "").partition(". ")[0].removesuffix(".")
    kept = [note for note in notes(parameter) if note.startswith(("default", "required"))]
    return f"{text}. [{'; '.join(kept)}]" if kept else f"{text}."


def notes(parameter: Any) -> list[str]:
    """Return the notes in brackets behind the help of a parameter."""
    texts = []
    if parameter.envvar:
        texts.append(f"env: {parameter.envvar}")
    # A command states the default as text if the value is None.
    if isinstance(parameter.show_default, str):
        texts.append(f"default: {parameter.show_default}")
    elif parameter.default not in (None, False, "", 0, []) and parameter.show_default:
        texts.append(f"default: {_plain(parameter.default)}")
    if parameter.required:
        texts.append("required")
    if getattr(parameter, "multiple", False):
        texts.append("repeatable")
    return texts


def _help_text(parameter: Any) -> str:
    text, texts = parameter.help or "", notes(parameter)
    return f"{text} [{'; '.join(texts)}]" if texts else text


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(getattr(value, "value", value))  # of an enum


SYNTAX = (
    "The flags are those of the Go program, with one dash or two. A bool takes its value after an "
    "equals sign: -verbose=false. SIGINT and SIGTERM end it, with everything on disk."
)


def daemon_page(program: str, summary: str, flags: Mapping[str, Flag]) -> HelpPage:
    """Return the page of ``nsq PROGRAM --help``; ``-help`` prints the format of Go."""
    from nsqtools.server.go_flags import entries

    # The default of a flag for the host name differs between machines, and its help states it.
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
