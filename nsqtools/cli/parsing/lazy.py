"""A typer group made from the registry, whose commands are imported only when one is chosen.

Until then each command is a `Stub`: a name and a line of help, which is enough for listings,
completion of names and "did you mean".
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from nsqtools.cli.parsing.coercion import NativeCoercion
from nsqtools.cli.parsing.describe import describe
from nsqtools.cli.parsing.help import group_page, render, root_page
from nsqtools.cli.parsing.inject import flatten
from nsqtools.cli.registry import Command, Group


class Stub(TyperCommand):
    """A command that is known by name and not imported yet."""


class RealCommand(NativeCoercion, TyperCommand):
    """A command with our help page, parsed without pydantic."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        runtime = ctx.obj
        formatter.write(render(describe(self, ctx), colour=runtime.colour, width=runtime.width))


class LazyGroup(NativeCoercion, TyperGroup):
    """The group ``name``, with the commands that ``group`` lists."""

    def __init__(self, name: str, group: Group):
        super().__init__(name=name, help=group.help, rich_markup_mode=None)
        self.group = group
        self._hidden: dict[str, Stub] = {}  # apart, because typer suggests what is in commands
        for child, entry in group.commands.items():
            if isinstance(entry, Group):
                self.commands[child] = LazyGroup(child, entry)
                continue
            stubs = self._hidden if entry.hidden else self.commands
            stubs[child] = Stub(child, short_help=entry.help, rich_markup_mode=None)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """A group alone shows its help, as ``nsq`` alone does."""
        return super().parse_args(ctx, args or ["--help"])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, hidden ones too."""
        return super().get_command(ctx, cmd_name) or self._hidden.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Choose the command as typer does, suggestions included, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load(args[0]) if isinstance(command, Stub) else command, rest

    def load(self, name: str) -> Any:
        """Import one command and build its parser."""
        entry = self.group.commands[name]
        assert isinstance(entry, Command)
        command = get_command_from_info(
            CommandInfo(name=name, callback=flatten(entry.load()), cls=RealCommand),
            pretty_exceptions_short=False,
            rich_markup_mode=None,
        )
        self.commands[name] = command
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        runtime = ctx.obj
        page = root_page() if ctx.parent is None else group_page(ctx.command_path, self.group)
        formatter.write(render(page, colour=runtime.colour, width=runtime.width))
