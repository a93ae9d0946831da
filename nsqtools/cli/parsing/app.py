"""Run one command line through typer: a tree of lazy commands, and its usage errors translated.

The tree is made from the registry, and a command is imported only when it is chosen. Until then it
is a name and a line of help, which is enough for listings, completion of names and "did you mean".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from typer import Exit
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from nsqtools.cli.parsing.binding import (
    BadOptionUsage,
    BadParameter,
    MissingParameter,
    NativeCoercion,
    NoSuchOption,
    UsageError,
    flatten,
)
from nsqtools.cli.parsing.help import describe, group_page, render, render_brief, root_page
from nsqtools.cli.registry import COMMANDS, GONE, ROOT_HELP, Command, Group
from nsqtools.cli.running.runtime import Runtime, before_dashes, configure_logging, with_json
from nsqtools.errors import ConfigurationError

HELP_NAMES = ["-h", "--help"]

NEAR = 0.75
"""Similarity of a suggested option. click suggests from 0.6 on, which is --where for --header."""


class RealCommand(NativeCoercion, TyperCommand):
    """A command with our help pages, parsed without pydantic.

    One with ``--json`` alone takes ``-o json`` for the same, as those with more forms do.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names = {name for parameter in self.params for name in parameter.opts}
        if "--json" in names and "-o" not in names:
            own = before_dashes(args)
            args = [*with_json(own), *args[len(own) :]]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        look = {"color": ctx.obj.has_color, "width": ctx.obj.width}
        is_brief = "--help" not in ctx.obj.arguments
        page = render_brief(self, ctx, **look) if is_brief else render(describe(self, ctx), **look)
        formatter.write(page)


class LazyGroup(NativeCoercion, TyperGroup):
    """The group ``name``, with the commands that ``group`` lists."""

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
        """A group alone shows its help, as ``nsq`` alone does."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Choose the command as typer does, and import it; suggest what it may have been.

        ``ls`` is another name of each ``list``."""
        if args[0] == "ls" and "list" in self.group.commands:
            args = ["list", *args[1:]]
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except UsageError as error:
            from difflib import get_close_matches  # 3 ms, for a mistake

            if instead := GONE.get(f"{ctx.command_path} {args[0]}"):
                error.message = f"there is no {ctx.command_path} {args[0]} any more: use {instead}"
            elif meant := get_close_matches(args[0], self.commands, 1):
                error.message = f"{error.message.rstrip('.')}. Did you mean {meant[0]!r}?"
            raise
        return name, command if isinstance(command, LazyGroup) else self.load(args[0]), rest

    def load(self, name: str) -> Any:
        """Import one command and build its parser."""
        entry = self.group.commands[name]
        assert isinstance(entry, Command)
        self.commands[name] = command = parser_of(name, entry.load())
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        runtime = ctx.obj
        page = root_page() if ctx.parent is None else group_page(ctx.command_path, self.group)
        formatter.write(render(page, color=runtime.has_color, width=runtime.width))


def command_tree() -> LazyGroup:
    """The whole ``nsq``, each command not yet imported."""
    return LazyGroup("nsq", Group(ROOT_HELP, COMMANDS))


def run(arguments: Sequence[str], runtime: Runtime | None = None) -> int:
    """Run the command that ``arguments`` name; returns the exit status it chose, else 0.

    Raises `ConfigurationError` for a wrong command line, and whatever the command raises.
    """
    tree = command_tree()
    runtime = runtime or Runtime.of_process(arguments)
    configure_logging(logging.WARNING, runtime.stderr)  # until the command's options are read
    try:
        with tree.make_context(
            "nsq", list(arguments), obj=runtime, help_option_names=HELP_NAMES
        ) as context:
            return tree.invoke(context) or 0
    except Exit as answered:  # --help has been printed
        return answered.exit_code
    except UsageError as error:
        raise _wrong_usage(error, f"nsq {arguments[0]}", arguments) from error


def parser_of(name: str, function: Callable[..., Any]) -> Any:
    how = getattr(function, "context_settings", None)
    return get_command_from_info(
        CommandInfo(name=name, callback=flatten(function), cls=RealCommand, context_settings=how),
        pretty_exceptions_short=False,
        rich_markup_mode=None,
    )


def _wrong_usage(error: UsageError, command: str, arguments: Sequence[str]) -> ConfigurationError:
    path = error.ctx.command_path if error.ctx else command
    if isinstance(error, NoSuchOption) and (instead := GONE.get(f"{path} {error.option_name}")):
        error.message = f"there is no {path} {error.option_name} any more: use {instead}"
    hint = _topic_hint(error, path, arguments) or _hint(error, path)
    return ConfigurationError(_message(error), hint=hint)


def _topic_hint(error: UsageError, path: str, arguments: Sequence[str]) -> str:
    """What to write for ``nsq tail clicks``; "" if that is not the mistake."""
    context: Any = error.ctx
    parameters = context.command.params if context else ()
    missing = error.param if isinstance(error, MissingParameter) else None
    is_missing = missing is not None and missing.name == "topic"
    is_too_many = error.message.startswith("Got unexpected extra argument")
    takes_it = any("-t" in each.opts for each in parameters)
    if not takes_it or not (is_missing or is_too_many):
        return ""
    word = next(iter(arguments[len(path.split()) - 1 :]), "-")
    if word.startswith("-"):
        return ""
    if any(each.param_type_name == "argument" for each in parameters):
        return f"Write {path} -t TOPIC {word}, or {path} -t {word}" if is_missing else ""
    return f"Write {path} -t {word}"


def _message(error: UsageError) -> str:
    """What is wrong, in one line that begins as ours do; a wrong setting says where it is."""
    message = error.message if isinstance(error, NoSuchOption) else error.format_message()
    context: Any = error.ctx
    if isinstance(error, BadParameter) and context and error.param:
        from nsqtools.cli.options.connection import active_setting

        setting = active_setting(context, error.param.name)
        if setting is not None:
            message = f"{setting.place}: {error.message}"
    return message[:1].lower() + message[1:].rstrip(".")


def _hint(error: UsageError, path: str) -> str:
    if isinstance(error, NoSuchOption):
        if path == "nsq":
            return f"Options come after the command: nsq COMMAND {error.option_name}"
        from difflib import get_close_matches

        if near := get_close_matches(error.option_name, error.possibilities or (), 1, NEAR):
            return f"Did you mean {near[0]}?"
    if isinstance(error, BadOptionUsage) and "does not take a value" in error.message:
        return f"Write {error.option_name} alone for yes, and leave it out for the default."
    return f"See {path} --help."
