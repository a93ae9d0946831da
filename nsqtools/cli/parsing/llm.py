"""``nsq --help-llm``: all commands in one Markdown document, for programs that read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nsqtools.cli.parsing.app import LazyGroup, command_tree
from nsqtools.cli.parsing.help import HelpPage, describe
from nsqtools.cli.registry import DEPRECATED, ROOT_HELP, Command
from nsqtools.cli.running.runtime import ExitStatus

# Options that many commands share are described once, under the first command that has them.
_SHARED_PANELS = ("Connection", "TLS, compression, secret", "Logging", "Filters", "One channel")

_INTRODUCTION = """\
# nsq

{help}

Each command states its impact, the worst that any of its options can do: it *reads*, *changes*
something, or *destroys* messages, topics, channels or files, which cannot be undone. `--dry-run`
shows what a command would do. Commands that destroy ask on a terminal; without one they need
`--yes`. `--json` prints JSON, whose schema is printed by `nsq schema COMMAND`; messages of the
command itself go to stderr. Addresses come from options, NSQ_... variables or the configuration
file.

Exit statuses: {statuses}.
"""


def llm_page() -> str:
    """Return the document."""
    statuses = "; ".join(f"{status.value} {status.meaning}" for status in ExitStatus)
    lines = [_INTRODUCTION.format(help=ROOT_HELP, statuses=statuses)]
    described: set[str] = set()
    for path, entry, parser in all_parsers():
        lines += [f"## nsq {path} ({entry.impact})", ""]
        if parser is None:
            lines += [f"{entry.help} Its flags: `nsq {path} --help`.", ""]
        else:
            context = parser.context_class(parser, info_name=f"nsq {path}")
            lines += _section(describe(parser, context), described)
    return "\n".join(lines)


def all_parsers() -> Iterator[tuple[str, Command, Any]]:
    """Yield path, entry and parser of each command that is not deprecated; daemons have none."""

    def walk(group: LazyGroup, prefix: str) -> Iterator[tuple[str, Command, Any]]:
        for name, entry in group.group.commands.items():
            if isinstance(entry, Command):
                yield prefix + name, entry, None if entry.raw else group.load(name)
            else:
                child = group.commands[name]
                assert isinstance(child, LazyGroup)
                yield from walk(child, f"{prefix}{name} ")

    return (item for item in walk(command_tree(), "") if item[0] not in DEPRECATED)


def _section(page: HelpPage, described: set[str]) -> Iterator[str]:
    yield from (f"`{page.usage}`", "", page.description.strip(), "")
    for panel, rows in page.sections.items():
        for label, text in rows:
            is_known = panel in _SHARED_PANELS and label in described
            if not is_known and label != "--help":
                described.add(label)
                yield f"- `{label}`: {text}"
    if page.examples:
        yield from ("", "```sh", *page.examples, "```")
    yield ""
