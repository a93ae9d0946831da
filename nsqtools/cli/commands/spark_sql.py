"""``nsq spark sql``: a query over archives and Parquet.

The services are imported when it runs, for the help page does not need them.
"""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from nsqtools.cli.exit_status import ExitStatus
from nsqtools.cli.output import write_listing
from nsqtools.cli.runtime import Session
from nsqtools.cli.spark_session import SparkOptions, job_progress, open_spark

Query = Annotated[str, Argument(metavar="SQL", help="The query.")]


def sql(query: Query, *, spark: SparkOptions, runtime: Session) -> int:
    """Ask archives and Parquet in SQL.

    Examples:
        nsq spark sql 'SELECT topic, count(*) FROM archive GROUP BY 1'
    """
    with open_spark(runtime, spark.settings("nsq spark sql")) as session:
        with job_progress(runtime, session):
            frame = session.sql(query)
            rows = frame.collect()
        write_listing(runtime, frame.columns, rows, json=False)
    return ExitStatus.DONE
