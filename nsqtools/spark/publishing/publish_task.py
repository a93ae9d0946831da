"""Publish the rows of one partition, and account for each. Knows nothing of Spark.

What tasks have to know is a `SinkPlan`, read from the options once, on the driver:

    topic, nsqdTcpAddress ...   see `format_options`; without an address of nsqd, every nsqd that
                                nsqlookupd knows
    rate, slots                 messages per second in total, and the tasks that share it
    retryTimeout                how long to retry while nsqd cannot be reached (1m); each attempt of
                                a task waits a quarter of what the one before it waited
    retryUnknown                whether messages with an unknown outcome are sent again (true)
    batchRows                   messages per MPUB (500)
    max_outstanding             MPUBs without a response (8)
    deadLetterPath              a directory, or a place in an object store, for rows that cannot be
                                published
    ledgerPath, ledgerJob       one, see `row_outcomes`, and a text that names the job
    outcomePath                 a file for the counts, as JSON

Arrow makes lists of the rows, which are cut into spans of up to 500 (`batchRows`), a span into one
publish per topic and delay, and spans follow each other without waiting: the producer limits
unanswered publishes. Spans finish in any order, because parts of them may be refused, halved or
sent to another nsqd; what counts, and what a ledger notes, is the *prefix*: the rows from the
beginning that are done, without a gap.

A row that nsqd or we refuse becomes a dead letter, or is counted where there is no directory for
them: the other rows are published, and the job fails once, at its end, instead of publishing
everything again with each attempt of a task. What no row is to blame for (nsqd is unreachable, or
refuses us) ends the task.
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
MAX_OUTSTANDING = 8  # a kill duplicates at most this many batches, and two

TEXT = {"string"}
NUMBER = {"tinyint", "smallint", "int", "bigint"}
COLUMNS = {"body": {"binary", *TEXT}, "topic": TEXT, "defer_ms": NUMBER}
# What archives and their Parquet have besides: not published, but in the lines of dead letters.
ORIGIN = {"nsqd": TEXT, "id": TEXT, "ts_ns": {"bigint"}, "attempts": NUMBER}
UNUSED = ("timestamp", "date", "file", "pos")


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """What all tasks of a job do. ``rate`` is messages a second for one task, 0 without limit.

    ``topic`` None means the column; ``job`` names the job's dead letters. ``addresses`` are
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
    dead_letters: Place | None = None
    ledger: Place | None = None
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
    connection = read_connection(options, environ, (NSQD_TCP, LOOKUPD_HTTP))
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
    folders = [plan.dead_letters] if plan.dead_letters is not None else []
    if plan.outcome is not None:
        folders.append(LocalPlace(plan.outcome.parent))
    for folder in folders:
        probe = f".nsq-probe-{uuid.uuid4().hex}"
        with translating_errors("write into", folder):
            folder.put(probe, b"")
            folder.delete(probe)


def check_columns(columns: Mapping[str, str], *, has_topic: bool) -> None:
    """Refuse what cannot be published. ``columns`` are names and Spark's types."""
    known = COLUMNS | ORIGIN
    for name, type in columns.items():
        if name not in known and name not in UNUSED:
            hint = (
                'Select what it has: .select("body", "topic", "defer_ms"), the last two as needed.'
            )
            raise ConfigurationError(f"format 'nsq' does not use the column {name!r}", hint=hint)
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
    """Look up what a job needs to begin, once. Raises `NsqError`."""
    make_folders(plan)
    given = tuple(str(parse_address(text)) for text in plan.connection.nsqd_tcp_addresses)
    return replace(plan, addresses=given or nsqd_addresses(plan.connection))


# -- a task --------------------------------------------------------------------------------------

MAX_DEFER_MS = round(MAX_DELAY_S * 1000)  # what nsqd accepts of it is its --max-req-timeout

is_topic = lru_cache(maxsize=1024)(is_valid_name)


def refusal(body: bytes | None, topic: str | None, defer_ms: int | None, most_bytes: int) -> str:
    """Why a row cannot be published; ``""`` when it can. ``most_bytes`` is the limit of a body."""
    if topic is None:
        return "the topic is null"
    if not is_topic(topic):
        return f"{topic!r} is not a valid topic"
    if body is None:
        return "the body is null"
    if not body:
        return "the body is empty, which NSQ cannot carry"
    if len(body) > most_bytes:
        return f"{len(body)} bytes are above the limit of {most_bytes}"
    if defer_ms is not None and not 0 <= defer_ms <= MAX_DEFER_MS:
        return f"a delay of {defer_ms} ms is not one that nsqd can hold"
    return ""


def fitting(bodies: Sequence[bytes | None], most_bytes: int) -> int:
    """How many bodies from the first go into one batch: one at least."""
    if sum(map(len, filter(None, bodies))) <= most_bytes:
        return len(bodies)
    ends = list(accumulate(len(body or b"") for body in bodies))
    return max(1, bisect_right(ends, most_bytes))


class Chunk(NamedTuple):
    """Some rows. ``topics`` is None where all go to the topic of the options, ``defers_ms`` where
    none is deferred; ``message`` makes the envelope of a dead letter, from its place here and its
    topic. ``first_row`` is the number that its first row has in the partition."""

    bodies: list[bytes | None]
    topics: list[str | None] | None
    defers_ms: list[int | None] | None
    message: Callable[[int, str], Envelope]
    first_row: int = 0


def chunk_of(batch: pyarrow.RecordBatch, *, has_topic: bool) -> Chunk:
    """Return the rows of a batch, whose columns `check_columns` has found good.

    With ``has_topic`` the options name one, and a column of topics is not looked at.
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
    """The values of a column of binaries or texts, as bytes."""
    if not pyarrow.types.is_binary(array.type):
        array = array.cast(pyarrow.large_binary())  # of texts nothing is copied
    values: list[bytes | None] = array.to_pylist()
    return values


@dataclass(slots=True, eq=False)
class RowSpan:
    """Rows up to the number ``stop``, with the checksum there; ``pending`` publishes are under way.

    ``counts`` are what becomes of its rows.
    """

    stop: int
    checksum: int
    pending: int = 0
    counts: RowCounts = field(default_factory=RowCounts)


def advance(entry: LedgerEntry, spans: deque[RowSpan]) -> None:
    """Move the finished spans from the beginning, the prefix, to its entry."""
    while spans and not spans[0].pending:
        span = spans.popleft()
        entry.done, entry.checksum = span.stop, span.checksum
        entry.add(span.counts)


class PublishTask:
    """Publishes the rows of ``partition``; ``attempt`` counts from 0. To be `run` once."""

    def __init__(self, plan: SinkPlan, partition: int, attempt: int = 0) -> None:
        self._plan, self._partition, self._attempt = plan, partition, attempt
        self._limit = plan.client_options.publish_max_msg_size
        self._report = PublishReport()
        self._entry = LedgerEntry()  # that of the ledger, if there is one
        self._spans: deque[RowSpan] = deque()
        self._sent_before = 0
        self._row = 0  # the number of the next row
        self._checksum = 0
        self._fatal: NsqError | None = None
        self._ledger: LedgerPart | StoredLedgerPart | None = None
        self._dead_letters: RowDeadLetters | None = None
        self._has_dead_letters = False  # that are not durable yet
        self._publisher = Publisher(
            plan.rotated(partition), plan.client_options, plan.attempt(attempt), plan.rate
        )

    def run(self, chunks: Iterable[Chunk]) -> PublishReport:
        """Publish everything and return the outcome.

        Raises `NsqError` when nsqd is unreachable for too long, or refuses, not because of a row;
        `ConfigurationError` when the rows are not those that the ledger knows; `OutputError`.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            self._open(stack)
            stack.callback(self._publisher.close)  # before the ledger is unlocked
            rest = self._entry.done
            for chunk in chunks:
                if skipped := min(rest, len(chunk.bodies)):
                    rest = self._skip(chunk, skipped, rest)
                self._publish_chunk(chunk._replace(first_row=self._row - skipped), skipped)
            if rest:
                raise self._changed_input()
            self._publisher.drain()
            self._check()
            self._entry.sent = self._entry.done  # a kill may have left it ahead
            self._note(is_last=True)
            if self._dead_letters is not None:
                self._dead_letters.sync()
        report = self._report
        report.add(self._entry)
        report.retried = self._publisher.retried
        report.repeated = self._entry.repeated + self._publisher.repeated
        report.seconds = time.monotonic() - began
        return report

    # -- what an earlier attempt has done -------------------------------------------------------

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
            self._sent_before, self._report.before = self._entry.sent, self._entry.done
        if plan.dead_letters is not None:
            done = None if self._ledger is None else self._report.before
            letters = RowDeadLetters(plan.dead_letters, plan.job, self._partition, done=done)
            self._dead_letters = stack.enter_context(letters)

    def _skip(self, chunk: Chunk, count: int, rest: int) -> int:
        """Skip rows that are done; return how many more there are."""
        self._add_to_checksum(chunk.bodies[:count])
        self._row += count
        if rest == count and self._checksum != self._entry.checksum:
            raise self._changed_input()
        return rest - count

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
            stop = start + fitting(chunk.bodies[start:stop], self._plan.batch_bytes)
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
            advance(self._entry, self._spans)
        for topic, defer_s, places, bodies in groups:
            ended = partial(self._ended, span, chunk, places)
            self._publisher.publish(topic, bodies, ended, defer_s=defer_s)

    def _groups(
        self, chunk: Chunk, start: int, stop: int, span: RowSpan
    ) -> Iterator[tuple[str, float | None, Sequence[int], list[bytes]]]:
        """What goes into one publish each: topic, delay, places in the chunk, and bodies.

        Rows that cannot be published are refused on the way.
        """
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
        for place in range(start, stop):
            body = chunk.bodies[place]
            topic = self._plan.topic if chunk.topics is None else chunk.topics[place]
            defer_ms = chunk.defers_ms[place] if chunk.defers_ms is not None else None
            reason = refusal(body, topic, defer_ms, self._limit)
            if reason or topic is None or body is None:
                span.counts.rejected += 1
                self._refuse(span, chunk, place, topic or "", reason)
                continue
            places, grouped = groups.setdefault((topic, defer_ms or None), ([], []))
            places.append(place)
            grouped.append(body)
        for (name, delay_ms), (places, grouped) in groups.items():
            yield name, None if delay_ms is None else delay_ms / 1000, places, grouped

    # -- outcomes -------------------------------------------------------------------------------

    def _ended(
        self, span: RowSpan, chunk: Chunk, places: Sequence[int], batch: PublishBatch
    ) -> None:
        """A publish has its outcomes."""
        confirmed = len(batch.bodies) - len(batch.errors)
        if confirmed:
            span.counts.add(RowCounts({batch.topic: confirmed}))
        for index, error in sorted(batch.failures().items()):
            if self._publisher.has_given_up or not is_fault_of_row(error):
                self._fatal = self._fatal or error
                return  # the span stays pending: its rows are not done
            is_unknown = isinstance(error, PublishUnknown)
            span.counts.unknown += is_unknown
            span.counts.rejected += not is_unknown
            self._refuse(span, chunk, places[index], batch.topic, str(error))
        span.pending -= 1
        advance(self._entry, self._spans)

    def _refuse(self, span: RowSpan, chunk: Chunk, place: int, topic: str, reason: str) -> None:
        row = chunk.first_row + place
        if len(self._report.reasons) < MAX_REASONS:
            self._report.reasons.append(f"row {row} of partition {self._partition}: {reason}")
        if self._dead_letters is not None:
            self._dead_letters.write(row, chunk.message(place, topic), reason)
            self._has_dead_letters = True
            span.counts.dead_lettered += 1

    # -- the ledger -----------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        """Note that the last rows are going to be sent."""
        entry = self._entry
        entry.repeated += max(0, min(self._row, self._sent_before) - (self._row - count))
        entry.sent = max(entry.sent, self._row)
        self._note()

    def _note(self, *, is_last: bool = False) -> None:
        if self._ledger is None or not (is_last or self._ledger.is_due):
            return
        if self._dead_letters is not None and self._has_dead_letters:
            self._dead_letters.sync()  # before the ledger counts them as done
            self._has_dead_letters = False
        self._ledger.note(is_last=is_last)

    # -- the end --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise what ends the task, naming it."""
        if self._fatal is None:
            return
        self._note(is_last=True)
        error = self._fatal
        kind = {"refused": RefusedError, "connect": ConnectionFailed}.get(error.category, NsqError)
        raise kind(f"partition {self._partition}: {error}", hint=error.hint) from error


def is_fault_of_row(error: NsqError | None) -> bool:
    """Whether another row might have been taken: nsqd refused this one for what it is, or the
    connection broke over it."""
    if isinstance(error, PublishUnknown):
        return not isinstance(error.__cause__, ServerError)  # its disk fails
    return isinstance(error, PublishError) and may_split(error)
