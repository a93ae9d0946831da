"""All that nsqtools uses of PySpark and that is not its public interface.

What takes it is here, and nowhere else.
``pyproject.toml`` bounds pyspark by the versions that were tried, which are those below `BEYOND`;
``tests/spark/test_pyspark_internals.py`` says what each function relies on, and fails first.
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
    from pyspark.sql.types import StructType

OLDEST, STREAMS, BEYOND = (4, 0), (4, 2, 1), (4, 4)
"""OLDEST is the first with data sources in Python, STREAMS with read limits and availableNow."""


def version_of_pyspark() -> tuple[int, ...]:
    """Return the version that is installed, as numbers. Raises ``ImportError``."""
    import pyspark

    return tuple(int(part) for part in pyspark.__version__.split(".")[:3] if part.isdigit())


def need_streams() -> None:
    """Raise `NsqError` where PySpark is too old for streams."""
    if (found := version_of_pyspark()) < STREAMS:
        needed, here = (".".join(map(str, each)) for each in (STREAMS, found))
        raise NsqError(
            f"streams need pyspark {needed} or newer, and this is {here}",
            hint="Batches and compaction run on it: nsq spark compact, sql, report, replay.",
        )


QUERY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers that write JSON to stderr and take fields that no other logger takes."""


def launch(conf: Mapping[str, str], **options: Any) -> Any:
    """Start a JVM with some settings; return py4j's gateway, whose ``proc`` is its process.

    `SparkSession.builder` would call the same, but without ``options`` for `subprocess.Popen`, and
    there is no other way to keep the JVM off the terminal, or to let it inherit locks. Raises
    `PySparkRuntimeError` when the JVM ends.
    """
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway

    def start() -> None:
        try:
            given = SparkConf().setAll(list(conf.items()))
            started.set_result(launch_gateway(given, options))  # type: ignore[no-untyped-call]
        except BaseException as error:
            started.set_exception(error)

    # Handlers of signals run on the main thread. There one could interrupt the fork, and leave a
    # process that nothing refers to, and that ends only when it has fetched its packages.
    started: Future[Any] = Future()
    thread = Thread(target=start, name="spark-start", daemon=True)
    try:
        thread.start()
        return started.result()
    except BaseException:
        while not started.done():
            time.sleep(0.05)
            if thread.ident is None:  # it was not begun
                raise
            kill_started(sys._current_frames().get(thread.ident))
        if started.exception() is None:
            kill_group(started.result().proc)
        raise


def kill_started(frame: FrameType | None) -> None:
    """End the JVM that pyspark waits for in a frame, or above: only it knows the process yet."""
    while frame is not None:
        if isinstance(process := frame.f_locals.get("proc"), Popen):
            kill_group(process)
        frame = frame.f_back


def kill_group(process: Popen[bytes]) -> None:
    """End a JVM at once, with what it started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def redirect_accumulator_errors(context: SparkContext, write: Callable[[str], object]) -> None:
    """Have the server that counts for tasks report the end of the JVM to ``write``.

    It is Python's ``socketserver``, which prints a traceback for a connection that ends.
    """
    server: Any = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: write(traceback.format_exc())


def java_trace(error: BaseException) -> str:
    """Return Java's stack trace of one of PySpark's errors, "" where there is none."""
    return str(getattr(error, "_stackTrace", None) or "")


def struct_of(schema: pyarrow.Schema) -> StructType:
    """Return columns of Arrow as Spark has them. Raises `ConfigurationError`."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as exc:
        raise ConfigurationError(f"Spark has no such column: {exc}") from None


GLOB_PATHS = "__globPaths__"
"""An option of files: ``false`` takes brackets, braces and stars in their paths as they are."""


def columns(schema: StructType, known: pyarrow.Schema) -> list[str]:
    """Return the columns that are wanted: all, or those of a schema that the user gave."""
    types = {each.name: each.dataType.simpleString() for each in struct_of(known).fields}
    for field in schema.fields:
        if types.get(field.name) != field.dataType.simpleString():
            names = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise ConfigurationError(
                f"unknown column {field.simpleString()}", hint=f"The columns are: {names}."
            )
    return [field.name for field in schema.fields]
