"""All that nsqtools uses of PySpark and that is not its public interface.

PySpark has no public way to run its JVM as a process of ours (so that ^C and its output stay ours),
nor to use one JVM after another in one process. What that takes is here, and nowhere else.
``pyproject.toml`` bounds pyspark by the versions that were tried, which are those below `BEYOND`;
``tests/spark/test_pyspark_internals.py`` says what each function relies on, and fails first.
"""

from __future__ import annotations

import os
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


def scanned_columns(spark: SparkSession, query: str) -> dict[str, set[str]]:
    """Return the columns that a query reads of each directory that its views read as files.

    Plans the query and runs nothing. A directory is missing where the plan does not show its
    columns: in a statement that is not a query, and everywhere when an expression has a subquery.
    """
    jvm: Any = spark._jvm
    state = spark._jsparkSession.sessionState()
    skip = jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
    execution = state.executePlan(state.sqlParser().parsePlan(query), skip)
    if not execution.optimizedPlan().subqueriesAll().isEmpty():
        return {}
    leaves = execution.sparkPlan().collectLeaves()
    columns: dict[str, set[str]] = {}
    for at in range(leaves.size()):
        leaf = leaves.apply(at)
        if leaf.getClass().getSimpleName() == "FileSourceScanExec":
            root = str(leaf.relation().location().rootPaths().head().toUri().getPath())
            columns.setdefault(root, set()).update(leaf.requiredSchema().fieldNames())
    return columns
