"""The columns of an archived message in Arrow, and text of an archive into such columns.

    topic, nsqd, id    who it is: ids alone repeat between nsqd
    timestamp, ts_ns   nsqd's time of publishing: in microseconds, as tables know time, and in
                       nanoseconds since 1970, as nsqd wrote it
    attempts
    body               text; null where the bytes are not UTF-8
    body_bytes         those bytes; null where the body is text

So SQL sees text as text, and every byte comes back, as with ``body`` and ``body64`` of a line.
With `BodyKind.binary` there is one column ``body`` of bytes. Files of bare bodies know only the
body: the other columns are null.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import pyarrow
from pyarrow import compute, timestamp, types
from pyarrow import json as arrow_json

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.form import BEGINNING as MESSAGE
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import EVER, TimeRange
from nsqtools.archive.reader import AMONG_BODIES, form_of, read_text, split_lines, whole_lines
from nsqtools.records.envelope import BodyKind, decode

IDENTITY = ("topic", "nsqd", "id")
"""The columns that identify a message: ids alone repeat between nsqd."""


def message_schema(kind: BodyKind = BodyKind.string) -> pyarrow.Schema:
    """Return the columns of a message, without those that `body_columns` makes of its body."""
    body = [("body", pyarrow.string()), ("body_bytes", pyarrow.binary())]
    return pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in IDENTITY),
            ("timestamp", pyarrow.timestamp("us", tz="UTC")),
            ("ts_ns", pyarrow.int64()),
            ("attempts", pyarrow.int32()),
            *([("body", pyarrow.binary())] if kind is BodyKind.binary else body),
        ]
    )


BEGINNING = b'{"topic": "'
ORIGIN = re.compile(rb'\{"topic": "([^"\\\x00-\x1f]*)", "nsqd": "([^"\\\x00-\x1f]*)", ')
LONGEST_BLOCK = 2**31 - 2
ID_LENGTH = 16
MOST_ATTEMPTS = 2**16 - 1

Columns = dict[str, Any]
"""Arrow arrays of the columns of a message, by name."""


def fast_columns(
    text: bytes, lines: int, wanted: Collection[str], kind: BodyKind = BodyKind.string
) -> Columns | None:
    """Read the ``wanted`` columns of ``lines`` lines of messages.

    None when the lines are not as `encode_many` writes them.
    """
    if not (_begin_with(BEGINNING, text, lines) and text.endswith(b"\n")):
        return None
    keys = {key for name, some in KEYS_OF.items() if name in wanted for key in some}
    read: Columns | None = {}
    if keys:
        same = _same_in_all(text, lines, keys) if keys <= {"topic", "nsqd"} else None
        read = same or _parsed(text, lines, keys)
    return None if read is None or not _is_right(read) else _wanted(read, kind)


def _begin_with(beginning: bytes, text: bytes, lines: int) -> bool:
    """Whether each of the lines begins so."""
    return text.startswith(beginning) and text.count(b"\n" + beginning) == lines - 1


def _same_in_all(text: bytes, lines: int, keys: Collection[str]) -> Columns | None:
    """The columns of topic and nsqd if all lines have the same: most files have one topic."""
    first = ORIGIN.match(text)
    if first is None or not _begin_with(first[0], text, lines):
        return None
    try:
        values = {"topic": first[1].decode(), "nsqd": first[2].decode()}
    except UnicodeDecodeError:
        return None
    return {name: pyarrow.repeat(values[name], lines) for name in keys}


KEYS_OF = {
    **{name: (name,) for name in (*IDENTITY, "attempts")},
    **dict.fromkeys(("timestamp", "ts_ns"), ("ts",)),
    **dict.fromkeys(("body", "body_bytes"), ("body", "body64")),
}
"""The keys of the JSON that a column is made of."""
_JSON = dict.fromkeys(("topic", "nsqd", "id", "ts", "attempts", "body", "body64"), pyarrow.string())
_JSON |= {"ts": pyarrow.int64(), "attempts": pyarrow.int32()}


def _parsed(text: bytes, lines: int, keys: Collection[str]) -> Columns | None:
    if len(text) >= LONGEST_BLOCK:
        return None
    schema = pyarrow.schema([(name, _JSON[name]) for name in _JSON if name in keys])
    others = "error" if len(keys) == len(_JSON) else "ignore"
    if (table := read_json(text, lines, schema, others)) is None:
        return None
    try:
        table.validate(full=True)  # it accepts bytes that are not UTF-8 as text
    except pyarrow.ArrowInvalid:
        return None
    return {name: one_array(table[name]) for name in table.column_names}


def one_array(column: pyarrow.ChunkedArray) -> pyarrow.Array:
    """Return the values as one array, without a copy where they are one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def read_json(text: Any, count: int, schema: pyarrow.Schema, others: str) -> Any:
    """Read ``count`` objects as a table; None if the count or the schema differs.

    ``others`` is what becomes of other fields: "error", "ignore", or "infer".
    """
    try:
        table = arrow_json.read_json(
            pyarrow.BufferReader(text),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior=others
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    return table if table.num_rows == count else None


def _is_right(read: Columns) -> bool:
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


def _wanted(read: Columns, kind: BodyKind) -> Columns | None:
    columns: Columns = {name: read[name] for name in read if name in KEYS_OF and name != "body"}
    if "ts" in read:
        columns |= {"timestamp": micros(read["ts"]), "ts_ns": read["ts"]}
    if "body" in read:
        raw = _decoded(read["body"], read["body64"])
        if raw is None or (kind is not BodyKind.binary and _has_text(raw)):
            return None
        columns |= bodies_as(read["body"], raw, kind)
    return columns


def micros(ts_ns: Any) -> Any:
    """Return the column ``timestamp`` of times in nanoseconds."""
    return compute.divide(ts_ns, 1000).cast(timestamp("us", tz="UTC"))


def _decoded(body: Any, body64: Any) -> Any:
    """Return the bytes of ``body64``; None unless each row has one of the two, and it is valid."""
    count = len(body)
    if body64.null_count == count:
        return pyarrow.nulls(count, pyarrow.binary()) if not body.null_count else None
    if not compute.all(compute.xor(body.is_null(), body64.is_null())).as_py():
        return None
    try:
        raw = [
            None if encoded is None else a2b_base64(encoded, strict_mode=True)
            for encoded in body64.to_pylist()
        ]
    except (Base64Error, ValueError):
        return None
    return pyarrow.array(raw, pyarrow.binary())


def _has_text(raw: Any) -> bool:
    """Whether some bytes are text: other programs than ours may write it so."""
    return any(_text(each) is not None for each in raw.drop_null().to_pylist())


def bodies_as(body: Any, raw: Any, kind: BodyKind) -> Columns:
    """Return the columns of bodies as a kind has them; each is text, or bytes where it is not."""
    if kind is BodyKind.binary:
        body = body.cast(pyarrow.binary())
        has_all = raw is None or not body.null_count
        return {"body": body if has_all else compute.coalesce(body, raw)}
    if types.is_string(body.type):
        return {"body": body, **({} if raw is None else {"body_bytes": raw})}
    try:
        return {"body": body.cast(pyarrow.string())}
    except pyarrow.ArrowInvalid:  # some are not UTF-8
        body = body if raw is None else compute.coalesce(body, raw.cast(body.type))
        return columns_of_bodies(body.to_pylist(), kind)


def columns_of_bodies(bodies: Sequence[bytes | None], kind: BodyKind) -> Columns:
    """Return the columns of bodies, each of which has either text or bytes."""
    if kind is BodyKind.binary:
        return {"body": pyarrow.array(bodies, pyarrow.binary())}
    texts = [None if body is None else _text(body) for body in bodies]
    raw = [body if text is None else None for body, text in zip(bodies, texts, strict=True)]
    return {
        "body": pyarrow.array(texts, pyarrow.string()),
        "body_bytes": pyarrow.array(raw, pyarrow.binary()),
    }


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def exact_columns(
    lines: Sequence[bytes], kind: BodyKind = BodyKind.string
) -> tuple[Columns, list[int], list[tuple[int, str]]]:
    """Read lines one by one; return the columns, which lines they are of, and what is wrong.

    Lines are counted from 0.
    """
    rows, kept, problems = [], [], []
    for number, line in enumerate(lines):
        try:
            rows.append(decode(line))
            kept.append(number)
        except ValueError as exc:
            problems.append((number, f"line {number + 1} is not a message: {exc}"))
    topic, nsqd, ids, times, attempts, bodies = zip(*rows, strict=True) if rows else [()] * 6
    ts_ns = pyarrow.array(times, pyarrow.int64())
    columns = {
        "topic": pyarrow.array(topic, pyarrow.string()),
        "nsqd": pyarrow.array(nsqd, pyarrow.string()),
        "id": pyarrow.array([each.decode("latin-1") for each in ids], pyarrow.string()),
        "timestamp": micros(ts_ns),
        "ts_ns": ts_ns,
        "attempts": pyarrow.array(attempts, pyarrow.int32()),
    }
    return columns | columns_of_bodies(bodies, kind), kept, problems


def bare_columns(
    bodies: Sequence[bytes], topic: str | None, kind: BodyKind = BodyKind.string
) -> Columns:
    """Return the columns of bare bodies: only their topic may be known."""
    schema, count = message_schema(kind), len(bodies)
    columns = {field.name: pyarrow.nulls(count, field.type) for field in schema}
    if topic is not None:
        columns["topic"] = pyarrow.repeat(topic, count)
    return columns | columns_of_bodies(bodies, kind)


def filtered_columns(within: TimeRange, names: Collection[str]) -> set[str]:
    """Return the columns that `wanted_rows` looks at."""
    return {*names, *(["ts_ns"] if within != EVER else ())}


def wanted_rows(columns: Columns, within: TimeRange, names: Mapping[str, Iterable[str]]) -> Any:
    """Return a mask of the rows in a range whose columns have one of the ``names`` for them.

    None when all rows are wanted. One without a time is, as bare bodies have none.
    """
    masks = [] if within == EVER else [within.mask(columns["ts_ns"])]
    for column, wanted in names.items():
        values = pyarrow.array(sorted(wanted), pyarrow.string())
        masks.append(compute.is_in(columns[column], value_set=values))
    return compute.fill_null(reduce(compute.and_kleene, masks), True) if masks else None


# -- a whole file --------------------------------------------------------------------------------

JSON_ROWS = 10_000  # of a batch whose bodies may become a thousand columns


def read_batches(
    archive: ArchiveFile,
    on_damage: Callable[[str, str], None],
    *,
    kind: BodyKind = BodyKind.string,
    delimiter: bytes = b"\n",
    topic: str | None = None,
    within: TimeRange = EVER,
    on_rows: Callable[[int], object] = lambda count: None,
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over a file of messages or of bare bodies, in the columns of `message_schema`.

    ``on_rows`` gets the number of messages read, those out of the range included.

    ``topic`` is that of bare bodies. Damage is reported and skipped, as by `read_text`, which says
    what is raised. Memory is bounded by `BATCH_TEXT` and a member, or one body if that is longer.
    """
    schema, form = message_schema(kind), form_of(archive)
    if form.foreign:
        on_damage(archive.shown, form.foreign)
        return
    is_bare = form.kind is LineKind.bodies
    delimiter = delimiter if is_bare else b"\n"
    number = 0
    for text in whole_lines(read_text(archive, on_damage, within), delimiter):
        lines = text.count(b"\n")
        columns: Columns | None
        if is_bare:
            bodies = split_lines(text, delimiter)
            if BEGINNING in text and any(map(MESSAGE.match, bodies)):
                on_damage(archive.shown, f"it has {AMONG_BODIES}")
                bodies = [body for body in bodies if not MESSAGE.match(body)]
            columns = bare_columns(bodies, topic, kind)
        else:
            columns = fast_columns(text, lines, schema.names, kind)
        if columns is None:
            columns, _, problems = exact_columns(split_lines(text, b"\n"), kind)
            for at, problem in problems:
                on_damage(archive.shown, f"from line {number + 1} on, {problem} (at {at + 1})")
        number += lines
        on_rows(len(columns["body"]))
        batch = pyarrow.RecordBatch.from_pydict(columns, schema)
        mask = wanted_rows(columns, within, {})
        batch = batch if mask is None else batch.filter(mask)
        most = JSON_ROWS if kind is BodyKind.json else max(1, batch.num_rows)
        yield from (batch.slice(at, most) for at in range(0, batch.num_rows, most))


def batch_of_bodies(bodies: Sequence[bytes]) -> pyarrow.RecordBatch:
    """Return bare bodies in the columns of `message_schema`."""
    return pyarrow.RecordBatch.from_pydict(bare_columns(bodies, None), message_schema())
