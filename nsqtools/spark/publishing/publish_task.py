"""Publish the rows of one partition, and account for each row. Independent of Spark.

The driver reads the options once, into a `SinkPlan` for all tasks:

    topic, nsqdTcpAddress ...   see `format_options`; without an address of nsqd, every nsqd that
                                nsqlookupd lists
    rate, slots                 messages per second in total, and the tasks that share them
    retryTimeout                how long to retry an unreachable nsqd (1m); each attempt of a task
                                retries for a quarter of the previous time
    retryUnknown                whether messages with an unknown outcome are sent again (true)
    batchRows                   messages per MPUB (500)
    max_outstanding             MPUBs without a response (8)
    deadLetterPath              a directory, or a place in an object store, for rows that cannot be
                                published
    ledgerPath, ledgerJob       a ledger, see `row_outcomes`, and a text that identifies the job
    outcomePath                 a file for the counts, as JSON

Rows are cut into spans of up to 500 (`batchRows`), and a span into one publish for each topic and
delay. Spans follow each other without waiting; the producer limits unanswered publishes. Spans
finish in any order, because parts of them may be refused, halved or sent to another nsqd. The
ledger therefore records the *prefix*: the finished rows from the beginning, without a gap.

A row that is refused, by nsqd or here, becomes a dead letter, or is counted if there is no
directory for dead letters. The other rows are published, and the job fails once, at its end.
Otherwise each attempt of a task would publish everything again. A failure that no row causes (nsqd
is unreachable, or refuses the client) ends the task.
"""

from __future__ import annotations

import hashlib
import time
import uuid
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from nsqtools.archive.place import LocalPlace, Place, translating_errors
from nsqtools.client.connection_settings import ConnectionSettings, PublishMode
from nsqtools.client.options import ClientOptions
from nsqtools.client.outcomes import may_split
from nsqtools.cluster.directory import nsqd_addresses
from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    NsqError,
    PublishError,
    PublishUnknown,
    RefusedError,
    ServerError,
)
from nsqtools.protocol.commands import MAX_DELAY_S
from nsqtools.protocol.names import check_topic, is_valid_name, parse_address
from nsqtools.publish.publisher import RETRY_TIMEOUT_S, PublishBatch, Publisher, PublishOptions
from nsqtools.records.envelope import Envelope
from nsqtools.spark.format_options import LOOKUPD_HTTP, NSQD_TCP, Options, read_connection, slots_of
from nsqtools.spark.publishing.row_outcomes import (
    LOCK_WAIT_S,
    MAX_REASONS,
    NO_ID,
    LedgerEntry,
    LedgerPart,
    PublishReport,
    RowCounts,
    RowDeadLetters,
    StoredLedgerPart,
)

BATCH_ROWS = 500
BATCH_BYTES = 1 << 19
# A kill duplicates at most this many batches and two more.
MAX_OUTSTANDING = 8

TEXT = {"string"}
NUMBER = {"tinyint", "smallint", "int", "bigint"}
COLUMNS = {"body": {"binary", *TEXT}, "topic": TEXT, "defer_ms": NUMBER}
# These columns of archives are not published, but are part of dead letters.
ORIGIN = {"nsqd": TEXT, "id": TEXT, "ts_ns": {"bigint"}, "attempts": NUMBER}
UNUSED = ("timestamp", "date", "file", "pos")


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """The settings of all tasks of a job. ``rate`` is messages a second of one task, 0: no limit.

    Without a ``topic``, a column has it. ``job`` is part of the names of dead letters. `prepared`
    looks up the nsqd ``addresses`` that ``connection`` does not name. ``outcome`` is a file for the
    counts.
    """

    connection: ConnectionSettings
    client_options: ClientOptions
    options: PublishOptions
    topic: str | None
    job: str
    addresses: tuple[str, ...] = ()
    rate: float = 0.0
    batch_rows: int = BATCH_ROWS
    dead_letters: Place | None = None
    ledger: Place | None = None
    ledger_job: str = ""
    outcome: Path | None = None

    @property
    def batch_bytes(self) -> int:
        """The most bytes of bodies in an MPUB, without the sizes of its messages."""
        sizes = 4 * (self.batch_rows + 1)
        return min(BATCH_BYTES, self.client_options.publish_max_body_size - sizes)

    def rotated(self, partition: int) -> tuple[str, ...]:
        """Return the nsqd of a task, which uses the first and fails over to the others."""
        first = partition % len(self.addresses)
        return self.addresses[first:] + self.addresses[:first]

    def attempt(self, number: int) -> PublishOptions:
        """Return the options for an attempt, counted from 0."""
        # The first attempt has waited long enough for nsqd, so later ones fail faster.
        timeout_s = self.options.retry_timeout_s / 4**number
        return replace(self.options, retry_timeout_s=timeout_s)


def sink_plan(
    given: Mapping[str, str], columns: Mapping[str, str], environ: Mapping[str, str]
) -> SinkPlan:
    """Read the options of ``format("nsq")`` for writing columns with these types.

    Raises `ConfigurationError`, before anything is published.
    """
    options = Options("nsq", given)
    connection = read_connection(options, environ, (NSQD_TCP, LOOKUPD_HTTP))
    topic = options.text("topic")
    check_columns(columns, has_topic=topic is not None)
    retry_s = options.duration_s("retryTimeout")
    ledger = options.place("ledgerPath")
    job = "\n".join([options.text("ledgerJob") or "", topic or "", *sorted(columns)])
    # A job with a ledger has the same name in every run, any other job a unique one.
    name = hashlib.sha256(f"{ledger}\n{job}".encode()).hexdigest() if ledger else uuid.uuid4().hex
    plan = SinkPlan(
        connection,
        connection.client_options(max_outstanding=MAX_OUTSTANDING),
        PublishOptions(
            PublishMode.FAILOVER,
            RETRY_TIMEOUT_S if retry_s is None else retry_s,
            options.flag("retryUnknown", default=True),
        ),
        None if topic is None else check_topic(topic),
        name[:12],
        connection.nsqd_tcp_addresses,
        rate=_task_rate(options, environ),
        batch_rows=options.integer("batchRows") or BATCH_ROWS,
        dead_letters=options.place("deadLetterPath"),
        ledger=ledger,
        ledger_job=job,
        outcome=options.location("outcomePath"),
    )
    options.end()
    return plan


def create_output_folders(plan: SinkPlan) -> None:
    """Create the directories of the job's output. Raises `OutputError`."""
    # Writing a probe now keeps a job from failing for a directory after it has published.
    outcome_folder = LocalPlace(plan.outcome.parent) if plan.outcome is not None else None
    folders: list[Place | None] = [plan.dead_letters, outcome_folder]
    for folder in filter(None, folders):
        probe = f".nsq-probe-{uuid.uuid4().hex}"
        with translating_errors("write into", folder):
            folder.put(probe, b"")
            folder.delete(probe)


def check_columns(columns: Mapping[str, str], *, has_topic: bool) -> None:
    """Refuse columns, given as names and Spark's types, that cannot be published."""
    types = COLUMNS | ORIGIN
    for name, type in columns.items():
        if name not in types and name not in UNUSED:
            raise ConfigurationError(
                f"format 'nsq' does not use the column {name!r}",
                hint='Select its columns: .select("body", "topic", "defer_ms"), the last two as '
                "needed.",
            )
        if type not in types.get(name, {type}):
            raise ConfigurationError(
                f"the column {name!r} is of type {type}, not {' or '.join(sorted(types[name]))}",
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


def _task_rate(options: Options, environ: Mapping[str, str]) -> float:
    """Return the share of the rate for each of the tasks that run in parallel."""
    rate = options.number("rate")
    slots = options.integer("slots") or slots_of(environ)
    if not rate:
        return 0.0
    if not slots:
        raise ConfigurationError(
            "the option 'rate' is for all tasks, and the number of parallel tasks is unknown",
            hint='Give it: .option("slots", spark.sparkContext.defaultParallelism)',
        )
    return rate / slots


def prepared(plan: SinkPlan) -> SinkPlan:
    """Return the plan with addresses, and create the directories. Raises `NsqError`."""
    create_output_folders(plan)
    addresses = tuple(str(parse_address(text)) for text in plan.connection.nsqd_tcp_addresses)
    return replace(plan, addresses=addresses or nsqd_addresses(plan.connection))


# -- a task --------------------------------------------------------------------------------------

MAX_DEFER_MS = round(MAX_DELAY_S * 1000)  # nsqd itself accepts up to its --max-req-timeout.

is_topic = lru_cache(maxsize=1024)(is_valid_name)


def refusal(body: bytes | None, topic: str | None, defer_ms: int | None, max_bytes: int) -> str:
    """Return the reason why a row cannot be published, ``""`` for a valid row."""
    if topic is None:
        return "the topic is null"
    if not is_topic(topic):
        return f"{topic!r} is not a valid topic"
    if body is None:
        return "the body is null"
    if not body:
        return "the body is empty, which NSQ cannot carry"
    if len(body) > max_bytes:
        return f"{len(body)} bytes are above the limit of {max_bytes} (publish_max_msg_size)"
    if defer_ms is not None and not 0 <= defer_ms <= MAX_DEFER_MS:
        return f"a delay of {defer_ms} ms is outside the range of nsqd"
    return ""


def count_fitting(bodies: Sequence[bytes | None], max_bytes: int) -> int:
    """Return how many bodies from the first fit into one batch, at least one."""
    if sum(map(len, filter(None, bodies))) <= max_bytes:
        return len(bodies)
    ends = list(accumulate(len(body or b"") for body in bodies))
    return max(1, bisect_right(ends, max_bytes))


class Chunk(NamedTuple):
    """Consecutive rows of a partition.

    ``topics`` is None if all rows go to the topic of the options, ``defers_ms`` if no row is
    deferred. ``message`` returns the envelope of a dead letter, given its index in the chunk and
    its topic. ``first_row`` is the number of the first row in the partition.
    """

    bodies: list[bytes | None]
    topics: list[str | None] | None
    defers_ms: list[int | None] | None
    message: Callable[[int, str], Envelope]
    first_row: int = 0


def chunk_of(batch: pyarrow.RecordBatch, *, has_topic: bool) -> Chunk:
    """Return the rows of a batch, whose columns `check_columns` has checked.

    With ``has_topic`` the options have the topic, and a topic column is ignored.
    """
    names = batch.schema.names
    bodies = byte_strings(batch.column("body"))
    topics = None if has_topic else batch.column("topic").to_pylist()
    defers = batch.column("defer_ms").to_pylist() if "defer_ms" in names else None

    def message(index: int, topic: str) -> Envelope:
        def value(name: str) -> Any:
            return batch.column(name)[index].as_py() if name in names else None

        id = (value("id") or "").encode()
        return Envelope(
            topic,
            value("nsqd") or "",
            id if len(id) == len(NO_ID) else NO_ID,
            value("ts_ns") or 0,
            value("attempts") or 0,
            bodies[index] or b"",
        )

    return Chunk(bodies, topics, defers, message)


def byte_strings(array: pyarrow.Array) -> list[bytes | None]:
    """Return the values of a binary or text column as bytes."""
    if not pyarrow.types.is_binary(array.type):
        array = array.cast(pyarrow.large_binary())  # This cast does not copy the texts.
    values: list[bytes | None] = array.to_pylist()
    return values


@dataclass(slots=True, eq=False)
class RowSpan:
    """The rows up to the number ``stop``, with the checksum of all rows up to there.

    ``pending`` publishes have no outcome yet. ``counts`` are the outcomes of its rows.
    """

    stop: int
    checksum: int
    pending: int = 0
    counts: RowCounts = field(default_factory=RowCounts)


def record_finished_spans(entry: LedgerEntry, spans: deque[RowSpan]) -> None:
    """Remove the finished spans at the beginning, and add them to the entry of the ledger."""
    while spans and not spans[0].pending:
        span = spans.popleft()
        entry.done, entry.checksum = span.stop, span.checksum
        entry.add(span.counts)


class PublishTask:
    """Publishes the rows of ``partition``; ``attempt`` counts from 0. Call `run` once."""

    def __init__(self, plan: SinkPlan, partition: int, attempt: int = 0) -> None:
        self._plan, self._partition, self._attempt = plan, partition, attempt
        self._limit = plan.client_options.publish_max_msg_size
        self._report = PublishReport()
        self._entry = LedgerEntry()  # With a ledger, this is its last entry.
        self._spans: deque[RowSpan] = deque()
        self._previously_sent = 0
        self._row = 0  # The number of the next row.
        self._checksum = 0
        self._fatal: NsqError | None = None
        self._ledger: LedgerPart | StoredLedgerPart | None = None
        self._dead_letters: RowDeadLetters | None = None
        self._has_unsynced_letters = False
        self._publisher = Publisher(
            plan.rotated(partition), plan.client_options, plan.attempt(attempt), plan.rate
        )

    def run(self, chunks: Iterable[Chunk]) -> PublishReport:
        """Publish all rows and return the outcome.

        Raises `NsqError` if nsqd is unreachable for too long or refuses the client,
        `ConfigurationError` if the rows differ from those of the ledger, and `OutputError`.
        """
        began_s = time.monotonic()
        with ExitStack() as stack:
            self._open(stack)
            stack.callback(self._publisher.close)  # It must not publish after the ledger's unlock.
            to_skip = self._entry.done
            for chunk in chunks:
                if skipped := min(to_skip, len(chunk.bodies)):
                    to_skip = self._skip(chunk, skipped, to_skip)
                self._publish_chunk(chunk._replace(first_row=self._row - skipped), skipped)
            if to_skip:
                raise self._changed_input()
            self._publisher.drain()
            self._check()
            self._entry.sent = self._entry.done  # An earlier attempt may have recorded more.
            self._note(is_last=True)
            if self._dead_letters is not None:
                self._dead_letters.sync()
        report = self._report
        report.add(self._entry)
        report.retried = self._publisher.retried
        report.repeated = self._entry.repeated + self._publisher.repeated
        report.seconds = time.monotonic() - began_s
        return report

    # -- progress of an earlier attempt ---------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        plan = self._plan
        if plan.ledger is not None:
            if plan.ledger.is_remote:
                self._ledger = StoredLedgerPart(plan.ledger, self._partition)
            else:
                wait_s = LOCK_WAIT_S / 4**self._attempt
                self._ledger = LedgerPart(plan.ledger, self._partition, wait_s=wait_s)
            stack.enter_context(self._ledger)
            self._entry = self._ledger.entry
            self._previously_sent, self._report.before = self._entry.sent, self._entry.done
        if plan.dead_letters is not None:
            done = None if self._ledger is None else self._report.before
            letters = RowDeadLetters(plan.dead_letters, plan.job, self._partition, done=done)
            self._dead_letters = stack.enter_context(letters)

    def _skip(self, chunk: Chunk, count: int, to_skip: int) -> int:
        """Skip finished rows; return how many remain to be skipped."""
        self._add_to_checksum(chunk.bodies[:count])
        self._row += count
        if to_skip == count and self._checksum != self._entry.checksum:
            raise self._changed_input()
        return to_skip - count

    def _add_to_checksum(self, bodies: Sequence[bytes | None]) -> None:
        self._checksum = zlib.crc32(b"".join([body or b"" for body in bodies]), self._checksum)

    def _changed_input(self) -> ConfigurationError:
        return ConfigurationError(
            f"partition {self._partition} is not what it was when its ledger was begun "
            f"({self._plan.ledger})",
            hint="Give the same input in the same order, or another ledger.",
        )

    # -- rows -----------------------------------------------------------------------------------

    def _publish_chunk(self, chunk: Chunk, start: int) -> None:
        while start < len(chunk.bodies):
            stop = start + self._publisher.allowance(self._plan.batch_rows)
            stop = start + count_fitting(chunk.bodies[start:stop], self._plan.batch_bytes)
            self._publish_span(chunk, start, stop)
            start = stop

    def _publish_span(self, chunk: Chunk, start: int, stop: int) -> None:
        self._row += stop - start
        if self._ledger is not None:
            self._add_to_checksum(chunk.bodies[start:stop])
        span = RowSpan(self._row, self._checksum)
        self._spans.append(span)
        groups = list(self._groups(chunk, start, stop, span))
        span.pending = len(groups)
        self._publisher.poll()
        self._check()
        self._begin(stop - start)
        if not groups:
            record_finished_spans(self._entry, self._spans)
        for topic, defer_s, indexes, bodies in groups:
            on_outcome = partial(self._on_outcome, span, chunk, indexes)
            self._publisher.publish(topic, bodies, on_outcome, defer_s=defer_s)

    def _groups(
        self, chunk: Chunk, start: int, stop: int, span: RowSpan
    ) -> Iterator[tuple[str, float | None, Sequence[int], list[bytes]]]:
        """Yield the publishes of a span: topic, delay, indexes in the chunk, and bodies.

        Invalid rows are refused.
        """
        # Usually all rows are valid messages of one topic, and need no loop over the rows.
        bodies = chunk.bodies[start:stop]
        topics = chunk.topics[start:stop] if chunk.topics is not None else [self._plan.topic]
        sendable = list(filter(None, bodies))
        topic = topics[0]
        if (
            chunk.defers_ms is None
            and len(sendable) == len(bodies)
            and topics.count(topic) == len(topics)
            and topic is not None
            and is_topic(topic)
            and max(map(len, sendable)) <= self._limit
        ):
            yield topic, None, range(start, stop), sendable
            return
        groups: dict[tuple[str, int | None], tuple[list[int], list[bytes]]] = {}
        for index in range(start, stop):
            body = chunk.bodies[index]
            topic = self._plan.topic if chunk.topics is None else chunk.topics[index]
            defer_ms = chunk.defers_ms[index] if chunk.defers_ms is not None else None
            reason = refusal(body, topic, defer_ms, self._limit)
            if reason or topic is None or body is None:
                span.counts.rejected += 1
                self._refuse(span, chunk, index, topic or "", reason)
                continue
            indexes, grouped = groups.setdefault((topic, defer_ms or None), ([], []))
            indexes.append(index)
            grouped.append(body)
        for (name, delay_ms), (indexes, grouped) in groups.items():
            yield name, None if delay_ms is None else delay_ms / 1000, indexes, grouped

    # -- outcomes -------------------------------------------------------------------------------

    def _on_outcome(
        self, span: RowSpan, chunk: Chunk, indexes: Sequence[int], batch: PublishBatch
    ) -> None:
        """Account for the outcomes of a publish."""
        confirmed = len(batch.bodies) - len(batch.errors)
        if confirmed:
            span.counts.add(RowCounts({batch.topic: confirmed}))
        for index, error in sorted(batch.failures().items()):
            if self._publisher.has_given_up or not is_fault_of_row(error):
                self._fatal = self._fatal or error
                return  # The span stays pending, because its rows are not finished.
            is_unknown = isinstance(error, PublishUnknown)
            span.counts.unknown += is_unknown
            span.counts.rejected += not is_unknown
            self._refuse(span, chunk, indexes[index], batch.topic, str(error))
        span.pending -= 1
        record_finished_spans(self._entry, self._spans)

    def _refuse(self, span: RowSpan, chunk: Chunk, index: int, topic: str, reason: str) -> None:
        row = chunk.first_row + index
        if len(self._report.reasons) < MAX_REASONS:
            self._report.reasons.append(f"row {row} of partition {self._partition}: {reason}")
        if self._dead_letters is not None:
            self._dead_letters.write(row, chunk.message(index, topic), reason)
            self._has_unsynced_letters = True
            span.counts.dead_lettered += 1

    # -- the ledger -----------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        """Record in the ledger that the last ``count`` rows are about to be sent."""
        entry = self._entry
        entry.repeated += max(0, min(self._row, self._previously_sent) - (self._row - count))
        entry.sent = max(entry.sent, self._row)
        self._note()

    def _note(self, *, is_last: bool = False) -> None:
        if self._ledger is None or not (is_last or self._ledger.is_due):
            return
        if self._dead_letters is not None and self._has_unsynced_letters:
            # Dead letters must be durable before the ledger counts their rows as finished.
            self._dead_letters.sync()
            self._has_unsynced_letters = False
        self._ledger.note(is_last=is_last)

    # -- the end --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise the failure that ends the task, with the number of its partition."""
        if self._fatal is None:
            return
        self._note(is_last=True)
        error = self._fatal
        kind = {"refused": RefusedError, "connect": ConnectionFailed}.get(error.category, NsqError)
        raise kind(f"partition {self._partition}: {error}", hint=error.hint) from error


def is_fault_of_row(error: NsqError | None) -> bool:
    """Return whether nsqd refused this row, or closed the connection over it, but takes others."""
    if isinstance(error, PublishUnknown):
        return not isinstance(
            error.__cause__, ServerError
        )  # A ServerError means nsqd's disk fails.
    return isinstance(error, PublishError) and may_split(error)
