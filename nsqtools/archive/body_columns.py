"""Convert fields of JSON bodies to columns (``--body json``), with or without a ``--schema``.

The body itself is kept, so that every byte can be replayed. If a value does not fit its column, the
column is null, ``_error`` lists the field, and the other fields keep their values. A body that is
not a JSON object has only null columns. Both cases are counted, and neither is an error. A new
field gets a nullable column if its values are plain: text, numbers, true and false. Objects and
lists become columns only if the schema declares them.

Arrow's JSON reader reads all bodies of a batch together. If it refuses, each body is checked
separately, and the fitting parts are read together. Each result belongs to the right row, because
each body begins and ends like an object, and Arrow returns as many objects as there are bodies.

Names: a field with the name of a message column (``id``, ``topic``), or one that differs from
another field only in case, which tables ignore, gets the column ``body_id``. A field keeps its
column forever: the metadata of the column has the name of the field (`FIELD`). A column without
metadata, as 0.3.0 made it, belongs to the first field to which this rule assigns it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any

import pyarrow
from pyarrow import compute, string, types

from nsqtools.archive.columns import KEYS_OF, joined, message_schema, one_array, read_json
from nsqtools.records.envelope import BodyKind

ERROR = "_error"
RESERVED = frozenset({*KEYS_OF, "file", "pos", "date", "hour"})
"""Columns of a message and of its position."""
_RESERVED_LOWER = {name.lower() for name in (*RESERVED, ERROR)}
FIELD = b"nsqtools.field"
"""Metadata of a column: the name of its field in the bodies."""
# Bodies whose keys are ids would otherwise get a column for each id.
MAX_COLUMNS = 1000
# Arrow makes a column for each key in a batch, with 12 bytes for each row.
MAX_CELLS = 4 << 20
# Arrow is slow with more keys, and crashes with more levels of nesting.
MAX_KEYS_PER_BODY = 200
# If each twentieth of 10,000 bodies has a key of its own, they need a fifth more than MAX_CELLS. A
# sample of 250 shows more than MAX_RARE_KEYS of these keys with a probability of 99.5 %.
SAMPLE_BODIES = 250
# Arrow reads a body that fits in 1 us, and a check takes 12 us. A batch that Arrow refuses is read
# again in parts, of which those with an odd body are checked. Smaller parts would cost more where
# odd bodies are frequent.
BATCH_PARTS = 16
MAX_CHECKED_BODIES = 1000
INSPECTED_BODIES = 100  # per batch; enough to find the fields that most bodies have
# Keys that occur in only one body of the sample: the whole batch may have many times as many.
MAX_RARE_KEYS = 4
_KEY = re.compile(r'"([^"\\]*)"\s*:')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Arrow cannot write half of a surrogate pair.
_FINER_THAN_MICROS = re.compile(r"(\.\d{6})\d+")
_MAX_EXACT = 2**53  # A double has not every larger integer.
_MISFIT = object()
# Arrow reads these, though JSON does not have them.
_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NOT_IN_NAMES = re.compile(r"[ ,;{}()\n\t=\0]")  # Parquet and Delta forbid these in column names.
_IS_OBJECT = r"(?s)\A\s*\{.*\}\s*\z"


class BodyColumns:
    """Adds columns for the fields of bodies.

    Args:
        fields: The initial fields, by their names in bodies.
        columns: The columns of the table. They keep their types and fields.
        evolves: Whether new fields become columns, which `schema` includes afterwards.

    ``misfits`` counts bodies that did not fit. ``without_column`` has the fields that could not get
    a column.
    """

    def __init__(
        self,
        fields: Iterable[pyarrow.Field] = (),
        columns: Iterable[pyarrow.Field] = (),
        *,
        evolves: bool = True,
    ) -> None:
        self.evolves = evolves
        self.misfits = 0
        self.without_column: set[str] = set()
        self._types: dict[str, pyarrow.DataType] = {}  # by the name in the body
        self._converters: dict[str, Callable[[object], object]] = {}
        self._columns: dict[str, str] = {}  # the name of the column, by the name in the body
        self._used_names: set[str] = set()
        # Columns of the table without metadata, by name.
        self._unclaimed: dict[str, pyarrow.DataType] = {}
        self._inferred: set[str] = set()  # fields whose types may still change
        self._is_widened = False
        self._parse_float: Callable[[str], float] | None = None  # needed only for decimals
        for column in columns:
            if column.name.lower() in _RESERVED_LOWER:
                continue
            self._used_names.add(column.name.lower())
            name = (column.metadata or {}).get(FIELD, b"").decode()
            if name and name not in self._types:
                self._map(name, column.name, column.type)
            elif not name:
                self._unclaimed[column.name] = column.type
        for field in fields:
            if field.name not in self._types:
                self._add(field.name, field.type)
        self.freeze_types()

    @property
    def fields(self) -> list[pyarrow.Field]:
        """The fields by their names in bodies, to pass to another object."""
        return [pyarrow.field(name, type) for name, type in self._types.items()]

    def schema(self) -> pyarrow.Schema:
        """Return the columns of a batch that `add` returns, including those of the message."""
        return pyarrow.schema([*message_schema(BodyKind.json), *self._body_fields()])

    def freeze_types(self) -> None:
        """Keep the inferred types, because a file has them now."""
        self._inferred.clear()

    def _body_fields(self) -> list[pyarrow.Field]:
        fields = [
            pyarrow.field(self._columns[name], type, metadata={FIELD: name.encode()})
            for name, type in self._types.items()
        ]
        return [*fields, pyarrow.field(ERROR, pyarrow.string())]

    def _add(self, name: str, type: pyarrow.DataType | None) -> None:
        """Map a field to its column in the table, or else to a new column.

        Without a type no new column is made, and the field remains only in the body.
        """
        if not name or _LONE_SURROGATE.search(name):
            self.without_column.add(name)
            return
        for column in _column_names(name):
            if column in self._unclaimed:
                self._map(name, column, self._unclaimed.pop(column))
                return
            if column.lower() not in self._used_names:
                break
        if type is not None and self._is_full:
            self.without_column.add(name)
        elif type is not None:
            self._map(name, column, type)
            self._inferred.add(name)

    @property
    def _is_full(self) -> bool:
        return len(self._types) + len(self._unclaimed) >= MAX_COLUMNS

    def _map(self, name: str, column: str, type: pyarrow.DataType) -> None:
        self._used_names.add(column.lower())
        self._types[name], self._columns[name] = type, column
        self._converters[name] = _converter(type)
        if _has_decimals(type):
            self._parse_float = _Number

    def _unmapped(self, names: Iterable[str]) -> list[str]:
        """Return the fields without a column.

        Fields with the name of an unclaimed column come first: it more likely belongs to them than
        to a field whose name must be changed.
        """
        unmapped = [name for name in names if name not in self._types]
        unmapped = [name for name in unmapped if name not in self.without_column]
        return sorted(unmapped, key=lambda name: name not in self._unclaimed)

    # -- a batch --------------------------------------------------------------------------------

    def add(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Add the columns of its bodies to a batch of `message_schema`."""
        body = batch["body"]
        evolves = self.evolves and bool(self._unclaimed or not self._is_full)
        if self.evolves and not evolves:
            self._record_fields_without_column(body)
        values = None
        if not evolves or _has_few_keys(body):
            values = _read(body, self._types, is_inferring=evolves)
            if values is not None and any(map(_may_be_rounded, values.values())):
                values = None
            if values is None and batch.num_rows > MAX_CHECKED_BODIES:
                return self._add_parts(batch)
        errors: list[str | None] = [None] * batch.num_rows
        if values is None:
            self._is_widened = False
            fitted = [self._fit_body(text) for text in body.to_pylist()]
            # All bodies must be checked against the new type.
            if self._is_widened:
                return self.add(batch)
            errors = [error for _, error in fitted]
            values = self._read_fitting([text for text, _ in fitted], errors)
            self.misfits += sum(error is not None for error in errors)
        elif evolves and self._evolve(values):
            return self.add(batch)
        arrays = [
            values[name] if name in values else pyarrow.nulls(batch.num_rows, type)
            for name, type in self._types.items()
        ]
        names = [*batch.schema.names, *(field.name for field in self._body_fields())]
        arrays.append(pyarrow.array(errors, pyarrow.string()))
        return pyarrow.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    def _add_parts(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Add the columns to parts of a batch, so that only few bodies are checked one by one."""
        misfits, types_before = self.misfits, dict(self._types)
        length = -(-batch.num_rows // BATCH_PARTS)
        offsets = range(0, batch.num_rows, length)
        parts = [self.add(batch.slice(offset, length)) for offset in offsets]
        if self._types != types_before:
            self.misfits = misfits
            return self.add(batch)
        return joined(parts)

    def _evolve(self, values: Mapping[str, Any]) -> bool:
        """Add new fields; return whether a column has another type than Arrow has inferred."""
        new = [name for name in self._unmapped(values) if not types.is_null(values[name].type)]
        for name in new:
            kind = values[name].type
            # Arrow infers a time from text that looks like one. Later values may be other text.
            is_time = types.is_temporal(kind)
            self._add(name, None if types.is_nested(kind) else string() if is_time else kind)
        return any(self._types.get(name, values[name].type) != values[name].type for name in new)

    def _record_fields_without_column(self, body: Any) -> None:
        """Record fields of some bodies that get no column because there are too many."""
        for text in body[:INSPECTED_BODIES].to_pylist():
            value = _parse(text)
            for name in self._unmapped(value) if isinstance(value, dict) else ():
                if _type_of(value[name]) is not None and len(self.without_column) < MAX_COLUMNS:
                    self.without_column.add(name)

    # -- bodies that do not fit -----------------------------------------------------------------

    def _fit_body(self, text: str | None) -> tuple[str | None, str | None]:
        """Return a body with values that fit its columns, and an error; add its new fields."""
        if text is None:
            return None, "it is not UTF-8"
        value = _parse(text, self._parse_float)
        if not isinstance(value, dict):
            return None, "it is not JSON" if value is _MISFIT else "it is not a JSON object"
        for name in self._unmapped(value) if self.evolves else ():
            if value[name] is not None and value[name] is not _MISFIT:
                self._add(name, _type_of(value[name]))
        fitting: dict[str, object] = {}
        errors: list[str] = []
        is_changed = False
        for name, item in value.items():
            convert = self._converters.get(name)
            if convert is None:
                if item is _MISFIT:
                    errors.append(f"{name} is not a number of 64 bits")
                continue
            converted = convert(item)
            if converted is _MISFIT and isinstance(item, float) and self._widen(name):
                converted = item
            if converted is _MISFIT:
                errors.append(f"{name} is not {self._types[name]}")
            else:
                fitting[name] = converted
                is_changed |= converted is not item
        return json.dumps(fitting) if errors or is_changed else text, "; ".join(errors) or None

    def _widen(self, name: str) -> bool:
        """Change an inferred integer column to double, if no file has the column yet."""
        if not (name in self._inferred and types.is_integer(self._types[name])):
            return False
        self._map(name, self._columns[name], pyarrow.float64())
        self._is_widened = True
        return True

    def _read_fitting(
        self, texts: Sequence[str | None], errors: list[str | None]
    ) -> dict[str, pyarrow.Array]:
        """Read the fitted bodies, with nulls in the rows of all others."""
        rows = [row for row, text in enumerate(texts) if text is not None]
        bodies = pyarrow.array([texts[row] for row in rows], pyarrow.string())
        parts = list(self._read_by_halves(bodies, rows, errors))
        index_of_row = {row: index for index, row in enumerate(rows)}
        indices = pyarrow.array(map(index_of_row.get, range(len(texts))), pyarrow.int64())
        return {
            name: pyarrow.concat_arrays([part[name] for part in parts]).take(indices)
            for name in self._types
        }

    def _read_by_halves(
        self, bodies: Any, rows: Sequence[int], errors: list[str | None]
    ) -> Iterator[dict[str, Any]]:
        """Read bodies; find one that Arrow still refuses by halving, and read it field by field."""
        values = _read(bodies, self._types, is_inferring=False)
        if values is not None:
            yield values
        elif len(rows) == 1:
            values, error = self._read_by_fields(bodies[0].as_py())
            errors[rows[0]] = "; ".join(filter(None, (errors[rows[0]], error)))
            yield values
        else:
            half = len(rows) // 2
            yield from self._read_by_halves(bodies[:half], rows[:half], errors)
            yield from self._read_by_halves(bodies[half:], rows[half:], errors)

    def _read_by_fields(self, text: str) -> tuple[dict[str, Any], str]:
        """Read each field of a body that Arrow refuses, and return the errors of the others."""
        pairs: list[tuple[str, object]] = []

        def record_pairs(object_pairs: list[tuple[str, object]]) -> dict[str, object]:
            pairs[:] = object_pairs  # The outermost object is the last one.
            return dict(object_pairs)

        value = json.loads(text, object_pairs_hook=record_pairs, parse_float=self._parse_float)
        counts = Counter(name for name, _ in pairs)
        values: dict[str, Any] = {}
        errors = [f"{name} occurs {times} times" for name, times in counts.items() if times > 1]
        for name, kind in self._types.items():
            column = None
            if counts[name] == 1:
                item = self._converters[name](value[name])
                if item is not _MISFIT:
                    body = pyarrow.array([json.dumps({name: item})])
                    column = _read(body, {name: kind}, is_inferring=False)
                if column is None:
                    errors.append(f"{name} is not {kind}")
            values[name] = pyarrow.nulls(1, kind) if column is None else column[name]
        return values, "; ".join(errors) or "it does not fit its columns"


def join_errors(first: Any, second: Any) -> Any:
    """Join two columns of errors, which are null in rows without an error."""
    joined = compute.binary_join_element_wise(first, second, "; ")
    return compute.coalesce(joined, first, second)


def _column_names(name: str) -> Iterator[str]:
    """Iterate over the possible column names of a field, in order of preference."""
    column = _NOT_IN_NAMES.sub("_", name)
    if column.lower() not in _RESERVED_LOWER:
        yield column
    yield f"body_{column}"
    yield from (f"body_{column}_{number}" for number in count(2))


class _Number(float):
    """A fraction with its text, of which a decimal needs all digits."""

    def __init__(self, text: str) -> None:
        self.text = text


def _parse(text: str | None, parse_float: Callable[[str], float] | None = None) -> Any:
    """Return the value of a JSON body, `_MISFIT` if it is invalid.

    A number with 400 or more digits is a `_MISFIT` inside the value.
    """
    # Python refuses integers with thousands of digits, and the parser is slower with a function.
    for parse_int in (None, _bounded_int):
        try:
            return json.loads(
                text or "",
                parse_constant=_CONSTANTS.get,
                parse_int=parse_int,
                parse_float=parse_float,
            )
        except (ValueError, RecursionError):
            continue
    return _MISFIT


def _bounded_int(digits: str) -> object:
    return int(digits) if len(digits) < 400 else _MISFIT


def _read(body: Any, kinds: Mapping[str, Any], *, is_inferring: bool) -> dict[str, Any] | None:
    """Read JSON objects in the given columns, and infer the types of other fields.

    Returns None if a body is not an object or does not fit.
    """
    rows = len(body)
    if not rows:
        return {name: pyarrow.nulls(0, kind) for name, kind in kinds.items()}
    if body.null_count:
        return None
    # The regular expression, which allows blanks, is slower.
    is_object = compute.and_(compute.starts_with(body, "{"), compute.ends_with(body, "}"))
    if not compute.all(is_object).as_py() and not (
        compute.all(compute.match_substring_regex(body, _IS_OBJECT)).as_py()
    ):
        return None
    lines = compute.binary_join_element_wise(body, "", "\n")
    _, offsets, data = lines.buffers()
    ends = memoryview(offsets).cast("b").cast("i")
    text = data.slice(ends[lines.offset], ends[lines.offset + rows] - ends[lines.offset])
    on_other_fields = "infer" if is_inferring else "ignore"
    table = read_json(text, rows, pyarrow.schema(list(kinds.items())), on_other_fields)
    # Arrow refuses nanoseconds in a column of microseconds. Nanoseconds are only the second
    # attempt, because they cannot represent years after 2262.
    finer = {name: _with_nanoseconds(kind) for name, kind in kinds.items()}
    if table is None and finer != kinds:
        table = read_json(text, rows, pyarrow.schema(list(finer.items())), on_other_fields)
    if table is None or not all(map(_has_valid_decimals, table.columns)):
        return None
    return {
        name: _cast(kinds[name], one_array(table[name]))
        if name in kinds
        else _new_column(table[name])
        for name in table.column_names
    }


def _with_nanoseconds(kind: Any) -> Any:
    """Return a type with times in nanoseconds, as Go writes them."""
    if types.is_struct(kind):
        return pyarrow.struct([(field.name, _with_nanoseconds(field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(_with_nanoseconds(kind.value_type))
    return pyarrow.timestamp("ns", tz=kind.tz) if types.is_timestamp(kind) else kind


def _cast(kind: Any, values: Any) -> Any:
    return values if values.type == kind else values.cast(kind, safe=False)


def _has_decimals(kind: Any) -> bool:
    return "decimal" in str(kind)  # also in nested types


def _has_valid_decimals(column: Any) -> bool:
    """Return whether decimals have their number of digits, which Arrow's JSON reader exceeds."""
    try:
        column.validate(full=_has_decimals(column.type))
    except pyarrow.ArrowInvalid:
        return False
    return True


def _may_be_rounded(values: Any) -> bool:
    """Return whether some doubles are so large that an integer may have lost digits."""
    kind = values.type
    if types.is_struct(kind):
        return any(map(_may_be_rounded, values.flatten()))
    if types.is_list(kind):
        return _may_be_rounded(values.flatten())
    if not types.is_floating(kind):
        return False
    ends = compute.min_max(values).as_py().values()
    return any(end is not None and not -_MAX_EXACT < end < _MAX_EXACT for end in ends)


def _has_few_keys(body: Any) -> bool:
    """Return whether Arrow can infer the fields of bodies safely.

    If keys are ids, also in nested objects, it needs gigabytes of memory, and deep nesting crashes
    it.
    """
    # Counting in all bodies together is much faster, and suffices for short and flat ones: a key
    # takes 5 bytes, and an object begins with one brace.
    text = _text_of(body)
    objects = compute.sum(compute.starts_with(body, "{")).as_py() or 0
    nested = text.count(b"{") - objects + text.count(b"[")
    longest = compute.max(compute.binary_length(body)).as_py() or 0
    colons = text.count(b":")
    if nested >= MAX_KEYS_PER_BODY or longest > 5 * MAX_KEYS_PER_BODY:
        counts = [compute.count_substring(body, character) for character in ":{["]
        if (compute.max(compute.max_element_wise(*counts)).as_py() or 0) > MAX_KEYS_PER_BODY:
            return False
    if len(body) * colons <= MAX_CELLS:
        return True
    sample = (
        body.take(pyarrow.array(range(0, len(body), len(body) // SAMPLE_BODIES + 1)))
        .drop_null()
        .to_pylist()
    )
    bodies = Counter(chain.from_iterable(set(_KEY.findall(text)) for text in sample))
    return sum(count == 1 for count in bodies.values()) <= MAX_RARE_KEYS


def _text_of(body: Any) -> bytes:
    _, offsets, data = body.buffers()
    ends = memoryview(offsets).cast("b").cast("i")[body.offset : body.offset + len(body) + 1]
    return bytes(memoryview(data)[ends[0] : ends[-1]]) if data is not None else b""


def _new_column(column: Any) -> Any:
    """Return the values of a new field; of a nested field, which gets no column, only a type."""
    # Arrow fails to concatenate lists of nulls.
    is_plain = not pyarrow.types.is_nested(column.type)
    return one_array(column) if is_plain else pyarrow.nulls(0, pyarrow.list_(pyarrow.int8()))


PLAIN_TYPES = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    str: string(),
}
"""The types of columns by the types of JSON values."""


def _type_of(value: object) -> Any:
    """Return the type of the column for a plain value; None for other values."""
    return PLAIN_TYPES.get(float if isinstance(value, float) else type(value))


def _converter(kind: Any) -> Callable[[object], object]:
    """Return a function that converts a JSON value to one that Arrow reads as a type.

    The function returns `_MISFIT` for a value that does not fit, and the same object for a value
    that does not change, because it is called for each field of each body.
    """
    convert = _converter_of(kind)
    return lambda value: None if value is None else convert(value)


def _converter_of(kind: Any) -> Callable[[Any], object]:
    if types.is_struct(kind):
        converters = [(field.name, _converter(field.type)) for field in kind]

        def to_struct(value: Any) -> object:
            if not isinstance(value, dict):
                return _MISFIT
            items = {name: convert(value[name]) for name, convert in converters if name in value}
            return _MISFIT if _MISFIT in items.values() else items

        return to_struct
    if types.is_list(kind):
        convert_item = _converter(kind.value_type)

        def to_list(value: Any) -> object:
            items = list(map(convert_item, value)) if isinstance(value, list) else [_MISFIT]
            return _MISFIT if _MISFIT in items else items

        return to_list
    if types.is_integer(kind):
        end = 2 ** (kind.bit_width - types.is_signed_integer(kind))
        minimum = -end if types.is_signed_integer(kind) else 0

        def to_integer(value: Any) -> object:
            if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
                value = int(value)
            return value if type(value) is int and minimum <= value < end else _MISFIT

        return to_integer
    if types.is_boolean(kind):
        return lambda value: value if isinstance(value, bool) else _MISFIT
    if types.is_decimal(kind):
        return lambda value: _to_decimal(value, kind)
    if types.is_floating(kind):
        return _to_double
    return _to_time if types.is_timestamp(kind) else _to_text


def _to_double(value: object) -> object:
    """Return a number that a double represents exactly, or any fraction."""
    if type(value) is int:
        # float() raises an error for an integer with more bits.
        is_exact = abs(value) <= _MAX_EXACT or (
            value.bit_length() < 1024 and int(float(value)) == value
        )
        return value if is_exact else _MISFIT
    if not isinstance(value, float):
        return _MISFIT
    # Python reads 1e400 as infinity. Only the literal constants are accepted.
    is_literal = any(value is constant for constant in _CONSTANTS.values())
    return value if is_literal or math.isfinite(value) else _MISFIT


def _to_decimal(value: object, kind: Any) -> object:
    """Return the text of a number, or text with a number, without more digits than the type has."""
    text = value.text if isinstance(value, _Number) else value
    text = str(text) if type(text) is int else text
    # A huge integer has more digits than `str` accepts.
    with suppress(pyarrow.ArrowException, ArithmeticError, UnicodeError, ValueError):
        if isinstance(text, str):
            pyarrow.array([text], string()).cast(kind)
            return text
    return _MISFIT


def _to_text(value: object) -> object:
    return value if isinstance(value, str) and not _LONE_SURROGATE.search(value) else _MISFIT


def _to_time(value: object) -> object:
    """Return a time as text with at most microseconds, if Arrow can parse it."""
    if not isinstance(value, str):
        return _MISFIT
    text = _FINER_THAN_MICROS.sub(r"\1", value)
    # The first type needs a time zone in the text, the second one forbids it.
    for zone in ("UTC", None):
        with suppress(pyarrow.ArrowException, UnicodeError):
            pyarrow.array([text], pyarrow.string()).cast(pyarrow.timestamp("us", tz=zone))
            return text
    return _MISFIT
