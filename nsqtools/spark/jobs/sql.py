"""``nsq spark sql``: a query over archives and Parquet, each under a name.

`QueryRows` converts Spark's values to text for a table, or for JSON to the forms of a message's
envelope, with ``"body64"`` in place of ``"body"`` if bytes are not UTF-8.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date
from decimal import Decimal
from functools import reduce
from math import isfinite
from typing import Any, NamedTuple, cast

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from nsqtools.archive.finding import find_inputs, table_files
from nsqtools.archive.place import LocalPlace, Place
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.files.scratch import scratch_directory
from nsqtools.spark.archive_format import ONE_SCAN, PUSHDOWN
from nsqtools.spark.archives.read_settings import BYTES, Bodies
from nsqtools.spark.failures import is_sparks, spark_errors
from nsqtools.spark.format_options import read_place
from nsqtools.spark.jobs.inputs import damage_options, load_columns, read_files
from nsqtools.spark.pyspark_internals import struct_of
from nsqtools.spark.spark_settings import PUSHDOWN_CONF, SparkSettings

ARCHIVE, PARQUET, DELTA = "archive", "parquet", "delta"

SqlValue = str | int | float | bool | None

INT_MAX = 2**31 - 1  # Java's largest int, and so the largest LIMIT.


class NamedView(NamedTuple):
    """A name for queries, and its places."""

    name: str
    kind: str
    paths: tuple[Place, ...]


def named_views(
    archives: Iterable[str], parquet: Iterable[str], paths: Iterable[Place]
) -> list[NamedView]:
    """Return the views of ``NAME=PATH`` texts, and of bare paths, which are named after their kind.

    A repeated name has all of its paths. A Delta table may be given as Parquet. Raises
    `ConfigurationError`, and `NotFoundError` for a path that does not exist.
    """
    paths_of: dict[tuple[str, str], list[Place]] = {}
    for kind, texts in ((ARCHIVE, archives), (PARQUET, parquet)):
        for text in texts:
            name, _, path = text.partition("=")
            if not path or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ConfigurationError(
                    f"--{kind} {text!r} has no name",
                    hint=f"Write --{kind} NAME=PATH; SQL knows it by that name.",
                )
            place = read_place(f"--{kind} {text}", path)
            is_table = kind == PARQUET and bool(find_inputs([place]).delta)
            paths_of.setdefault((name, DELTA if is_table else kind), []).append(place)
    inputs = find_inputs(list(paths))
    bare = ((ARCHIVE, inputs.archives), (PARQUET, inputs.parquet), (DELTA, inputs.delta))
    for kind, places in bare:
        if places:
            paths_of.setdefault((kind, kind), []).extend(places)
    names = [name.lower() for name, _ in paths_of]
    for name, kind in paths_of:
        if names.count(name.lower()) > 1:
            raise ConfigurationError(f"{name} names archives and Parquet")
        find_inputs(paths_of[name, kind])
    return [NamedView(name, kind, tuple(places)) for (name, kind), places in paths_of.items()]


def plan_query(
    spark: SparkSession,
    settings: SparkSettings,
    views: Sequence[NamedView],
    text: str,
    damage_path: Place | None = None,
    bodies: Bodies = BYTES,
) -> DataFrame:
    """Create the views and plan the query, without computing its rows.

    Damage fails the query, or with a ``damage_path`` is skipped and reported there. Raises
    `NotFoundError` for an unknown table, and `ConfigurationError` for invalid SQL.
    """
    archives = [view for view in views if view.kind == ARCHIVE]
    columns = struct_of(bodies.archived_schema())
    try:
        with spark_errors(settings):
            for view in views:
                if view.kind != ARCHIVE:
                    tables = table_files(view.paths).items()
                    frames = (read_files(spark, root, names) for root, names in tables)
                    rows = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
                    rows.createOrReplaceTempView(view.name)
            scans = used_columns(spark, [view.name for view in archives], columns, text)
            options = damage_options(damage_path) | bodies.options()
            can_push = spark.conf.get(PUSHDOWN_CONF, "false") == "true"
            for view in archives:
                used = scans.get(view.name, [])
                options[PUSHDOWN] = ONE_SCAN if can_push and len(used) == 1 else "false"
                names = set[str]().union(*used) if used else columns.names
                reader = spark.read.format("nsq-archive").options(**options)
                rows = load_columns(reader, view.paths, names, columns)
                rows.createOrReplaceTempView(view.name)
            return spark.sql(text)
    except NotFoundError as error:
        view_names = ", ".join(view.name for view in views) or "none, because no path was given"
        raise NotFoundError(str(error), hint=f"Known here: {view_names}.") from error


def used_columns(
    spark: SparkSession, names: Sequence[str], columns: StructType, text: str
) -> dict[str, list[set[str]]]:
    """Return the ``columns`` that each scan of the views reads in a query, by the view's name.

    A view that is missing in the result may be read in any way. Spark does not pass the needed
    columns to a Python data source, but its plan shows them for files. So the query is planned over
    empty Parquet files, and not run.
    """
    scans: dict[str, list[set[str]]] = {}
    with scratch_directory("nsq-spark-") as place:
        try:
            for number, name in enumerate(names):
                folder = place / str(number)
                folder.mkdir()
                spark.read.schema(columns).parquet(
                    LocalPlace(folder).hadoop_url
                ).createOrReplaceTempView(name)
            plan = str(spark.sql(f"EXPLAIN FORMATTED {text}").collect()[0][0])
            for operator in plan.split("\n\n"):
                scanned = re.search(
                    rf"^Location: .*{re.escape(str(place))}/(\d+)\]$", operator, re.MULTILINE
                )
                if scanned is None:
                    continue
                schemas = re.findall(r"^ReadSchema: struct<(.*)>$", operator, re.MULTILINE)
                structs = (
                    cast(StructType, StructType.fromDDL(ddl)) for ddl in filter(None, schemas)
                )
                used = {name for struct in structs for name in struct.names}
                # A name with special characters may have been parsed wrongly.
                if not schemas or not used <= set(columns.names):
                    return {}
                scans.setdefault(names[int(scanned[1])], []).append(used)
        except Exception as error:  # The query itself will fail for the same reason.
            if not is_sparks(error):
                raise
            return {}
    return scans


class QueryRows:
    """The rows of one query, converted for printing."""

    def __init__(self, frame: DataFrame) -> None:
        self.columns: list[str] = frame.columns
        self.duplicates = [name for name in self.columns if self.columns.count(name) > 1]
        self._frame = frame
        types = [field.dataType for field in frame.schema]
        self._timed = [type if "timestamp" in type.simpleString() else None for type in types]

    def rows(self, count: int) -> Iterator[Row]:
        """Return at most ``count`` rows, or with 0 all rows, which are computed lazily."""
        if 0 < count <= INT_MAX:
            return iter(self._frame.limit(count).collect())
        return self._frame.toLocalIterator(prefetchPartitions=True)

    def cells(self, row: Row) -> list[SqlValue]:
        """Return a row of a table."""
        return [cell(value) for value in self._values(row)]

    def document(self, row: Row) -> dict[str, Any]:
        """Return a row as a JSON object."""
        return fields(zip(self.columns, self._values(row), strict=True))

    def _values(self, row: Row) -> Iterator[Any]:
        for value, kind in zip(row, self._timed, strict=True):
            yield value if kind is None else zoned(value, kind)


def zoned(value: Any, kind: DataType) -> Any:
    """Return a value with its timestamps in UTC.

    pyspark returns both kinds of timestamps without a zone. Those of `TimestampType` are in the
    zone of this process.
    """
    if value is None:
        return None
    if isinstance(kind, TimestampType):
        return value.astimezone(UTC)
    if isinstance(kind, ArrayType):
        return [zoned(item, kind.elementType) for item in value]
    if isinstance(kind, MapType):
        return {zoned(key, kind.keyType): zoned(value[key], kind.valueType) for key in value}
    if isinstance(kind, StructType):
        return Row(*kind.names)(*map(zoned, value, [field.dataType for field in kind]))
    return value


def cell(value: Any) -> SqlValue:
    """Convert a value for a table: bytes to text with escapes, structures to JSON."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    readable = plain(value)
    return readable if isinstance(readable, str) else json.dumps(readable, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Convert a value for JSON. Numbers that JSON cannot represent exactly become text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    if isinstance(value, date):  # A datetime is a date as well.
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes | bytearray):
        name, text = field("base", bytes(value))
        return text if name == "base" else {name: text}
    if hasattr(value, "asDict"):  # a struct
        return fields(value.asDict().items())
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Convert named values to a JSON object."""
    return dict(
        field(name, bytes(value)) if isinstance(value, bytes | bytearray) else (name, plain(value))
        for name, value in pairs
    )


def field(name: str, data: bytes) -> tuple[str, str]:
    """Return bytes as text under the name, or as base64 under another name."""
    try:
        return name, data.decode()
    except UnicodeDecodeError:
        return f"{name}64", b64encode(data).decode()
