"""Every use of PySpark's private interfaces.

``pyproject.toml`` limits pyspark to the tested versions, which are those below `BEYOND`.
``tests/spark/test_pyspark_internals.py`` tests the assumptions of each function, and fails first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from subprocess import Popen
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    import pyarrow
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

OLDEST, STREAMS, BEYOND = (4, 0), (4, 2, 1), (4, 4)
"""OLDEST is the first with Python data sources, STREAMS with read limits and availableNow."""


def version_of_pyspark() -> tuple[int, ...]:
    """Return the installed version. Raises ``ImportError``."""
    import pyspark

    return tuple(int(part) for part in pyspark.__version__.split(".")[:3] if part.isdigit())


def require_streams() -> None:
    """Raise `NsqError` if PySpark is too old for streams."""
    if (version := version_of_pyspark()) < STREAMS:
        needed, installed = (".".join(map(str, numbers)) for numbers in (STREAMS, version))
        raise NsqError(
            f"streams need pyspark {needed} or newer, and this is {installed}",
            hint="Batches and compaction run on it: nsq spark compact, sql, report, replay.",
        )


QUERY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers that write JSON to stderr and take fields that no other logger takes."""


def launch(conf: Mapping[str, str], **options: Any) -> Any:
    """Start a JVM with these settings; return py4j's gateway, whose ``proc`` is its process.

    `SparkSession.builder` calls the same function, but without ``options`` for `subprocess.Popen`,
    which are the only way to keep the JVM off the terminal and to let it inherit locks. Raises
    `PySparkRuntimeError` if the JVM ends.
    """
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway

    def start() -> None:
        try:
            settings = SparkConf().setAll(list(conf.items()))
            started.set_result(launch_gateway(settings, options))  # type: ignore[no-untyped-call]
        except BaseException as error:
            started.set_exception(error)

    # Signal handlers run on the main thread. On it, a handler could interrupt the fork and leave a
    # process without a reference, which would end only after it has fetched its packages.
    started: Future[Any] = Future()
    thread = Thread(target=start, name="spark-start", daemon=True)
    try:
        thread.start()
        return started.result()
    except BaseException:
        while not started.done():
            time.sleep(0.05)
            if thread.ident is None:  # The thread has not started, and never will.
                raise
            kill_started(sys._current_frames().get(thread.ident))
        if started.exception() is None:
            kill_group(started.result().proc)
        raise


def kill_started(frame: FrameType | None) -> None:
    """Kill the JVM that pyspark starts in a frame or its callers, where its only reference is."""
    while frame is not None:
        if isinstance(process := frame.f_locals.get("proc"), Popen):
            kill_group(process)
        frame = frame.f_back


def kill_group(process: Popen[bytes]) -> None:
    """Kill a JVM and its child processes."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def redirect_accumulator_errors(context: SparkContext, write: Callable[[str], object]) -> None:
    """Let the accumulator server of tasks report the end of the JVM to ``write``.

    The server is Python's ``socketserver``, which would print a traceback for a lost connection.
    """
    server: Any = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: write(traceback.format_exc())


def java_trace(error: BaseException) -> str:
    """Return the Java stack trace of a PySpark error, "" for an error without one."""
    return str(getattr(error, "_stackTrace", None) or "")


def struct_of(schema: pyarrow.Schema) -> StructType:
    """Convert columns of Arrow to Spark's types. Raises `ConfigurationError`."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as exc:
        raise ConfigurationError(f"Spark has no such column: {exc}") from None


def delete_folder(session: SparkSession, url: str) -> None:
    """Delete a folder with Hadoop, and in a bucket also the objects that only mark a folder."""
    jvm: Any = session._jvm
    context: Any = session.sparkContext
    path = jvm.org.apache.hadoop.fs.Path(url)
    path.getFileSystem(context._jsc.hadoopConfiguration()).delete(path, True)


GLOB_PATHS = "__globPaths__"
"""An option of files: with ``false``, brackets, braces and stars in paths are literal."""


def columns(schema: StructType, available: pyarrow.Schema) -> list[str]:
    """Return the names of a query's columns. Raises `ConfigurationError` for an unknown column."""
    types = {field.name: field.dataType.simpleString() for field in struct_of(available).fields}
    for field in schema.fields:
        if types.get(field.name) != field.dataType.simpleString():
            names = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise ConfigurationError(
                f"unknown column {field.simpleString()}", hint=f"The columns are: {names}."
            )
    return [field.name for field in schema.fields]
