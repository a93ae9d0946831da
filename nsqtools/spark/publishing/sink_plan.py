"""What a task has to know to publish its rows: read from the options once, on the driver.

topic, nsqdTcpAddress ...   see `format_options`; without an address of nsqd, every nsqd that
                            nsqlookupd knows
rate, slots                 messages per second in total, and the tasks that share it
retryTimeout                how long to retry while nsqd cannot be reached (1m); each attempt of a
                            task waits a quarter of what the one before it waited
retryUnknown                whether messages with an unknown outcome are sent again (true)
batchRows                   messages per MPUB (500)
max_outstanding             MPUBs without a response (8)
deadLetterPath              a directory, or a place in an object store, for rows that cannot be
                            published
ledgerPath, ledgerJob       one for `ledger`, and a text that names the job
outcomePath                 a file for the counts, as JSON
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nsqtools.archive.location import Location
from nsqtools.archive.storage import failing
from nsqtools.archive.storage_objects import open_storage
from nsqtools.client.connection_settings import ConnectionSettings, PublishMode
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.directory import open_cluster
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.names import check_topic, parse_address
from nsqtools.publish.publisher import RETRY_TIMEOUT_S, PublishOptions
from nsqtools.spark.format_options import Options, producer_connection

BATCH_ROWS = 500
BATCH_BYTES = 1 << 19
MAX_OUTSTANDING = 8  # a kill duplicates at most this many batches, and two

SLOTS = "NSQ_SPARK_SLOTS"

TEXT = {"string"}
NUMBER = {"tinyint", "smallint", "int", "bigint"}
COLUMNS = {"body": {"binary", *TEXT}, "topic": TEXT, "defer_ms": NUMBER}
# What archives and their Parquet have besides: not published, but in the lines of dead letters.
ORIGIN = {"nsqd": TEXT, "id": TEXT, "ts_ns": {"bigint"}, "attempts": NUMBER}
UNUSED = ("timestamp", "date", "file", "pos")


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """What all tasks of a job do. ``rate`` is messages a second for one task, 0 without limit.

    ``topic`` None stands for the column; ``job`` names the job's dead letters. ``addresses`` are
    those of nsqd, which `prepared` looks up where ``connection`` does not say them; ``outcome`` is
    a file for the counts.
    """

    connection: ConnectionSettings
    client_options: ClientOptions
    options: PublishOptions
    topic: str | None
    job: str
    addresses: tuple[str, ...] = ()
    rate: float = 0.0
    batch_rows: int = BATCH_ROWS
    dead_letters: Location | None = None
    ledger: Location | None = None
    ledger_job: str = ""
    outcome: Path | None = None

    @property
    def batch_bytes(self) -> int:
        """The most bytes of bodies in an MPUB, beside the sizes of its messages."""
        sizes = 4 * (self.batch_rows + 1)
        return min(BATCH_BYTES, self.client_options.publish_max_body_size - sizes)

    def rotated(self, partition: int) -> tuple[str, ...]:
        """The nsqd of a task: the first is used, the others stand by."""
        first = partition % len(self.addresses)
        return self.addresses[first:] + self.addresses[:first]

    def attempt(self, number: int) -> PublishOptions:
        """The options for an attempt, from 0: the first one has waited for nsqd long enough."""
        timeout_s = self.options.retry_timeout_s / 4**number
        return replace(self.options, retry_timeout_s=timeout_s)


def sink_plan(
    given: Mapping[str, str], columns: Mapping[str, str], environ: Mapping[str, str]
) -> SinkPlan:
    """Read the options of ``format("nsq")`` for writing columns with these types.

    Raises `ConfigurationError`, before anything is published.
    """
    options = Options("nsq", given)
    connection = producer_connection(options, environ)
    topic = options.text("topic")
    check_columns(columns, has_topic=topic is not None)
    retry_s = options.duration_s("retryTimeout")
    ledger = options.place("ledgerPath")
    job = "\n".join([options.text("ledgerJob") or "", topic or "", *sorted(columns)])
    # the same each time where a ledger leads the job on, else that of no other job
    named = hashlib.sha256(f"{ledger}\n{job}".encode()).hexdigest() if ledger else uuid.uuid4().hex
    plan = SinkPlan(
        connection,
        connection.client_options(max_outstanding=MAX_OUTSTANDING),
        PublishOptions(
            PublishMode.FAILOVER,
            RETRY_TIMEOUT_S if retry_s is None else retry_s,
            options.flag("retryUnknown", default=True),
        ),
        None if topic is None else check_topic(topic),
        named[:12],
        connection.nsqd_tcp_addresses,
        rate=_rate_of_a_task(options, environ),
        batch_rows=options.integer("batchRows") or BATCH_ROWS,
        dead_letters=options.place("deadLetterPath"),
        ledger=ledger,
        ledger_job=job,
        outcome=options.location("outcomePath"),
    )
    options.end()
    return plan


def make_folders(plan: SinkPlan) -> None:
    """Make the directories that will be written to: a job must not fail for them at its end.

    Raises `OutputError`.
    """
    for folder in filter(None, (plan.dead_letters, plan.outcome and plan.outcome.parent)):
        storage, probe = open_storage(str(folder)), f".nsq-probe-{uuid.uuid4().hex}"
        with failing("write into", folder):
            storage.put(probe, b"")
            storage.delete(probe)


def check_columns(columns: Mapping[str, str], *, has_topic: bool) -> None:
    """Refuse what cannot be published. ``columns`` are names and Spark's types."""
    known = COLUMNS | ORIGIN
    for name, type in columns.items():
        if name not in known and name not in UNUSED:
            raise ConfigurationError(
                f"format 'nsq' does not use the column {name!r}",
                hint='Select what it has: .select("body", "topic", "defer_ms"), the last two as '
                "needed.",
            )
        if type not in known.get(name, {type}):
            raise ConfigurationError(
                f"the column {name!r} is of type {type}, not {' or '.join(sorted(known[name]))}",
                hint="Convert it with cast, or with to_json.",
            )
    if "body" not in columns:
        raise ConfigurationError(
            f"column 'body' is missing (columns: {', '.join(columns) or 'none'})",
            hint='Make one: .selectExpr("to_json(struct(*)) AS body")',
        )
    if "topic" not in columns and not has_topic:
        raise ConfigurationError(
            "no topic: neither a column nor an option 'topic' is given",
            hint='Give one: .option("topic", "clicks")',
        )


def _rate_of_a_task(options: Options, environ: Mapping[str, str]) -> float:
    """The share of one task of those that run at a time; a task that waits needs none."""
    rate = options.number("rate")
    slots = options.integer("slots")
    if not rate:
        return 0.0
    text = environ.get(SLOTS, "")
    if slots is None and text.isdecimal():
        slots = int(text)
    if not slots:
        raise ConfigurationError(
            "the option 'rate' is for all tasks, and the number of parallel tasks is unknown",
            hint='Give it: .option("slots", spark.sparkContext.defaultParallelism)',
        )
    return rate / slots


def producer_addresses(settings: ConnectionSettings) -> tuple[str, ...]:
    """The nsqd given by address; without any, all that some nsqlookupd knows.

    Raises `ConfigurationError` for a bad address, `ConnectionFailed` when no nsqlookupd answers and
    `NotFoundError` when none knows an nsqd.
    """
    if settings.nsqd_tcp_addresses:
        return tuple(str(parse_address(text)) for text in settings.nsqd_tcp_addresses)
    with open_cluster(settings) as cluster:
        answers, failures = cluster.known_nodes()
    if failures and not answers:
        raise failures[0].error
    found = {
        str(cluster.reachable(known.node.tcp)) for nodes in answers.values() for known in nodes
    }
    if not found:
        raise NotFoundError(
            f"{', '.join(settings.lookupd_http_addresses)} know no nsqd",
            hint="Give one by its address: nsqdTcpAddress.",
        )
    return tuple(sorted(found))


def prepared(plan: SinkPlan) -> SinkPlan:
    """Look up what a job needs to begin, once. Raises `NsqError`."""
    make_folders(plan)
    return replace(plan, addresses=producer_addresses(plan.connection))
