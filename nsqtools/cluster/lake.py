"""Problems of the tables that topics land in, for ``nsq check --lake``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import join, quote

from nsqtools.cluster.problems import WHOLE_NODE, Fault, Problem
from nsqtools.cluster.texts import duration_text


@dataclass(frozen=True, slots=True)
class TopicRows:
    """The rows of a topic in a table.

    ``newest_s`` is the time of the newest message in seconds since 1970, None without one.
    ``misfits`` are the rows with an error in files that have messages of the last day.
    ``partition_by`` are the partition columns in addition to topic and date. ``new_place`` is free
    for another version of the table, "" if it has several topics.
    """

    place: str
    topic: str
    rows: int
    newest_s: float | None
    misfits: int
    is_delta: bool = True
    partition_by: Sequence[str] = ()
    new_place: str = ""


@dataclass(frozen=True, slots=True)
class WaitingLogs:
    """Finished logs that have not landed, and since when the oldest one is finished."""

    directory: str
    logs: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Lake:
    """Everything that was measured. ``failures`` are pairs of a place and its error."""

    topics: Sequence[TopicRows] = ()
    waiting: Sequence[WaitingLogs] = ()
    failures: Sequence[tuple[str, str]] = ()
    max_age_s: float | None = None
    """The greatest age of the newest message of a topic."""


def find_lake_problems(lake: Lake, now_s: float) -> Iterator[Problem]:
    """Yield tables and directories that cannot be read, misfits, old tables and waiting logs."""
    for place, error in lake.failures:
        yield Problem(Fault.NOT_READABLE, error, node=place, weight=WHOLE_NODE)
    for waiting in lake.waiting:
        text = f"{waiting.logs:,}, the oldest for {duration_text(now_s - waiting.oldest_s)}"
        yield Problem(
            Fault.LOGS_WAIT,
            text,
            node=waiting.directory,
            weight=waiting.logs,
            named_remedy=f"{Fault.LOGS_WAIT.remedy[:-1]} {quote(waiting.directory)}.",
        )
    for rows in lake.topics:
        if rows.misfits:
            text = f"{rows.misfits:,} in files of the last day"
            yield Problem(
                Fault.MISFITS,
                text,
                rows.topic,
                node=rows.place,
                weight=rows.misfits,
                named_remedy=_widening_of(rows),
            )
        age_s = None if rows.newest_s is None else now_s - rows.newest_s
        if lake.max_age_s is not None and (age_s is None or age_s > lake.max_age_s):
            text = "no message has a time" if age_s is None else f"newest {duration_text(age_s)}"
            yield Problem(Fault.TABLE_OLD, text, rows.topic, node=rows.place)


def _widening_of(rows: TopicRows) -> str:
    """Return the remedy for misfits with commands that make a table with wider types.

    Delta widens no whole numbers to fractions, and rewriting a table while others write to it is
    not safe, so the new table is another one.
    """
    if not rows.new_place:
        return ""
    schema = f"{rows.topic}.json"
    sample = join(["nsq", "archive", "schema", rows.place, "-n", str(rows.rows)])
    convert = ["nsq", "archive", "convert", rows.place, "-o", rows.new_place]
    convert += ["--store", "delta" if rows.is_delta else "parquet"]
    convert += ["--body", "json", "--schema", schema]
    for name in rows.partition_by:
        convert += ["--partition-by", name if name == "hour" else f".{name}"]
    return (
        "Their _error names the fields: correct the publisher, or stop the writers of the table and"
        f" make one with wider types for them: {sample} > {quote(schema)} && {join(convert)}"
    )
