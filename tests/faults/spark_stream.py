"""A program under fault tests: streams into Parquet that are started again and again.

    python spark_stream.py DIRECTORY {"FORMAT": {"OPTION": "VALUE"}}

It goes on until it is killed, and starts a query anew when that fails. When there is a file
``DIRECTORY/finish`` it stops them, reads what is left, and prints a document: for each format, how
often each body is in the sink.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.spark import CONF

from nsqtools.spark.session import spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

MOST_STARTS = 200
FINISH = "finish"


def started(
    spark: SparkSession, name: str, place: Path, options: dict[str, str], **trigger: bool | str
) -> StreamingQuery:
    frame = spark.readStream.format(name).options(**options).load().select("nsqd", "id", "body")
    writer = frame.writeStream.option("checkpointLocation", str(place / "checkpoint"))
    return writer.trigger(**trigger).format("parquet").start(str(place / "parquet"))


def run(spark: SparkSession, directory: Path, streams: dict[str, dict[str, str]]) -> None:
    queries: dict[str, StreamingQuery] = {}
    starts = 0
    while not (directory / FINISH).exists() and starts < MOST_STARTS:
        for name, options in streams.items():
            if name not in queries or not queries[name].isActive:
                place = directory / name
                queries[name] = started(spark, name, place, options, processingTime="0 seconds")
                print("started", name, flush=True)
                starts += 1
        time.sleep(0.2)
    for query in queries.values():
        query.stop()


def finish(
    spark: SparkSession, directory: Path, streams: dict[str, dict[str, str]]
) -> dict[str, dict[str, int]]:
    queries = [
        started(spark, name, directory / name, options, availableNow=True)
        for name, options in streams.items()
    ]
    for query in queries:
        query.awaitTermination()
    return {name: counts(spark, directory / name) for name in streams}


def counts(spark: SparkSession, place: Path) -> dict[str, int]:
    rows = spark.read.parquet(str(place / "parquet")).select("body").toArrow()
    return dict(Counter(body.decode() for body in rows["body"].to_pylist()))


def main() -> None:
    directory, streams = Path(sys.argv[1]), json.loads(sys.argv[2])
    settings = SparkSettings("local[2,4]", "faults", "1g", CONF, directory / "spark.log")
    with spark_session(settings) as spark:
        run(spark, directory, streams)
        print(json.dumps(finish(spark, directory, streams)), flush=True)


if __name__ == "__main__":
    main()
