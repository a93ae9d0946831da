"""Successive samples of a cluster, for `nsq top`, `nsq stat` and `nsq web`.

All nsqd are asked at the same time, and each has one question at a time. A sample consists of the
last answer of each. With an interval it waits for answers during part of the interval only, and a
later answer is part of the next sample. An nsqd that fails, or does not answer for `COUNTED_S`, is
excluded until it answers again. The nsqd are discovered again every `LOOKUP_S`.

An nsqd that has answered stays even if no nsqlookupd announces it, because its absence is a problem
to show. It is forgotten after `FORGOTTEN_S` without an answer, if no nsqlookupd that answers
announces it. An nsqlookupd that does not answer changes nothing about the nsqd. A given nsqd is
never forgotten.

The threads are daemon threads, so that quitting does not wait for an nsqd that hangs. Answers are
decoded one at a time: that leaves the processor to the thread that draws, and bounds the memory.

A client that can announce an nsqd can announce a thousand, each with the longest answers. So each
nsqd, and each sample, has a budget of JSON objects. An nsqd beyond it is named, and rarely asked.
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

# An nsqd under load answers within seconds. Excluding it earlier would make sums jump.
COUNTED_S = 5.0
LOOKUP_S = 5.0
# A question that is open for longer marks the nsqd as silent on the screen.
SLOW_S = 1.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 1.0
# Ten minutes without an announcement or an answer: longer than a restart or an upgrade takes.
FORGOTTEN_S = 600.0
# Of the nsqd that have probably left, so many are asked for one sample.
MAX_LEFT_AT_ONCE = 32
# JSON objects: a topic or a channel is two, a consumer is one. A million take 1.5 GB.
MAX_ENTRIES_OF_NODE, MAX_ENTRIES = 200_000, 600_000
OVER_BUDGET_S = 60.0


class OverBudget(ProtocolError):
    """The answer of an nsqd exceeds its budget, or the remaining budget of the sample."""


class SampleScope(NamedTuple):
    """Questions in addition to the queues: consumers (of a topic or channel), and memory."""

    consumers: bool = False
    topic: str = ""
    channel: str = ""
    memory: bool = False


QUEUES_ONLY = SampleScope()


class NodeState(NamedTuple):
    """An nsqd in a sample.

    ``silent_s`` is the time since its last answer, 0.0 while it answers, and ``error`` the reason,
    if known. With an error ``rows`` are the last known rows without rates, and ``consumers`` is
    empty. ``heap`` is the memory in use in bytes, if it was asked for. ``seen_s`` is when it
    answered last, in seconds since 1970, or None.
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
        """Whether it has answered before, and fails now."""
        return bool(self.error) and self.seen_s is not None


class Sample(NamedTuple):
    """One sample. ``rows`` has the queues of each included nsqd, ``totals`` of all together.

    ``time_s`` is seconds since 1970, ``at_s`` the same on the monotonic clock. ``reports`` are the
    statistics of the included nsqd. ``failures`` are the errors of excluded nsqd and of nsqlookupd.
    ``nodes`` has every remembered nsqd.
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
        """The start time of each nsqd in seconds since 1970, by address."""
        return {report.address: report.stats.start_time for report in self.reports}


NO_SAMPLE = Sample(0, [], [], (), ())


class SampleFilter(NamedTuple):
    """Names or patterns of topics and channels to sample; none selects all.

    With named channels, the rows of topics themselves are excluded.
    """

    topics: Sequence[str] = ()
    channels: Sequence[str] = ()

    def among(self, rows: list[QueueRow]) -> list[QueueRow]:
        """Return the selected rows."""
        if not self.topics and not self.channels:
            return rows
        return [row for row in rows if self.has(row.topic, row.channel)]

    def has(self, topic: str, channel: str) -> bool:
        """Return whether a channel, or with ``""`` the topic itself, is selected."""
        is_selected = matches(channel, self.channels) if channel else not self.channels
        return is_selected and matches(topic, self.topics)

    def check(self, rows: Sequence[QueueRow], failures: Sequence[DaemonFailure] = ()) -> None:
        """Raise `NotFoundError` for a name or pattern that no row has.

        A monitor must not be silent because its topic is gone or misspelled. ``failures`` are
        daemons that may have it.
        """
        topics = {row.topic for row in rows}
        select_names("topic", self.topics, topics, failures)
        channels = {row.channel for row in rows if matches(row.topic, self.topics)} - {""}
        select_names("channel", self.channels, channels, failures)


@dataclass(slots=True)
class _Node:
    """An nsqd and its last answer.

    ``asked_s`` is the time of the open question, None if there is none; ``tried_s`` is the time of
    the last question.
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
        """The pause before the next question to an nsqd that has left or exceeds its budget."""
        if isinstance(self.error, OverBudget):
            return OVER_BUDGET_S
        return 0.0 if self.is_announced or self.error is None else LOOKUP_S


class Sampler:
    """Takes samples of a cluster, on one thread. `stop` it from any.

    Without ``interval_s`` a sample waits for all daemons. If ``required``, the first sample fails
    if no daemon answers, or if none has a named topic or channel.
    """

    def __init__(
        self,
        cluster: Cluster,
        selection: SampleFilter,
        *,
        required: bool = True,
        interval_s: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._selection = selection
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

    def sample(self, scope: SampleScope = QUEUES_ONLY) -> Sample:
        """Take one sample. With an interval it takes at most half of the interval.

        The first sample waits until a daemon has answered, and `FIRST_WAIT_S` for the others. It
        raises `NotFoundError` for a name or pattern that no daemon has, and the first failure if
        none answers. Later samples contain the failures instead: a long run survives an outage.
        """
        if time.monotonic() - self._looked_up_s >= LOOKUP_S:
            if self._waits_for_all or not self._has_begun:
                self._look_up()
            else:
                self._looked_up_s = math.inf  # until it has
                self._jobs.append(self._look_up)
        self._wait_for(self._ask_all(scope))
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug
        self._cluster.remember(self.answering)
        sample = self._build_sample(scope)
        if not self._has_begun and not self._is_interrupted:
            if self._required and sample.failures and not sample.reports:
                raise sample.failures[0].error
            if self._required or not sample.failures:
                self._check_named(sample.failures)
            self._has_begun = True
        return sample

    def samples(
        self, interval_s: float, count: int | None = None, scope: SampleScope = QUEUES_ONLY
    ) -> Iterator[Sample]:
        """Sample every ``interval_s`` seconds, beginning after one interval, with rates.

        Slow answers do not shift the schedule. Ends after ``count`` samples, or when `stop` is
        called.
        """
        next_s = time.monotonic()
        self.sample(scope)
        sample_count = 0
        while count is None or sample_count < count:
            next_s = max(next_s + interval_s, time.monotonic())
            if self._stopped.wait(next_s - time.monotonic()):
                return
            yield self.sample(scope)
            sample_count += 1

    def stop(self) -> None:
        """End `samples`. With an interval, do not wait any more either."""
        self._stopped.set()

    @property
    def _is_interrupted(self) -> bool:
        return self._stopped.is_set() and not self._waits_for_all

    # -- questions --------------------------------------------------------------------------------

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
        """Add the discovered nsqd, and forget nsqd that left."""
        self._failures = tuple(failures)
        failed = {failure.address for failure in self._failures}
        lookupds = self._cluster.lookupds
        is_known = not lookupds or any(address not in failed for address in lookupds)
        aliases = self._cluster.aliases
        given_addresses = set(self._cluster.given_addresses).difference(aliases)
        now_s = time.monotonic()
        for address, client in known.items():
            if address not in self._nodes:
                meters = RateMeter(self._least_s), ConsumerMeter(self._least_s)
                self._nodes[address] = _Node(address, client, *meters, now_s, now_s)
            self._nodes[address].client = client  # certificates are renewed
        for address, node in self._nodes.items():
            if address in known or address in given_addresses:
                node.is_announced, node.announced_s = True, now_s
            elif is_known or address in aliases:
                node.is_announced = False
        departed = [node for node in self._nodes.values() if not node.is_announced]
        departed.sort(key=lambda node: -node.announced_s)
        for number, node in enumerate(departed):
            is_remembered = (
                number < MAX_NODES
                and node.address not in aliases
                and node.answered_s is not None
                and (node.error is None or now_s - node.answered_s <= FORGOTTEN_S)
            )
            if not is_remembered and node.asked_s is None:
                del self._nodes[node.address]

    def _ask_all(self, scope: SampleScope) -> list[_Node]:
        """Ask every nsqd without an open question; return them.

        Failed nsqd come last. Of the nsqd that have left, only `MAX_LEFT_AT_ONCE` are idle_nodes.
        """
        now_s = time.monotonic()
        with self._changed:
            nodes = [node for node in self._nodes.values() if node.asked_s is None]
            idle_nodes = [node for node in nodes if now_s - node.tried_s >= node.pause_s]
            idle_nodes.sort(key=lambda node: (node.pause_s, node.error is not None, node.tried_s))
            del idle_nodes[sum(not node.pause_s for node in idle_nodes) + MAX_LEFT_AT_ONCE :]
            for node in idle_nodes:
                node.asked_s = node.tried_s = now_s
                self._jobs.append(partial(self._ask, node, scope))
            # If no thread can be started, these jobs start with the next sample.
            for _ in range(min(len(self._jobs), MAX_WORKERS - self._workers)):
                threading.Thread(target=self._work, name="nsq-sample", daemon=True).start()
                self._workers += 1
        return idle_nodes

    def _work(self) -> None:
        """Run jobs until none is left. At most `MAX_WORKERS` threads do so."""
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

    def _ask(self, node: _Node, scope: SampleScope) -> None:
        error: NsqError | None = None
        try:
            latest_s = (node.asked_s or 0.0) + self._cluster.timeout_s
            take = partial(self._take_answer, node, scope)
            self._cluster.ask_one((node.address, scope), take, latest_s)
            if not node.is_announced:
                # Many nsqd may have left, and each would keep a connection.
                node.client.close()
        except NsqError as exc:
            # The error stays with the node; its traceback would keep all frames in memory.
            error = exc.with_traceback(None)
            error.__cause__ = error.__context__ = None
        finally:
            with self._changed:
                node.error = error
                node.asked_s = None
                self._changed.notify_all()

    def _take_answer(self, node: _Node, scope: SampleScope) -> None:
        topics, client = self._selection.topics, node.client
        only = topics[0] if len(topics) == 1 else ""
        is_scoped = scope.consumers and bool(scope.topic)
        began_s = time.monotonic()
        answer = client.ask_stats(
            # For a single name nsqd itself leaves out all other topics.
            "" if is_pattern(only) or node.answered_s is None else only,
            clients=scope.consumers and not is_scoped,
            memory=scope.memory,
        )
        at_s = (began_s + time.monotonic()) / 2
        scoped = client.stats(scope.topic, scope.channel, clients=True) if is_scoped else None
        with self._reading:
            entries = self._check_budget(node, answer)
            stats = node.reader.read(bytes(answer), client.decode_stats)
            del answer
            report = NodeReport(node.address, at_s, stats)
            measured = node.meter.measure(report)
            consumers = []
            if scope.consumers:
                source = report if scoped is None else report._replace(stats=scoped)
                consumers = node.consumer_meter.measure(source)
        with self._changed:
            node.report, node.measured, node.entries = report, measured, entries
            node.consumers, node.consumers_of = consumers, scope
            if scope.memory:
                node.heap = (report.stats.memory or {}).get("heap_in_use_bytes")
            node.answered_s, node.answered_at_s = time.monotonic(), time.time()

    def _check_budget(self, node: _Node, answer: bytearray) -> int:
        """Return the number of entries in an answer. Raises `OverBudget`."""
        entries = answer.count(b"{")
        with self._changed:
            used = sum(other.entries for other in self._nodes.values() if other is not node)
        budget = min(MAX_ENTRIES_OF_NODE, MAX_ENTRIES - used)
        if entries > budget:
            raise OverBudget(
                f"{node.client.url}: its statistics have {entries} entries, and there is room"
                f" for {max(0, budget)}",
                hint="Name the nsqd that you trust with allow_announced (nsq: -X).",
            )
        return entries

    def _wait_for(self, asked: Sequence[_Node]) -> None:
        """Wait for answers. The first sample waits until a daemon has answered."""
        is_first = not self._has_begun and not self._waits_for_all
        ends_s = time.monotonic() + (FIRST_WAIT_S if is_first else self._wait_s)
        with self._changed:
            while any(node.asked_s is not None for node in asked) and not self._is_interrupted:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 and not (is_first and self._lacks_something()):
                    return
                self._changed.wait(min(left_s, 0.2) if left_s > 0 else 0.2)

    # -- the sample -------------------------------------------------------------------------------

    def _all_rows(self) -> list[QueueRow]:
        return [row for node in self._nodes.values() for row in node.measured]

    def _lacks_something(self) -> bool:
        try:
            self._selection.check(self._all_rows())
        except NotFoundError:
            return True
        return all(node.report is None for node in self._nodes.values())

    def _check_named(self, failures: Sequence[DaemonFailure]) -> None:
        """Raise `NotFoundError` as `SampleFilter.check` does.

        A topic that only nsqlookupd has gets an error of its own.
        """
        selection, rows = self._selection, self._all_rows()
        try:
            selection.check(rows, failures)
        except NotFoundError:
            if failures:
                raise
            cluster = self._cluster
            listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
            absent = merge_names(listed) - {row.topic for row in rows}
            for topic in selection.topics:
                if topic in absent:
                    raise NotFoundError(describe_registered_only(f"topic {topic}")) from None
            raise

    def _build_sample(self, scope: SampleScope) -> Sample:
        now_s, time_s = time.monotonic(), time.time()
        reports, states = [], []
        lookupds = self._cluster.lookupds
        with self._changed:
            failures = [
                failure
                for failure in self._failures
                if failure.address in lookupds or failure.address not in self._nodes
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
                prefix = "" if node.is_announced else "no longer announced; "
                is_silent = error is not None or open_s > SLOW_S
                stats = node.report.stats if node.report else None
                states.append(
                    NodeState(
                        node.address,
                        self._selection.among(node.measured),
                        node.consumers if not error and node.consumers_of == scope else [],
                        stats.version if stats else "",
                        stats.health if stats else "",
                        node.heap,
                        now_s - (node.answered_s or node.since_s) if is_silent else 0.0,
                        f"{prefix}{DaemonFailure(node.address, error).reason}" if error else "",
                        node.answered_at_s,
                    )
                )
        rows = [row for state in states if not state.error for row in state.rows]
        sums = self._sums.totals(rows)
        return Sample(time_s, rows, sums, tuple(reports), tuple(failures), tuple(states), now_s)
