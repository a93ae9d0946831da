"""Samples of a cluster that no slow daemon delays: what `nsq top` shows.

Every nsqd is asked on a thread of its own, and has one question at a time. A sample is put together
from the last answer of each after a short wait; one that comes later is in the next sample. An nsqd
that does not answer is in the sample too, with the time since: its queues count for `COUNTED_S`
after its last answer, unless it fails earlier. The nsqd are looked up again every `LOOKUP_S`, on
another thread.

The threads are daemons: who quits does not wait for an nsqd that hangs. Answers are read one after
the other, so that they leave the processor to the thread that draws.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nsqtools.cluster.answer_reading import AnswerReader, SumReader
from nsqtools.cluster.consumer_rows import ConsumerMeter, ConsumerRow
from nsqtools.cluster.directory import Cluster, DaemonFailure, NsqdToAsk
from nsqtools.cluster.name_patterns import is_pattern
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import SampleFilter, check_named
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.protocol.stats import read_stats

COUNTED_S = 5.0
LOOKUP_S = 5.0
SLOW_S = 1.0
"""A question that is open for longer is called unanswered."""
FIRST_WAIT_S = 1.0
FORGOTTEN_S = 600.0
"""How long an nsqd is shown that nsqlookupd does not announce any more."""


class Question(NamedTuple):
    """What is asked besides the queues: the consumers (of a topic, of a channel), the memory."""

    consumers: bool = False
    topic: str = ""
    channel: str = ""
    memory: bool = False


QUEUES_ONLY = Question()


@dataclass(frozen=True, slots=True)
class NodeState:
    """An nsqd as a sample has it.

    ``silent_s`` is the time since its last answer, 0.0 while it answers; ``error`` says why, as far
    as it is known. ``rows`` and ``consumers`` are empty while it is not counted. ``heap`` is the
    memory in use in bytes, where it was asked for.
    """

    address: str
    rows: list[QueueRow]
    consumers: list[ConsumerRow]
    version: str = ""
    health: str = ""
    heap: int | None = None
    silent_s: float = 0.0
    error: str = ""

    @property
    def is_silent(self) -> bool:
        return self.silent_s > 0


@dataclass(frozen=True, slots=True)
class LiveSample:
    """One sample. ``totals`` are the rows of all nsqd together, of those that count.

    ``failures`` are nsqlookupd that did not answer, and addresses at which there is another nsqd.
    """

    time_ns: int
    nodes: tuple[NodeState, ...]
    totals: list[QueueRow]
    failures: tuple[DaemonFailure, ...] = ()


@dataclass(slots=True)
class _Node:
    """An nsqd that is asked again and again, and its last answer."""

    nsqd: NsqdToAsk
    reader: AnswerReader
    consumer_meter: ConsumerMeter
    since_s: float
    is_announced: bool = True
    asked_s: float | None = None
    answered_s: float | None = None
    error: NsqError | None = None
    measured: list[QueueRow] = field(default_factory=list)
    rows: list[QueueRow] = field(default_factory=list)
    """Those of ``measured`` that are wanted."""
    consumers: list[ConsumerRow] = field(default_factory=list)
    consumers_of: Question = QUEUES_ONLY
    version: str = ""
    health: str = ""
    heap: int | None = None


class LiveSampler:
    """Samples a cluster every ``interval_s``. Use it on one thread."""

    def __init__(self, cluster: Cluster, wanted: SampleFilter, interval_s: float) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._least_s = interval_s / 2
        self._wait_s = min(interval_s / 2, 0.5)
        self._nodes: dict[str, _Node] = {}
        self._failures: tuple[DaemonFailure, ...] = ()
        self._looked_up_s = 0.0
        self._is_looking_up = False
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._sums = SumReader()
        self._bug: Exception | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Do not wait any more, in `first`. From any thread."""
        self._is_stopped = True

    def first(self) -> LiveSample:
        """Take the first sample: wait for everybody, but not long once somebody has answered.

        Raises `NotFoundError` for a name or pattern that is nowhere, and the first failure when
        nobody answers.
        """
        self._look_up()
        if not self._nodes and self._failures:
            raise self._failures[0].error
        self._ask_all(QUEUES_ONLY)
        with self._changed:
            ends_s = time.monotonic() + FIRST_WAIT_S
            while any(node.asked_s is not None for node in self._nodes.values()):
                answered = any(node.answered_s is not None for node in self._nodes.values())
                left_s = ends_s - time.monotonic()
                if self._is_stopped or (answered and left_s <= 0 and self._has_what_is_named()):
                    return self._put_together()
                self._changed.wait(max(left_s, 0.0) if answered and left_s > 0 else 0.2)
        self._raise_bug()
        nodes = self._nodes.values()
        errors = [node.error for node in nodes if node.error is not None]
        if errors and all(node.answered_s is None for node in nodes):
            raise errors[0]
        check_named(self._cluster, self._wanted, self._all_rows())
        return self._put_together()

    def sample(self, question: Question = QUEUES_ONLY) -> LiveSample:
        """Take a sample: whatever happens, this returns within half an interval."""
        if time.monotonic() - self._looked_up_s >= LOOKUP_S and not self._is_looking_up:
            self._is_looking_up = True
            self._start(self._look_up)
        asked = self._ask_all(question)
        ends_s = time.monotonic() + self._wait_s
        with self._changed:
            while any(node.asked_s is not None for node in asked):
                if not self._changed.wait(ends_s - time.monotonic()):
                    break
        self._raise_bug()
        return self._put_together(question)

    # -- asking -------------------------------------------------------------------------------

    def _look_up(self) -> None:
        try:
            found, failures = self._cluster.nsqds()
            with self._changed:
                self._take_over(found, failures)
        finally:
            self._is_looking_up = False
            self._looked_up_s = time.monotonic()

    def _take_over(self, found: Iterable[NsqdToAsk], failures: Iterable[DaemonFailure]) -> None:
        """Note which nsqd there are; those that are gone are shown for a while."""
        self._failures = tuple(failures)
        known = {nsqd.address: nsqd for nsqd in found}
        now_s = time.monotonic()
        for address, nsqd in known.items():
            if address not in self._nodes:
                self._nodes[address] = _Node(
                    nsqd, AnswerReader(address, self._least_s), ConsumerMeter(self._least_s), now_s
                )
        named = {failure.address for failure in self._failures}
        for address, node in list(self._nodes.items()):
            # one that did not say its name just now is still the one it was
            node.is_announced = address in known or address in named or not known
            seen_s = node.since_s if node.answered_s is None else node.answered_s
            if not node.is_announced and now_s - seen_s > FORGOTTEN_S:
                del self._nodes[address]

    def _ask_all(self, question: Question) -> list[_Node]:
        """Put the question to every nsqd that has answered the last one; return these."""
        with self._changed:
            asked = [
                node
                for node in self._nodes.values()
                if node.asked_s is None and (node.is_announced or node.error is None)
            ]
            for node in asked:
                node.asked_s = time.monotonic()
        for node in asked:
            self._start(lambda node=node: self._ask(node, question))  # type: ignore[misc]
        return asked

    def _ask(self, node: _Node, question: Question) -> None:
        error: NsqError | None = None
        try:
            self._take_answer(node, question)
        except NsqError as exc:
            error = exc
        finally:
            with self._changed:
                node.error = error
                node.asked_s = None
                self._changed.notify_all()

    def _take_answer(self, node: _Node, question: Question) -> None:
        only = self._wanted.topics[0] if len(self._wanted.topics) == 1 else ""
        client = node.nsqd.client
        is_scoped = question.consumers and bool(question.topic)
        began_s = time.monotonic()
        document = client.stats(
            # nsqd leaves the rest out itself where one name is asked for
            "" if is_pattern(only) or node.answered_s is None else only,
            clients=question.consumers and not is_scoped,
            memory=question.memory,
        )
        at_s = (began_s + time.monotonic()) / 2
        scoped = (
            client.stats(question.topic, question.channel, clients=True) if is_scoped else document
        )
        with self._reading:
            rows = node.reader.read(document, at_s)
            wanted = [row for row in rows if self._wanted.covers(row)]
            consumers = []
            if question.consumers:
                stats = read_stats(scoped)
                consumers = node.consumer_meter.measure(node.nsqd.address, at_s, stats)
            # the rest of the answer, read as tolerantly
            head = read_stats({**document, "topics": None, "producers": None})
        with self._changed:
            node.measured, node.rows = rows, wanted
            node.consumers, node.consumers_of = consumers, question
            node.version, node.health = head.version, head.health
            if question.memory:
                node.heap = (head.memory or {}).get("heap_in_use_bytes")
            node.answered_s = time.monotonic()

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as exc:
                self._bug = exc

        threading.Thread(target=run, name="nsq-live", daemon=True).start()

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    # -- putting together ---------------------------------------------------------------------

    def _all_rows(self) -> list[QueueRow]:
        return [row for node in self._nodes.values() for row in node.measured]

    def _has_what_is_named(self) -> bool:
        try:
            self._wanted.check(self._all_rows())
        except NotFoundError:
            return False
        return True

    def _put_together(self, question: Question = QUEUES_ONLY) -> LiveSample:
        now_s = time.monotonic()
        with self._changed:
            nodes = tuple(self._state(node, question, now_s) for node in self._nodes.values())
            failures = tuple(each for each in self._failures if each.address not in self._nodes)
        rows = [row for node in nodes for row in node.rows]
        return LiveSample(time.time_ns(), nodes, self._sums.totals(rows), failures)

    @staticmethod
    def _state(node: _Node, question: Question, now_s: float) -> NodeState:
        seen_s = node.since_s if node.answered_s is None else node.answered_s
        is_open = node.asked_s is not None and now_s - node.asked_s > SLOW_S
        silent_s = now_s - seen_s if is_open or node.error is not None else 0.0
        is_counted = node.error is None and now_s - seen_s <= COUNTED_S
        error = "" if node.error is None else str(node.error)
        if not node.is_announced and node.error is not None:
            error = f"not announced any more; {error}"
        return NodeState(
            node.nsqd.address,
            node.rows if is_counted else [],
            node.consumers if is_counted and node.consumers_of == question else [],
            node.version,
            node.health,
            node.heap,
            silent_s,
            error,
        )
