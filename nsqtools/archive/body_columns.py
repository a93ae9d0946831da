"""Columns made of JSON bodies, beside the body: ``--body json``, with or without ``--schema``.

The body itself stays, so that every byte can be replayed. A field whose value does not fit its
column is null, and ``_error`` lists it; the other fields of the body have their values. A body that
is no JSON object has no columns. Both are counted, and stop nothing. A field that has no column yet
gets one, nullable, for as long as its values are plain: text, numbers, true and false. Objects and
lists become columns where the schema says so, and stay in the body otherwise.

All bodies of a batch are read by Arrow's JSON reader in one go. When it refuses, each one is looked
at by itself, and what fits of them is read together. What it reads belongs to the right rows,
because each body begins and ends as an object, and there are as many objects as bodies.

Names: a field that is called like a column of the message (``id``, ``topic``), or like another one
in other case, which tables do not tell apart, is ``body_id``. A field keeps its column forever: the
column's metadata has the field's own name (`FIELD`), because the name of a column does not tell it.
A column without that, as 0.3.0 made it, belongs to the first field that the rule gives it to.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute, string, types

from nsqtools.archive.columns import KEYS_OF, message_schema, one_array, read_json
from nsqtools.archive.place import translating_errors
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

ERROR = "_error"
RESERVED = frozenset({*KEYS_OF, "file", "pos", "date", "hour"})
"""Columns of a message, and those that say where it is."""
_OWN = {name.lower() for name in (*RESERVED, ERROR)}
FIELD = b"nsqtools.field"
"""Metadata of a column: the name of its field in the bodies."""
MOST_COLUMNS = 1000  # bodies whose keys are ids would make a column of each
MOST_CELLS = 4 << 20  # rows times keys, 12 bytes each: Arrow has a column for each key it finds
MOST_KEYS = 200  # and objects and lists in each other, of a body: it is slow then, or dies
SAMPLE = 1000
NOTED_BODIES = 100  # of a batch: what most of them have is in some
MOST_RARE = 4  # keys of a sample that only one body has: the rest may have as many times more
_KEY = re.compile(r'"([^"\\]*)"\s*:')
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which Arrow cannot write
_FINER_THAN_MICROS = re.compile(r"(\.\d{6})\d+")
_EXACT = 2**53  # from here on not every whole number is a double
_MISFIT = object()
_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # Arrow reads them
_NOT_IN_NAMES = re.compile(r"[ ,;{}()\n\t=\0]")  # of columns in Parquet and Delta
_IS_OBJECT = r"(?s)\A\s*\{.*\}\s*\z"


class BodyColumns:
    """Makes columns of bodies.

    Args:
        fields: Those to begin with, by the bodies' own names.
        columns: Those that the table has. They keep their type and their field.
        evolves: Whether new fields become columns; `schema` has all of them from then on.

    ``misfits`` counts the bodies that did not fit, ``without_column`` are the fields that could not
    get a column.
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
        self._columns: dict[str, str] = {}  # the name of the column, by that in the body
        self._taken: set[str] = set()
        self._unclaimed: dict[str, pyarrow.DataType] = {}  # columns of the table, by their names
        self._inferred: set[str] = set()  # fields whose type no file has yet
        for column in columns:
            if column.name.lower() in _OWN:
                continue
            self._taken.add(column.name.lower())
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
        """The fields by their names in the body: what to begin with the next time."""
        return [pyarrow.field(name, type) for name, type in self._types.items()]

    def schema(self) -> pyarrow.Schema:
        """Return the columns that `add` gives a batch now, those of the message included."""
        return pyarrow.schema([*message_schema(BodyKind.json), *self._own_fields()])

    def freeze_types(self) -> None:
        """Keep the types from now on: a file has them."""
        self._inferred.clear()

    def _own_fields(self) -> list[pyarrow.Field]:
        own = [
            pyarrow.field(self._columns[name], type, metadata={FIELD: name.encode()})
            for name, type in self._types.items()
        ]
        return [*own, pyarrow.field(ERROR, pyarrow.string())]

    def _add(self, name: str, type: pyarrow.DataType | None) -> None:
        """Give a field its column: that of the table, else a new one if it has a type for it."""
        if not name or _HALF.search(name):
            self.without_column.add(name)
            return
        for column in _column_names(name):
            if column in self._unclaimed:
                self._map(name, column, self._unclaimed.pop(column))
                return
            if column.lower() not in self._taken:
                break
        if type is not None and self._is_full:
            self.without_column.add(name)
        elif type is not None:  # else it stays in the body
            self._map(name, column, type)
            self._inferred.add(name)

    @property
    def _is_full(self) -> bool:
        return len(self._types) + len(self._unclaimed) >= MOST_COLUMNS

    def _map(self, name: str, column: str, type: pyarrow.DataType) -> None:
        self._taken.add(column.lower())
        self._types[name], self._columns[name] = type, column
        self._converters[name] = _converter(type)

    def _new_in(self, names: Iterable[str]) -> list[str]:
        """Return the fields without a column, those first that are called as a column is: it is
        rather theirs than that of a field whose name had to be changed."""
        new = [name for name in names if name not in self._types]
        new = [name for name in new if name not in self.without_column]
        return sorted(new, key=lambda name: name not in self._unclaimed)

    # -- a batch --------------------------------------------------------------------------------

    def add(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return a batch of `message_schema` with the columns of its bodies."""
        body = batch["body"]
        evolves = self.evolves and bool(self._unclaimed or not self._is_full)
        if self.evolves and not evolves:
            self._note_fields(body)
        read = None
        if not evolves or _has_few_keys(body):
            read = _read(body, self._types, is_inferring=evolves)
            if read is not None and any(map(_may_be_rounded, read.values())):
                read = None
        errors: list[str | None] = [None] * batch.num_rows
        if read is None:
            types_before = dict(self._types)
            fitted = [self._fit(text) for text in body.to_pylist()]
            if any(self._types[name] != kind for name, kind in types_before.items()):
                return self.add(batch)
            errors = [error for _, error in fitted]
            read = self._scattered([text for text, _ in fitted], errors)
            self.misfits += sum(error is not None for error in errors)
        elif evolves and self._evolve(read):
            return self.add(batch)
        arrays = [
            read[name] if name in read else pyarrow.nulls(batch.num_rows, type)
            for name, type in self._types.items()
        ]
        names = [*batch.schema.names, *(field.name for field in self._own_fields())]
        arrays.append(pyarrow.array(errors, pyarrow.string()))
        return pyarrow.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    def _evolve(self, read: Mapping[str, Any]) -> bool:
        """Take in new fields; return whether one has another type than Arrow found."""
        new = [name for name in self._new_in(read) if not types.is_null(read[name].type)]
        for name in new:
            kind = read[name].type
            is_time = types.is_temporal(kind)  # as text may look
            self._add(name, None if types.is_nested(kind) else string() if is_time else kind)
        return any(self._types.get(name, read[name].type) != read[name].type for name in new)

    def _note_fields(self, body: Any) -> None:
        """Note which fields some bodies have that find no room for a column."""
        for text in body[:NOTED_BODIES].to_pylist():
            value = _parse(text)
            for name in self._new_in(value) if isinstance(value, dict) else ():
                if _type_of(value[name]) is not None and len(self.without_column) < MOST_COLUMNS:
                    self.without_column.add(name)

    # -- bodies that do not fit -----------------------------------------------------------------

    def _fit(self, text: str | None) -> tuple[str | None, str | None]:
        """Return a body as the columns take it, and what does not fit; take in its new fields."""
        if text is None:
            return None, "it is not UTF-8"
        value = _parse(text)
        if not isinstance(value, dict):
            return None, "it is not JSON" if value is _MISFIT else "it is not a JSON object"
        for name in self._new_in(value) if self.evolves else ():
            if value[name] is not None and value[name] is not _MISFIT:
                self._add(name, _type_of(value[name]))
        kept: dict[str, object] = {}
        wrong: list[str] = []
        is_changed = False
        for name, item in value.items():
            convert = self._converters.get(name)
            if convert is None:
                if item is _MISFIT:
                    wrong.append(f"{name} is not a number of 64 bits")
                continue
            converted = convert(item)
            if converted is _MISFIT and type(item) is float and self._widen(name):
                converted = item
            if converted is _MISFIT:
                wrong.append(f"{name} is not {self._types[name]}")
            else:
                kept[name] = converted
                is_changed |= converted is not item
        return json.dumps(kept) if wrong or is_changed else text, "; ".join(wrong) or None

    def _widen(self, name: str) -> bool:
        """Make whole numbers doubles where fractions follow, if no file has them yet."""
        if not (name in self._inferred and types.is_integer(self._types[name])):
            return False
        self._map(name, self._columns[name], pyarrow.float64())
        return True

    def _scattered(
        self, texts: Sequence[str | None], errors: list[str | None]
    ) -> dict[str, pyarrow.Array]:
        """Read the bodies that have columns, and put nulls where the others are."""
        rows = [row for row, text in enumerate(texts) if text is not None]
        bodies = pyarrow.array([texts[row] for row in rows], pyarrow.string())
        parts = list(self._read_by_halves(bodies, rows, errors))
        numbers = {row: number for number, row in enumerate(rows)}
        places = pyarrow.array([numbers.get(row) for row in range(len(texts))], pyarrow.int64())
        return {
            name: pyarrow.concat_arrays([part[name] for part in parts]).take(places)
            for name in self._types
        }

    def _read_by_halves(
        self, bodies: Any, rows: Sequence[int], errors: list[str | None]
    ) -> Iterator[dict[str, Any]]:
        """Read bodies that fit; one that Arrow refuses is found by halving, and read by itself."""
        read = _read(bodies, self._types, is_inferring=False)
        if read is not None:
            yield read
        elif len(rows) == 1:
            one, error = self._read_by_fields(bodies[0].as_py())
            errors[rows[0]] = "; ".join(filter(None, (errors[rows[0]], error)))
            yield one
        else:
            half = len(rows) // 2
            yield from self._read_by_halves(bodies[:half], rows[:half], errors)
            yield from self._read_by_halves(bodies[half:], rows[half:], errors)

    def _read_by_fields(self, text: str) -> tuple[dict[str, Any], str]:
        """Read what Arrow takes of a body that it refuses, and say what it does not."""
        pairs: list[tuple[str, object]] = []

        def note(some: list[tuple[str, object]]) -> dict[str, object]:
            pairs[:] = some  # those of the outermost object come last
            return dict(some)

        value = json.loads(text, object_pairs_hook=note)
        counts = Counter(name for name, _ in pairs)
        read: dict[str, Any] = {}
        wrong = [f"{name} is there {times} times" for name, times in counts.items() if times > 1]
        for name, kind in self._types.items():
            one = None
            if counts[name] == 1:
                lone = pyarrow.array([json.dumps({name: value[name]})])
                one = _read(lone, {name: kind}, is_inferring=False)
                if one is None:
                    wrong.append(f"{name} is not {kind}")
            read[name] = pyarrow.nulls(1, kind) if one is None else one[name]
        return read, "; ".join(wrong) or "it is not read as the columns are"


def join_errors(errors: Any, more: Any) -> Any:
    """Return two columns of errors, null where nothing is wrong, as one."""
    return compute.coalesce(compute.binary_join_element_wise(errors, more, "; "), errors, more)


def _column_names(name: str) -> Iterator[str]:
    """The names that the column of a field may have, in order."""
    column = _NOT_IN_NAMES.sub("_", name)
    if column.lower() not in _OWN:
        yield column
    yield f"body_{column}"
    yield from (f"body_{column}_{number}" for number in count(2))


def _parse(text: str | None) -> Any:
    """Return what a body says, `_MISFIT` if it is not JSON; so is a number of so many digits."""
    for parse_int in (None, _bounded_int):  # Python refuses those of thousands of digits
        try:
            return json.loads(text or "", parse_constant=_CONSTANTS.get, parse_int=parse_int)
        except (ValueError, RecursionError):
            continue
    return _MISFIT


def _bounded_int(digits: str) -> object:
    return int(digits) if len(digits) < 400 else _MISFIT


def _read(body: Any, kinds: Mapping[str, Any], *, is_inferring: bool) -> dict[str, Any] | None:
    """Read JSON objects in the given columns, and in what else is found; None if one is not so."""
    rows = len(body)
    if not rows:
        return {name: pyarrow.nulls(0, kind) for name, kind in kinds.items()}
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
    text = data.slice(ends[lines.offset], ends[lines.offset + rows] - ends[lines.offset])
    others = "infer" if is_inferring else "ignore"
    table = read_json(text, rows, pyarrow.schema(list(kinds.items())), others)
    finer = {name: _with_nanoseconds(kind) for name, kind in kinds.items()}
    if table is None and finer != kinds:  # not at first: they have no year beyond 2262
        table = read_json(text, rows, pyarrow.schema(list(finer.items())), others)
    if table is None:
        return None
    return {
        name: _as(kinds[name], one_array(table[name])) if name in kinds else _found(table[name])
        for name in table.column_names
    }


def _with_nanoseconds(kind: Any) -> Any:
    """Return a type whose times are as fine as Go writes them."""
    if types.is_struct(kind):
        return pyarrow.struct([(each.name, _with_nanoseconds(each.type)) for each in kind])
    if types.is_list(kind):
        return pyarrow.list_(_with_nanoseconds(kind.value_type))
    return pyarrow.timestamp("ns", tz=kind.tz) if types.is_timestamp(kind) else kind


def _as(kind: Any, values: Any) -> Any:
    return values if values.type == kind else values.cast(kind, safe=False)


def _may_be_rounded(values: Any) -> bool:
    """Whether some doubles are so large that a whole number may have lost digits."""
    kind = values.type
    if types.is_struct(kind):
        return any(map(_may_be_rounded, values.flatten()))
    if types.is_list(kind):
        return _may_be_rounded(values.flatten())
    if not types.is_floating(kind):
        return False
    ends = compute.min_max(values).as_py().values()
    return any(end is not None and not -_EXACT < end < _EXACT for end in ends)


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
    return _PLAIN.get(type(value))


def _converter(kind: Any) -> Callable[[object], object]:
    """Return what makes a value of JSON one that Arrow reads as a type, `_MISFIT` if none is.

    It is called for every field of a body, and returns the value itself where nothing changes.
    """
    convert = _converter_of(kind)
    return lambda value: None if value is None else convert(value)


def _converter_of(kind: Any) -> Callable[[Any], object]:
    if types.is_struct(kind):
        known = [(field.name, _converter(field.type)) for field in kind]

        def of_struct(value: Any) -> object:
            if not isinstance(value, dict):
                return _MISFIT
            some = {name: convert(value[name]) for name, convert in known if name in value}
            return _MISFIT if _MISFIT in some.values() else some

        return of_struct
    if types.is_list(kind):
        convert_item = _converter(kind.value_type)

        def of_list(value: Any) -> object:
            some = list(map(convert_item, value)) if isinstance(value, list) else [_MISFIT]
            return _MISFIT if _MISFIT in some else some

        return of_list
    if types.is_integer(kind):
        most = 2 ** (kind.bit_width - types.is_signed_integer(kind))
        least = -most if types.is_signed_integer(kind) else 0

        def of_integer(value: Any) -> object:
            if type(value) is float and value.is_integer() and abs(value) <= _EXACT:
                value = int(value)
            return value if type(value) is int and least <= value < most else _MISFIT

        return of_integer
    if types.is_boolean(kind):
        return lambda value: value if isinstance(value, bool) else _MISFIT
    if types.is_floating(kind):
        return _double
    return _time if types.is_timestamp(kind) else _text


def _double(value: object) -> object:
    """A number; of whole ones only those whose digits a double keeps."""
    if type(value) is int:
        is_kept = abs(value) <= _EXACT or (
            value.bit_length() < 1024 and int(float(value)) == value  # else it is none at all
        )
        return value if is_kept else _MISFIT
    if type(value) is not float:
        return _MISFIT
    is_meant = math.isfinite(value) or any(value is each for each in _CONSTANTS.values())
    return value if is_meant else _MISFIT  # as 1e400 is not


def _text(value: object) -> object:
    return value if isinstance(value, str) and not _HALF.search(value) else _MISFIT


def _time(value: object) -> object:
    """A time in microseconds. Arrow is asked, for it knows more forms than Python."""
    if not isinstance(value, str):
        return _MISFIT
    text = _FINER_THAN_MICROS.sub(r"\1", value)
    for zone in ("UTC", None):  # with a zone in the text, and without
        with suppress(pyarrow.ArrowException, UnicodeError):
            pyarrow.array([text], pyarrow.string()).cast(pyarrow.timestamp("us", tz=zone))
            return text
    return _MISFIT


# -- schemas ------------------------------------------------------------------------------------


def load_schema(source: Path | str) -> dict[str, Any]:
    """Read a JSON Schema of an object.

    ``source`` is a file, or the text itself. Returns a JSON Schema. Raises `OutputError` and
    `ConfigurationError`.
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    shown = "the schema" if is_text else str(source)
    with translating_errors("read", shown):
        text = str(source) if is_text else Path(source).read_bytes()
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"{shown} is not JSON ({exc})") from None
    try:
        return json_schema(fields_of(document))
    except ValueError as exc:
        raise ConfigurationError(
            f"{shown} is no schema of columns: {exc}",
            hint="Give each field one type, or leave it out: it stays in the body. "
            "nsq archive schema ARCHIVE prints a schema.",
        ) from None


def fields_of(document: Mapping[str, Any] | None) -> list[pyarrow.Field]:
    """Return the fields of a schema; none of None. Raises ``ValueError`` with the reason."""
    return [] if document is None else _fields_in("it", document)


def _fields_in(name: str, schema: Any) -> list[pyarrow.Field]:
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(known, Mapping):
        raise ValueError(f"{name} has no properties")
    return [pyarrow.field(each, _arrow_type(each, of)) for each, of in known.items()]


def _arrow_type(name: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(kinds, str | list):
        raise ValueError(f"{name} has no type, but {json.dumps(schema)[:60]}")
    some = [each for each in ([kinds] if isinstance(kinds, str) else kinds) if each != "null"]
    plain = dict(zip(("boolean", "integer", "number", "string"), _PLAIN.values(), strict=True))
    if len(some) != 1:
        raise ValueError(f"{name} has {len(some)} types, not one")
    if some[0] == "array":
        return pyarrow.list_(_arrow_type(f"{name}[]", schema.get("items")))
    if some[0] == "object":
        if not (fields := _fields_in(name, schema)):  # Parquet has none
            raise ValueError(f"{name} is an object without properties")
        return pyarrow.struct(fields)
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
