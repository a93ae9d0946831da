"""Read the options of a data source: ``spark.read.format("nsq-archive").option("since", "-2h")``.

Spark hands options over as text with keys in lower case, so ``maxRowsPerTrigger``,
``max-rows-per-trigger`` and ``max_rows_per_trigger`` are one option here. An option that nobody
reads is an error, as everywhere in nsqtools: one that is silently ignored is worse than none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.durations import parse_duration
from nsqtools.records.units import parse_size, parse_time

Value = TypeVar("Value")

TRUE, FALSE = "true", "false"


def normal(name: str) -> str:
    """Return the form in which names are compared: lower case, without ``-`` and ``_``."""
    return name.lower().replace("-", "").replace("_", "")


class Options:
    """The options of one use of ``format``; ``end`` says that all have been read.

    Every method raises `ConfigurationError`, naming the option, for a value that cannot be read.
    """

    def __init__(self, format: str, given: Mapping[str, str]) -> None:
        self._format = format
        self._given = {normal(name): str(given[name]) for name in given}
        self._known: dict[str, str] = {}

    def text(self, name: str) -> str | None:
        """Return an option as it is, None when it is not given."""
        self._known[normal(name)] = name
        return self._given.get(normal(name))

    def required(self, name: str, example: str) -> str:
        """Return an option that must be there and not be empty."""
        value = self.text(name)
        if not value:
            raise ConfigurationError(
                f"format {self._format!r} needs the option {name!r}",
                hint=f'For example: .option("{name}", "{example}")',
            )
        return value

    def list(self, name: str) -> list[str]:
        """Return values separated by commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]

    def integer(self, name: str, *, low: int = 1) -> int | None:
        """Return a number that is not below ``low``."""
        number = self._read(name, "a whole number", int)
        if number is not None and number < low:
            raise ConfigurationError(f"option {name}={number} is below {low}")
        return number

    def number(self, name: str) -> float | None:
        """Return a number that is not negative, whole or not."""
        number = self._read(name, "a number", float)
        if number is not None and not 0 <= number < float("inf"):
            raise ConfigurationError(f"option {name}={number:g} is not a number from 0")
        return number

    def size(self, name: str) -> int | None:
        """Return bytes: ``64KiB``, ``100MB``."""
        return self._read(name, "a size such as 64MiB", parse_size)

    def duration_s(self, name: str) -> float | None:
        """Return seconds: ``250ms``, ``5m``."""
        return self._read(name, "a duration such as 30s", parse_duration)

    def time_ns(self, name: str) -> int | None:
        """Return nanoseconds since 1970: RFC 3339, or ``-2h`` before now."""
        now_ns = time.time_ns()
        return self._read(
            name,
            "a time such as 2026-11-21T08:00:00Z or -2h",
            lambda text: parse_time(text, now_ns=now_ns),
        )

    def flag(self, name: str, *, default: bool) -> bool:
        """Return ``true`` or ``false``."""
        return self.choice(name, (TRUE, FALSE), default=TRUE if default else FALSE) == TRUE

    def choice(self, name: str, choices: Iterable[str], *, default: str) -> str:
        """Return one of some words."""
        value = (self.text(name) or default).strip().lower()
        if value not in choices:
            raise ConfigurationError(f"option {name}={value} is none of {', '.join(choices)}")
        return value

    def end(self) -> None:
        """Refuse the options that were given and asked for by nobody."""
        for name in sorted(set(self._given) - set(self._known)):
            from difflib import get_close_matches

            near = get_close_matches(name, self._known, 1)
            known = ", ".join(sorted(self._known.values()))
            raise ConfigurationError(
                f"format {self._format!r} has no option {name!r}",
                hint=f"Did you mean {self._known[near[0]]}?" if near else f"It has: {known}.",
            )

    def _read(self, name: str, kind: str, read: Callable[[str], Value]) -> Value | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return read(text)
        except ValueError:
            raise ConfigurationError(f"option {name}={text!r} is not {kind}") from None
