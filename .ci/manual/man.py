"""The manual: a page a command, in section 1.

A page says what the help says (`tree`), and adds the environment, the files and the exit statuses
of the command, for which the help has no room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from manual import roff
from manual.markdown import to_roff
from manual.tree import OPTIONS, Option, Page
from nsqtools.cli.running.runtime import ExitStatus

ALL_COMMANDS = {
    "NO_COLOR": "If not empty, output has no colors.",
    "FORCE_COLOR": "If not empty, output has colors in a pipe too.",
}
TYPED_COMMANDS = {"NSQ_DEBUG": "If not empty, errors show a traceback, as with --debug."}
WITH_PROFILES = {"XDG_CONFIG_HOME": "The directory of nsqtools/config.toml; by default ~/.config."}
WITH_SECRET = {"NSQ_AUTH_SECRET": "The auth secret itself, unless --auth-secret-file is given."}

CONVENTIONS = """
Options come after the command: `nsq tail -v`. An option means the same in every command that has
it.

Data goes to stdout and nothing else does; logs, progress, questions and errors go to stderr. A
listing is a table on a terminal and tab-separated in a pipe; `--json` makes it JSON. An error is
one line, followed by a line that begins with *hint:* if there is a remedy.

Durations are written `250ms`, `30s`, `5m` or `1h30m`, sizes `64KiB` or `100MB`, times as in RFC
3339 or as `-2h`, relative to now. Addresses are `host:port`.

Destructive commands show a plan first and ask; without a terminal they need `--yes`.
"""

DAEMON_STATUS = {
    0: "stopped by SIGINT or SIGTERM, with everything on disk",
    1: "it could not start, or could not write everything to disk",
    2: "the command line cannot work",
}
FEW_STATUSES = (ExitStatus.DONE, ExitStatus.FAILED, ExitStatus.USAGE)

CONFIG_PAGE = ("nsq-config", 5)
OPTIONS_PAGE = ("nsq-options", 7)
ARCHIVE_PAGE = ("nsq-archive", 5)
FIRST_GUIDES = (("nsq-tutorial", 7), ("nsq-operate", 7))
ABOUT_ARCHIVES = {"to-file", "archive", "replay", "spark"}


def name_of(page: Page) -> str:
    """``nsq-topic-create``."""
    return "-".join(page.words)


def render_man(page: Page, root: Page) -> str:
    """One page."""
    sections = {
        "NAME": [f"{roff.escape(name_of(page))} \\- {roff.escape(_uncapitalised(page.summary))}"],
        "SYNOPSIS": [_synopsis(page)],
        "DESCRIPTION": roff.paragraphs(page.help.description),
        "CONVENTIONS": to_roff(CONVENTIONS) if page is root else [],
        "COMMANDS": list(_commands(page)),
        "ARGUMENTS": [
            line
            for argument in page.arguments
            for line in roff.entry(
                roff.italic(argument.metavar), _explained(argument.help, argument.notes)
            )
        ],
        "OPTIONS": [*_options(_described_here(page)), *_reference(page)],
        "ENVIRONMENT": [
            line
            for name, text in environment(page).items()
            for line in roff.entry(roff.bold(name), roff.escape(text))
        ],
        "FILES": _files(page),
        "EXIT STATUS": [
            line
            for status, meaning in statuses(page).items()
            for line in roff.entry(roff.bold(str(status)), _sentence(meaning))
        ],
        "EXAMPLES": roff.example(page.help.examples),
        "SEE ALSO": roff.references(list(_see_also(page, root))),
    }
    lines = roff.title(name_of(page), 1)
    for title, body in sections.items():
        if body:
            lines += [f".SH {title}", *body]
    return roff.page(lines)


def environment(page: Page) -> dict[str, str]:
    """The environment variables that a command reads, each with its purpose."""
    variables: dict[str, str] = {}
    pages = page.walk() if len(page.words) == 1 else [page]
    for option in (option for each in pages for option in _described_here(each)):
        if option.environment:
            several = "; separate several values by spaces" if option.is_repeatable else ""
            variables[option.environment] = f"Replaces {option.names[-1]}{several}."
        if "--auth-secret-file" in option.names:
            variables |= WITH_SECRET
        if "--profile" in option.names:
            variables |= WITH_PROFILES
        if "--debug" in option.names:
            variables |= TYPED_COMMANDS
    return variables | ALL_COMMANDS


def statuses(page: Page) -> dict[int, str]:
    """The exit statuses that a command can have, each with its meaning."""
    if page.has_go_flags:
        return DAEMON_STATUS
    known = FEW_STATUSES if page.is_raw else ExitStatus
    return {int(status): status.meaning for status in known}


def _synopsis(page: Page) -> str:
    rest = page.help.usage.removeprefix(page.path)
    pieces = re.split(r"([A-Z]{2,})", rest)
    styled = [roff.italic(each) if each.isupper() else roff.escape(each) for each in pieces]
    return roff.bold(page.path) + "".join(styled)


def _commands(page: Page) -> Iterator[str]:
    panel = ""
    for title, rows in page.help.sections.items():
        names = {name for name, _ in rows}
        for command in page.commands:
            if command.words[-1] in names:
                if title != panel and len(page.help.sections) > 2:
                    panel = title
                    yield f".SS {roff.escape(title)}"
                yield from roff.entry(
                    roff.reference(name_of(command), 1), roff.escape(command.summary)
                )


def _described_here(page: Page) -> list[Option]:
    """Return the options of a page without those that nsq-options(7) alone describes."""
    return [option for option in page.options if not option.is_of_connection]


def _reference(page: Page) -> list[str]:
    if len(_described_here(page)) == len(page.options):
        return []
    return [".SS Connection options", f"See {roff.reference(*OPTIONS_PAGE)}."]


def _options(options: Iterable[Option]) -> Iterator[str]:
    by_panel: dict[str, list[Option]] = {OPTIONS: []}
    for option in options:
        by_panel.setdefault(option.panel, []).append(option)
    for panel, members in by_panel.items():
        if panel != OPTIONS:
            yield f".SS {roff.escape(panel)}"
        for option in members:
            yield from roff.entry(_tag(option), _explained(option.help, option.notes))


def _tag(option: Option) -> str:
    tag = ", ".join(map(roff.bold, option.names))
    if option.off_names:
        return tag + " / " + ", ".join(map(roff.bold, option.off_names))
    if option.metavar:
        return f"{tag} {roff.italic(option.metavar)}"
    return tag


NOTES = {
    "env": "Environment: {}.",
    "default": "Default: {}.",
    "required": "Required.",
    "repeatable": "May be given more than once.",
}


def _explained(help: str, notes: Iterable[str]) -> str:
    sentences = [help] if help else []
    for note in notes:
        kind, _, value = note.partition(": ")
        sentences.append(NOTES[kind].format(value))
    return roff.escape(" ".join(sentences)) or r"\&"


def _files(page: Page) -> list[str]:
    if not any("--profile" in option.names for option in page.options):
        return []
    return roff.entry(
        roff.italic("~/.config/nsqtools/config.toml"),
        f"Settings and profiles, see {roff.reference(*CONFIG_PAGE)}.",
    )


def _see_also(page: Page, root: Page) -> Iterator[tuple[str, int]]:
    if page is not root:
        yield name_of(root), 1
    for other in root.walk():
        is_beside = other.words[:-1] == page.words[:-1] and len(page.words) > 2
        is_above = other.words == page.words[:-1]
        if other is not page and (is_beside or is_above or other in page.commands):
            yield name_of(other), 1
    if page is root or any("--profile" in option.names for option in page.options):
        yield CONFIG_PAGE
    if page is root or ABOUT_ARCHIVES & {*page.words}:
        yield ARCHIVE_PAGE
    if page is root:
        yield from FIRST_GUIDES


def _uncapitalised(summary: str) -> str:
    summary = summary.rstrip(".")
    return summary[0].lower() + summary[1:]


def _sentence(meaning: str) -> str:
    text = meaning[0].upper() + meaning[1:] + "."
    return roff.escape(text.replace("`", ""))
