"""Options and arguments as single words, the form in which the scripts for bash and fish hold them.

    --json                     a switch
    --tls,--no-tls             spellings of one option: where one was given none is offered again
    *-t,--topic=@topics        it takes a topic; * if it may be repeated
    --mode=all|failover        it takes one of these values
    -n,--count=                it takes a value, and nothing can be offered
    -deflate?=true|false       a bool of Go: the value follows = or is left out

The word of an argument is what follows = here, with a leading * if it may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from nsqtools.cli.docs.tree import Argument, Option
from nsqtools.cli.docs.values import Candidates, Value

WIDEST = 100
HEADER = "Rendered by python -m nsqtools.cli.docs: do not edit."


def option_word(option: Option) -> str:
    """The word for an option."""
    word = ("*" if option.is_repeatable else "") + ",".join(option.spellings)
    if option.value is None:
        return word
    return f"{word}{'?' if option.value_is_optional else ''}={_value(option.value)}"


def argument_word(argument: Argument) -> str:
    """The word for an argument: its value, after ``*`` if it may be repeated."""
    return ("*" if argument.is_repeatable else "") + _value(argument.value)


def spelled(options: Iterable[Option], *, with_value: bool) -> list[str]:
    """All spellings of the options that take a value, or of those that take none."""
    return [
        name for each in options if (each.value is not None) is with_value for name in each.names
    ]


def single_quoted(text: str) -> str:
    """The text as one word of bash or zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def in_columns(words: Iterable[str], indent: int = 16) -> list[str]:
    """The words in lines of at most 100 columns."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= WIDEST:
            lines[-1] += " " + word
        else:
            lines.append(" " * indent + word)
    return lines


def _value(value: Value) -> str:
    if value.kind is Candidates.CHOICE:
        return "|".join(value.choices)
    return f"@{value.kind.value}" if value.kind is not Candidates.ANYTHING else ""
