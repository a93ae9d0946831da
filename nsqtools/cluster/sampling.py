"""Samples of a cluster, one after the other: what `nsq top`, `nsq stat` and `nsq web` show.

All nsqd are asked at the same time, and each has one question at a time. A sample is put together
from the last answer of each. With an interval it waits for them for a part of that only, and an
answer that comes later is in the next sample. An nsqd that fails, or lets a question wait for
`COUNTED_S`, counts no more until it answers again. The nsqd are looked up again every `LOOKUP_S`.

An nsqd that has answered stays, however little nsqlookupd knows of it: one that is gone is a
problem to show. It is forgotten when it was not reached for `FORGOTTEN_S` and no nsqlookupd that
answers announces it. An nsqlookupd that does not answer changes nothing about the nsqd. An nsqd
whose address was given is never forgotten.

The threads are daemons: who quits does not wait for an nsqd that hangs. Answers are read one after
the other, so that they leave the processor to the thread that draws and only one is in memory.

A client that can announce an nsqd can announce a thousand, each with the longest answers. So
an nsqd, and a sample, has a budget of JSON objects; an nsqd beyond it is named, and seldom asked.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nsqtools.cluster.directory import MAX_WORKERS, Cluster, DaemonFailure, Nsqds
from nsqtools.cluster.queue_rows import (
    ConsumerMeter,
    ConsumerRow,
    NodeReport,
    QueueRow,
    RateMeter,
    SumReader,
)
from nsqtools.cluster.topics import (
    describe_registered_only,
    is_pattern,
    matches,
    merge_names,
    select_names,
)
from nsqtools.errors import DeadlineExceeded, NotFoundError, NsqError, ProtocolError
from nsqtools.http.http_api import MAX_NODES, NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.stats import StatsReader

COUNTED_S = 5.0
LOOKUP_S = 5.0
SLOW_S = 1.0
"""A question that is open for longer is called unanswered."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 1.0
FORGOTTEN_S = 600.0
"""How long an nsqd is remembered that is neither announced nor reached."""
MAX_LEFT_AT_ONCE = 32
MAX_ENTRIES_OF_NODE, MAX_ENTRIES = 200_000, 600_000
"""JSON objects: a topic or a channel is two of them, a consumer one. A million take 1.5 GB."""
OVER_BUDGET_S = 60.0


class OverBudget(ProtocolError):
    """An nsqd says more than is kept of one, or than there is room for beside the others."""


class SampleScope(NamedTuple):
    """What is asked besides the queues: the consumers (of a topic, of a channel), the memory."""

    consumers: bool = False
    topic: str = ""
    channel: str = ""
    memory: bool = False


QUEUES_ONLY = SampleScope()


class NodeState(NamedTuple):
    """An nsqd as a sample has it.

    ``silent_s`` is the time since its last answer, 0.0 while it answers; ``error`` says why, as far
    as it is known. With an error ``rows`` are the last known ones, without rates, and ``consumers``
    are empty. ``heap`` is the memory in use in bytes, where it was asked for. ``seen_s`` is when it
    answered last, in seconds since 1970, None for one that never did.
    """

    address: str
    rows: list[QueueRow]
    consumers: list[ConsumerRow]
    version: str = ""
    health: str = ""
    heap: int | None = None
    silent_s: float = 0.0
    error: str = ""
    seen_s: float | None = None

    @property
    def is_silent(self) -> bool:
        return self.silent_s > 0

    @property
    def is_gone(self) -> bool:
        """Whether it has answered before, and does not any more."""
        return bool(self.error) and self.seen_s is not None


class Sample(NamedTuple):
    """One sample. ``rows`` are those of each nsqd that counts, ``totals`` of all these together.

    ``time_s`` is seconds since 1970, ``reports`` are their statistics. ``failures`` are the nsqd
    that do not count and why, and the nsqlookupd that did not answer. ``nodes`` has every nsqd that
    was ever asked and is remembered. ``at_s`` is when it was taken, on the monotonic clock.
    """

    time_s: float
    rows: list[QueueRow]
    totals: list[QueueRow]
    reports: tuple[NodeReport, ...]
    failures: tuple[DaemonFailure, ...]
    nodes: tuple[NodeState, ...] = ()
    at_s: float = 0.0

    @property
    def started(self) -> dict[str, int]:
        """When each nsqd started, in seconds since 1970, by address."""
        return {report.address: report.stats.start_time for report in self.reports}


NO_SAMPLE = Sample(0, [], [], (), ())


class SampleFilter(NamedTuple):
    """What to sample: names or patterns of topics and channels, none for all.

    With channels named, topics themselves are not shown.
    """

    topics: Sequence[str] = ()
    channels: Sequence[str] = ()

    def among(self, rows: list[QueueRow]) -> list[QueueRow]:
        """Return the rows that are wanted."""
        if not self.topics and not self.channels:
            return rows
        return [row for row in rows if self.has(row.topic, row.channel)]

    def has(self, topic: str, channel: str) -> bool:
        """Tell whether a channel is wanted, or with ``""`` the topic itself."""
        is_wanted = matches(channel, self.channels) if channel else not self.channels
        return is_wanted and matches(topic, self.topics)

    def check(self, rows: Sequence[QueueRow], failures: Sequence[DaemonFailure] = ()) -> None:
        """Raise `NotFoundError` for a name or pattern that no row has: an alarm must not be silent
        because its topic is gone or misspelt. ``failures`` are daemons that may have it."""
        topics = {row.topic for row in rows}
        select_names("topic", self.topics, topics, failures)
        channels = {row.channel for row in rows if matches(row.topic, self.topics)} - {""}
        select_names("channel", self.channels, channels, failures)


@dataclass(slots=True)
class _Node:
    """An nsqd that is asked again and again, and its last answer.

    ``asked_s`` is when the open question was asked, None while there is none, ``tried_s`` when the
    last one was.
    """

    address: str
    client: NsqdHTTPClient
    meter: RateMeter
    consumer_meter: ConsumerMeter
    since_s: float
    announced_s: float
    reader: StatsReader = field(default_factory=StatsReader)
    is_announced: bool = True
    asked_s: float | None = None
    tried_s: float = -math.inf
    answered_s: float | None = None
    answered_at_s: float | None = None  # the same, in seconds since 1970
    error: NsqError | None = None
    report: NodeReport | None = None
    measured: list[QueueRow] = field(default_factory=list)
    entries: int = 0
    consumers: list[ConsumerRow] = field(default_factory=list)
    consumers_of: SampleScope = QUEUES_ONLY
    heap: int | None = None

    @property
    def pause_s(self) -> float:
        """How long it is left alone, where it has probably left or says too much."""
        if isinstance(self.error, OverBudget):
            return OVER_BUDGET_S
        return 0.0 if self.is_announced or self.error is None else LOOKUP_S


class Sampler:
    """Samples a cluster, again and again, on one thread. `stop` it from any.

    Without ``interval_s`` a sample waits for all daemons. With ``required`` the first sample fails
    where none answers, and where none that answers has what is named.
    """

    def __init__(
        self,
        cluster: Cluster,
        wanted: SampleFilter,
        *,
        required: bool = True,
        interval_s: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._required = required
        self._waits_for_all = interval_s is None
        self._least_s = (interval_s or 0.0) / 2
        self._wait_s = math.inf if interval_s is None else min(interval_s / 2, LONGEST_WAIT_S)
        self._nodes: dict[str, _Node] = {}
        self._failures: tuple[DaemonFailure, ...] = ()
        self._looked_up_s = -math.inf
        self._has_begun = False
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._workers = 0
        self._sums = SumReader()
        self._bug: Exception | None = None
        self._stopped = threading.Event()

    @property
    def answering(self) -> Nsqds:
        """The nsqd that answered when they were last asked."""
        with self._changed:
            return {
                address: node.client
                for address, node in self._nodes.items()
                if node.error is None and node.report is not None
            }

    def sample(self, question: SampleScope = QUEUES_ONLY) -> Sample:
        """Take one sample. With an interval it does not take longer than half of that.

        The first one waits until a daemon has answered, and a moment longer for the others. It
        raises `NotFoundError` for a name or pattern that is nowhere, and the first failure when
        none answers. Later that is a sample with nothing but failures: a long run outlives a bad
        moment.
        """
        if time.monotonic() - self._looked_up_s >= LOOKUP_S:
            if self._waits_for_all or not self._has_begun:
                self._look_up()
            else:
                self._looked_up_s = math.inf  # until it has
                self._jobs.append(self._look_up)
        self._wait_for(self._ask_all(question))
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug
        self._cluster.remember(self.answering)
        sample = self._build_sample(question)
        if not self._has_begun and not self._is_interrupted:
            if self._required and sample.failures and not sample.reports:
                raise sample.failures[0].error
            if self._required or not sample.failures:
                self._check_named(sample.failures)
            self._has_begun = True
        return sample

    def samples(
        self, interval_s: float, count: int | None = None, question: SampleScope = QUEUES_ONLY
    ) -> Iterator[Sample]:
        """Sample every ``interval_s`` seconds, the first time after one interval, with rates.

        Samples keep to the schedule however long an answer takes. Ends after ``count``, and
        when `stop` is called.
        """
        next_s = time.monotonic()
        self.sample(question)
        taken = 0
        while count is None or taken < count:
            next_s = max(next_s + interval_s, time.monotonic())
            if self._stopped.wait(next_s - time.monotonic()):
                return
            yield self.sample(question)
            taken += 1

    def stop(self) -> None:
        """End `samples`. With an interval, do not wait any more either."""
        self._stopped.set()

    @property
    def _is_interrupted(self) -> bool:
        return self._stopped.is_set() and not self._waits_for_all

    # -- who is asked -----------------------------------------------------------------------------

    def _look_up(self) -> None:
        try:
            found, failures = self._cluster.nsqds()
            with self._changed:
                self._merge_nodes(found, failures)
                kept = {address: node.client for address, node in self._nodes.items()}
            self._cluster.keep_only(kept)
        finally:
            self._looked_up_s = time.monotonic()

    def _merge_nodes(self, known: Nsqds, failures: Iterable[DaemonFailure]) -> None:
        """Note which nsqd there are, and forget those that left."""
        self._failures = tuple(failures)
        failed = {failure.address for failure in self._failures}
        lookupds = self._cluster.lookupds
        is_known = not lookupds or any(address not in failed for address in lookupds)
        aliases = self._cluster.aliases
        given = set(self._cluster.given).difference(aliases)
        now_s = time.monotonic()
        for address, client in known.items():
            if address not in self._nodes:
                meters = RateMeter(self._least_s), ConsumerMeter(self._least_s)
                self._nodes[address] = _Node(address, client, *meters, now_s, now_s)
            self._nodes[address].client = client  # certificates are renewed
        for address, node in self._nodes.items():
            if address in known or address in given:
                node.is_announced, node.announced_s = True, now_s
            elif is_known or address in aliases:
                node.is_announced = False
        left = [node for node in self._nodes.values() if not node.is_announced]
        left.sort(key=lambda node: -node.announced_s)
        for number, node in enumerate(left):
            is_remembered = (
                number < MAX_NODES
                and node.address not in aliases
                and node.answered_s is not None
                and (node.error is None or now_s - node.answered_s <= FORGOTTEN_S)
            )
            if not is_remembered and node.asked_s is None:
                del self._nodes[node.address]

    def _ask_all(self, question: SampleScope) -> list[_Node]:
        """Put the question to every nsqd that has answered the last one; return these.

        Those that failed come last, and of those that are asked seldom not all at once.
        """
        now_s = time.monotonic()
        with self._changed:
            nodes = [node for node in self._nodes.values() if node.asked_s is None]
            asked = [node for node in nodes if now_s - node.tried_s >= node.pause_s]
            asked.sort(key=lambda node: (node.pause_s, node.error is not None, node.tried_s))
            del asked[sum(not node.pause_s for node in asked) + MAX_LEFT_AT_ONCE :]
            for node in asked:
                node.asked_s = node.tried_s = now_s
                self._jobs.append(partial(self._ask, node, question))
            # what waits where no thread can be started is begun with the next sample
            for _ in range(min(len(self._jobs), MAX_WORKERS - self._workers)):
                threading.Thread(target=self._work, name="nsq-sample", daemon=True).start()
                self._workers += 1
        return asked

    def _work(self) -> None:
        """Do what waits for a thread, which `MAX_WORKERS` of them do."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._workers -= 1
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as exc:
                self._bug = exc

    def _ask(self, node: _Node, question: SampleScope) -> None:
        error: NsqError | None = None
        try:
            latest_s = (node.asked_s or 0.0) + self._cluster.timeout_s
            take = partial(self._take_answer, node, question)
            self._cluster.ask_one((node.address, question), take, latest_s)
            if not node.is_announced:
                node.client.close()  # it may be one of many that left
        except NsqError as exc:
            error = exc.with_traceback(None)  # it is kept, and would keep its frames
            error.__cause__ = error.__context__ = None
        finally:
            with self._changed:
                node.error = error
                node.asked_s = None
                self._changed.notify_all()

    def _take_answer(self, node: _Node, question: SampleScope) -> None:
        wanted, client = self._wanted, node.client
        only = wanted.topics[0] if len(wanted.topics) == 1 else ""
        is_scoped = question.consumers and bool(question.topic)
        began_s = time.monotonic()
        answer = client.ask_stats(
            # nsqd leaves the rest out itself where one name is asked for
            "" if is_pattern(only) or node.answered_s is None else only,
            clients=question.consumers and not is_scoped,
            memory=question.memory,
        )
        at_s = (began_s + time.monotonic()) / 2
        scoped = client.stats(question.topic, question.channel, clients=True) if is_scoped else None
        with self._reading:
            entries = self._check_budget(node, answer)
            stats = node.reader.read(bytes(answer), client.decode_stats)
            del answer
            report = NodeReport(node.address, at_s, stats)
            measured = node.meter.measure(report)
            consumers = []
            if question.consumers:
                asked = report if scoped is None else report._replace(stats=scoped)
                consumers = node.consumer_meter.measure(asked)
        with self._changed:
            node.report, node.measured, node.entries = report, measured, entries
            node.consumers, node.consumers_of = consumers, question
            if question.memory:
                node.heap = (report.stats.memory or {}).get("heap_in_use_bytes")
            node.answered_s, node.answered_at_s = time.monotonic(), time.time()

    def _check_budget(self, node: _Node, answer: bytearray) -> int:
        """Return how many entries an answer has. Raises `OverBudget`."""
        entries = answer.count(b"{")
        with self._changed:
            others = sum(each.entries for each in self._nodes.values() if each is not node)
        most = min(MAX_ENTRIES_OF_NODE, MAX_ENTRIES - others)
        if entries > most:
            raise OverBudget(
                f"{node.client.url}: its statistics have {entries} entries, and there is room"
                f" for {max(0, most)}",
                hint="Name those nsqd that you trust with allow_announced (nsq: -X).",
            )
        return entries

    def _wait_for(self, asked: Sequence[_Node]) -> None:
        """Wait for answers; the first time until a daemon has answered."""
        is_first = not self._has_begun and not self._waits_for_all
        ends_s = time.monotonic() + (FIRST_WAIT_S if is_first else self._wait_s)
        with self._changed:
            while any(node.asked_s is not None for node in asked) and not self._is_interrupted:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 and not (is_first and self._lacks_something()):
                    return
                self._changed.wait(min(left_s, 0.2) if left_s > 0 else 0.2)

    # -- putting together -------------------------------------------------------------------------

    def _all_rows(self) -> list[QueueRow]:
        return [row for node in self._nodes.values() for row in node.measured]

    def _lacks_something(self) -> bool:
        try:
            self._wanted.check(self._all_rows())
        except NotFoundError:
            return True
        return all(node.report is None for node in self._nodes.values())

    def _check_named(self, failures: Sequence[DaemonFailure]) -> None:
        """Raise `NotFoundError` as `SampleFilter.check` does.

        Topics that only nsqlookupd knows have an error of their own.
        """
        wanted, rows = self._wanted, self._all_rows()
        try:
            wanted.check(rows, failures)
        except NotFoundError:
            if failures:
                raise
            cluster = self._cluster
            listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
            absent = merge_names(listed) - {row.topic for row in rows}
            for topic in wanted.topics:
                if topic in absent:
                    raise NotFoundError(describe_registered_only(f"topic {topic}")) from None
            raise

    def _build_sample(self, question: SampleScope) -> Sample:
        now_s, time_s = time.monotonic(), time.time()
        reports, states = [], []
        lookupds = self._cluster.lookupds
        with self._changed:
            failures = [
                each
                for each in self._failures
                if each.address in lookupds or each.address not in self._nodes
            ]
            for node in self._nodes.values():
                open_s = 0.0 if node.asked_s is None else now_s - node.asked_s
                error = node.error
                if error is None and open_s > COUNTED_S:
                    error = DeadlineExceeded(f"{node.client.url}: no answer in time")
                if error is not None:
                    failures.append(DaemonFailure(node.address, error))
                    if any(row.rates for row in node.measured):
                        node.measured = [replace(row, rates=None) for row in node.measured]
                elif node.report is not None:
                    reports.append(node.report)
                left = "" if node.is_announced else "not announced any more; "
                is_silent = error is not None or open_s > SLOW_S
                stats = node.report.stats if node.report else None
                states.append(
                    NodeState(
                        node.address,
                        self._wanted.among(node.measured),
                        node.consumers if not error and node.consumers_of == question else [],
                        stats.version if stats else "",
                        stats.health if stats else "",
                        node.heap,
                        now_s - (node.answered_s or node.since_s) if is_silent else 0.0,
                        f"{left}{error}" if error else "",
                        node.answered_at_s,
                    )
                )
        rows = [row for state in states if not state.error for row in state.rows]
        sums = self._sums.totals(rows)
        return Sample(time_s, rows, sums, tuple(reports), tuple(failures), tuple(states), now_s)
