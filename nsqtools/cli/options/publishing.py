"""The options of the commands that publish: where to, how fast, and how long to try."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from nsqtools.cli.options.params import INPUT
from nsqtools.cli.parsing.binding import opt
from nsqtools.client.connection_settings import PublishMode
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.records.units import argument_bytes, parse_span, unescape

if TYPE_CHECKING:
    from nsqtools.client.connection_settings import ConnectionSettings
    from nsqtools.publish.publisher import PublishOptions
    from nsqtools.publish.unsent_files import UnsentFiles

DELIVERY = "Delivery"


def parse_defer(text: str) -> float:
    """Read a delay in seconds. Raises ``ValueError`` for one that nsqd refuses."""
    from nsqtools.protocol.commands import MAX_DELAY_S

    seconds = parse_span(text)
    if seconds > MAX_DELAY_S:
        raise ValueError(f"{text!r} is above nsqd's limit of 1h")
    return seconds


Rate = Annotated[
    float, opt("--rate N", "At most N messages a second; 0 for no limit.", DELIVERY, min=0)
]
Spread = Annotated[
    PublishMode,
    opt(
        "--mode",
        "With several nsqd: publish to all, an equal share to each, or to the first that works.",
        DELIVERY,
    ),
]
RetryTimeout = Annotated[
    float | None,
    opt(
        "--retry-timeout DURATION",
        "How long to retry when nsqd cannot be reached; 0s: do not retry.",
        DELIVERY,
        show_default="1m",
    ),
]
RetryUnknown = Annotated[
    bool,
    opt(
        "--retry-unknown",
        "Publish again what nsqd may have accepted: it can arrive twice.",
        DELIVERY,
    ),
]


PROGRESS_HELP = "Record here what is confirmed, and continue from there the next time."
CheckpointFile = Annotated[Path | None, opt("--checkpoint FILE", PROGRESS_HELP, DELIVERY)]
UnsentRecords = Annotated[
    Path | None,
    opt(
        "--unsent-file FILE",
        "Append unconfirmed records to this file (--mode all: to FILE.HOST:PORT).",
        DELIVERY,
    ),
]
TopicMap = Annotated[
    list[str] | None,
    opt("--topic -t [OLD=]NEW", "Where to publish, if not to the topic that a message came from."),
]
DryRun = Annotated[
    bool, opt("--dry-run", "Publish nothing; print how many messages would go to which topic.")
]


def publish_options(
    mode: PublishMode,
    retry_timeout_s: float | None,
    *,
    retry_unknown: bool = False,
    defer_s: float | None = None,
) -> PublishOptions:
    """How to publish; without a retry timeout the usual one."""
    from nsqtools.publish.publisher import RETRY_TIMEOUT_S, PublishOptions

    timeout_s = RETRY_TIMEOUT_S if retry_timeout_s is None else retry_timeout_s
    return PublishOptions(mode, timeout_s, retry_unknown, defer_s)


def unsent_files(
    path: Path | None, ending: bytes, mode: PublishMode, connection: ConnectionSettings
) -> UnsentFiles | None:
    """Where ``--unsent-file`` wants what is not confirmed: a file, or one for each nsqd."""
    if path is None:
        return None
    from nsqtools.publish.publisher import each_counted
    from nsqtools.publish.unsent_files import UnsentFiles

    return UnsentFiles(path, ending, each_counted(mode, connection.nsqd_tcp_addresses))


def how_far(confirmed: int, done: float, total: float, elapsed_s: float, *, read: str) -> str:
    """The progress line: what is confirmed, and what is read and the time left, if known."""
    from nsqtools.protocol.text import format_duration

    if not (done and total):
        return f"{confirmed:,} confirmed"
    left_s = elapsed_s * max(0.0, total - done) / done
    return f"{confirmed:,} confirmed, {read} read, {format_duration(round(left_s))} left"


def topic_map(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NEW`` and ``OLD=NEW``. Raises `ConfigurationError`."""
    topics = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not new or old in topics:
            raise ConfigurationError(
                f"invalid --topic {text!r}", hint="Write NEW once, or OLD=NEW for each topic."
            )
        topics[old] = new
    return topics


Keep = Callable[[Any], bool]


def parse_where(text: str) -> Keep:
    """Read a jq expression. Raises `ConfigurationError`."""
    from nsqtools.records.filters import where

    return where(text)


def parse_delimiter(text: str) -> bytes:
    """Read a delimiter with escapes. Raises ``ValueError``."""
    if not text:
        raise ValueError("a delimiter cannot be empty")
    return unescape(text)


class InputFormat(Enum):
    """What a record of the input is."""

    raw = "raw"
    jsonl = "jsonl"


Delimiter = Annotated[
    bytes | None,
    opt(
        "--delimiter -d TEXT",
        "What ends each record; \\0 for NUL.",
        INPUT,
        parser=parse_delimiter,
        show_default="\\n",
    ),
]


class GivenInput(NamedTuple):
    """What to publish: files, or texts, ``times`` times."""

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
    where: Keep | None, pick: Callable[[bytes], bytes | None] | None
) -> Callable[[bytes], bytes | None] | None:
    """What ``--where`` and ``--pick`` make of a body; None when all are published as they are."""
    if where is None and pick is None:
        return None
    from nsqtools.protocol.frames import WireMessage

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
