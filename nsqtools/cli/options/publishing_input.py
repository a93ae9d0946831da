"""What ``nsq pub`` publishes: texts and files, how they are cut into bodies, and which of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument

from nsqtools.cli.options.opt import opt
from nsqtools.cli.options.params import INPUT, delimiter_option, duration_option
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.message import WireMessage
from nsqtools.records import filters
from nsqtools.records.filters import compile_pick
from nsqtools.records.units import argument_bytes, unescape


def parse_delimiter(text: str) -> bytes:
    """Read a delimiter with escapes. Raises ``ValueError``."""
    if not text:
        raise ValueError("a delimiter cannot be empty")
    return unescape(text)


class InputFormat(Enum):
    """What a record of the input is."""

    raw = "raw"
    jsonl = "jsonl"


Texts = Annotated[
    list[str] | None,
    Argument(
        metavar="TEXT",
        help="Messages to publish; @FILE for the lines of a file, - for standard input.",
    ),
]
Messages = Annotated[
    list[str] | None, opt("--message -m TEXT", "Publish this text, whatever it begins with.", INPUT)
]
Files = Annotated[
    list[Path] | None,
    opt("--file -f FILE", "Publish the lines of this file; - for standard input.", INPUT),
]
Repeat = Annotated[
    int | None,
    opt(
        "--repeat N",
        "Publish the texts N times, with {n}, {uuid} and {now} or {now:%H:%M} filled in.",
        INPUT,
        min=1,
    ),
]
Interval = Annotated[
    float | None, duration_option("--interval", "Time between two rounds of --repeat.", panel=INPUT)
]
Where = Annotated[
    filters.Filter | None,
    opt(
        "--where JQ",
        "Publish only bodies that are JSON for which this is true, in jq's language.",
        INPUT,
        parser=filters.where,
    ),
]
Pick = Annotated[
    Callable[[bytes], bytes | None] | None,
    opt(
        "--pick JQ",
        "Publish what this makes of the JSON in a body, in place of it ('.user').",
        INPUT,
        parser=compile_pick,
    ),
]
Format = Annotated[
    InputFormat,
    opt(
        "--format", "raw: each record is a body. jsonl: what tail --json and archives write.", INPUT
    ),
]
Delimiter = Annotated[
    bytes | None,
    delimiter_option("What ends each record; \\0 for NUL.", panel=INPUT, parser=parse_delimiter),
]


class GivenInput(NamedTuple):
    """What to publish: files, or texts so many times."""

    paths: list[str]
    texts: list[bytes]
    times: int = 1
    interval_s: float = 0.0
    is_template: bool = False

    def batches(self, is_stopped: Callable[[], bool]) -> Iterable[Sequence[bytes]] | None:
        """The batches of the texts; None where files are read."""
        if not self.texts:
            return None
        if not self.is_template:
            return iter([self.texts])
        from nsqtools.publish.repeating import repeated

        return repeated(self.texts, self.times, self.interval_s, is_stopped)


def read_input(
    texts: Sequence[str],
    messages: Sequence[str],
    files: Sequence[Path],
    repeat: int | None,
    interval_s: float | None,
) -> GivenInput:
    """What the arguments and options name. Raises `ConfigurationError` and `OutputError`."""
    paths = [str(path) for path in files]
    bodies = [argument_bytes(text) for text in messages]
    for text in texts:
        if text == "-" or (text.startswith("@") and len(text) > 1):
            paths.append(text.removeprefix("@"))
        elif os.path.isfile(text):
            raise ConfigurationError(
                f"{text} is a file, and as an argument it is a text",
                hint=f"Write @{text} to publish its lines, or -m {text} for the text.",
            )
        else:
            bodies.append(argument_bytes(text))
    if bodies and paths:
        raise ConfigurationError("give either texts or files")
    if (repeat or interval_s) and not bodies:
        raise ConfigurationError(
            "--repeat and --interval are for texts", hint="Give the text as an argument."
        )
    if interval_s is not None and repeat is None:
        raise ConfigurationError("--interval needs --repeat")
    if repeat is not None:
        from nsqtools.publish.repeating import check_template

        for body in bodies:
            check_template(body)
    for path in paths:
        if path != "-" and not os.path.exists(path):
            raise OutputError(
                f"cannot read {path} (No such file or directory)",
                hint=f"To publish the text itself: -m @{path}",
            )
    return GivenInput(
        paths if paths or bodies else ["-"],
        bodies,
        repeat or 1,
        interval_s or 0.0,
        repeat is not None,
    )


def selection(
    where: filters.Filter | None, pick: Callable[[bytes], bytes | None] | None
) -> Callable[[bytes], bytes | None] | None:
    """What ``--where`` and ``--pick`` make of a body; None when all are published as they are."""
    if where is None and pick is None:
        return None

    def select(body: bytes) -> bytes | None:
        if where is not None and not where(WireMessage(0, 0, b"", body)):
            return None
        try:
            return body if pick is None else pick(body)
        except ValueError:
            return None

    return select


def size_of(paths: Sequence[str]) -> int:
    """The bytes in the files; 0 where that is not known."""
    try:
        return sum(os.path.getsize(path) for path in paths if os.path.isfile(path) or path == "-")
    except OSError:
        return 0
