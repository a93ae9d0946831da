"""The last part of the demonstration: the archive through Spark, where there is Spark.

A day is compacted when it is over, and the archive is of today: so what is compacted is a copy of
it that is dated two days back, which the demonstration says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec

from nsqtools.demo.stage import Stage
from nsqtools.demo.story import ARCHIVE, CLICKS, StoryWriter, check
from nsqtools.errors import NsqError

TIMEOUT_S = 300.0
DAYS_BACK = 2
DAY_NS = 86_400 * 1_000_000_000
OLD_ARCHIVE = "archive-of-then"
PARQUET = "parquet"


def missing(environ: Mapping[str, str]) -> str:
    """Say in a line what Spark lacks here and how to get it; empty when it can run."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        return "PySpark is not installed: pip install 'nsqtools[spark,spark-java]'"
    from nsqtools.spark.java import find_java

    try:
        find_java(environ)
    except NsqError as error:
        return f"{error}: pip install 'nsqtools[spark-java]'"
    return ""


def run_pipeline(stage: Stage, teller: StoryWriter) -> None:
    """Compact the archive into Parquet, and report on it. Raises `DemoFailed`, `DemoStopped`."""
    _date_back(stage)
    compact = ("spark", "compact", OLD_ARCHIVE, "--output", PARQUET)
    purpose = f"Turn a day that is over into Parquet (the same clicks, dated {DAYS_BACK} days back)"
    teller.announce(purpose, stage.shown(*compact))
    done = stage.run(*compact, as_on_a_terminal=True, timeout_s=TIMEOUT_S)
    check(f"{CLICKS} messages read, 0 duplicates removed" in done.err, done.err)
    teller.tell(f"{done.out.decode()}{done.err}")

    report = ("spark", "report", PARQUET)
    teller.announce("Report on it", stage.shown(*report))
    done = stage.run(*report, as_on_a_terminal=True, timeout_s=TIMEOUT_S)
    check(f"{CLICKS} messages of 1 topics" in done.err, done.err)
    teller.tell(f"{done.out.decode()}{done.err}")


def _date_back(stage: Stage) -> None:
    """Write the archive again, each message with a time some days earlier."""
    place = stage.directory / OLD_ARCHIVE
    place.mkdir()
    with open(place / "clicks.log", "w", encoding="utf-8") as file:
        for line in stage.run("archive", "cat", ARCHIVE).lines:
            message = json.loads(line)
            message["ts"] -= DAYS_BACK * DAY_NS
            file.write(json.dumps(message) + "\n")
