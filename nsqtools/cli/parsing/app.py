"""Run a command line through typer: a tree of lazy commands.

The tree is built from the registry. A command is imported when it is chosen. Until then it is a
name and a line of help, which suffices for listings, completion of names and "did you mean".
`llm_page` imports all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typer import Exit
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from nsqtools.cli.parsing.binding import NativeCoercion, UsageError, flatten
from nsqtools.cli.parsing.help import (
    HelpPage,
    group_page,
    help_page_of,
    render_brief,
    render_page,
    root_page,
)
from nsqtools.cli.parsing.mistakes import (
    refuse_single_dashes,
    split_queues,
    suggest_command,
    usage_error_of,
    words_of,
)
from nsqtools.cli.registry import COMMANDS, DEPRECATED, REMOVED, ROOT_HELP, Command, Group
from nsqtools.cli.running.runtime import (
    ExitStatus,
    Runtime,
    before_dashes,
    configure_logging,
    with_json,
)

HELP_NAMES = ["-h", "--help"]


class RealCommand(NativeCoercion, TyperCommand):
    """A command with our help pages, parsed without pydantic.

    A command with ``--json`` but without ``-o`` accepts ``-o json`` too, like commands with more
    output formats.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names = {name for parameter in self.params for name in parameter.opts}
        if "--json" in names and "-o" not in names:
            leading = before_dashes(args)
            args = [*with_json(leading), *args[len(leading) :]]
        words = list(words_of(self.params, args))
        refuse_single_dashes(self.params, words, ctx)
        return super().parse_args(ctx, [*split_queues(self.params, words), *args[len(words) :]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        color, width = ctx.obj.has_color, ctx.obj.width
        if "--help" in ctx.obj.arguments:
            formatter.write(render_page(help_page_of(self, ctx), color=color, width=width))
        else:
            formatter.write(render_brief(self, ctx, color=color, width=width))


class LazyGroup(NativeCoercion, TyperGroup):
    """A group of commands that are imported when they are chosen."""

    def __init__(self, name: str, group: Group):
        super().__init__(name=name, help=group.help, rich_markup_mode=None, suggest_commands=False)
        self.group = group
        for child, entry in group.commands.items():
            if isinstance(entry, Group):
                self.commands[child] = LazyGroup(child, entry)
            else:
                self.commands[child] = TyperCommand(
                    child, short_help=entry.help, rich_markup_mode=None
                )

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Show the help of a group without a command, as of ``nsq`` without one."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Import the chosen command, or suggest a command with a similar name.

        ``ls`` is an alias of each ``list``.
        """
        if args[0] == "ls" and "list" in self.group.commands:
            args = ["list", *args[1:]]
        try:
            name, command, arguments = super().resolve_command(ctx, args)
        except UsageError as error:
            if replacement := REMOVED.get(f"{ctx.command_path} {args[0]}"):
                error.message = f"{ctx.command_path} {args[0]} was removed: use {replacement}"
            elif suggestion := suggest_command(ctx.command_path, args, self.group):
                error.message = f"{error.message.rstrip('.')}. Did you mean {suggestion}?"
            raise
        return name, command if isinstance(command, LazyGroup) else self.load(args[0]), arguments

    def load(self, name: str) -> Any:
        """Import one command and build its parser."""
        entry = self.group.commands[name]
        assert isinstance(entry, Command)
        self.commands[name] = command = parser_of(name, entry.load())
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        runtime = ctx.obj
        page = root_page() if ctx.parent is None else group_page(ctx.command_path, self.group)
        formatter.write(render_page(page, color=runtime.has_color, width=runtime.width))


def command_tree() -> LazyGroup:
    """Return the tree of all commands, none of them imported."""
    return LazyGroup("nsq", Group(ROOT_HELP, COMMANDS))


def run(arguments: Sequence[str], runtime: Runtime | None = None) -> int:
    """Run the command that ``arguments`` name, and return its exit status.

    Raises `ConfigurationError` for a wrong command line, and the errors of the command.
    """
    tree = command_tree()
    runtime = runtime or Runtime.of_process(arguments)
    # For warnings before the command's own logging options have been read.
    configure_logging(logging.WARNING, runtime.stderr)
    try:
        with tree.make_context(
            "nsq", list(arguments), obj=runtime, help_option_names=HELP_NAMES
        ) as context:
            return tree.invoke(context) or 0
    except Exit as exit_request:  # after --help
        return exit_request.exit_code
    except UsageError as error:
        raise usage_error_of(error, f"nsq {arguments[0]}", arguments) from error


def parser_of(name: str, function: Callable[..., Any]) -> Any:
    """Return the typer command that parses the options of ``function`` and calls it."""
    info = CommandInfo(
        name=name,
        callback=flatten(function),
        cls=RealCommand,
        context_settings=getattr(function, "context_settings", None),
    )
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


# -- all commands in one document -----------------------------------------------------------------


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
            lines += _section(help_page_of(parser, context), described)
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
