"""Command lines in the syntax of Go's ``flag`` package, for a class of options.

A flag has one or two dashes and is ``-flag value`` or ``-flag=value``. A bool has a value only
after ``=``. The first other word, or ``--``, ends the flags. The words after that are ignored, as
nsqd ignores them.

A `FlagKind` parses the text of a flag, has Go's name of the type for the usage, and converts the
value for /config. The values of repeated flags are collected if the kind is repeatable.

The keys of the TOML file of ``--config`` are the names of the flags with underscores. Values are
read as nsqd reads them: a duration is Go's text or a number of milliseconds, a list may be one text
with commas, and a number may be a text. Unknown keys are ignored. One fault is not copied: nsqd
reads the number 0 as true for a bool.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import INT64, go_duration, parse_duration, plain_text
from nsqtools.server.daemon_log import LEVELS


def read_config(path: str, options_class: type) -> dict[str, Any]:
    """Return the options of a file by name. Raises `ConfigurationError` with nsqd's text."""
    import tomllib

    try:
        document = tomllib.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"failed to load config file {path} - {exc}") from exc
    for name, advice in REMOVED_FLAGS.items():
        if name.replace("-", "_") in document:
            raise ConfigurationError(f"{path}: {name} is gone: {advice}")
    options: dict[str, Any] = {}
    for field in fields(options_class):
        key = field.metadata["key"] or field.name
        if key not in document:
            continue
        try:
            options[field.name] = coerce(field.metadata["kind"], document[key])
        except (ValueError, TypeError) as exc:
            raise ConfigurationError(
                f"ERROR: Resolve failed to coerce value {document[key]!r} for {key} - {exc}"
            ) from exc
    return options


def coerce(kind: FlagKind, value: Any) -> Any:
    """Convert a TOML value to that of an option. Raises ``ValueError`` or ``TypeError``."""
    if kind is DURATION and type(value) is int:
        return value / 1000
    if kind in (STRINGS, PERCENTILES) and isinstance(value, list):
        item_type = str if kind is STRINGS else float
        if not all(isinstance(item, (item_type, int)) for item in value):
            raise TypeError("an item has the wrong type")
        return tuple(item_type(item) for item in value)
    if kind is BOOL and type(value) is int:
        return value != 0
    text = plain_text(value)
    return tuple(text.split(",")) if kind is STRINGS else kind.parse(text)


_BOOLS = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
TLS_VERSIONS = {"tls1.0": 0x0301, "tls1.1": 0x0302, "tls1.2": 0x0303, "tls1.3": 0x0304, "": 0x0301}


@dataclass(frozen=True, slots=True)
class FlagKind:
    """One type of flag.

    ``parse`` reads its text and raises ``ValueError`` with Go's reason. ``go_name`` is its name in
    the usage, ``show`` formats a default there, and ``wire`` converts a value for /config.
    """

    go_name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    wire: Callable[[Any], Any] = lambda value: value
    is_bool: bool = False
    repeatable: bool = False


def seconds_to_ns(seconds: float) -> int:
    """Return a duration in nanoseconds, Go's unit."""
    return round(seconds * 1_000_000_000)


def parse_int(text: str) -> int:
    """Read an integer literal of Go, with 0x, 0o, 0b, 0 for octal, and underscores."""
    digits = text.lstrip("+-")
    is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    value = int(text, 8 if is_octal else 0)
    if text != text.strip() or value not in INT64:
        raise ValueError
    return value


def parse_log_level(text: str) -> str:
    """Read a log level in any case."""
    if text.lower() not in LEVELS:
        raise ValueError(f"invalid log level '{text}' (debug, info, warn, error, fatal)")
    return text.lower()


def parse_tls_required(text: str) -> int:
    """Return 2 for true, 0 for false, and 1 for tcp-https."""
    if text.lower() == "tcp-https":
        return 1
    if text.lower() not in _BOOLS:
        raise ValueError(f'strconv.ParseBool: parsing "{text}": invalid syntax')
    return 2 if _BOOLS[text.lower()] else 0


def parse_tls_version(text: str) -> int:
    """Return the number of a version from tls1.0 to tls1.3."""
    if text.lower() not in TLS_VERSIONS:
        raise ValueError(f'unknown tlsVersionOption "{text}"')
    return TLS_VERSIONS[text.lower()]


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Read percentiles separated by commas."""
    values = tuple(float(word) for word in text.split(","))
    # Python's float() accepts spaces and underscores, and Go's parser does not.
    if not all(map(math.isfinite, values)) or re.search(r"[\s_]", text):
        raise ValueError
    return values


def _with_go_error(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that raises Go's error."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise ValueError("parse error") from None

    return read


STRING = FlagKind("string", lambda text: text, lambda value: f'"{value}"')
INT = FlagKind("int", _with_go_error(parse_int))
BOOL = FlagKind(
    "", _with_go_error(_BOOLS.__getitem__), lambda value: str(value).lower(), is_bool=True
)
DURATION = FlagKind(
    "duration",
    _with_go_error(parse_duration),
    lambda value: go_duration(seconds_to_ns(value)),
    seconds_to_ns,
)
STRINGS = FlagKind("value", lambda text: (text,), repeatable=True)
PERCENTILES = FlagKind("value", _with_go_error(parse_percentiles), repeatable=True)
LOG_LEVEL = FlagKind(
    "value", parse_log_level, str.upper, wire=lambda value: LEVELS.index(value) + 1
)
TLS_REQUIRED = FlagKind("", parse_tls_required, lambda value: "", is_bool=True)
TLS_MIN_VERSION = FlagKind(
    "value",
    parse_tls_version,
    lambda version: next(name for name, number in TLS_VERSIONS.items() if number == version),
)


FLOAT = FlagKind("float", _with_go_error(float), "{:g}".format)
KIND_OF = {int: INT, float: DURATION, str: STRING, bool: BOOL, tuple: STRINGS}
"""The kind of a flag by the type of its default."""


_USE_CONSUMERS = (
    "consumers give up, such as nsq to-http with --max-attempts and --dead-letter-topic"
)
_USE_MIN_DISK_FREE = (
    "use --min-disk-free, or ephemeral channels, which keep --mem-queue-size messages"
)
REMOVED_FLAGS = {
    "max-depth": _USE_MIN_DISK_FREE,
    "max-queue-bytes": _USE_MIN_DISK_FREE,
    "overflow-policy": _USE_MIN_DISK_FREE,
    "max-attempts": _USE_CONSUMERS,
    "dead-letter-topic": _USE_CONSUMERS,
}
"""Flags of the nsqd of nsqtools 0.2, with their replacements."""


class FlagError(Exception):
    """A command line that Go refuses, with Go's text."""


class HelpRequested(FlagError):
    """The command line has ``-h`` or ``-help``."""


def report_flag_error(error: FlagError, program: str, flags: Mapping[str, Flag]) -> int:
    """Print Go's error and the usage to stderr; return Go's exit status."""
    is_help = isinstance(error, HelpRequested)
    sys.stderr.write(("" if is_help else f"{error}\n") + usage(program, flags))
    return 0 if is_help else 2


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, and the name of the option that it sets (``""`` for none)."""

    option: str
    kind: FlagKind
    help: str
    default: Any


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """The options of a command line by name, and its other flags.

    ``without_effect`` are deprecated flags, and ``rest`` the words after the flags.
    """

    options: dict[str, Any]
    config: str
    asks_version: bool
    without_effect: tuple[str, ...]
    rest: Sequence[str]


_COMMON = {
    "config": Flag("", STRING, "path to config file", ""),
    "version": Flag("", BOOL, "print version string", False),
    "verbose": Flag("", BOOL, "[deprecated] has no effect, use --log-level", False),
}


def flags_of(options_class: type, deprecated: Mapping[str, str]) -> dict[str, Flag]:
    """Return the flags of an options class by name.

    ``deprecated`` are the names and help texts of bool flags without effect.
    """
    flags, defaults = dict(_COMMON), options_class()
    flags |= {name: Flag("", BOOL, help, False) for name, help in deprecated.items()}
    for field in fields(options_class):
        name = field.name.replace("_", "-")
        metadata, default = field.metadata, getattr(defaults, field.name)
        flags[name] = Flag(field.name, metadata["kind"], metadata["help"], default)
    return dict(sorted(flags.items()))


def parse_flags(flags: Mapping[str, Flag], arguments: Sequence[str]) -> ParsedFlags:
    """Read a command line. Raises `FlagError`, or `HelpRequested`."""
    values: dict[str, Any] = {}
    words = list(arguments)
    for name, text in _split(flags, words):
        flag = flags[name]
        try:
            value = flag.kind.parse(text)
        except ValueError as exc:
            problem = "invalid boolean value" if flag.kind.is_bool else "invalid value"
            subject = f"-{name}" if flag.kind.is_bool else f"flag -{name}"
            raise FlagError(f'{problem} "{text}" for {subject}: {exc}') from None
        values[name] = (*values.get(name, ()), *value) if flag.kind.repeatable else value
    deprecated = (name for name in values if flags[name].help.startswith("[deprecated]"))
    return ParsedFlags(
        {flags[name].option: value for name, value in values.items() if flags[name].option},
        config=values.get("config", ""),
        asks_version=values.get("version", False),
        without_effect=tuple(deprecated),
        rest=words,
    )


def _split(flags: Mapping[str, Flag], words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each flag, and remove them from ``words``."""
    while words and len(words[0]) > 1 and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            return
        body = word[2:] if word.startswith("--") else word[1:]
        if not body or body[0] in "-=":
            raise FlagError(f"bad flag syntax: {word}")
        name, equals, text = body.partition("=")
        if name not in flags:
            if name in ("h", "help"):
                raise HelpRequested
            advice = f" (gone: {REMOVED_FLAGS[name]})" if name in REMOVED_FLAGS else ""
            raise FlagError(f"flag provided but not defined: -{name}{advice}")
        if not equals:
            if not (words or flags[name].kind.is_bool):
                raise FlagError(f"flag needs an argument: -{name}")
            text = "true" if flags[name].kind.is_bool else words.pop(0)
        yield name, text


def usage(program: str, flags: Mapping[str, Flag]) -> str:
    """Return the page that Go prints for ``-help``."""
    lines = (f"  {head}\n    \t{text}\n" for head, text in entries(flags))
    return f"Usage of {program}:\n" + "".join(lines)


def entries(flags: Mapping[str, Flag]) -> Iterator[tuple[str, str]]:
    """Yield the heading and the help of each flag, including the default."""
    for name, flag in flags.items():
        text = flag.kind.show(flag.default)
        has_default = flag.default not in ("", 0, False, ()) and text
        default = f" (default {text})" if has_default else ""
        yield f"-{name} {flag.kind.go_name}".rstrip(), flag.help + default
