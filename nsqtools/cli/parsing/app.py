"""Run one command line through typer: parse, call the command, translate its usage errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer import BadParameter, Exit
from typer._click.exceptions import NoSuchOption, UsageError

from nsqtools.cli.options.profile import setting_in_force
from nsqtools.cli.parsing.lazy import LazyGroup
from nsqtools.cli.registry import COMMANDS, ROOT_HELP, Group
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError


def command_tree() -> LazyGroup:
    """The whole ``nsq``, each command not yet imported."""
    return LazyGroup("nsq", Group(ROOT_HELP, COMMANDS, panel=""))


def run(arguments: Sequence[str], runtime: Runtime | None = None) -> int:
    """Run the command that ``arguments`` name; returns the exit status it chose, else 0.

    Raises `ConfigurationError` for a wrong command line, and whatever the command raises.
    """
    tree = command_tree()
    runtime = runtime or Runtime.of_process()
    try:
        with tree.make_context("nsq", list(arguments), obj=runtime) as context:
            return tree.invoke(context) or 0
    except Exit as answered:  # --help has been printed
        return answered.exit_code
    except UsageError as error:
        path = error.ctx.command_path if error.ctx else f"nsq {arguments[0]}"
        raise ConfigurationError(_message(error), hint=_hint(error, path)) from error


def _message(error: UsageError) -> str:
    """What is wrong, in one line that begins as ours do; a wrong setting says where it stands."""
    message = error.message if isinstance(error, NoSuchOption) else error.format_message()
    context: Any = error.ctx
    if isinstance(error, BadParameter) and context and error.param:
        setting = setting_in_force(context, error.param.name)
        if setting is not None:
            message = f"{setting.place}: {error.message}"
    return message[:1].lower() + message[1:].rstrip(".")


def _hint(error: UsageError, path: str) -> str:
    if isinstance(error, NoSuchOption):
        if path == "nsq":
            return f"Options stand after the command: nsq COMMAND {error.option_name}"
        if error.possibilities:
            return f"Did you mean {' or '.join(sorted(error.possibilities))}?"
    return f"See {path} --help."
