"""Columns made of JSON bodies, beside the body: ``--body json``, with or without ``--schema``.

The body itself stays, so that every byte can be replayed. A body that does not fit the columns (it
is no JSON object, or a field has another type than its column) has none of them, and what is wrong
in ``_error``; it is counted, and stops nothing. A field that has no column yet gets one, nullable,
for as long as its values are plain: text, numbers, true and false. Objects and lists become columns
where the schema says so, and stay in the body otherwise.

All bodies of a batch are read by Arrow's JSON reader in one go. When it refuses, each one is looked
at by itself, and those that fit are read together. What it reads belongs to the right rows, because
each body begins and ends as an object, and there are as many objects as bodies.

Names: a field that is called like a column of the message (``id``, ``topic``) is ``body_id``; of
two that differ in case only, which tables do not tell apart, the second has no column.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute, string, types

from nsqtools.archive.columns import KEYS_OF, message_schema, one_array, read_json
from nsqtools.archive.storage import failing
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

ERROR = "_error"
RESERVED = frozenset({*KEYS_OF, "file", "pos", "date", "hour"})
"""Columns of a message, and those that say where it is."""
MOST_COLUMNS = 1000  # bodies whose keys are ids would make a column of each
MOST_CELLS = 4 << 20  # rows times keys, 12 bytes each: Arrow has a column for each key it finds
MOST_KEYS = 200  # and objects and lists in each other, of a body: it is slow then, or dies
SAMPLE = 1000
MOST_RARE = 4  # keys of a sample that only one body has: the rest may have as many times more
_KEY = re.compile(r'"([^"\\]*)"\s*:')
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which Arrow cannot write
_NOT_IN_NAMES = re.compile(r"[ ,;{}()\n\t=\0]")  # of columns in Parquet and Delta
_IS_OBJECT = r"(?s)\A\s*\{.*\}\s*\z"


class BodyColumns:
    """Makes columns of bodies. ``fields`` are those to begin with, by the bodies' own names.

    With ``evolves`` new fields become columns; `schema` has all of them from then on. ``misfits``
    counts the bodies that did not fit.
    """

    def __init__(self, fields: Iterable[pyarrow.Field] = (), *, evolves: bool = True) -> None:
        self.evolves = evolves
        self.misfits = 0
        self._types: dict[str, pyarrow.DataType] = {}  # by the name in the body
        self._checks: dict[str, Callable[[object], bool]] = {}
        self._columns: dict[str, str] = {}  # the name of the column, by that in the body
        self._taken = {name.lower() for name in (*RESERVED, ERROR)}
        self._left: set[str] = set()  # fields that become no column
        for field in fields:
            self._add(field.name, field.type)

    @property
    def fields(self) -> list[pyarrow.Field]:
        """The fields by their names in the body: what to begin with the next time."""
        return [pyarrow.field(name, type) for name, type in self._types.items()]

    def schema(self) -> pyarrow.Schema:
        """Return the columns that `add` gives a batch now, those of the message included."""
        return pyarrow.schema([*message_schema(BodyKind.json), *self._own_fields()])

    def _own_fields(self) -> list[pyarrow.Field]:
        own = [pyarrow.field(self._columns[name], type) for name, type in self._types.items()]
        return [*own, pyarrow.field(ERROR, pyarrow.string())]

    def _add(self, name: str, type: pyarrow.DataType) -> bool:
        column = _NOT_IN_NAMES.sub("_", name)
        if column.lower() in self._taken:
            column = f"body_{column}"
        if len(self._types) >= MOST_COLUMNS:
            return False
        if column.lower() in self._taken or not name or _HALF.search(name):
            self._left.add(name)
            return False
        self._taken.add(column.lower())
        self._types[name], self._columns[name] = type, column
        self._checks[name] = _checker(type)
        return True

    # -- a batch --------------------------------------------------------------------------------

    def add(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return a batch of `message_schema` with the columns of its bodies."""
        body = batch["body"]
        evolves = self.evolves and len(self._types) < MOST_COLUMNS
        read = None
        if not evolves or _has_few_keys(body):
            read = _read(body, self._types, is_inferring=evolves)
        errors = None
        if read is None:
            errors = [self._why(text) for text in body.to_pylist()]
            fits = pyarrow.array([error is None for error in errors])
            self.misfits += sum(error is not None for error in errors)
            read = self._scattered(body.filter(fits), fits, errors)
        if evolves and self._evolve(read):
            return self.add(batch)
        count = batch.num_rows
        arrays = [
            read[name] if name in read else pyarrow.nulls(count, type)
            for name, type in self._types.items()
        ]
        wrong = pyarrow.array(errors or [None] * count, pyarrow.string())
        names = [*batch.schema.names, *(field.name for field in self._own_fields())]
        return pyarrow.RecordBatch.from_arrays([*batch.columns, *arrays, wrong], names=names)

    def _evolve(self, read: Mapping[str, Any]) -> bool:
        """Take in new fields; return whether Arrow took one for times: it is text."""
        again = False
        for name, array in read.items():
            kind = array.type
            if name in self._types or name in self._left or types.is_null(kind):
                continue
            if types.is_nested(kind):
                self._left.add(name)
            elif types.is_temporal(kind):
                again |= self._add(name, string())
            else:
                self._add(name, kind)
        return again

    # -- bodies that do not fit -----------------------------------------------------------------

    def _why(self, text: str | None) -> str | None:
        """Return why a body does not fit, None if it does; take in its new fields."""
        if text is None:
            return "it is not UTF-8"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return "it is not JSON"
        if not isinstance(value, dict):
            return "it is not a JSON object"
        new: dict[str, Any] = {}
        for name, each in value.items():
            check = self._checks.get(name)
            if check is not None:
                if not check(each):
                    return f"{name} is not {self._types[name]}"
            elif self.evolves and name not in self._left and (kind := _type_of(each)) is not None:
                new[name] = kind
        for name, kind in new.items():
            self._add(name, kind)
        return None

    def _scattered(self, bodies: Any, fits: Any, errors: list[str | None]) -> dict[str, Any]:
        """Read the bodies that fit, and put nulls where the others are."""
        read = _read(bodies, self._types, is_inferring=False)
        if read is None:  # they fit by themselves, and Arrow reads some of them differently
            read = self._one_by_one(bodies, fits, errors)
        places = compute.cumulative_sum(fits.cast(pyarrow.int64()))
        places = compute.if_else(fits, compute.subtract(places, 1), None)
        return {name: array.take(places) for name, array in read.items()}

    def _one_by_one(self, bodies: Any, fits: Any, errors: list[str | None]) -> dict[str, Any]:
        rows = compute.indices_nonzero(fits).to_pylist()
        parts: dict[str, list[Any]] = {name: [] for name in self._types}
        for number, row in enumerate(rows):
            one = _read(bodies.slice(number, 1), self._types, is_inferring=False)
            if one is None:
                errors[row] = "it is not read as the columns are"
                self.misfits += 1
            for name, type in self._types.items():
                parts[name].append(pyarrow.nulls(1, type) if one is None else one[name])
        return {name: pyarrow.concat_arrays(some) for name, some in parts.items() if some}


def _read(body: Any, types: Mapping[str, Any], *, is_inferring: bool) -> dict[str, Any] | None:
    """Read JSON objects in the given columns, and in what else is found; None if one is not so."""
    count = len(body)
    if not count:
        return {name: pyarrow.nulls(0, type) for name, type in types.items()}
    if body.null_count:
        return None
    plain = compute.and_(compute.starts_with(body, "{"), compute.ends_with(body, "}"))
    if not compute.all(plain).as_py() and not (
        compute.all(compute.match_substring_regex(body, _IS_OBJECT)).as_py()
    ):
        return None
    lines = compute.binary_join_element_wise(body, "", "\n")
    _, offsets, data = lines.buffers()
    ends = memoryview(offsets).cast("b").cast("i")
    text = data.slice(ends[lines.offset], ends[lines.offset + count] - ends[lines.offset])
    schema = pyarrow.schema(list(types.items()))
    table = read_json(text, count, schema, "infer" if is_inferring else "ignore")
    if table is None:
        return None
    return {
        name: one_array(table[name]) if name in types else _found(table[name])
        for name in table.column_names
    }


def _has_few_keys(body: Any) -> bool:
    """Return whether Arrow can look for the fields of bodies: where keys are ids, in objects of
    objects, too, it takes memory by the gigabyte, and of deep ones it dies."""
    colons, *nested = (compute.count_substring(body, each) for each in ":{[")
    of_one = compute.max_element_wise(colons, *nested)
    if (compute.max(of_one).as_py() or 0) > MOST_KEYS:
        return False
    if len(body) * (compute.sum(colons).as_py() or 0) <= MOST_CELLS:
        return True
    sample = (
        body.take(pyarrow.array(range(0, len(body), len(body) // SAMPLE + 1)))
        .drop_null()
        .to_pylist()
    )
    bodies = Counter(chain.from_iterable(set(_KEY.findall(text)) for text in sample))
    return sum(count == 1 for count in bodies.values()) <= MOST_RARE


def _found(column: Any) -> Any:
    """A field that was not asked for; of one that becomes no column only its type counts."""
    is_plain = not pyarrow.types.is_nested(column.type)  # Arrow fails at joining lists of nulls
    return one_array(column) if is_plain else pyarrow.nulls(0, pyarrow.list_(pyarrow.int8()))


_PLAIN = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: string()}


def _type_of(value: object) -> Any:
    """Return the type of the column that a plain value makes; None for others."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return pyarrow.float64()
    return _PLAIN.get(type(value))


def _checker(kind: Any) -> Callable[[object], bool]:
    """Return what tells whether a value of JSON fits a type; asked for every field of a body."""
    fits = _fitting(kind)
    return lambda value: value is None or fits(value)


def _fitting(kind: Any) -> Callable[[object], bool]:
    if types.is_struct(kind):
        known = [(field.name, _checker(field.type)) for field in kind]
        return lambda value: (
            isinstance(value, dict)
            and all(check(value[name]) for name, check in known if name in value)
        )
    if types.is_list(kind):
        of_each = _checker(kind.value_type)
        return lambda value: isinstance(value, list) and all(map(of_each, value))
    if types.is_integer(kind):
        most = 2 ** (kind.bit_width - types.is_signed_integer(kind))
        least = -most if types.is_signed_integer(kind) else 0
        return lambda value: type(value) is int and least <= value < most
    if types.is_boolean(kind):
        return lambda value: isinstance(value, bool)
    if types.is_floating(kind):
        return lambda value: type(value) in (float, int)
    return _is_time if types.is_timestamp(kind) else lambda value: isinstance(value, str)


def _is_time(value: object) -> bool:
    """Whether Arrow reads it as a time: it is asked, for it knows more forms than Python."""
    try:
        pyarrow.array([value], pyarrow.string()).cast(pyarrow.timestamp("us", tz="UTC"))
    except (pyarrow.ArrowException, TypeError, ValueError):
        return False
    return True


# -- schemas ------------------------------------------------------------------------------------


def load_schema(source: Path | str) -> dict[str, Any]:
    """Read a JSON Schema of an object.

    ``source`` is a file, or the text itself. Returns a JSON Schema. Raises `OutputError` and
    `ConfigurationError`.
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    shown = "the schema" if is_text else str(source)
    with failing("read", shown):
        text = str(source) if is_text else Path(source).read_bytes()
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"{shown} is not JSON ({exc})") from None
    try:
        return json_schema(fields_of(document))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigurationError(
            f"{shown} is not a schema ({exc})", hint="nsq archive schema ARCHIVE prints one."
        ) from None


def fields_of(document: Mapping[str, Any] | None) -> list[pyarrow.Field]:
    """Return the fields of a schema; none of None. Raises ``ValueError`` and others for what is no
    schema."""
    known = {} if document is None else document["properties"]
    return [pyarrow.field(name, _arrow_type(name, of)) for name, of in known.items()]


def _arrow_type(name: str, schema: Mapping[str, Any]) -> Any:
    kinds = schema["type"]
    some = [each for each in ([kinds] if isinstance(kinds, str) else kinds) if each != "null"]
    plain = dict(zip(("boolean", "integer", "number", "string"), _PLAIN.values(), strict=True))
    if len(some) != 1:
        raise ValueError(f"{name} has not one type")
    if some[0] == "array":
        return pyarrow.list_(_arrow_type(name, schema["items"]))
    if some[0] == "object":
        return pyarrow.struct(
            [(each, _arrow_type(each, of)) for each, of in schema["properties"].items()]
        )
    if some[0] == "string" and schema.get("format") == "date-time":
        return pyarrow.timestamp("us", tz="UTC")
    if some[0] not in plain:
        raise ValueError(f"{name} has the unknown type {some[0]}")
    return plain[some[0]]


def json_schema(fields: Iterable[pyarrow.Field]) -> dict[str, Any]:
    """Return a JSON Schema that `fields_of` reads back."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {field.name: _json_type(field.type) for field in fields},
    }


def _json_type(kind: Any) -> dict[str, Any]:
    if types.is_struct(kind):
        return {"type": "object", "properties": {each.name: _json_type(each.type) for each in kind}}
    if types.is_list(kind):
        return {"type": "array", "items": _json_type(kind.value_type)}
    if types.is_timestamp(kind):
        return {"type": "string", "format": "date-time"}
    plain = {"boolean": types.is_boolean, "integer": types.is_integer, "number": types.is_floating}
    return {"type": next((name for name, is_so in plain.items() if is_so(kind)), "string")}
