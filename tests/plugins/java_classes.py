"""A Spark for runs of a minute: no optimizing compiler, and shared classes of the JVM.

A JVM takes most of its start to load and verify some 15,000 classes of Spark. The first worker that
needs Spark starts one JVM that writes its loaded classes to a file (Java's class data sharing),
which all others map, so a session takes half the CPU time. ``tests/run`` writes the file during the
type checks. It is kept for later runs; a JVM ignores a file that does not match, and without one it
starts as usual. It matches only one path of the jars, so all sessions share the home that
``nsq spark`` would make for each.

Trap: a JVM logs about such a file to stdout, which Spark's scripts read, so its log is off.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

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


class QuickSpark(NamedTuple):
    """``flags`` are for ``JAVA_TOOL_OPTIONS`` or ``spark.driver.extraJavaOptions``."""

    flags: str
    home: str


@pytest.fixture(scope="session")
def quick_spark() -> QuickSpark:
    classes, home = kept_classes()
    flags = f"{FLAGS} -XX:SharedArchiveFile={classes}" if classes.exists() else FLAGS
    return QuickSpark(flags, str(home))


def kept_classes() -> tuple[Path, Path]:
    """The file for this Java and these jars of PySpark, and its home of Spark.

    The first caller writes the file.
    """
    import pyspark

    from nsqtools.spark.java import find_java
    from nsqtools.spark.spark_settings import without_zip

    package = Path(pyspark.__file__).parent
    java, jars = find_java(os.environ), package / "jars"
    of = f"{jars} {jars.stat().st_mtime_ns} {java.program} {java.version}"
    kept = CACHE / f"classes-{zlib.crc32(of.encode()):08x}"
    classes, home = kept / "classes.jsa", kept / "spark"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not classes.exists():
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            write_classes(classes, without_zip(package, kept))
            by_age = sorted(CACHE.glob("classes-*/"), key=lambda path: path.stat().st_mtime)
            for old in by_age[:-KEPT]:
                shutil.rmtree(old)
    return classes, home


def write_classes(classes: Path, home: Path) -> None:
    with TemporaryDirectory(prefix="nsqtools-tests-") as directory:
        draft = Path(directory, "classes.jsa")
        program = [sys.executable, "-c", PROGRAM, directory]
        program.append(f"{FLAGS} -XX:ArchiveClassesAtExit={draft}")
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        environ = os.environ | {"SPARK_HOME": str(home)}
        subprocess.run(program, **silent, env=environ, timeout=TIMEOUT_S, check=False)
        if draft.exists():
            shutil.copyfile(draft, classes.with_suffix(".draft")).replace(classes)


if __name__ == "__main__":
    kept_classes()
