"""Explain a wrong command line in one line, with the nearest command line that works.

People type what other tools taught them: ``nsq sub clicks``, ``nsq pause clicks``, ``nsq check
127.0.0.1:4161``. A hint is a complete command line or an option, and is given only if it is near:
a wrong suggestion costs more than none.

nsqtools prints a channel as ``TOPIC/CHANNEL``, so command lines may contain it in that form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nsqtools.cli.parsing.binding import (
    BadOptionUsage,
    BadParameter,
    MissingParameter,
    NoSuchOption,
    UsageError,
)
from nsqtools.cli.registry import COMMANDS, LISTED, REMOVED, Command, Group
from nsqtools.errors import ConfigurationError

# Least similarity of a suggested option. click's 0.6 would suggest --where for --header.
OPTION_SIMILARITY = 0.75
# Least similarity of a suggested command. click's 0.6 would suggest pub for sub.
COMMAND_SIMILARITY = 0.7

# What other tools call our commands.
SYNONYMS = {
    **dict.fromkeys(("sub", "subscribe", "consume", "listen", "cat", "watch"), "nsq tail"),
    **dict.fromkeys(("publish", "produce", "send"), "nsq pub"),
    **dict.fromkeys(("ls", "topics"), "nsq topic list"),
    **dict.fromkeys(("ps", "servers"), "nsq nodes"),
    "channels": "nsq channel list",
    "rm": "nsq topic delete",
    "lag": "nsq stat",
    "man": "nsq help",
}

# Options for an address, by the usual port of the daemon.
OPTION_OF_PORT = {
    "4150": "--nsqd-tcp-address",
    "4151": "--nsqd-http-address",
    "4161": "--lookupd-http-address",
}
_PORT_OF_OPTION = {option: port for port, option in OPTION_OF_PORT.items()}

_QUEUE = re.compile(r"([^/=]+)/([^/]+)")
_ADDRESS = re.compile(r"(localhost|[\w.-]+):\d+|localhost|\[[\da-fA-F:]+\]:\d+")


class Word(NamedTuple):
    """A word of a command line: an argument, an option, or the value of an option.

    ``option`` is the parameter that an option, or a value, belongs to.
    """

    text: str
    option: Any = None
    is_value: bool = False

    @property
    def is_argument(self) -> bool:
        return not self.is_value and not self.text.startswith("-")


def options_by_name(params: Sequence[Any]) -> dict[str, Any]:
    """Return the options by all their names, such as ``-t``, ``--tls`` and ``--no-tls``."""
    return {
        name: parameter
        for parameter in params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


def words_of(params: Sequence[Any], args: Sequence[str]) -> Iterator[Word]:
    """Iterate over the words before ``--``."""
    options = options_by_name(params)
    option = None
    for arg in args:
        if option is not None:
            yield Word(arg, option, is_value=True)
            option = None
        elif arg == "--":
            return
        else:
            name, equals, _ = arg.partition("=")
            parameter = options.get(name) if arg.startswith("-") else None
            yield Word(arg, parameter)
            if parameter is not None and not (parameter.is_flag or parameter.count or equals):
                option = parameter


def refuse_single_dashes(params: Sequence[Any], words: Sequence[Word], context: Any) -> None:
    """Raise `NoSuchOption` for a long option with one dash, as Go's utilities accept it.

    ``-topic clicks`` would otherwise be parsed as ``-t opic`` and an argument ``clicks``.
    """
    names = options_by_name(params)
    for word in words:
        name = word.text.partition("=")[0]
        if not word.is_value and len(name) > 2 and f"-{name}" in names:
            raise NoSuchOption(name, possibilities=[f"-{name}"], ctx=context)


def split_queues(params: Sequence[Any], words: Sequence[Word]) -> list[str]:
    """Return the words with ``clicks/archive`` as a topic and a channel.

    That is one of two arguments, or the only ``--topic`` of a command with ``--channel``.
    """
    arguments = [param.name for param in params if param.param_type_name == "argument"]
    options = {param.name for param in params if "-t" in param.opts or "-c" in param.opts}
    has_pair = arguments[:2] == ["topic", "channel"]
    may_split = has_pair and sum(word.is_argument for word in words) == 1
    given = [word.option.name for word in words if word.option is not None and not word.is_value]
    may_split_option = options == {"topic", "channel"} and given.count("topic") == 1
    split: list[str] = []
    for word in words:
        queue = _QUEUE.fullmatch(word.text)
        is_topic = word.is_value and word.option.name == "topic"
        if queue and may_split and word.is_argument:
            split += queue.groups()
        elif queue and is_topic and may_split_option and "channel" not in given:
            split += [queue[1], "-c", queue[2]]
        else:
            split.append(word.text)
    return split


def suggest_command(path: str, typed: Sequence[str], group: Group) -> str:
    """Return what a user of ``path`` meant by an unknown command, "" if nothing is near.

    ``typed`` are the unknown command and the words after it.
    """
    name = typed[0]
    if path == "nsq":
        second = COMMANDS.get(typed[1]) if len(typed) > 1 else None
        if isinstance(second, Group) and name in second.commands:
            return f"nsq {typed[1]} {name}"
        if name in SYNONYMS:
            return SYNONYMS[name]
    elif isinstance(COMMANDS.get(name), Command):
        return f"nsq {name}"
    # The import takes 3 ms, so it is not at the top of the module.
    from difflib import get_close_matches

    if near := get_close_matches(name, group.commands, 1, COMMAND_SIMILARITY):
        return f"{path} {near[0]}"
    return " or ".join(
        f"nsq {parent} {name}"
        for parent, entry in LISTED.items()
        if path == "nsq" and isinstance(entry, Group) and name in entry.commands
    )


def usage_error_of(error: UsageError, command: str, arguments: Sequence[str]) -> ConfigurationError:
    """Return the error of a wrong command line, in our style and with a hint."""
    path = error.ctx.command_path if error.ctx else command
    if isinstance(error, NoSuchOption):
        name = f"{path} {error.option_name}"
        if replacement := REMOVED.get(name):
            error.message = f"{name} was removed: use {replacement}"
    hint = _corrected_line(error, path, arguments) or _hint(error, path)
    return ConfigurationError(_message(error), hint=hint)


def _message(error: UsageError) -> str:
    """Return the error in one line, with the place of an invalid setting."""
    message = error.message if isinstance(error, NoSuchOption) else error.format_message()
    context: Any = error.ctx
    if isinstance(error, BadParameter) and context and error.param:
        from nsqtools.cli.options.connection import active_setting

        setting = active_setting(context, error.param.name)
        if setting is not None:
            message = f"{setting.place}: {error.message}"
    return message[:1].lower() + message[1:].rstrip(".")


def _corrected_line(error: UsageError, path: str, arguments: Sequence[str]) -> str:
    """Return a hint with the command line for arguments that are options of the command.

    ``nsq tail clicks`` becomes ``nsq tail -t clicks``. Returns "" for other mistakes.
    """
    import shlex  # 0.7 ms, and needed for a mistake only

    context: Any = error.ctx
    parameters = context.command.params if context else ()
    missing = error.param.name if isinstance(error, MissingParameter) and error.param else ""
    is_too_many = error.message.startswith("Got unexpected extra argument")
    if missing != "topic" and not is_too_many:
        return ""
    words = list(words_of(parameters, arguments[len(path.split()) - 1 :]))
    if not words or not words[0].is_argument:
        return ""
    typed = [word.text for word in words if word.is_argument]
    others = [word.text for word in words if not word.is_argument]
    options = _options_of(typed, options_by_name(parameters))
    accepts_arguments = any(param.param_type_name == "argument" for param in parameters)
    if accepts_arguments and not (missing and len(typed) > 1):
        word = shlex.quote(typed[0])
        return f"Write {path} -t TOPIC {word}, or {path} -t {word}" if missing else ""
    if accepts_arguments:
        options = ["-t", *typed]
    return f"Write {shlex.join([*path.split(), *options, *others])}" if options else ""


def _options_of(typed: Sequence[str], names: Mapping[str, Any]) -> list[str]:
    """Return the options that arguments stand for; an empty list if that is not clear."""
    if _ADDRESS.fullmatch(typed[0]) and len(typed) == 1:
        host, _, port = typed[0].rpartition(":")
        options = [OPTION_OF_PORT.get(port, ""), *OPTION_OF_PORT.values()]
        name = next((option for option in options if option in names), "")
        return [name, typed[0] if host else f"{typed[0]}:{_PORT_OF_OPTION[name]}"] if name else []
    if "-t" not in names or len(typed) > 2:
        return []
    queue = _QUEUE.fullmatch(typed[0])
    topic, *channel = queue.groups() if queue and len(typed) == 1 else typed
    if channel and "-c" not in names:
        return []
    if not channel and "-c" in names and names["-c"].required:
        channel = ["CHANNEL"]
    return ["-t", topic, *(["-c", *channel] if channel else [])]


def _hint(error: UsageError, path: str) -> str:
    if isinstance(error, NoSuchOption):
        if path == "nsq":
            return f"Options come after the command: nsq COMMAND {error.option_name}"
        context: Any = error.ctx
        params = context.command.params if context else ()
        names = list(options_by_name(params)) or error.possibilities or ()
        if near := _near_options(error.option_name, names):
            return f"Did you mean {near}?"
    if isinstance(error, BadOptionUsage) and "does not take a value" in error.message:
        return f"Write {error.option_name} alone for yes, and omit it for the default."
    return f"See {path} --help."


def _near_options(typed: str, names: Sequence[str]) -> str:
    """Return the options that begin as ``typed`` does, else the most similar one."""
    beginning = [name for name in names if len(typed) > 4 and name.startswith(typed)]
    if beginning:
        return " or ".join(dict.fromkeys(beginning[:2]))
    from difflib import get_close_matches

    return "".join(get_close_matches(typed, names, 1, OPTION_SIMILARITY))
