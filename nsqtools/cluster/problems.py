"""Problems of a cluster, found in samples of it. Pure.

    find_problems(sample)                                 # in one sample
    find_problems(sample, EarlierTotals(totals, 10.0))    # and between two, ten seconds apart
    find_registration_problems(nodes, lookupds)           # where nsqlookupd and nsqd differ
    group_by_kind(problems)                               # for people: fifty of a kind are one line

A problem has a `Fault`, which has its severity and its remedy. The alerts that `nsq web` ships for
Prometheus cover the same problems, by its metric ``nsq_problem``. With earlier totals
(`RecentTotals` keeps them), rates are averages over the time between: consumers that take one batch
a second are not stuck.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from nsqtools.cluster.inventory import NodeStatus
from nsqtools.cluster.queue_rows import QueueRow, Rates, rates_between
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.protocol.names import is_ephemeral

LEAST_WINDOW_S = 5.0
"""In less time it does not show whether a queue is stuck or grows."""
PAST_S = 60.0
"""How far back `RecentTotals` looks, with a step of `PAST_STEP_S`."""
PAST_STEP_S = 10.0
LEAST_REQUEUED = 10
"""The share of fewer messages means nothing, unless none was finished."""
LEAST_CIRCULATING = 2
"""Requeues without a finished message from which on a message circulates. One is enough where
others wait: a consumer that backs off tries one message at a time."""
BATCH_S = 45.0
"""A consumer may collect a batch for so long: nsq_to_file finishes every 30 s by default."""


class Severity(enum.IntEnum):
    """How bad it is; the worst first."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        return self.name.lower()


CRITICAL, WARNING, NOTE = Severity


DISCARD = "If nobody needs the messages, nsq channel delete discards them."


class Fault(enum.Enum):
    """Kinds of problems: severity, what to do, and the name where it is not that of the member."""

    GONE = CRITICAL, "Start it again: its messages are in its -data-path."
    NO_ANSWER = CRITICAL, "Look at its process, its log and the network."
    NOT_WELL = (
        CRITICAL,
        "Make room on its disk; consumers that finish messages make room, too. Until then do not"
        " restart it, create channels or unpause topics: it drops what it cannot write.",
    )
    LEFT = (
        CRITICAL,
        "Start it again; if it left on purpose, take it from the file of --state or --expect.",
    )
    UNREACHABLE = (
        CRITICAL,
        "Look at its process; if it runs, set its -broadcast-address to one that consumers reach.",
    )
    # kinds that share a word differ in severity or remedy
    STUCK = (
        CRITICAL,
        "Nothing is delivered: the RDY of its consumers is 0, or they back off after failures:"
        " nsq stat --show clients.",
    )
    HANGS = (
        CRITICAL,
        "Its consumers answer nothing: look for handlers that hang: nsq stat --show clients.",
        "stuck",
    )
    TIMES_OUT = (
        CRITICAL,
        "Its consumers answer nothing in time: look for handlers that hang; slow ones have to"
        " TOUCH, or need a longer msg_timeout.",
        "stuck",
    )
    MAY_HANG = (
        WARNING,
        "Its handlers hang, or collect a batch: look for longer with --window 1m.",
        "stuck",
    )
    DEEP = CRITICAL, "Add consumers, or find out why they are slow."
    OLD = CRITICAL, "Find out why its consumers do not finish these messages."
    GROWS = CRITICAL, f"Start its consumers. {DISCARD}", "no consumers"
    NO_CONSUMERS = WARNING, f"Start its consumers. {DISCARD}"
    FALLS_BEHIND = WARNING, "Add consumers, or raise max_in_flight."
    NO_CONSUMERS_THERE = (
        WARNING,
        "Consumers have to find it: give them every nsqlookupd, or raise their max_in_flight.",
    )
    NO_CHANNELS = WARNING, "Create the channel that is to get them: nsq channel create."
    CHANNEL_MISSING = (
        WARNING,
        "Create it there with nsq channel create: it misses what is published before.",
    )
    LACKING = WARNING, "Run nsq topology apply with the file of --expect."
    REQUEUES = WARNING, "Handlers fail: see the consumers' logs."
    TIMEOUTS = WARNING, "Let handlers TOUCH, or raise msg_timeout."
    PAUSED_LONG = WARNING, "Unpause it, if no work on it is under way."
    NOT_REGISTERED = (
        WARNING,
        "Give that nsqd the nsqlookupd with -lookupd-tcp-address, and see its log.",
    )
    CLOCKS_DIFFER = WARNING, "Let NTP set the clock of its machine."
    VERSIONS_DIFFER = NOTE, "Finish the upgrade."
    RESTARTED = NOTE, "If that was not on purpose, see its log."
    TOMBSTONED = NOTE, "nsqlookupd hides it from consumers for a while."
    ON_DISK = NOTE, "Watch the free space of nsqd's -data-path."
    PAUSED = NOTE, "Unpause it when the work is done."

    def __init__(self, severity: Severity, remedy: str, word: str = "") -> None:
        self.word = word or self.name.lower().replace("_", " ")
        self.severity = severity
        self.remedy = remedy


UNSAFE_ON_FULL_DISK = {
    *(Fault.NO_CHANNELS, Fault.CHANNEL_MISSING, Fault.LACKING),  # they create channels
    *(Fault.UNREACHABLE, Fault.NOT_REGISTERED, Fault.VERSIONS_DIFFER),  # they restart nsqd
    *(Fault.PAUSED, Fault.PAUSED_LONG),  # of a topic: of a channel, consumers get the messages
}


class Problem(NamedTuple):
    """A line. ``topic`` and ``channel`` are those it is about, ``node`` the address of a daemon.

    ``weight`` orders problems of one severity: the number of messages as a rule. ``unwell`` are
    the nsqd that have to be well again before the remedy of the kind may be applied.
    """

    fault: Fault
    text: str
    topic: str = ""
    channel: str = ""
    node: str = ""
    weight: int = 0
    unwell: str = ""

    @property
    def remedy(self) -> str:
        if not self.unwell:
            return self.fault.remedy
        return f"First make room on the disk of {self.unwell}: until then a change loses messages."

    @property
    def kind(self) -> str:
        return self.fault.word

    @property
    def severity(self) -> Severity:
        return self.fault.severity

    @property
    def where(self) -> str:
        """The queue, the daemon, or both."""
        queue = f"{self.topic}/{self.channel}" if self.channel else self.topic
        return f"{queue} on {self.node}" if queue and self.node else queue or self.node

    @property
    def key(self) -> str:
        """What stays the same from one look to the next."""
        return f"{self.kind} {self.where}"


def queue_problem(kind: Fault, text: str, row: QueueRow) -> Problem:
    """Return the problem of a queue, on one nsqd or on all together."""
    return Problem(kind, text, row.topic, row.channel, row.node, row.depth)


class Bounds(NamedTuple):
    """From where on it is a problem. ``max_depth`` is messages of one queue, ``max_age_s`` how long
    one of them waits; None for any.

    A queue falls behind that has more than ``behind_depth`` messages and grows; ``requeue_share``
    is the part of what was sent that came back.
    """

    max_depth: int | None = None
    behind_depth: int = 1000
    requeue_share: float = 0.1
    max_age_s: float | None = None


class EarlierTotals(NamedTuple):
    """The totals of a sample that was taken ``ago_s`` seconds before."""

    totals: Sequence[QueueRow]
    ago_s: float


class _Kept(NamedTuple):
    """What is kept of a sample, for a minute: not the rows of each nsqd.

    ``at_s`` is on the monotonic clock: a clock that is set makes no time pass.
    """

    at_s: float
    totals: Sequence[QueueRow]
    started: Mapping[str, int]
    rows: Sequence[QueueRow] = ()


def comparable_totals(first: Sample | _Kept, sample: Sample) -> Sequence[QueueRow]:
    """Return the first totals of the queues whose nsqd have answered both times, in the same run:
    sums of others do not compare."""
    changed = {address for address, _ in first.started.items() ^ sample.started.items()}
    if not changed:
        return first.totals
    rows = (row for each in (first, sample) for row in each.rows if row.node in changed)
    left_out = {(row.topic, row.channel) for row in rows}
    return [row for row in first.totals if (row.topic, row.channel) not in left_out]


class RecentTotals:
    """Keeps the totals of a minute, of samples that come one after the other.

    Sums of other nsqd do not compare: one that went away takes its messages with it.
    """

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()

    def add(self, sample: Sample) -> None:
        """Keep a sample, if the one before it is not as new."""
        kept = self._kept
        while kept and sample.at_s - kept[0].at_s > PAST_S:
            kept.popleft()
        if not kept or sample.at_s - kept[-1].at_s >= PAST_STEP_S:
            kept.append(_Kept(sample.at_s, sample.totals, sample.started))

    def before(self, sample: Sample) -> EarlierTotals | None:
        """Return the oldest totals of the same nsqd, None where there are none yet.

        Queues of an nsqd that was restarted since are left out.
        """
        nsqds = sample.started.keys()
        for kept in self._kept:
            if kept.at_s < sample.at_s and kept.started.keys() == nsqds:
                return EarlierTotals(comparable_totals(kept, sample), sample.at_s - kept.at_s)
        return None


DEFAULT_BOUNDS = Bounds()


def find_problems(
    sample: Sample, earlier: EarlierTotals | None = None, bounds: Bounds = DEFAULT_BOUNDS
) -> list[Problem]:
    """Return what a sample shows, the worst first."""
    window = (
        earlier if earlier is not None and earlier.ago_s >= LEAST_WINDOW_S else EarlierTotals((), 0)
    )
    before = {row.key: row for row in window.totals}
    found = [*_of_daemons(sample), *_of_topology(sample)]
    with_channels = {row.topic for row in sample.totals if row.channel}
    paused: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)  # on each nsqd
    for row in sample.rows:
        paused[row.topic, row.channel].append(row.paused)
    for row in sample.totals:
        then = before.get(row.key)
        lately = then and rates_between(then, row, window.ago_s)
        stuck: list[Problem] = []
        if then and lately and row.channel and not row.paused:
            stuck = [*_of_consumers(then, row, lately, window.ago_s)]
            found += stuck or _of_window(then, row, lately, window.ago_s, bounds)
        rates = lately or row.rates
        found += _of_queue(row, rates, row.topic in with_channels, bounds)
        if rates and rates.timed_out > 0 and not stuck:
            text = f"{rate_text(rates.timed_out)}/s time out, {row.timed_out:,} so far"
            found.append(queue_problem(Fault.TIMEOUTS, text, row)._replace(weight=row.timed_out))
        if row.paused:
            states, text = paused[row.topic, row.channel], waiting_text(row.depth)
            if not all(states):
                text = f"on {sum(states)} of {len(states)} nsqd; {text}"
            found.append(queue_problem(Fault.PAUSED, text, row))
    return sort_by_severity(with_disk_guards(found, sample))


def with_disk_guards(problems: Iterable[Problem], sample: Sample) -> Iterator[Problem]:
    """Yield problems, with the nsqd on which the remedy of each would lose messages."""
    unwell = {  # with its topics
        address: {topic.topic_name for topic in stats.topics or ()}
        for address, _, stats in sample.reports
        if not stats.is_well
    }
    for problem in problems:
        is_paused_channel = problem.channel and problem.fault in (Fault.PAUSED, Fault.PAUSED_LONG)
        if problem.fault in UNSAFE_ON_FULL_DISK and not is_paused_channel:
            is_everywhere = not problem.topic or problem.fault is Fault.LACKING
            where = [
                address
                for address, topics in unwell.items()
                if (problem.node or address) == address
                and (is_everywhere or problem.topic in topics)
            ]
            problem = problem._replace(unwell=", ".join(where))
        yield problem


def sort_by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Sort the worst first, and among equals the one with the most messages."""
    return sorted(problems, key=lambda each: (each.severity, -each.weight, each.topic, each.node))


def group_by_kind(problems: Iterable[Problem]) -> dict[Fault, list[Problem]]:
    """Group problems, in their order."""
    groups: dict[Fault, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.fault, []).append(problem)
    return groups


def _of_daemons(sample: Sample) -> Iterator[Problem]:
    gone = {node.address: node for node in sample.nodes if node.is_gone}
    for failure in sample.failures:
        node = gone.get(failure.address)
        kind = Fault.NO_ANSWER if node is None else Fault.GONE
        text = str(failure.error) if node is None else gone_text(node)
        yield Problem(kind, text, node=failure.address, weight=1 << 62)
    for address, _, stats in sample.reports:
        if not stats.is_well:
            yield Problem(Fault.NOT_WELL, stats.health, node=address, weight=1 << 61)
    versions = Counter(report.stats.version for report in sample.reports)
    if len(versions) > 1:
        text = ", ".join(f"{count} nsqd of {name}" for name, count in versions.most_common())
        yield Problem(Fault.VERSIONS_DIFFER, text)


def summarize_kind(kind: Fault, found: Sequence[Problem]) -> str:
    """Say what is wrong of a kind: how often, and the worst of it."""
    amount = f" ({len(found)})" if len(found) > 1 else ""
    where = f" {found[0].where}" if found[0].where else ""
    return f"{kind.word}{amount}{where}: {found[0].text}"


def gone_text(node: NodeState) -> str:
    """Describe since when an nsqd is gone, why, and what it had."""
    had = messages_text(sum(row.kept for row in node.rows))
    return f"since {format_utc(node.seen_s or 0)}: {node.error}; {had} then"


def format_utc(time_s: float) -> str:
    """Return a date with its time, UTC; a dash for one that no calendar has."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "\N{EM DASH}"


def _of_queue(
    row: QueueRow, rates: Rates | None, has_channels: bool, bounds: Bounds
) -> Iterator[Problem]:
    """What one look at the total of a queue shows, and its rates."""
    waiting = waiting_text(row.depth)
    ingress = rates.ingress if rates else 0.0
    if row.channel and row.depth and not row.clients and not row.paused:
        growth = f", +{rate_text(ingress)}/s" if ingress > 0 else ""
        yield queue_problem(Fault.GROWS if growth else Fault.NO_CONSUMERS, waiting + growth, row)
    elif not row.channel and row.depth and not has_channels:
        yield queue_problem(Fault.NO_CHANNELS, f"{waiting} for the first channel", row)
    if bounds.max_depth is not None and row.depth > bounds.max_depth:
        yield queue_problem(Fault.DEEP, f"{waiting}, more than {bounds.max_depth:,}", row)


def _of_consumers(then: QueueRow, now: QueueRow, rates: Rates, ago_s: float) -> Iterator[Problem]:
    """Yield what is wrong with a channel whose consumers answered nothing between two looks.

    A time-out is no answer; a requeue is one. What is in flight counts as what waits does: a
    consumer may TOUCH forever. A consumer that takes what comes may collect a batch, so before
    `BATCH_S` it is judged only if the channel has never finished a message.
    """
    timed_out, requeued = now.timed_out - then.timed_out, now.requeued - then.requeued
    is_busy = all(row.clients and row.depth + row.in_flight for row in (then, now))
    if not is_busy or rates.finish or requeued:
        return
    finished = then.messages - then.depth - then.deferred - then.in_flight  # ever
    may_collect = ago_s < BATCH_S and finished > 0 and not (then.depth and now.depth)
    kind = Fault.HANGS if now.in_flight else Fault.STUCK
    if timed_out:
        kind = Fault.TIMES_OUT
    elif now.in_flight and may_collect:
        if rates.ingress:
            return
        kind = Fault.MAY_HANG
    in_flight = f", {now.in_flight:,} in flight" if now.in_flight else ""
    came_back = f", {timed_out:,} timed out" if timed_out else ""
    text = f"{waiting_text(now.depth)}{in_flight}; 0 finished{came_back} in {ago_s:.0f} s"
    yield queue_problem(kind, text, now)


def _of_window(
    then: QueueRow, now: QueueRow, rates: Rates, ago_s: float, bounds: Bounds
) -> Iterator[Problem]:
    """What two looks at the total of a channel show, and the rates between them."""
    growth = rates.ingress - rates.finish  # depth grows, too, when messages in flight come back
    if now.clients and now.depth > bounds.behind_depth and growth > 0:
        moved = f"{rate_text(rates.ingress)}/s in, {rate_text(rates.finish)}/s finished"
        text = f"{waiting_text(now.depth)}, +{rate_text(growth)}/s: {moved}"
        yield queue_problem(Fault.FALLS_BEHIND, text, now)
    requeued, sent = now.requeued - then.requeued, rates.egress * ago_s
    least = LEAST_REQUEUED if rates.finish else 1 if now.depth else LEAST_CIRCULATING
    if requeued >= least and requeued > bounds.requeue_share * sent:
        share = min(1.0, requeued / sent) if sent else 1.0
        yield queue_problem(Fault.REQUEUES, f"{share:.0%} of deliveries requeued", now)
    if growth > 0 and now.disk > then.disk and now.disk > bounds.behind_depth:
        yield queue_problem(Fault.ON_DISK, f"{now.disk:,} on disk, and growing", now)


def _of_topology(sample: Sample) -> Iterator[Problem]:
    """Where the nsqd of one topic differ. Ephemeral channels come and go with their consumers."""
    having: defaultdict[str, set[str]] = defaultdict(set)  # the topics, among the rows or not
    for address, _, stats in sample.reports:
        for each in stats.topics or ():
            having[each.topic_name].add(address)
    queues: defaultdict[tuple[str, str], list[QueueRow]] = defaultdict(list)
    for row in sample.rows:
        if row.channel:
            queues[row.topic, row.channel].append(row)
    for (topic, channel), rows in queues.items():
        lacking = having[topic].difference(row.node for row in rows)
        if lacking and not is_ephemeral(channel):
            text = f"not on {', '.join(sorted(lacking))}"
            yield Problem(Fault.CHANNEL_MISSING, text, topic, channel)
        has_consumers = any(row.clients for row in rows)
        for row in rows:
            if has_consumers and row.depth and not row.clients and not row.paused:
                text = f"{waiting_text(row.depth)}, its consumers are connected elsewhere"
                yield queue_problem(Fault.NO_CONSUMERS_THERE, text, row)


def find_registration_problems(
    nodes: Iterable[NodeStatus], lookupds: Sequence[str]
) -> Iterator[Problem]:
    """Yield where nsqlookupd and nsqd differ. ``lookupds`` are those that answered."""
    for node in nodes:
        missing = ", ".join(sorted(set(lookupds) - set(node.lookupds)))
        if missing and (node.lookupds or not node.error):
            text = f"{missing} does not know it"
            yield Problem(Fault.NOT_REGISTERED, text, node=node.address)
        for topic in node.tombstoned:
            yield Problem(Fault.TOMBSTONED, "hidden by nsqlookupd", topic, node=node.address)


def waiting_text(count: int) -> str:
    """``1 waiting``, ``6,629 waiting``."""
    return f"{count:,} waiting"


def messages_text(count: int) -> str:
    """``1 message``, ``6,629 messages``."""
    return f"{count:,} message{'s' if count != 1 else ''}"


def rate_text(per_s: float) -> str:
    """Return messages a second, with a decimal where there are few."""
    if 0 < per_s < 0.05:
        return "<0.1"
    return f"{per_s:.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}"
