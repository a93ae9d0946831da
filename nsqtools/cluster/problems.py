"""What is wrong with a cluster, and what to do about it: `nsq check` and `nsq web` say it. Pure.

    problems_of(sample)                                   # what one sample shows
    problems_of(sample, earlier=Earlier(totals, 10.0))    # and what happened in ten seconds
    problems_of_nodes(nodes, lookupds)                    # where nsqlookupd and nsqd differ
    by_kind(problems)                                     # for people: fifty of a kind are one

A problem has a `Kind`, which says how severe it is and what helps. The alerts that `nsq web` ships
for Prometheus are about the same problems: they are its metric ``nsq_problem``. Rates are those of
a longer time where an ``earlier`` sample is given (`Past` keeps it): consumers that take a batch a
second are not stuck.
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
"""How far back `Past` looks, with a step of `PAST_STEP_S`."""
PAST_STEP_S = 10.0
LEAST_REQUEUED = 10
"""A share of fewer messages says nothing."""


class Severity(enum.IntEnum):
    """How bad it is; the worst first."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        return self.name.lower()


CRITICAL, WARNING, NOTE = Severity


class Kind(enum.Enum):
    """Kinds of problems: severity, what to do, and the name where it is not that of the member."""

    GONE = CRITICAL, "Start it again, or remove it: its messages are there."
    NO_ANSWER = CRITICAL, "Look at its process, its log and the network."
    NOT_WELL = CRITICAL, "Its disk is full or read-only: see its log."
    LEFT = (
        CRITICAL,
        "Start it again; if it left on purpose, take it from the file of --state or --expect.",
    )
    UNREACHABLE = (
        CRITICAL,
        "Look at its process; if it runs, set its -broadcast-address to one that consumers reach.",
    )
    STUCK = (
        CRITICAL,
        "Look at the consumers' handlers, and whether their RDY is 0: nsq stat --show clients.",
    )
    DEEP = CRITICAL, "Add consumers, or find out why they are slow."
    OLD = CRITICAL, "Find out why its consumers do not take these messages."
    # two kinds share a word: how severe it is differs
    GROWS = CRITICAL, "Start its consumers, or delete the channel.", "no consumers"
    NO_CONSUMERS = WARNING, "Start its consumers, or delete the channel."
    FALLS_BEHIND = WARNING, "Add consumers, or raise max_in_flight."
    NO_CONSUMERS_THERE = (
        WARNING,
        "Consumers have to find it: give them every nsqlookupd, or raise their max_in_flight.",
    )
    NO_CHANNELS = WARNING, "Create the channel that is to get them."
    CHANNEL_MISSING = (
        WARNING,
        "Create it there with nsq channel create: what is published before it is there it misses.",
    )
    LACKING = WARNING, "Run nsq topology apply with the file of --expect."
    REQUEUES = WARNING, "The handlers fail: see the consumers' logs."
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


class Problem(NamedTuple):
    """A line. ``topic`` and ``channel`` are those it is about, ``node`` the address of a daemon.

    ``weight`` orders problems of one severity: the number of messages as a rule.
    """

    what: Kind
    text: str
    topic: str = ""
    channel: str = ""
    node: str = ""
    weight: int = 0

    @property
    def kind(self) -> str:
        return self.what.word

    @property
    def severity(self) -> Severity:
        return self.what.severity

    @property
    def where(self) -> str:
        """The queue, the daemon, or both."""
        queue = f"{self.topic}/{self.channel}" if self.channel else self.topic
        return f"{queue} on {self.node}" if queue and self.node else queue or self.node

    @property
    def key(self) -> str:
        """What stays the same from one look to the next."""
        return f"{self.kind} {self.where}"


def of_row(kind: Kind, text: str, row: QueueRow) -> Problem:
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


class Earlier(NamedTuple):
    """The totals of a sample that was taken ``ago_s`` seconds before."""

    totals: Sequence[QueueRow]
    ago_s: float


class _Kept(NamedTuple):
    """What is kept of a sample, for a minute: not the rows of each nsqd."""

    time_s: float
    totals: Sequence[QueueRow]
    started: Mapping[str, int]
    rows: Sequence[QueueRow] = ()


def comparable(first: Sample | _Kept, sample: Sample) -> Sequence[QueueRow]:
    """Return the first totals of the queues whose nsqd have answered both times, in the same run:
    sums of others do not compare."""
    changed = {address for address, _ in first.started.items() ^ sample.started.items()}
    if not changed:
        return first.totals
    rows = (row for each in (first, sample) for row in each.rows if row.node in changed)
    left_out = {(row.topic, row.channel) for row in rows}
    return [row for row in first.totals if (row.topic, row.channel) not in left_out]


class Past:
    """Keeps the totals of a minute, of samples that come one after the other.

    Sums of other nsqd do not compare: one that went away takes its messages with it.
    """

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()

    def add(self, sample: Sample) -> None:
        """Keep a sample, if the one before it is not as new."""
        kept = self._kept
        while kept and kept[-1].time_s >= sample.time_s:  # the clock was set back
            kept.pop()
        while kept and sample.time_s - kept[0].time_s > PAST_S:
            kept.popleft()
        if not kept or sample.time_s - kept[-1].time_s >= PAST_STEP_S:
            kept.append(_Kept(sample.time_s, sample.totals, sample.started))

    def before(self, sample: Sample) -> Earlier | None:
        """Return the oldest totals of the same nsqd, None where there are none yet.

        Queues of an nsqd that was restarted since are left out.
        """
        nsqds = sample.started.keys()
        for kept in self._kept:
            if kept.time_s < sample.time_s and kept.started.keys() == nsqds:
                return Earlier(comparable(kept, sample), sample.time_s - kept.time_s)
        return None


DEFAULT_BOUNDS = Bounds()


def problems_of(
    sample: Sample, earlier: Earlier | None = None, bounds: Bounds = DEFAULT_BOUNDS
) -> list[Problem]:
    """Return what a sample shows, the worst first."""
    window = earlier if earlier is not None and earlier.ago_s >= LEAST_WINDOW_S else Earlier((), 0)
    before = {row.key: row for row in window.totals}
    found = [*_of_daemons(sample), *_of_topology(sample)]
    with_channels = {row.topic for row in sample.totals if row.channel}
    paused: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)  # on each nsqd
    for row in sample.rows:
        paused[row.topic, row.channel].append(row.paused)
    for row in sample.totals:
        then = before.get(row.key)
        lately = then and rates_between(then, row, window.ago_s)
        if then and lately and row.channel and not row.paused:
            found += _of_window(then, row, lately, window.ago_s, bounds)
        found += _of_queue(row, lately or row.rates, row.topic in with_channels, bounds)
        if row.paused:
            states, text = paused[row.topic, row.channel], waiting_text(row.depth)
            if not all(states):
                text = f"on {sum(states)} of {len(states)} nsqd; {text}"
            found.append(of_row(Kind.PAUSED, text, row))
    return in_order(found)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort the worst first, and among equals the one with the most messages."""
    return sorted(problems, key=lambda each: (each.severity, -each.weight, each.topic, each.node))


def by_kind(problems: Iterable[Problem]) -> dict[Kind, list[Problem]]:
    """Group problems, in their order."""
    groups: dict[Kind, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.what, []).append(problem)
    return groups


def _of_daemons(sample: Sample) -> Iterator[Problem]:
    gone = {node.address: node for node in sample.nodes if node.is_gone}
    for failure in sample.failures:
        node = gone.get(failure.address)
        kind = Kind.NO_ANSWER if node is None else Kind.GONE
        text = str(failure.error) if node is None else gone_text(node)
        yield Problem(kind, text, node=failure.address, weight=1 << 62)
    for address, _, stats in sample.reports:
        if stats.health not in ("OK", ""):
            text = f"nsqd says: {stats.health}"
            yield Problem(Kind.NOT_WELL, text, node=address, weight=1 << 61)
    versions = Counter(report.stats.version for report in sample.reports)
    if len(versions) > 1:
        text = ", ".join(f"{count} nsqd of {name}" for name, count in versions.most_common())
        yield Problem(Kind.VERSIONS_DIFFER, text)


def in_a_line(kind: Kind, found: Sequence[Problem]) -> str:
    """Say what is wrong of a kind: how often, and the worst of it."""
    amount = f" ({len(found)})" if len(found) > 1 else ""
    where = f" {found[0].where}" if found[0].where else ""
    return f"{kind.word}{amount}{where}: {found[0].text}"


def gone_text(node: NodeState) -> str:
    """Say since when an nsqd is gone, and why."""
    return f"since {moment(node.seen_s or 0)}: {node.error}"


def moment(time_s: float) -> str:
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
        coming = f" and {rate_text(ingress)} come every second" if ingress > 0 else ""
        yield of_row(Kind.GROWS if coming else Kind.NO_CONSUMERS, waiting + coming, row)
    elif not row.channel and row.depth and not has_channels:
        yield of_row(Kind.NO_CHANNELS, f"{waiting} for the first channel", row)
    if bounds.max_depth is not None and row.depth > bounds.max_depth:
        yield of_row(Kind.DEEP, f"{waiting}, more than {bounds.max_depth:,}", row)
    if rates and rates.timed_out > 0:
        text = f"{rate_text(rates.timed_out)} messages time out every second"
        problem = of_row(Kind.TIMEOUTS, f"{text}, {row.timed_out:,} so far", row)
        yield problem._replace(weight=row.timed_out)


def _of_window(
    then: QueueRow, now: QueueRow, rates: Rates, ago_s: float, bounds: Bounds
) -> Iterator[Problem]:
    """What two looks at the total of a channel show, and the rates between them."""
    waiting = waiting_text(now.depth)
    growth = rates.ingress - rates.finish  # depth grows, too, when messages in flight come back
    returned = now.requeued + now.timed_out - then.requeued - then.timed_out
    if now.clients and now.depth and then.depth and not (rates.finish or rates.requeue):
        took = f", {now.in_flight:,} are in flight" if now.in_flight else ""
        text = f"{waiting}{took}, and none was finished in {ago_s:.0f} s"
        yield of_row(Kind.STUCK, text, now)
    elif now.clients and now.depth > bounds.behind_depth and growth > 0:
        moved = f"{rate_text(rates.ingress)} come, {rate_text(rates.finish)} are finished"
        text = f"{waiting}, {rate_text(growth)} more every second: {moved}"
        yield of_row(Kind.FALLS_BEHIND, text, now)
    if returned >= LEAST_REQUEUED and rates.requeue > bounds.requeue_share * rates.egress:
        share = min(1.0, rates.requeue / rates.egress) if rates.egress else 1.0
        yield of_row(Kind.REQUEUES, f"{share:.0%} of what was sent came back", now)
    if growth > 0 and now.disk > then.disk and now.disk > bounds.behind_depth:
        yield of_row(Kind.ON_DISK, f"{now.disk:,} messages are on disk, and they become more", now)


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
            yield Problem(Kind.CHANNEL_MISSING, text, topic, channel)
        has_consumers = any(row.clients for row in rows)
        for row in rows:
            if has_consumers and row.depth and not row.clients and not row.paused:
                text = f"{row.depth:,} messages wait, and its consumers are elsewhere"
                yield of_row(Kind.NO_CONSUMERS_THERE, text, row)


def problems_of_nodes(nodes: Iterable[NodeStatus], lookupds: Sequence[str]) -> Iterator[Problem]:
    """Yield where nsqlookupd and nsqd differ. ``lookupds`` are those that answered."""
    for node in nodes:
        missing = ", ".join(sorted(set(lookupds) - set(node.lookupds)))
        if missing and (node.lookupds or not node.error):
            text = f"{missing} does not know it"
            yield Problem(Kind.NOT_REGISTERED, text, node=node.address)
        for topic in node.tombstoned:
            yield Problem(Kind.TOMBSTONED, "hidden by nsqlookupd", topic, node=node.address)


def waiting_text(count: int) -> str:
    """``1 message waits``, ``2 messages wait``."""
    return "1 message waits" if count == 1 else f"{count:,} messages wait"


def rate_text(per_s: float) -> str:
    """Return messages a second, with a decimal where there are few."""
    if 0 < per_s < 0.05:
        return "<0.1"
    return f"{per_s:.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}"
