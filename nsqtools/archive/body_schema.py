"""Read JSON Schemas as the fields of bodies, and write fields as a schema.

Schemas that programs generate are accepted: references to definitions, alternatives with null,
``enum`` and ``const``. A field without one type gets no column, its values remain in the body, and
its name is logged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute, types

from nsqtools.archive.body_columns import FIELD, PLAIN_TYPES
from nsqtools.archive.place import translating_errors
from nsqtools.errors import ConfigurationError

log = logging.getLogger("nsqtools")

MAX_DEPTH = 20
STEP = ""
References = tuple[str, ...]
"""The references that lead to a schema, with a `STEP` for each level between them."""
Resolved = tuple[Mapping[str, Any], References]
_NAMES = dict(zip(("boolean", "integer", "number", "string"), PLAIN_TYPES.values(), strict=True))
_NAME_OF = dict(zip(PLAIN_TYPES, _NAMES, strict=True))
_NUMBERS = {"integer", "number"}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
MAX_DIGITS = 38  # of a decimal, in Parquet, Delta and the engines that read them
_RFC_3339 = (
    r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[T ]([01]\d|2[0-3])(:[0-5]\d){2}(\.\d+)?"
    r"(Z|[+-]\d\d:\d\d)$"
)


def load_schema(source: Path | str) -> dict[str, Any]:
    """Read and normalize a JSON Schema of an object from a file, or from text that begins with {.

    Raises `OutputError` and `ConfigurationError`.
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    shown = "the schema" if is_text else str(source)
    with translating_errors("read", shown):
        text = str(source) if is_text else Path(source).read_bytes()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"{shown} is not JSON ({exc})") from None
    skipped: list[str] = []
    try:
        fields = _Reader(document, skipped.append).fields("it", document)
    except ValueError as exc:
        skipped, fields = [str(exc)], []
    if not fields and skipped:
        raise ConfigurationError(
            f"{shown} is not a schema of columns: {skipped[0]}",
            hint="nsq archive schema ARCHIVE prints a schema.",
        )
    for reason in skipped:
        log.warning("no column by %s: %s", shown, reason)
    return json_schema(fields)


def fields_of(document: Mapping[str, Any] | None) -> list[pyarrow.Field]:
    """Return the fields of a JSON Schema, [] for None. Raises ``ValueError`` with the reason."""

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    return [] if document is None else _Reader(document, refuse).fields("it", document)


class _Reader:
    """Reads the definitions of a ``document``. ``skip`` gets the reason why a field has no type."""

    def __init__(self, document: Any, skip: Callable[[str], None]) -> None:
        self._document = document
        self._skip = skip

    def fields(self, name: str, schema: Any, path: References = ("#",)) -> list[pyarrow.Field]:
        """Return the fields of the schema of an object. Raises ``ValueError``."""
        resolved, path = self._resolve(name, schema, path)
        if not isinstance(properties := resolved.get("properties"), Mapping):
            raise ValueError(f"{name} has no properties")
        fields = []
        for field, of in properties.items():
            try:
                kind = self._type(field, of, (*path, STEP))
            except ValueError as exc:
                self._skip(str(exc))
            else:
                fields.append(pyarrow.field(field, kind))
        return fields

    def _type(self, name: str, schema: Any, path: References) -> Any:
        schema, path = self._resolve(name, schema, path)
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if not isinstance(kinds, str | list):
            raise ValueError(f"{name} has no type, but {json.dumps(schema)[:60]}")
        kinds = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"}
        if kinds == _NUMBERS:
            kinds = {"number"}
        if len(kinds) != 1:
            raise ValueError(f"{name} has {len(kinds)} types, not one")
        (kind,) = kinds
        if kind == "array":
            return pyarrow.list_(self._type(f"{name}[]", schema.get("items"), (*path, STEP)))
        if kind == "object":
            # Parquet has no structs without fields.
            if not (fields := self.fields(name, schema, path)):
                raise ValueError(f"{name} is an object without properties")
            return pyarrow.struct(fields)
        if match := _DECIMAL.fullmatch(str(schema.get("format"))):
            digits, scale = map(int, match.groups())
            if not scale <= digits <= MAX_DIGITS or not digits:
                raise ValueError(f"{name} is {match[0]}, and decimals have at most 38 digits")
            return pyarrow.decimal128(digits, scale)
        if kind == "string" and schema.get("format") == "date-time":
            return pyarrow.timestamp("us", tz="UTC")
        if kind not in _NAMES:
            raise ValueError(f"{name} has the unknown type {kind}")
        return _NAMES[kind]

    def _resolve(self, name: str, schema: Any, path: References) -> Resolved:
        """Return the schema without references and alternatives, and the path to it."""
        if not isinstance(schema, Mapping):
            raise ValueError(f"{name} has no type, but {json.dumps(schema)[:60]}")
        if path.count(STEP) > MAX_DEPTH:
            raise ValueError(f"{name} has more than {MAX_DEPTH} levels above it")
        if isinstance(reference := schema.get("$ref"), str):
            if reference in path:
                raise ValueError(f"{name} refers to itself")
            return self._resolve(name, self._definition(name, reference), (*path, reference))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := schema.get(key), list):
                return _only_one(name, [self._resolve(name, part, path) for part in parts])
        if "type" not in schema and ("enum" in schema or "const" in schema):
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if isinstance(values, list):
                kinds = [_NAME_OF.get(type(value), "null") for value in values]
                return {"type": sorted({*kinds})}, path
        return schema, path

    def _definition(self, name: str, reference: str) -> Any:
        place = self._document
        for part in reference.removeprefix("#/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            place = place.get(part) if isinstance(place, Mapping) else None
        if place is None:
            raise ValueError(f"{name} refers to {reference}, which is not in the schema")
        return place


def _only_one(name: str, schemas: Sequence[Resolved]) -> Resolved:
    """Return the alternative that is not null; of numbers the wider type."""
    with_type = [resolved for resolved in schemas if resolved[0].get("type") != "null"]
    if {str(schema.get("type")) for schema, _ in with_type} == _NUMBERS:
        return {"type": "number"}, ()
    if len(with_type) != 1:
        raise ValueError(f"{name} has {len(with_type)} types, not one")
    return with_type[0]


def json_schema(fields: Iterable[pyarrow.Field]) -> dict[str, Any]:
    """Return a JSON Schema from which `fields_of` returns the same fields."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {field.name: _json_type(field.type) for field in fields},
    }


def _json_type(kind: Any) -> dict[str, Any]:
    if types.is_struct(kind):
        properties = {field.name: _json_type(field.type) for field in kind}
        return {"type": "object", "properties": properties}
    if types.is_list(kind):
        return {"type": "array", "items": _json_type(kind.value_type)}
    if types.is_timestamp(kind):
        return {"type": "string", "format": "date-time"}
    if types.is_decimal(kind):
        return {"type": "number", "format": f"decimal({kind.precision},{kind.scale})"}
    plain = {"boolean": types.is_boolean, "integer": types.is_integer, "number": types.is_floating}
    return {"type": next((name for name, matches in plain.items() if matches(kind)), "string")}


class TimeFields:
    """Finds the text fields of a sample in which all values are times with a zone."""

    def __init__(self) -> None:
        self._are_times: dict[str, bool] = {}

    def add(self, rows: pyarrow.RecordBatch, schema: pyarrow.Schema) -> None:
        """Check rows of the sample, whose columns have ``schema``."""
        for column in schema:
            values = rows[column.name].drop_null()
            if column.metadata and types.is_string(values.type) and len(values):
                name = column.metadata[FIELD].decode()
                are_times = compute.all(compute.match_substring_regex(values, _RFC_3339)).as_py()
                self._are_times[name] = are_times and self._are_times.get(name, True)

    def apply(self, fields: Iterable[pyarrow.Field]) -> list[pyarrow.Field]:
        """Return the fields, with the type of times where it fits."""
        time = pyarrow.timestamp("us", tz="UTC")
        return [
            field.with_type(time) if self._are_times.get(field.name) else field for field in fields
        ]
