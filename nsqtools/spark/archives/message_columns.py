"""The columns of a message in Spark and in Arrow, and text of an archive into such columns.

``ts_ns`` is nsqd's time of publishing, nanoseconds since 1970; ``timestamp`` is the same cut to
microseconds, as Spark's own type. Files of bare bodies know only ``body``: the other columns are
null. ``file`` and ``pos`` locate an archived message: the file's path, and the byte position of the
member that holds it.

The fast way reads with Arrow's JSON reader. It takes a text only when every line begins like a
message, when Arrow sees as many rows as there are lines, and when they pass the checks of
`records.envelope`. Everything else (damage, keys in another order, unknown keys) goes the exact
way, line by line. Both give the same rows.

Parsing costs several times what unpacking does, so only the columns that a query uses are parsed.
Columns that are not parsed are not checked either: lines are still counted, and compared with the
index.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsqtools.archive.reader import EVER, TimeRange
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
ORIGIN = re.compile(rb'\{"topic": "([^"\\\x00-\x1f]*)", "nsqd": "([^"\\\x00-\x1f]*)", ')
LONGEST_BLOCK = 2**31 - 2
ID_LENGTH = 16
MOST_ATTEMPTS = 2**16 - 1

Columns = dict[str, Any]
"""Arrow arrays of the columns of a message, by name."""


def fast_columns(text: bytes, lines: int, wanted: Collection[str]) -> Columns | None:
    """Read the ``wanted`` columns of ``lines`` lines of messages.

    None when the lines are not as `encode_many` writes them.
    """
    if not (_begin_with(BEGINNING, text, lines) and text.endswith(b"\n")):
        return None
    keys = {key for name, some in KEYS_OF.items() if name in wanted for key in some}
    same = _same_in_all(text, lines) if len(keys) < len(_json_schema()) else {}
    read: Columns | None = {name: same[name] for name in keys & same.keys()}
    if keys := keys - same.keys():
        parsed = _parsed(text, lines, keys) if len(text) < LONGEST_BLOCK else None
        read = None if parsed is None or read is None else read | parsed
    return None if read is None or not _is_right(read) else _wanted(read)


def _begin_with(beginning: bytes, text: bytes, lines: int) -> bool:
    """Whether each of the lines begins so."""
    return text.startswith(beginning) and text.count(b"\n" + beginning) == lines - 1


def _same_in_all(text: bytes, lines: int) -> Columns:
    """The columns of topic and nsqd where all lines have the same: most files have one topic."""
    import pyarrow

    first = ORIGIN.match(text)
    if first is None or not _begin_with(first[0], text, lines):
        return {}
    try:
        values = {"topic": first[1].decode(), "nsqd": first[2].decode()}
    except UnicodeDecodeError:
        return {}
    text_type = pyarrow.string()
    return {
        name: pyarrow.repeat(pyarrow.scalar(value, text_type), lines)
        for name, value in values.items()
    }


KEYS_OF = {
    "topic": ("topic",),
    "nsqd": ("nsqd",),
    "id": ("id",),
    "timestamp": ("ts",),
    "ts_ns": ("ts",),
    "attempts": ("attempts",),
    "body": ("body", "body64"),
}
"""The keys of the JSON that a column is made of."""


def _parsed(text: bytes, lines: int, keys: Collection[str]) -> Columns | None:
    import pyarrow
    from pyarrow import json

    known = _json_schema()
    is_all = len(keys) == len(known)
    try:
        table = json.read_json(
            pyarrow.BufferReader(text),
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=pyarrow.schema([each for each in known if each.name in keys]),
                unexpected_field_behavior="error" if is_all else "ignore",
            ),
        )
        table.validate(full=True)  # it accepts bytes that are not UTF-8 as text
    except pyarrow.ArrowInvalid:
        return None
    if table.num_rows != lines:
        return None
    return {name: table[name].combine_chunks() for name in table.column_names}


def _json_schema() -> pyarrow.Schema:
    import pyarrow

    text = pyarrow.string()
    number = pyarrow.int64()
    return pyarrow.schema(
        [
            ("topic", text),
            ("nsqd", text),
            ("id", text),
            ("ts", number),
            ("attempts", pyarrow.int32()),
            ("body", text),
            ("body64", text),
        ]
    )


def _is_right(read: Columns) -> bool:
    from pyarrow import compute

    if any(read[name].null_count for name in read if not name.startswith("body")):
        return False
    if "attempts" in read:
        attempts = compute.min_max(read["attempts"]).as_py()
        if attempts["min"] < 0 or attempts["max"] > MOST_ATTEMPTS:
            return False
    if "id" not in read:
        return True
    lengths = compute.min_max(compute.binary_length(read["id"])).as_py()
    is_ascii = compute.all(compute.string_is_ascii(read["id"])).as_py()
    return bool((lengths["min"], lengths["max"]) == (ID_LENGTH, ID_LENGTH) and is_ascii)


def _wanted(read: Columns) -> Columns | None:
    columns: Columns = {name: read[name] for name in read if name in KEYS_OF and name != "body"}
    if "ts" in read:
        columns |= {"timestamp": _micros(read["ts"]), "ts_ns": read["ts"]}
    if "body" in read:
        body = _bodies(read["body"], read["body64"])
        if body is None:
            return None
        columns["body"] = body
    return columns


def _micros(ts_ns: Any) -> Any:
    from pyarrow import compute, timestamp

    return compute.divide(ts_ns, 1000).cast(timestamp("us", tz="UTC"))


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
    return {
        "topic": topic,
        "nsqd": nsqd,
        "id": id,
        "timestamp": _micros(ts_ns),
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


def filtered_columns(within: TimeRange, names: Collection[str]) -> set[str]:
    """Return the columns that `wanted_rows` looks at."""
    return {*names, *(["ts_ns"] if within != EVER else ())}


def wanted_rows(columns: Columns, within: TimeRange, names: Mapping[str, Iterable[str]]) -> Any:
    """Return a mask of the rows in a range whose columns have one of the ``names`` for them.

    None when all rows are wanted. One without a time is, as bare bodies have none.
    """
    import pyarrow
    from pyarrow import compute

    masks = []
    if within.since_ns is not None:
        masks.append(compute.greater_equal(columns["ts_ns"], within.since_ns))
    if within.until_ns is not None:
        masks.append(compute.less(columns["ts_ns"], within.until_ns))
    for column, wanted in names.items():
        values = pyarrow.array(sorted(wanted), pyarrow.string())
        masks.append(compute.is_in(columns[column], value_set=values))
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = compute.and_kleene(mask, other)
    return compute.fill_null(mask, True)
