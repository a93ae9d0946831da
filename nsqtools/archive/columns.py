"""Convert the text of archives to Arrow columns of messages.

    topic, nsqd, id    the identity: ids alone repeat between nsqd
    timestamp, ts_ns   the time of publishing by the clock of nsqd: in microseconds, the resolution
                       of tables, and in nanoseconds since 1970, as nsqd wrote it
    attempts
    body               text; null if the bytes are not UTF-8
    body_bytes         the bytes of such a body; null if the body is text

So SQL reads text as text, and every byte is preserved, as with ``body`` and ``body64`` of a line.
With `BodyKind.binary` there is one column ``body`` of bytes. For files of bare bodies, all columns
but the body are null.

The fast path reads uniform lines by position (`uniform_values`), and others by Arrow's JSON reader.
It accepts a text only if every line begins like a message, Arrow returns one row for each line, and
the rows pass the checks of `records.envelope`. Any other text (with damage, keys in another order
or unknown keys) takes the exact path, which reads line by line. All paths return the same rows.

Parsing costs several times as much as decompression, so only the columns that a query needs are
parsed. The others are not checked, but lines are always counted and compared with the index.
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
from nsqtools.archive.layout import ALL_TIMES, TimeRange
from nsqtools.archive.reader import (
    AMONG_BODIES,
    BATCH_TEXT,
    form_of,
    has_columns,
    read_columns,
    read_text,
    split_lines,
    whole_lines,
)
from nsqtools.records.envelope import BodyKind, decode

IDENTITY = ("topic", "nsqd", "id")
"""The columns that identify a message: ids alone repeat between nsqd."""


def message_schema(kind: BodyKind = BodyKind.string) -> pyarrow.Schema:
    """Return the columns of a message, without the columns of fields in its body."""
    text_or_bytes = [("body", pyarrow.string()), ("body_bytes", pyarrow.binary())]
    return pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in IDENTITY),
            ("timestamp", pyarrow.timestamp("us", tz="UTC")),
            ("ts_ns", pyarrow.int64()),
            ("attempts", pyarrow.int32()),
            *([("body", pyarrow.binary())] if kind is BodyKind.binary else text_or_bytes),
        ]
    )


LINE_PREFIX = b'{"topic": "'
MAX_BLOCK_SIZE = 2**31 - 2  # Arrow's JSON reader takes the size as an int32.
ID_LENGTH = 16
MAX_ATTEMPTS = 2**16 - 1

Columns = dict[str, Any]
"""Arrow arrays of the columns of a message, by name."""


def fast_columns(
    text: bytes, lines: int, names: Collection[str], kind: BodyKind = BodyKind.string
) -> Columns | None:
    """Read the named columns of ``lines`` lines of messages.

    Returns None if the lines do not have the form in which `encode_many` writes them.
    """
    if not (_all_begin_with(LINE_PREFIX, text, lines) and text.endswith(b"\n")):
        return None
    if len(text) >= MAX_BLOCK_SIZE:
        return None
    keys = {key for name in KEYS_OF if name in names for key in KEYS_OF[name]}
    values: Columns | None = {}
    if keys:
        constants = _constant_columns(text, lines, keys) if keys <= {"topic", "nsqd"} else None
        values = constants or uniform_values(text, lines, keys) or _parse(text, lines, keys)
    return None if values is None or not _is_valid(values) else _to_columns(values, kind)


def _all_begin_with(beginning: bytes, text: bytes, lines: int) -> bool:
    """Return whether each of the lines begins with the same bytes."""
    return text.startswith(beginning) and text.count(b"\n" + beginning) == lines - 1


def _constant_columns(text: bytes, lines: int, keys: Collection[str]) -> Columns | None:
    """Return the columns of topic and nsqd if all lines have the same, without parsing them.

    Most files have one topic.
    """
    first = ORIGIN.match(text)
    if first is None or not _all_begin_with(first[0], text, lines):
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
"""The keys in the JSON of a message from which a column is computed."""
_JSON = dict.fromkeys(("topic", "nsqd", "id", "ts", "attempts", "body", "body64"), pyarrow.string())
_JSON |= {"ts": pyarrow.int64(), "attempts": pyarrow.int32()}


def _parse(text: bytes, lines: int, keys: Collection[str]) -> Columns | None:
    schema = pyarrow.schema([(name, _JSON[name]) for name in _JSON if name in keys])
    on_other_fields = "error" if len(keys) == len(_JSON) else "ignore"
    if (table := read_json(text, lines, schema, on_other_fields)) is None:
        return None
    # The JSON reader accepts bytes that are not UTF-8 as text.
    try:
        table.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    return {name: one_array(table[name]) for name in table.column_names}


def one_array(column: pyarrow.ChunkedArray) -> pyarrow.Array:
    """Return the values as one array, without a copy if there is only one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def read_json(text: Any, count: int, schema: pyarrow.Schema, on_other_fields: str) -> Any:
    """Read ``count`` objects as a table; return None if the count or the schema differs.

    ``on_other_fields`` is "error", "ignore" or "infer".
    """
    try:
        table = arrow_json.read_json(
            pyarrow.BufferReader(text),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior=on_other_fields
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    return table if table.num_rows == count else None


def _is_valid(values: Columns) -> bool:
    """Return whether values pass the checks of `records.envelope`."""
    if any(values[name].null_count for name in values if not name.startswith("body")):
        return False
    if "attempts" in values:
        attempts = compute.min_max(values["attempts"]).as_py()
        if attempts["min"] < 0 or attempts["max"] > MAX_ATTEMPTS:
            return False
    if "id" not in values:
        return True
    lengths = compute.min_max(compute.binary_length(values["id"])).as_py()
    is_ascii = compute.all(compute.string_is_ascii(values["id"])).as_py()
    return bool((lengths["min"], lengths["max"]) == (ID_LENGTH, ID_LENGTH) and is_ascii)


def _to_columns(values: Columns, kind: BodyKind) -> Columns | None:
    columns: Columns = {name: values[name] for name in values if name in KEYS_OF and name != "body"}
    if "ts" in values:
        columns |= {"timestamp": micros(values["ts"]), "ts_ns": values["ts"]}
    if "body" in values:
        raw = _decode_base64(values["body"], values["body64"])
        if raw is None or (kind is not BodyKind.binary and _has_text(raw)):
            return None
        columns |= bodies_as(values["body"], raw, kind)
    return columns


def micros(ts_ns: Any) -> Any:
    """Return the column ``timestamp`` for times in nanoseconds."""
    return compute.divide(ts_ns, 1000).cast(timestamp("us", tz="UTC"))


def _decode_base64(body: Any, body64: Any) -> Any:
    """Return the bytes of ``body64``; None unless each row has exactly one valid body."""
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
    """Return whether some bytes are UTF-8 text: other programs may write text as ``body64``."""
    return any(_text(body) is not None for body in raw.drop_null().to_pylist())


def bodies_as(body: Any, raw: Any, kind: BodyKind) -> Columns:
    """Convert columns of bodies to a kind. Each row has text in ``body`` or bytes in ``raw``."""
    if kind is BodyKind.binary:
        body = body.cast(pyarrow.binary())
        is_complete = raw is None or not body.null_count
        return {"body": body if is_complete else compute.coalesce(body, raw)}
    if types.is_string(body.type):
        return {"body": body, **({} if raw is None else {"body_bytes": raw})}
    try:
        return {"body": body.cast(pyarrow.string())}
    except pyarrow.ArrowInvalid:
        # Some bodies are not UTF-8.
        body = body if raw is None else compute.coalesce(body, raw.cast(body.type))
        return columns_of_bodies(body.to_pylist(), kind)


def columns_of_bodies(bodies: Sequence[bytes | None], kind: BodyKind) -> Columns:
    """Return the columns of bodies. A null stays null in both columns."""
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
    """Read lines one by one.

    Returns the columns, the numbers of the lines that are messages, and the problems of the others
    with their numbers. The first line has the number 0.
    """
    rows, valid, problems = [], [], []
    for number, line in enumerate(lines):
        try:
            rows.append(decode(line))
            valid.append(number)
        except ValueError as exc:
            problems.append((number, f"line {number + 1} is not a message: {exc}"))
    topic, nsqd, ids, times, attempts, bodies = zip(*rows, strict=True) if rows else [()] * 6
    ts_ns = pyarrow.array(times, pyarrow.int64())
    columns = {
        "topic": pyarrow.array(topic, pyarrow.string()),
        "nsqd": pyarrow.array(nsqd, pyarrow.string()),
        "id": pyarrow.array([id.decode("latin-1") for id in ids], pyarrow.string()),
        "timestamp": micros(ts_ns),
        "ts_ns": ts_ns,
        "attempts": pyarrow.array(attempts, pyarrow.int32()),
    }
    return columns | columns_of_bodies(bodies, kind), valid, problems


def bare_columns(
    bodies: Sequence[bytes], topic: str | None, kind: BodyKind = BodyKind.string
) -> Columns:
    """Return the columns of bare bodies; all but the body and perhaps the topic are null."""
    schema, count = message_schema(kind), len(bodies)
    columns = {field.name: pyarrow.nulls(count, field.type) for field in schema}
    if topic is not None:
        columns["topic"] = pyarrow.repeat(topic, count)
    return columns | columns_of_bodies(bodies, kind)


def log_columns(batch: pyarrow.RecordBatch, kind: BodyKind) -> Columns:
    """Return the columns of a record batch of a log in Arrow: see `arrow_member`."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    ids, ts_ns = columns["id"], columns["ts_ns"]
    try:
        text_ids = ids.cast(pyarrow.string())
        is_ascii = compute.all(compute.string_is_ascii(text_ids), min_count=0).as_py()
    except pyarrow.ArrowInvalid:
        is_ascii = False
    if not is_ascii:
        text_ids = pyarrow.array([id.decode("latin-1") for id in ids.to_pylist()], pyarrow.string())
    columns |= {
        "id": text_ids,
        "timestamp": micros(ts_ns),
        "attempts": columns["attempts"].cast(pyarrow.int32()),
    }
    columns |= bodies_as(columns["body"], None, kind)
    if kind is not BodyKind.binary and "body_bytes" not in columns:
        columns["body_bytes"] = pyarrow.nulls(batch.num_rows, pyarrow.binary())
    return columns


def _join(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Join batches, so that each has many rows: a delivery of nsqd may have few."""
    pending: list[pyarrow.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if pending and (rows + batch.num_rows > JSON_BATCH_ROWS or size > BATCH_TEXT):
            yield joined(pending)
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if pending:
        yield joined(pending)


def joined(batches: list[pyarrow.RecordBatch]) -> pyarrow.RecordBatch:
    """Return one record batch with the rows of all, of which there is at least one."""
    if len(batches) == 1:
        return batches[0]
    # The concat_batches of pyarrow needs version 19, and pyproject.toml allows 18.
    columns = [batch.columns for batch in batches]
    arrays = [pyarrow.concat_arrays(same) for same in zip(*columns, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=batches[0].schema)


def filtered_columns(within: TimeRange, names: Collection[str]) -> set[str]:
    """Return the columns that `row_mask` needs."""
    return {*names, *(["ts_ns"] if within != ALL_TIMES else ())}


def row_mask(columns: Columns, within: TimeRange, values: Mapping[str, Iterable[str]]) -> Any:
    """Return a mask of the selected rows; None if all rows are selected.

    A row is selected if its time is in the range and each column in ``values`` has one of the
    listed values. A missing time or value matches, because bare bodies have neither.
    """
    masks = [] if within == ALL_TIMES else [within.mask(columns["ts_ns"])]
    for column, allowed in values.items():
        value_set = pyarrow.array(sorted(allowed), pyarrow.string())
        masks.append(compute.is_in(columns[column], value_set=value_set))
    return compute.fill_null(reduce(compute.and_kleene, masks), True) if masks else None


# -- a whole file --------------------------------------------------------------------------------

# Bounds the memory of a batch whose bodies have up to a thousand fields.
JSON_BATCH_ROWS = 10_000


def read_batches(
    archive: ArchiveFile,
    on_damage: Callable[[str, str], None],
    *,
    kind: BodyKind = BodyKind.string,
    delimiter: bytes = b"\n",
    topic: str | None = None,
    within: TimeRange = ALL_TIMES,
    on_rows: Callable[[int], object] = lambda count: None,
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over a file of messages or bare bodies, in the columns of `message_schema`.

    ``on_rows`` is called with the number of messages in each piece of text, before those out of
    the range are removed. ``topic`` is the topic of bare bodies. Damage is reported and skipped.
    Memory is bounded by `BATCH_TEXT` and one member, or one longer body. Raises the errors of
    `read_text`.
    """
    schema, form = message_schema(kind), form_of(archive)
    if has_columns(archive, form, on_damage):
        for log_batch in _join(read_columns(archive, on_damage, within)):
            on_rows(log_batch.num_rows)
            yield from _selected(log_columns(log_batch, kind), schema, within, kind)
        return
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
            if LINE_PREFIX in text and any(map(MESSAGE.match, bodies)):
                on_damage(archive.shown, f"it has {AMONG_BODIES}")
                bodies = [body for body in bodies if not MESSAGE.match(body)]
            columns = bare_columns(bodies, topic, kind)
        else:
            columns = fast_columns(text, lines, schema.names, kind)
        if columns is None:
            columns, _, problems = exact_columns(split_lines(text, b"\n"), kind)
            for index, problem in problems:
                on_damage(archive.shown, f"from line {number + 1} on, {problem} (at {index + 1})")
        number += lines
        on_rows(len(columns["body"]))
        yield from _selected(columns, schema, within, kind)


def _selected(
    columns: Columns, schema: pyarrow.Schema, within: TimeRange, kind: BodyKind
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the rows in a range of times."""
    batch = pyarrow.RecordBatch.from_pydict(columns, schema)
    mask = row_mask(columns, within, {})
    batch = batch if mask is None else batch.filter(mask)
    size = JSON_BATCH_ROWS if kind is BodyKind.json else max(1, batch.num_rows)
    yield from (batch.slice(offset, size) for offset in range(0, batch.num_rows, size))


def batch_of_bodies(bodies: Sequence[bytes]) -> pyarrow.RecordBatch:
    """Return bare bodies in the columns of `message_schema`."""
    return pyarrow.RecordBatch.from_pydict(bare_columns(bodies, None), message_schema())


# -- uniform lines ------------------------------------------------------------------------------

# Reading lines whose keys have constant positions takes two thirds of the CPU of JSON. Archivers
# write lines of one topic and nsqd, so the lines differ only in the length of the body, as long as
# times have 19 digits (the years 2001 to 2262) and attempts one. The only escapes in bodies are
# those of quotes, as in bodies of JSON. Lines of any other form are left to a parser.
#
# The checks accept only what a parser would read as the same values. Quotes and constants between
# the values are at their positions, each backslash is in a body and before a quote, bodies have no
# other quotes and no control characters, and all is UTF-8.

ORIGIN = re.compile(rb'\{"topic": "([^"\\\x00-\x1f]*)", "nsqd": "([^"\\\x00-\x1f]*)", ')
_ID = b'"id": "'
_LAYOUT = (
    ("id", 16, b'", "ts": ', compute.ascii_is_alnum),
    ("ts", 19, b', "attempts": ', compute.ascii_is_decimal),
    ("attempts", 1, b', "body": "', compute.ascii_is_decimal),
)
"""The values after the origin: key, length, the bytes that follow, and a check."""
_END = b'"}'
_MIN_TIME = 10**18
_QUOTES = 20
"""Quotes of a line without those in its body."""
# A number of another type would widen each byte of the text to eight.
_QUOTE, _BACKSLASH = (pyarrow.scalar(code, pyarrow.uint8()) for code in b'"\\')
_BLANK = ord(" ")


def uniform_values(text: bytes, lines: int, keys: Collection[str]) -> dict[str, Any] | None:
    """Return the values of keys as Arrow arrays; None if the text is not so many uniform lines.

    ``text`` has less than 2 GiB and ends with a newline.
    """
    first = ORIGIN.match(text)
    prefix = first[0] + _ID if first else b""
    if first is None or text.count(b"\n" + prefix) + text.startswith(prefix) != lines:
        return None
    data = _numbers(pyarrow.py_buffer(text))
    quotes, backslashes = compute.equal(data, _QUOTE), compute.equal(data, _BACKSLASH)
    escapes = _sum(backslashes)
    is_escape = compute.and_(backslashes[:-1], quotes[1:])
    if _sum(is_escape) != escapes or _sum(quotes) != lines * _QUOTES + escapes:
        return None
    rows = _split(data)
    if len(rows) != lines:
        return None
    try:
        values, position = _fixed_values(rows, len(prefix))
        if values is None or not _have_ends(rows, position):
            return None
        if "body" in keys:
            if escapes:
                rows = _split(data.filter(compute.invert(backslashes)))
            body = compute.binary_slice(rows, position, -len(_END))
            if _min(_numbers(body.buffers()[2])) < _BLANK:
                return None
            values["body"] = body.cast(pyarrow.string())
            values["body64"] = pyarrow.nulls(lines, pyarrow.string())
        for number, key in enumerate(("topic", "nsqd"), 1):
            values[key] = pyarrow.repeat(first[number].decode(), lines)
    # Something is not UTF-8, or a time is too large.
    except (UnicodeDecodeError, pyarrow.ArrowInvalid):
        return None
    return {key: values[key] for key in keys}


def _fixed_values(rows: Any, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return the values of constant length and the position of the body; None for other values."""
    values = {}
    for key, length, separator, is_valid in _LAYOUT:
        value = compute.binary_slice(rows, position, position := position + length)
        follows = compute.binary_slice(rows, position, position := position + len(separator))
        values[key] = value.cast(pyarrow.string())
        if not _all(compute.equal(follows, separator)) or not _all(is_valid(values[key])):
            return None, position
    values["ts"] = values["ts"].cast(pyarrow.int64())
    values["attempts"] = values["attempts"].cast(pyarrow.int32())
    # JSON has no zeros before a number.
    return (values if _min(values["ts"]) >= _MIN_TIME else None), position


def _have_ends(rows: Any, position: int) -> bool:
    """Return whether bodies at a position end before a quote that is not escaped."""
    is_long = _min(compute.binary_length(rows)) >= position + len(_END)
    is_escaped = compute.ends_with(rows, b"\\" + _END)
    return is_long and _all(compute.ends_with(rows, _END)) and not _sum(is_escaped)


def _split(data: pyarrow.Array) -> Any:
    """Return the lines of a text as an array of bytes."""
    ends = pyarrow.array([0, len(data)], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.binary(), 1, [None, ends, data.buffers()[1]])
    return compute.split_pattern(text, b"\n").values[:-1]


def _numbers(data: pyarrow.Buffer) -> pyarrow.Array:
    return pyarrow.Array.from_buffers(pyarrow.uint8(), data.size, [None, data])


def _sum(mask: Any) -> int:
    return compute.sum(mask).as_py() or 0


def _min(numbers: Any) -> int:
    return int(compute.min(numbers).as_py() or 0)


def _all(mask: Any) -> bool:
    return bool(compute.all(mask).as_py())
