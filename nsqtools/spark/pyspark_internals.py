"""All that nsqtools uses of PySpark and that is not its public interface.

PySpark has no public way to run its JVM as a process of ours (so that ^C and its output stay ours),
nor to use one JVM after another in one process. What that takes is here, and nowhere else.
``pyproject.toml`` bounds pyspark by the versions that were tried, which are those below `BEYOND`;
``tests/spark/test_pyspark_internals.py`` says what each function relies on, and fails first.
"""

from __future__ import annotations

import os
import re
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

OLDEST, BEYOND = (4, 2, 1), (4, 4)
"""OLDEST is the first with read limits and availableNow for Python data sources."""

HANDSHAKE_PATH = "_PYSPARK_DRIVER_CONN_INFO_PATH"
"""The variable that names the file in which a JVM, once it is ready, says how to reach it."""

QUERY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers that write JSON to stderr and take fields that no other logger takes."""


def parse_handshake(data: bytes) -> tuple[int, str]:
    """Return the port and the secret that ``PythonGatewayServer`` wrote: an int, a Java string."""
    port, length = struct.unpack_from(">ii", data)
    return int(port), data[8 : 8 + length].decode()


def has_context() -> bool:
    """Whether this process has a Spark context."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def connect_session(port: int, secret: str) -> SparkSession:
    """Make a session in a running JVM, as in a program that ``spark-submit`` started."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    with environment({"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}):
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
    try:
        return SparkSession(SparkContext(gateway=gateway))
    except BaseException:
        forget_context()
        raise


def close_gateway(context: SparkContext) -> None:
    """Close the connections of py4j, and end its callback server."""
    gateway: Any = context._gateway
    gateway.shutdown()


def forget_context() -> None:
    """Forget the JVM, so that the next context of this process uses another one."""
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None


def redirect_accumulator_errors(context: SparkContext, write: Callable[[str], object]) -> None:
    """Have the server that counts for tasks report the end of the JVM to ``write``.

    It is Python's ``socketserver``, which prints a traceback for a connection that ends.
    """
    server: Any = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: write(traceback.format_exc())


def count_block_managers(context: SparkContext) -> int:
    """How many executors have registered, the driver included."""
    status: Any = context._jsc.sc()
    return int(status.getExecutorMemoryStatus().size())


def java_trace(error: BaseException) -> str:
    """Return Java's stack trace of one of PySpark's errors, "" where there is none."""
    return str(getattr(error, "_stackTrace", None) or "")


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process, or remove those that are None, and restore them."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environ(changes)
    try:
        yield
    finally:
        _set_environ(before)


def _set_environ(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def stand_in(spark: SparkSession, name: str, ddl: str) -> int:
    """Make an empty view that plans are made of; return what `used_columns` knows it by."""
    jvm: Any = spark._jvm
    session = spark._jsparkSession
    empty = jvm.org.apache.spark.api.java.JavaSparkContext(session.sparkContext()).emptyRDD()
    frame = session.createDataFrame(empty, jvm.org.apache.spark.sql.types.StructType.fromDDL(ddl))
    frame.createOrReplaceTempView(name)
    return int(frame.queryExecution().analyzed().rdd().id())


def used_columns(spark: SparkSession, query: str) -> dict[int, set[str]]:
    """Return the columns that a query reads of each stand-in.

    Plans the query and runs nothing. A stand-in is missing where the plan does not show it: in some
    statements that are no queries, and everywhere when an expression has a subquery.
    """
    jvm: Any = spark._jvm
    state = spark._jsparkSession.sessionState()
    skip = jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
    plan = state.executePlan(state.sqlParser().parsePlan(query), skip).optimizedPlan()
    found: dict[int, set[str]] = {}
    if plan.subqueriesAll().isEmpty():
        _add_used(plan, None, found)
    return found


_ATTRIBUTE = re.compile(r"([^\s(,]+)#(\d+)")
"""A column as Spark prints it: ``topic#187``. One question for all is quicker than one for each."""


def _add_used(node: Any, wanted: set[str] | None, found: dict[int, set[str]]) -> None:
    """Add what is read of the stand-ins below a node.

    ``wanted`` are the numbers of the columns that nodes above use; None are all. The optimizer puts
    a projection above whatever is not used whole, with at most filters between.
    """
    kind = str(node.nodeName())
    if kind == "LogicalRDD":
        columns = _ATTRIBUTE.findall(node.output().toString())
        used = {name for name, number in columns if wanted is None or number in wanted}
        found.setdefault(int(node.rdd().id()), set()).update(used)
        return
    if kind not in ("Project", "Aggregate", "Filter"):
        wanted = None
    elif kind != "Filter" or wanted is not None:
        above = wanted if kind == "Filter" and wanted is not None else set()
        columns = _ATTRIBUTE.findall(node.references().toSeq().toString())
        wanted = above | {number for _, number in columns}
    children = node.children()
    for at in range(children.size()):
        _add_used(children.apply(at), wanted, found)
