"""Help pages (`HelpPage`) of typer commands and of daemons, for --help and the manual.

The parameters are read by their plain attributes (names, help, default, panel) rather than through
typer's own help methods, whose wording changes between versions. A daemon is a raw command (see
`registry`): the server reads its arguments, in Go's syntax. Its module has ``flags()`` and
``page()``.
"""

from __future__ import annotations

from enum import Enum
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from nsqtools.cli.parsing.help import HelpPage, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typer.core import TyperCommand

    from nsqtools.server.go_flags import Flag


EXAMPLES = "Examples:"


def describe(command: TyperCommand, ctx: Any) -> HelpPage:
    """The help page of ``command``, whose docstring ends with a block of examples."""
    description, _, examples = cleandoc(command.help or "").partition(EXAMPLES)
    sections: dict[str, list[Row]] = {}
    arguments = []
    parameters: list[Any] = command.get_params(ctx)
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            arguments.append(_argument_usage(parameter))
            sections.setdefault("Arguments", []).append(
                (_argument_usage(parameter), _text(parameter))
            )
        elif not parameter.hidden:
            panel = parameter.rich_help_panel or "Options"
            sections.setdefault(panel, []).append((label(parameter), _text(parameter)))
    usage = " ".join([ctx.command_path, "[OPTIONS]", *arguments])
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return HelpPage(usage, description, sections, lines)


def label(option: Any) -> str:
    """The option as it is typed: ``-t, --topic TOPIC``, ``--tls / --no-tls``."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    return names if option.is_flag or option.count else f"{names} {metavar(option)}"


def metavar(parameter: Any) -> str:
    """The word that stands for the value, or the few values there are."""
    return str(parameter.metavar or "|".join(choices(parameter)) or parameter.name.upper())


def choices(parameter: Any) -> tuple[str, ...]:
    """The values that an enum allows; none for any other type."""
    from nsqtools.cli.parsing.binding import annotation_of  # imports typer

    annotation = annotation_of(parameter)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(member.value) for member in annotation)
    # older versions of typer have the choices elsewhere
    known = getattr(getattr(parameter, "type", None), "choices", ())
    return tuple(str(getattr(choice, "value", choice)) for choice in known)


def _argument_usage(argument: Any) -> str:
    word = metavar(argument)
    if argument.nargs == -1:
        word += "..."
    return word if argument.required else f"[{word}]"


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
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(value)


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
