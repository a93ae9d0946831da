"""``nsq spark replay``: archived messages back into topics, in parallel."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.connection import ProducerConnection
from nsqtools.cli.options.params import SELECTION, Delimiter, Since, Until, time_range
from nsqtools.cli.options.publishing import (
    DELIVERY,
    PROGRESS_HELP,
    PublishDryRun,
    Rate,
    RetryTimeout,
    RetryUnknown,
    TopicMap,
    topic_map,
)
from nsqtools.cli.options.spark_options import (
    SparkChoice,
    job_progress,
    name_flags,
    naming_flags,
    open_spark,
    place_opt,
    places_argument,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import report_damages, report_publishing
from nsqtools.cli.render.output import Form, ListingForm, write_json, write_listing
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, stop_on_signals
from nsqtools.protocol.text import format_duration

if TYPE_CHECKING:
    from nsqtools.spark.jobs.replay_job import ReplayOutcome


COLUMNS = ("topic", "messages")
ON_A_CLUSTER = "give a --ledger, where damage is reported"


def replay(
    paths: Annotated[
        list[Any],  # of Location
        places_argument("Archives or Parquet: files, or directories with all below."),
    ],
    topic: TopicMap = None,
    since: Since = None,
    until: Until = None,
    where: str | None = opt(
        "SQL",
        "Only messages for which this is true; columns: topic, nsqd, id, timestamp, ts_ns, "
        "attempts, body.",
        SELECTION,
    ),
    delimiter: Delimiter = None,
    rate: Rate = 0.0,
    retry_timeout: RetryTimeout = None,
    retry_unknown: RetryUnknown = False,
    ledger: Any = place_opt("DIR", PROGRESS_HELP, DELIVERY),
    dead_letters: Any = place_opt(
        "DIR", "Where messages that cannot be published go, with the reason.", DELIVERY
    ),
    dry_run: PublishDryRun = False,
    *,
    form: ListingForm,
    connection: ProducerConnection,
    spark: SparkChoice,
    runtime: Session,
) -> int:
    """Publish messages from archives and Parquet again, in parallel.

    Messages are published in no particular order. With several nsqd, each task publishes to one of
    them, and to the others if that fails. Spark retries a failed task. With --ledger the retry
    continues where the task stopped, as does the whole replay when it is run again. An interrupted
    task publishes at most 10 batches of 500 messages twice (15,000 messages with a ledger in an
    object store); they are counted. If Spark runs on several machines, the directories must be
    shared. To keep the original order or speed, use nsq replay.

    Examples:
        nsq spark replay /data/nsq --where "topic = 'clicks' AND attempts > 1" --dry-run
        nsq spark replay /var/nsq --topic clicks=again --since -2h --ledger replay.ledger
    """
    from nsqtools.archive.finding import find_inputs
    from nsqtools.files.scratch import scratch_directory
    from nsqtools.spark.format_options import as_options, export_secrets
    from nsqtools.spark.jobs.replay_job import ReplayJob, ReplayRequest

    form.check(COLUMNS)
    time_range(since, until)  # Raises for contradicting times.
    request = ReplayRequest(
        tuple(paths), topic_map(topic or ()), since, until, where or "", delimiter
    )
    options = as_options(connection) | {"retryUnknown": str(retry_unknown).lower()}
    if retry_timeout is not None:
        options["retryTimeout"] = format_duration(retry_timeout)
    if rate:
        options["rate"] = str(rate)
    ledger, dead_letters = (each and each.absolute() for each in (ledger, dead_letters))
    if dead_letters is not None:
        options["deadLetterPath"] = str(dead_letters)
    connection.client_options()  # Raises for invalid options before Spark is started.
    export_secrets(connection, os.environ)
    inputs = find_inputs(paths)
    settings = spark.settings(
        "nsq spark replay",
        (*inputs.parquet, *inputs.delta),
        python_places=(*inputs.archives, *filter(None, (ledger, dead_letters))),
    )
    with naming_flags(ON_A_CLUSTER), ExitStack() as stack:
        work = stack.enter_context(scratch_directory("nsq-spark-"))
        job = ReplayJob(
            settings, request, options, ledger, work=work, shares_work=settings.is_local
        )
        session = stack.enter_context(open_spark(runtime, settings))
        job.open(session)
        for path in job.excluded:
            runtime.info(
                f"nsq: {path} is left out: it is in progress, and with a ledger only "
                "files are read that do not grow"
            )
        if dry_run:
            with job_progress(runtime, session):
                outcome = job.count()
            return show_outcome(runtime, outcome, dry_run=True, form=form)
        with stop_on_signals(job.stop) as signals:
            with job_progress(runtime, session):
                outcome = job.run()
            if outcome.error is not None:
                name_flags(outcome.error, ON_A_CLUSTER)
            status = show_outcome(runtime, outcome, dry_run=False, form=form)
            if ledger is not None and not outcome.is_complete:
                runtime.info(
                    f"nsq: run it again to continue; up to {outcome.in_doubt} messages may be "
                    "published twice"
                )
    return signals.status(otherwise=status)


def show_outcome(
    runtime: Runtime, outcome: ReplayOutcome, *, dry_run: bool, form: Form
) -> ExitStatus:
    """Print the counts, and the reason if messages were not published; return the status."""
    from nsqtools.spark.publishing.row_outcomes import report_document, summary

    report = outcome.report
    if form.is_document and not dry_run:
        write_json(runtime, report_document(report, is_complete=outcome.is_complete), indent=2)
    else:
        write_listing(runtime, COLUMNS, sorted(report.topics.items()), form)
    damage = report_damages(runtime, outcome.damages)
    if dry_run:
        runtime.info(f"nsq: {report.confirmed} messages would be published")
        return damage.status
    return report_publishing(
        runtime,
        summary(report),
        confirmed=report.confirmed,
        is_complete=outcome.error is None,
        error=outcome.error,
        damage=damage,
    )
