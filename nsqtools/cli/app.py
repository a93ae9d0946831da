"""Run one command line through typer: parse, call the command, translate its usage errors."""

from __future__ import annotations

from collections.abc import Sequence

from typer import Exit
from typer._click.exceptions import NoSuchOption, UsageError

from nsqtools.cli.lazy import LazyGroup
from nsqtools.cli.registry import COMMANDS, ROOT_HELP, Group
from nsqtools.cli.runtime import Runtime
from nsqtools.errors import ConfigurationError, NsqError


def command_tree() -> LazyGroup:
    """The whole ``nsq``, each command not yet imported."""
    return LazyGroup("nsq", Group(ROOT_HELP, COMMANDS, panel=""))


def run(arguments: Sequence[str], runtime: Runtime | None = None) -> int:
    """Run the command that ``arguments`` name; returns the exit status it chose, else 0.

    Raises `ConfigurationError` for a wrong command line, and whatever the command raises.
    """
    tree = command_tree()
    try:
        with tree.make_context(
            "nsq", list(arguments), obj=runtime or Runtime.of_process()
        ) as context:
            return tree.invoke(context) or 0
    except Exit as answered:
        return answered.exit_code
    except UsageError as error:
        raise usage_error(error) from error


def usage_error(error: UsageError) -> NsqError:
    """Our error for typer's: its message in one line, and where to read on."""
    message = error.message if isinstance(error, NoSuchOption) else error.format_message()
    if isinstance(error, NoSuchOption) and error.possibilities:
        hint = f"did you mean {' or '.join(sorted(error.possibilities))}?"
    else:
        hint = f"see {error.ctx.command_path if error.ctx else 'nsq'} --help"
    return ConfigurationError(message.rstrip("."), hint=hint)
