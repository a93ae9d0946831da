"""``nsq spark sql``: a query over archives and Parquet, each under a name.

Rows come back as Spark has them. `QueryRows` makes values printable: text for a table, and for JSON
the forms of a message's envelope, ``"body64"`` in place of ``"body"`` where bytes are not UTF-8.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple, cast

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from nsqtools.archive.finding import find_inputs, table_files
from nsqtools.archive.place import LocalPlace, Place
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.files.scratch import scratch_directory
from nsqtools.spark.archives.read_settings import BYTES, Bodies
from nsqtools.spark.failures import is_sparks, spark_errors
from nsqtools.spark.format_options import read_place
from nsqtools.spark.jobs.inputs import damage_options, load_columns, read_files
from nsqtools.spark.pyspark_internals import struct_of
from nsqtools.spark.spark_settings import PUSHDOWN_CONF, SparkSettings

ARCHIVE, PARQUET, DELTA = "archive", "parquet", "delta"

Plain = str | int | float | bool | None

INT_MAX = 2**31 - 1  # of Java, and so of a LIMIT


class NamedView(NamedTuple):
    """A name for queries, and its files."""

    name: str
    kind: str
    paths: tuple[Place, ...]


def named_views(
    archives: Iterable[str], parquet: Iterable[str], paths: Iterable[Place]
) -> list[NamedView]:
    """The views of ``NAME=PATH`` texts, and of bare paths, which are named after their kind.

    A name that is given several times has all its paths; a table of Delta may be given as Parquet.
    Raises `ConfigurationError`, and `NotFoundError` for a path that is not there.
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
    found = find_inputs(list(paths))
    for kind, bare in ((ARCHIVE, found.archives), (PARQUET, found.parquet), (DELTA, found.delta)):
        for each in bare:
            paths_of.setdefault((kind, kind), []).append(each)
    names = [name.lower() for name, _ in paths_of]
    for name, kind in paths_of:
        if names.count(name.lower()) > 1:
            raise ConfigurationError(f"{name} names archives and Parquet")
        find_inputs(paths_of[name, kind])
    return [NamedView(name, kind, tuple(each)) for (name, kind), each in paths_of.items()]


def plan_query(
    spark: SparkSession,
    settings: SparkSettings,
    views: Sequence[NamedView],
    text: str,
    damage_path: Place | None = None,
    bodies: Bodies = BYTES,
) -> DataFrame:
    """Give the views their names and plan the query; what it returns is not yet computed.

    What is damaged fails the query, or with a ``damage_path`` is left out and written there.
    Raises `NotFoundError` for an unknown table, `ConfigurationError` for what is wrong SQL.
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
            found = used_columns(spark, [view.name for view in archives], columns, text)
            options = damage_options(damage_path) | bodies.options()
            can_push = spark.conf.get(PUSHDOWN_CONF, "false") == "true"
            for view in archives:
                used = found.get(view.name, [])
                # Spark keeps the filters of one scan for a view, and all its scans have them
                options["filterPushdown"] = str(can_push and len(used) == 1)
                read = set[str]().union(*used) if used else columns.names
                reader = spark.read.format("nsq-archive").options(**options)
                rows = load_columns(reader, view.paths, read, columns)
                rows.createOrReplaceTempView(view.name)
            return spark.sql(text)
    except NotFoundError as error:
        known = ", ".join(view.name for view in views) or "none, because no path was given"
        raise NotFoundError(str(error), hint=f"Known here: {known}.") from error


def used_columns(
    spark: SparkSession, names: Sequence[str], columns: StructType, text: str
) -> dict[str, list[set[str]]]:
    """Return which of the ``columns`` each scan of some views reads in a query, by name.

    A view that is not in it may be read in any way: the plan does not show how. Spark does not tell
    the columns to a data source in Python, but says what it would read of files: the query is
    planned over empty ones, and not run.
    """
    found: dict[str, list[set[str]]] = {}
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
                read = re.findall(r"^ReadSchema: struct<(.*)>$", operator, re.MULTILINE)
                kinds = (cast(StructType, StructType.fromDDL(each)) for each in filter(None, read))
                used = {name for kind in kinds for name in kind.names}
                if not read or not used <= set(columns.names):  # a name may have any characters
                    return {}
                found.setdefault(names[int(scanned[1])], []).append(used)
        except Exception as error:  # the query itself fails for the same reason, in a moment
            if not is_sparks(error):
                raise
            return {}
    return found


class QueryRows:
    """Turns the rows of one query into what can be printed."""

    def __init__(self, frame: DataFrame) -> None:
        self.columns: list[str] = frame.columns
        self.twins = [name for name in self.columns if self.columns.count(name) > 1]
        self._frame = frame
        kinds = [each.dataType for each in frame.schema]
        self._timed = [each if "timestamp" in each.simpleString() else None for each in kinds]

    def rows(self, count: int) -> Iterator[Row]:
        """At most ``count`` rows, computed at once; 0 for all, computed as they are asked for."""
        if 0 < count <= INT_MAX:
            return iter(self._frame.limit(count).collect())
        return self._frame.toLocalIterator(prefetchPartitions=True)

    def cells(self, row: Row) -> list[Plain]:
        """A row of a table."""
        return [cell(value) for value in self._values(row)]

    def document(self, row: Row) -> dict[str, Any]:
        """A row as an object of JSON."""
        return fields(zip(self.columns, self._values(row), strict=True))

    def _values(self, row: Row) -> Iterator[Any]:
        for value, kind in zip(row, self._timed, strict=True):
            yield value if kind is None else zoned(value, kind)


def zoned(value: Any, kind: DataType) -> Any:
    """A value whose moments are in UTC.

    pyspark has both kinds of timestamps without a zone; one is in that of this process.
    """
    if value is None:
        return None
    if isinstance(kind, TimestampType):
        return value.astimezone(UTC)
    if isinstance(kind, ArrayType):
        return [zoned(each, kind.elementType) for each in value]
    if isinstance(kind, MapType):
        return {zoned(key, kind.keyType): zoned(value[key], kind.valueType) for key in value}
    if isinstance(kind, StructType):
        return Row(*kind.names)(*map(zoned, value, [each.dataType for each in kind]))
    return value


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
    if isinstance(value, date):  # or a datetime
        return value.isoformat().replace("+00:00", "Z")
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
