"""The columns of a message in Spark and in Arrow, and text of an archive into such columns.

``ts_ns`` is nsqd's time of publishing, nanoseconds since 1970; ``timestamp`` is the same cut to
microseconds, as Spark's own type. Files of bare bodies know only ``body``: the other columns are
null. ``file`` and ``pos`` locate an archived message: the file's path, and the byte position of the
member that holds it.

The fast way reads with Arrow's JSON reader. It takes a text only when every line begins like a
message, when Arrow sees as many rows as there are lines, and when they pass the checks of
`records.envelope`. Everything else (damage, keys in another order, unknown keys) goes the exact
way, line by line. Both give the same rows.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nsqtools.archive.reader import TimeRange
from nsqtools.records.envelope import decode

if TYPE_CHECKING:
    import pyarrow

MESSAGE_DDL = (
    "topic string, nsqd string, id string, timestamp timestamp, ts_ns bigint, attempts int, "
    "body binary"
)
ARCHIVED_DDL = f"{MESSAGE_DDL}, file string, pos bigint"

IDENTITY = ("topic", "nsqd", "id")
"""The columns that identify a message: ids alone repeat between nsqd."""


def message_schema() -> pyarrow.Schema:
    """The Arrow schema of `MESSAGE_DDL`."""
    import pyarrow

    return pyarrow.schema(
        [
            ("topic", pyarrow.string()),
            ("nsqd", pyarrow.string()),
            ("id", pyarrow.string()),
            ("timestamp", pyarrow.timestamp("us", tz="UTC")),
            ("ts_ns", pyarrow.int64()),
            ("attempts", pyarrow.int32()),
            ("body", pyarrow.binary()),
        ]
    )


def archived_schema() -> pyarrow.Schema:
    """The Arrow schema of `ARCHIVED_DDL`."""
    import pyarrow

    return pyarrow.schema([*message_schema(), ("file", pyarrow.string()), ("pos", pyarrow.int64())])


BEGINNING = b'{"topic": "'
LONGEST_BLOCK = 2**31 - 2
ID_LENGTH = 16
MOST_ATTEMPTS = 2**16 - 1

Columns = dict[str, Any]
"""Arrow arrays of the columns of a message, by name."""


def fast_columns(text: bytes, lines: int) -> Columns | None:
    """Read ``lines`` lines of messages; None when they are not as `encode_many` writes them."""
    import pyarrow
    from pyarrow import json

    is_as_written = (
        text.startswith(BEGINNING)
        and text.endswith(b"\n")
        and text.count(b"\n" + BEGINNING) == lines - 1
        and len(text) < LONGEST_BLOCK
    )
    if not is_as_written:
        return None
    try:
        table = json.read_json(
            pyarrow.BufferReader(text),
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=_json_schema(), unexpected_field_behavior="error"
            ),
        )
        table.validate(full=True)  # it accepts bytes that are not UTF-8 as text
    except pyarrow.ArrowInvalid:
        return None
    if table.num_rows != lines:
        return None
    return _checked({name: table[name].combine_chunks() for name in table.column_names})


def _json_schema() -> pyarrow.Schema:
    import pyarrow

    text = pyarrow.string()
    number = pyarrow.int64()
    return pyarrow.schema(
        [
            *(("topic", text), ("nsqd", text), ("id", text), ("ts", number)),
            *(("attempts", pyarrow.int32()), ("body", text), ("body64", text)),
        ]
    )


def _checked(read: Columns) -> Columns | None:
    from pyarrow import compute

    if any(read[name].null_count for name in ("topic", "nsqd", "id", "ts", "attempts")):
        return None
    attempts = compute.min_max(read["attempts"]).as_py()
    lengths = compute.min_max(compute.binary_length(read["id"])).as_py()
    is_right = (
        attempts["min"] >= 0
        and attempts["max"] <= MOST_ATTEMPTS
        and (lengths["min"], lengths["max"]) == (ID_LENGTH, ID_LENGTH)
        and compute.all(compute.string_is_ascii(read["id"])).as_py()
    )
    body = _bodies(read["body"], read["body64"]) if is_right else None
    if body is None:
        return None
    return _columns(read["topic"], read["nsqd"], read["id"], read["ts"], read["attempts"], body)


def _bodies(body: Any, body64: Any) -> Any:
    """Unite the two; None unless exactly one of them is given, and base64 is valid."""
    import pyarrow

    bodies = body.cast(pyarrow.binary())
    if body64.null_count == len(body64):
        return bodies if not body.null_count else None
    united = []
    for plain, encoded in zip(bodies.to_pylist(), body64.to_pylist(), strict=True):
        if (plain is None) is (encoded is None):
            return None
        if plain is None:
            try:
                plain = a2b_base64(encoded, strict_mode=True)
            except (Base64Error, ValueError):
                return None
        united.append(plain)
    return pyarrow.array(united, pyarrow.binary())


def _columns(topic: Any, nsqd: Any, id: Any, ts_ns: Any, attempts: Any, body: Any) -> Columns:
    from pyarrow import compute, timestamp

    micros = compute.divide(ts_ns, 1000).cast(timestamp("us", tz="UTC"))
    return {
        "topic": topic,
        "nsqd": nsqd,
        "id": id,
        "timestamp": micros,
        "ts_ns": ts_ns,
        "attempts": attempts,
        "body": body,
    }


def exact_columns(lines: Sequence[bytes]) -> tuple[Columns, list[int], list[tuple[int, str]]]:
    """Read lines one by one; return the columns, which lines they are of, and what is wrong.

    Lines are counted from 0.
    """
    import pyarrow

    rows, kept, problems = [], [], []
    for number, line in enumerate(lines):
        try:
            rows.append(decode(line))
            kept.append(number)
        except ValueError as exc:
            problems.append((number, f"line {number + 1} is not a message: {exc}"))
    topic, nsqd, ids, ts_ns, attempts, bodies = zip(*rows, strict=True) if rows else [()] * 6
    columns = _columns(
        pyarrow.array(topic, pyarrow.string()),
        pyarrow.array(nsqd, pyarrow.string()),
        pyarrow.array([each.decode("latin-1") for each in ids], pyarrow.string()),
        pyarrow.array(ts_ns, pyarrow.int64()),
        pyarrow.array(attempts, pyarrow.int32()),
        pyarrow.array(bodies, pyarrow.binary()),
    )
    return columns, kept, problems


def body_columns(bodies: Sequence[bytes], topic: str | None) -> Columns:
    """Return the columns of bare bodies: only their topic may be known."""
    import pyarrow

    count = len(bodies)
    text, number = pyarrow.nulls(count, pyarrow.string()), pyarrow.nulls(count, pyarrow.int64())
    attempts = pyarrow.nulls(count, pyarrow.int32())
    columns = _columns(text, text, text, number, attempts, pyarrow.array(bodies, pyarrow.binary()))
    if topic is not None:
        columns["topic"] = pyarrow.repeat(pyarrow.scalar(topic, pyarrow.string()), count)
    return columns


def wanted_rows(columns: Columns, within: TimeRange, topics: Iterable[str]) -> Any:
    """Return a mask of the rows that are in a range and of some topics; None when all are."""
    import pyarrow
    from pyarrow import compute

    masks = []
    if within.since_ns is not None:
        masks.append(compute.greater_equal(columns["ts_ns"], within.since_ns))
    if within.until_ns is not None:
        masks.append(compute.less(columns["ts_ns"], within.until_ns))
    if topics:
        names = pyarrow.array(sorted(topics), pyarrow.string())
        masks.append(compute.is_in(columns["topic"], value_set=names))
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = compute.and_kleene(mask, other)
    return compute.fill_null(mask, True)  # bodies without a time
