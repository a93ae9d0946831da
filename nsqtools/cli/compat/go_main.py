"""Run as one of NSQ's Go utilities: chosen by the name of the program, with its exit statuses.

0 also after INT and TERM, 1 for whatever fails, 2 for flags that do not exist. There is no
configuration file and no environment: a unit file of the Go utility means what it says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nsqtools.cli.compat.go_utilities import UTILITIES
from nsqtools.cli.compat.translation import GoFatal, Translation, translate
from nsqtools.cli.running.ends import report_error
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import escape_line
from nsqtools.server.go_flags import FlagError, HelpAsked, parse_flags, usage

VERSION = "1.3.0"  # of the utilities whose flags these are
SIGNALS = (130, 143)


def go_main(program: str, arguments: Sequence[str]) -> int:
    """Run ``program`` with Go's flags; return its exit status."""
    flags = UTILITIES[program]
    try:
        given = read_flags(program, arguments)
        if given.get("version"):
            from nsqtools import __version__

            sys.stdout.write(f"{program} v{VERSION} (nsqtools {__version__})\n")
            return 0
        translation = translate(program, given)
    except HelpAsked:
        sys.stderr.write(usage(program, flags))
        return 0
    except FlagError as exc:
        sys.stderr.write(f"{exc}\n{usage(program, flags)}")
        return 2
    except GoFatal as exc:
        sys.stderr.write(f"{program}: {escape_line(str(exc))}\n")
        return 1
    try:
        status = _run(program, given, translation)
    except GoFatal as exc:
        sys.stderr.write(f"{program}: {escape_line(str(exc))}\n")
        return 1
    if status in SIGNALS:
        return 0
    return 1 if 0 < status < 128 else status


def read_flags(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return every flag of a utility with its value. Raises `FlagError` and `HelpAsked`, and
    `GoFatal` for words that are no flags where the utility refuses them."""
    flags = UTILITIES[program]
    given = parse_flags(flags, arguments)
    values = {name: flag.default for name, flag in flags.items()} | given.options
    if program == "nsq_to_file" and (rest := _words_after(flags, arguments)):
        raise GoFatal(f"unknown arguments: [{' '.join(rest)}]")
    if given.asks_version:
        values["version"] = True
    elif program != "nsq_to_file":  # which ignores what it does not know; we refuse that later
        for flag in ("consumer-opt", "producer-opt"):
            for text in values.get(flag, ()):
                _check_client_option(flag, text)
    return values


def _check_client_option(flag: str, text: str) -> None:
    """Refuse what go-nsq does not know, as a flag that cannot be read."""
    from nsqtools.cli.compat.go_programs import option_of
    from nsqtools.client.options import read_option

    name, value = option_of(text)
    try:
        read_option(name, value)
    except ConfigurationError as exc:
        reason = f"invalid option {name}" if "unknown" in str(exc) else str(exc)
        raise FlagError(f'invalid value "{text}" for flag -{flag}: {reason}') from None


def _words_after(flags: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """The words after the last flag."""
    words = list(arguments)
    while words and words[0].startswith("-") and len(words[0]) > 1:
        word = words.pop(0)
        if word == "--":
            break
        name, equals, _ = word.lstrip("-").partition("=")
        if not equals and not flags[name].kind.is_bool:
            words = words[1:]
    return words


def _run(program: str, given: Mapping[str, Any], translation: Translation) -> int:
    for name in [name for name in os.environ if name.startswith("NSQ_") and name != "NSQ_DEBUG"]:
        del os.environ[name]
    runtime = Runtime(sys.stdout, sys.stderr, {**os.environ, "XDG_CONFIG_HOME": os.devnull})
    try:
        if program == "nsq_tail" and given["n"] > 0 and len(given["topic"]) > 1:
            from nsqtools.cli.compat.go_programs import tail_each

            return tail_each(given, runtime)
        if program == "nsq_stat":
            from nsqtools.cli.compat.go_programs import print_stat

            return print_stat(given, runtime)
        if program == "nsq_to_file":
            from nsqtools.cli.compat.go_programs import write_files

            return write_files(given, runtime)
        from nsqtools.cli.parsing.app import run

        return run(translation.argv, runtime)
    except (NsqError, OSError) as exc:
        return report_error(exc, sys.stderr, debug=bool(os.environ.get("NSQ_DEBUG")))
