"""``nsq spark sql``: a query over archives and Parquet, each under a name.

Rows come back as Spark has them. `QueryRows` makes values printable: text for a table, and for JSON
the forms of a message's envelope, ``"body64"`` in place of ``"body"`` where bytes are not UTF-8.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import TimestampType

from nsqtools.archive.catalog import find_inputs, table_files
from nsqtools.archive.location import Location, absolute, parse_place
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.spark.archives.read_settings import BYTES, Bodies
from nsqtools.spark.failures import is_sparks, spark_errors
from nsqtools.spark.jobs.inputs import damage_options, load_columns, read_files
from nsqtools.spark.pyspark_internals import stand_in, struct_of, used_columns
from nsqtools.spark.spark_settings import PUSHDOWN_CONF

if TYPE_CHECKING:
    from nsqtools.spark.spark_settings import SparkSettings

ARCHIVE, PARQUET, DELTA = "archive", "parquet", "delta"

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class NamedView:
    """A name for queries, and its files."""

    name: str
    kind: str
    paths: tuple[str, ...]


def named_views(
    archives: Iterable[str], parquet: Iterable[str], paths: Iterable[Location]
) -> list[NamedView]:
    """The views of ``NAME=PATH`` texts, and of bare paths, which are named after their kind.

    A name that is given several times has all its paths; a table of Delta may be given as Parquet.
    Raises `ConfigurationError`, and `NotFoundError` for a path that is not there.
    """
    paths_of: dict[tuple[str, str], list[Location]] = {}
    for kind, texts in ((ARCHIVE, archives), (PARQUET, parquet)):
        for text in texts:
            name, _, path = text.partition("=")
            if not path or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ConfigurationError(
                    f"--{kind} {text!r} has no name",
                    hint=f"Write --{kind} NAME=PATH; SQL knows it by that name.",
                )
            try:
                place = parse_place(path)
            except ValueError as exc:
                raise ConfigurationError(f"--{kind} {text}: {exc}") from None
            is_table = kind == PARQUET and bool(find_inputs([place]).delta)
            paths_of.setdefault((name, DELTA if is_table else kind), []).append(place)
    found = find_inputs(list(paths))
    for kind, bare in ((ARCHIVE, found.archives), (PARQUET, found.parquet), (DELTA, found.delta)):
        for each in bare:
            paths_of.setdefault((kind, kind), []).append(each)
    names = [name.lower() for name, _ in paths_of]
    for name, kind in paths_of:
        if names.count(name.lower()) > 1:
            raise ConfigurationError(f"{name} names archives and Parquet")
        find_inputs(paths_of[name, kind])
    return [
        NamedView(name, kind, tuple(str(absolute(path)) for path in each))
        for (name, kind), each in paths_of.items()
    ]


def places_of(views: Iterable[NamedView]) -> list[Location]:
    """Return all places of some views."""
    return [parse_place(path) for view in views for path in view.paths]


def plan_query(
    spark: SparkSession,
    settings: SparkSettings,
    views: Sequence[NamedView],
    text: str,
    damage_path: Location | None = None,
    bodies: Bodies = BYTES,
) -> DataFrame:
    """Give the views their names and plan the query; what it returns is not yet computed.

    What is damaged fails the query, or with a ``damage_path`` is left out and written there.
    Raises `NotFoundError` for an unknown table, `ConfigurationError` for what is wrong SQL.
    """
    try:
        with spark_errors(settings):
            used = columns_of_views(spark, views, text, bodies)
            for view in views:
                _read(spark, view, damage_path, used, bodies).createOrReplaceTempView(view.name)
            return spark.sql(text)
    except NotFoundError as error:
        known = ", ".join(view.name for view in views) or "none, because no path was given"
        raise NotFoundError(str(error), hint=f"Known here: {known}.") from error


def columns_of_views(
    spark: SparkSession, views: Sequence[NamedView], text: str, bodies: Bodies = BYTES
) -> dict[str, set[str]]:
    """Return the columns of archives that a query reads, by view.

    A view that is not in it may be read in any way: the plan does not show how. Spark does not tell
    the columns to a data source in Python, so the query is planned over empty views in their place.
    """
    stand_ins = {}
    columns = struct_of(bodies.archived_schema())
    for view in views:
        if view.kind == ARCHIVE:
            stand_ins[stand_in(spark, view.name, columns)] = view.name
        else:
            _read_files(spark, view).createOrReplaceTempView(view.name)
    try:
        found = used_columns(spark, text)
    except Exception as error:  # the query itself fails for the same reason, in a moment
        if not is_sparks(error):
            raise
        return {}
    return {stand_ins[number]: found[number] for number in stand_ins.keys() & found}


def _read(
    spark: SparkSession,
    view: NamedView,
    damage_path: Location | None,
    used: Mapping[str, Collection[str]],
    bodies: Bodies,
) -> DataFrame:
    if view.kind != ARCHIVE:
        return _read_files(spark, view)
    reader = spark.read.format("nsq-archive").options(**damage_options(damage_path))
    reader = reader.options(**bodies.options())
    if spark.conf.get(PUSHDOWN_CONF, "false") == "true":
        reader = reader.option("filterPushdown", "true")
    if view.name not in used:
        return reader.load(list(view.paths))
    return load_columns(reader, view.paths, used[view.name], bodies)


def _read_files(spark: SparkSession, view: NamedView) -> DataFrame:
    tables = table_files(places_of([view]))
    frames = (read_files(spark, root, names) for root, names in tables.items())
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)


class QueryRows:
    """Turns the rows of one query into what can be printed."""

    def __init__(self, frame: DataFrame) -> None:
        self.columns: list[str] = frame.columns
        self._frame = frame
        # pyspark has both kinds of timestamps without a zone; one is in that of this process
        self._is_moment = [isinstance(each.dataType, TimestampType) for each in frame.schema]

    def first(self, count: int) -> list[Row]:
        """At most ``count`` rows, computed at once."""
        return self._frame.limit(count).collect()

    def all(self) -> Iterator[Row]:
        """All rows, computed as they are asked for; in memory is a part of them."""
        return self._frame.toLocalIterator(prefetchPartitions=True)

    def cells(self, row: Row) -> list[Plain]:
        """A row of a table."""
        return [cell(value) for value in self._values(row)]

    def document(self, row: Row) -> dict[str, Any]:
        """A row as an object of JSON."""
        return fields(zip(self.columns, self._values(row), strict=True))

    def _values(self, row: Row) -> Iterator[Any]:
        for value, is_moment in zip(row, self._is_moment, strict=True):
            yield value.astimezone(UTC) if is_moment and value is not None else value


def cell(value: Any) -> Plain:
    """A value for a table: bytes as text, what is not UTF-8 escaped; structures as JSON."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    readable = plain(value)
    return readable if isinstance(readable, str) else json.dumps(readable, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value for JSON. Numbers that JSON lacks, or cannot hold exactly, are text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # neither NaN nor infinite
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        name, text = field("base", bytes(value))
        return text if name == "base" else {name: text}
    if hasattr(value, "asDict"):  # a struct
        return fields(value.asDict().items())
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Named values as an object of JSON."""
    return dict(
        field(name, bytes(value)) if isinstance(value, bytes | bytearray) else (name, plain(value))
        for name, value in pairs
    )


def field(name: str, data: bytes) -> tuple[str, str]:
    """Bytes under a name: as text, or under another name as base64."""
    try:
        return name, data.decode()
    except UnicodeDecodeError:
        return f"{name}64", b64encode(data).decode()
