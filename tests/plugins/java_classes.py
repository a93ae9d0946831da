"""JVM flags for runs of a minute: no optimizing compiler, and Spark's classes as once loaded.

A JVM takes most of its start to load and verify some 15,000 classes of Spark. The first worker that
needs Spark has one JVM write what it loaded to a file (Java's class data sharing), which all others
map: a session takes half the CPU time. Where that fails, they start as ever. ``tests/run`` has it
written while types are checked, for the tests with Spark take longest.

The file is kept for later runs in ``~/.cache/nsqtools-tests``, by the Java and the PySpark that it
is of; a JVM ignores one that does not fit.

Trap: what a JVM says about such a file goes to stdout, which Spark's scripts read; hence no log.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -Xlog:disable"
TIMEOUT_S = 600.0
CACHE = Path.home() / ".cache" / "nsqtools-tests"
KEPT = 4

PROGRAM = """
import sys
from pathlib import Path
from nsqtools.spark import session
from nsqtools.spark.spark_settings import SparkSettings

session.STOP_TIMEOUT_S = 500.0  # the file is written at the end
directory, flags = Path(sys.argv[1]), sys.argv[2]
conf = {"spark.driver.extraJavaOptions": flags, "spark.sql.shuffle.partitions": "1"}
settings = SparkSettings("local[2]", "classes", "1g", conf, directory / "log")
with session.spark_session(settings) as spark:
    numbers = spark.range(10).selectExpr("id", "cast(id as string) as text")
    numbers.write.parquet(str(directory / "numbers"))
    spark.read.parquet(str(directory / "numbers")).groupBy("text").count().toArrow()
"""


@pytest.fixture(scope="session")
def quick_jvm() -> str:
    """The flags, for ``JAVA_TOOL_OPTIONS`` or ``spark.driver.extraJavaOptions``."""
    classes = kept_classes()
    return f"{FLAGS} -XX:SharedArchiveFile={classes}" if classes.exists() else FLAGS


def kept_classes() -> Path:
    """The file, which the first who asks writes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    classes = CACHE / f"classes-{key():08x}.jsa"
    with (CACHE / "classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not classes.exists():
            write_classes(classes)
            by_age = sorted(CACHE.glob("classes-*.jsa"), key=lambda path: path.stat().st_mtime)
            for old in by_age[:-KEPT]:
                old.unlink()
    return classes


def key() -> int:
    """A number for the jars of PySpark, where they are, and Java."""
    import pyspark

    from nsqtools.spark.java import find_java

    java = find_java(os.environ)
    jars = Path(pyspark.__file__).parent / "jars"
    return zlib.crc32(f"{jars} {jars.stat().st_mtime_ns} {java.program} {java.version}".encode())


def write_classes(classes: Path) -> None:
    """Write the classes that a session of Spark loads; no file where that fails."""
    with TemporaryDirectory(prefix="nsqtools-tests-") as directory:
        draft = Path(directory, "classes.jsa")
        flags = f"{FLAGS} -XX:ArchiveClassesAtExit={draft}"
        program = [sys.executable, "-c", PROGRAM, directory, flags]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run(program, **silent, timeout=TIMEOUT_S, check=False)
        if draft.exists():
            whole = shutil.copyfile(draft, classes.with_suffix(".draft"))
            whole.replace(classes)


if __name__ == "__main__":
    kept_classes()
