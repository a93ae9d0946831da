"""Command lines in the syntax of Go's ``flag`` package, for a class of options.

One or two dashes; ``-flag value`` or ``-flag=value``; a bool takes a value only after ``=``; the
first other word, or ``--``, ends the flags, and what follows is ignored, as nsqd ignores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from nsqtools.server.settings.flag_kinds import BOOL, STRING, FlagKind


class FlagError(Exception):
    """A command line that Go would refuse; the text is Go's."""


class HelpAsked(Exception):
    """``-h`` or ``-help`` was given."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: the option it sets (``""`` for none), its kind, help and default."""

    option: str
    kind: FlagKind
    help: str
    default: Any


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was given: options by name, and the flags that are not options."""

    options: dict[str, Any]
    config: str
    asks_version: bool
    without_effect: tuple[str, ...]  # deprecated flags


_COMMON = {
    "config": Flag("", STRING, "path to config file", ""),
    "version": Flag("", BOOL, "print version string", False),
    "verbose": Flag("", BOOL, "[deprecated] has no effect, use --log-level", False),
}


def flags_of(options_class: type, deprecated: Mapping[str, str]) -> dict[str, Flag]:
    """Return the flags of an options class by name; ``deprecated`` are bools that do nothing."""
    flags = dict(_COMMON)
    flags |= {name: Flag("", BOOL, help, False) for name, help in deprecated.items()}
    for field in fields(options_class):
        name = field.name.replace("_", "-")
        flags[name] = Flag(
            field.name, field.metadata["kind"], field.metadata["help"], _default(field)
        )
    return dict(sorted(flags.items()))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def parse_flags(flags: Mapping[str, Flag], arguments: Sequence[str]) -> CommandLine:
    """Read a command line. Raises `FlagError` or `HelpAsked`."""
    given: dict[str, Any] = {}
    for name, text in _split(flags, arguments):
        flag = flags[name]
        try:
            value = flag.kind.parse(text)
        except ValueError as exc:
            what = "boolean value" if flag.kind.is_bool else "value"
            where = f"-{name}" if flag.kind.is_bool else f"flag -{name}"
            raise FlagError(f'invalid {what} "{text}" for {where}: {exc}') from None
        given[name] = (*given.get(name, ()), *value) if flag.kind.repeatable else value
    return CommandLine(
        {flags[name].option: value for name, value in given.items() if flags[name].option},
        config=given.get("config", ""),
        asks_version=given.get("version", False),
        without_effect=tuple(name for name in given if flags[name].help.startswith("[deprecated]")),
    )


def _split(flags: Mapping[str, Flag], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each flag."""
    words = iter(arguments)
    for word in words:
        if len(word) < 2 or not word.startswith("-") or word == "--":
            return
        body = word[2:] if word.startswith("--") else word[1:]
        if not body or body[0] in "-=":
            raise FlagError(f"bad flag syntax: {word}")
        name, equals, text = body.partition("=")
        if name not in flags:
            if name in ("h", "help"):
                raise HelpAsked
            raise FlagError(f"flag provided but not defined: -{name}")
        if not equals:
            following = "true" if flags[name].kind.is_bool else next(words, None)
            if following is None:
                raise FlagError(f"flag needs an argument: -{name}")
            text = following
        yield name, text


def usage(program: str, flags: Mapping[str, Flag]) -> str:
    """Return the page that Go prints for ``-help``."""
    shown = (f"  {head}\n    \t{text}\n" for head, text in entries(flags))
    return f"Usage of {program}:\n" + "".join(shown)


def entries(flags: Mapping[str, Flag]) -> Iterator[tuple[str, str]]:
    """Yield the head and the help of each flag, the default included."""
    for name, flag in flags.items():
        shown = flag.kind.show(flag.default)
        has_default = flag.default not in ("", 0, False, ()) and shown
        default = f" (default {shown})" if has_default else ""
        yield f"-{name} {flag.kind.go_name}".rstrip(), flag.help + default
