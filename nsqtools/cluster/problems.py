"""Problems of a cluster, found in samples of it. Pure.

    find_problems(sample)                                 # in one sample
    find_problems(sample, EarlierTotals(totals, 10.0))    # and between two, ten seconds apart
    find_registration_problems(nodes, lookupds)           # where nsqlookupd and nsqd differ
    group_by_kind(problems)                               # for people: fifty of a kind are one line

A problem has a `Fault`, which has its severity and its remedy. The alerts that `nsq web` ships for
Prometheus cover the same problems, by its metric ``nsq_problem``. With earlier totals
(`RecentTotals` keeps them), rates are averages over the time between: consumers that take one batch
a second are not stuck.

A remedy must not lose messages. An nsqd with a full disk drops messages on their way from a topic
to a channel, and at its exit those that it has in memory only. So the remedies of
`UNSAFE_ON_FULL_DISK` are withheld for such an nsqd, and `nsqtools.cluster.admin` refuses them.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nsqtools.cluster.inventory import NodeStatus
from nsqtools.cluster.queue_rows import QueueRow, Rates, rates_between
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.cluster.texts import last_seen_text, rate_text, waiting_text
from nsqtools.http.http_api import PORTS
from nsqtools.protocol.names import is_ephemeral

# A healthy consumer of a quiet queue may answer nothing for seconds; over a shorter time every
# queue with a single slow handler would look stuck.
LEAST_WINDOW_S = 5.0
# A minute evens out consumers that finish in batches. Only the totals of every tenth second are
# kept, to bound the memory for a cluster with many queues.
PAST_S = 60.0
PAST_STEP_S = 10.0
# One failure among five deliveries is 20 %, and no reason for a warning.
LEAST_REQUEUED = 10
# Requeues without any finished message from which on a message counts as circulating. One is
# enough where other messages wait, because a consumer in backoff tries one message at a time.
LEAST_CIRCULATING = 2
# A consumer may collect a batch: nsq_to_file finishes its messages every 30 s by default. The other
# 15 s are for its fsync and for the distance between two samples.
BATCH_S = 45.0
# Daemons come before queues: no queue has so many messages.
WHOLE_NODE = 1 << 62


class Severity(enum.IntEnum):
    """The severity of a problem; the worst has the lowest number."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        return self.name.lower()


CRITICAL, WARNING, NOTE = Severity


DISCARD = "If nobody needs the messages, nsq channel delete discards them."


class Fault(enum.Enum):
    """Kinds of problems: severity, remedy, and the word for users if it is another one."""

    GONE = CRITICAL, "Start it again: its messages are in its -data-path."
    NO_ANSWER = CRITICAL, "Look at its process, its log and the network."
    WRONG_PORT = CRITICAL, PORTS, "no answer"
    NOT_WELL = (
        CRITICAL,
        "Make room on its disk; consumers that finish messages make room, too. Until then do not"
        " restart it, create channels or unpause topics: it drops messages that it cannot write.",
    )
    LEFT = (
        CRITICAL,
        "Start it again; if it left on purpose, remove it from the file of --state or --expect.",
    )
    UNREACHABLE = (
        CRITICAL,
        "Look at its process; if it runs, set its -broadcast-address to one that consumers reach.",
    )
    NOT_HEALTHY = (
        CRITICAL,
        "It continues when the cause is gone: an nsqd that it cannot reach, a full disk, or more"
        " work than it can do. Its log has the details.",
    )
    NOT_READABLE = CRITICAL, "Look at the place, and at the credentials of this command."
    LOGS_WAIT = (
        CRITICAL,
        "The log of nsq to-file says why they do not land."
        " Repair damaged ones: nsq archive repair.",
        "logs wait",
    )
    TABLE_OLD = (
        CRITICAL,
        "Look whether its nsq to-file or nsq spark ingest runs, and reaches every nsqd.",
        "table is old",
    )
    MISFITS = (
        WARNING,
        "Their _error names the fields: correct the publisher, or make tables of the topics with"
        " wider types, as in nsq-lake(7).",
    )
    # Faults with the same word differ in severity or remedy.
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
        "Its consumers answer too late: look for handlers that hang; slow ones have to TOUCH, or"
        " need a longer msg_timeout.",
        "stuck",
    )
    MAY_HANG = (
        WARNING,
        "Its handlers hang, or collect a batch: check for longer with --window 1m.",
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
    NO_CHANNELS = WARNING, "Create the channel that needs them: nsq channel create."
    CHANNEL_MISSING = (
        WARNING,
        "Create it there with nsq channel create: it misses all messages published before.",
    )
    LACKING = WARNING, "Run nsq topology apply with the file of --expect."
    REQUEUES = (
        WARNING,
        "Handlers fail: see the consumers' logs. Give up a message that always fails: max_attempts"
        " and a dead-letter topic.",
    )
    TIMEOUTS = WARNING, "Let handlers TOUCH, or raise msg_timeout."
    PAUSED_LONG = WARNING, "Unpause it, unless somebody still works on it."
    NOT_REGISTERED = (
        WARNING,
        "Give that nsqd the nsqlookupd with -lookupd-tcp-address, and see its log.",
    )
    CLOCKS_DIFFER = WARNING, "Let NTP set the clock of its machine."
    VERSIONS_DIFFER = NOTE, "Finish the upgrade."
    RESTARTED = NOTE, "If that was not on purpose, see its log."
    TOMBSTONED = (
        NOTE,
        "nsq tombstone deletes the topic there, too; otherwise it is visible again when the"
        " tombstone ends.",
    )
    RETURNED = (
        NOTE,
        "Stop the producers that publish it there before nsq tombstone.",
    )
    LEFTOVER = (
        NOTE,
        "Start its consumer, or delete it: nsqd drops messages that do not fit into its memory.",
    )
    ON_DISK = NOTE, "Watch the free space of nsqd's -data-path."
    PAUSED = NOTE, "Unpause it when the work is done."

    def __init__(self, severity: Severity, remedy: str, word: str = "") -> None:
        self.word = word or self.name.lower().replace("_", " ")
        self.severity = severity
        self.remedy = remedy


# Their remedies create channels, restart nsqd, or unpause a topic. An unpaused channel is safe: its
# messages go to consumers.
UNSAFE_ON_FULL_DISK = (
    {Fault.NO_CHANNELS, Fault.CHANNEL_MISSING, Fault.LACKING}
    | {Fault.UNREACHABLE, Fault.NOT_REGISTERED, Fault.VERSIONS_DIFFER}
    | {Fault.PAUSED, Fault.PAUSED_LONG}
)


class Problem(NamedTuple):
    """A problem of a queue (``topic``, ``channel``), of a daemon (``node``, its address), or both.

    ``weight`` orders problems of one severity, by the number of messages as a rule. ``unwell``
    names the nsqd that need room on their disks before the remedy is safe. ``named_remedy`` is the
    remedy of the fault with the names of this problem in it, if it has such names.
    """

    fault: Fault
    text: str
    topic: str = ""
    channel: str = ""
    node: str = ""
    weight: int = 0
    unwell: str = ""
    named_remedy: str = ""

    @property
    def remedy(self) -> str:
        if not self.unwell:
            return self.named_remedy or self.fault.remedy
        return f"First make room on the disk of {self.unwell}: until then a change loses messages."

    @property
    def kind(self) -> str:
        return self.fault.word

    @property
    def severity(self) -> Severity:
        return self.fault.severity

    @property
    def queue(self) -> tuple[str, str]:
        return self.topic, self.channel

    @property
    def where(self) -> str:
        """The queue, the daemon, or both, in words."""
        queue = f"{self.topic}/{self.channel}" if self.channel else self.topic
        return f"{queue} on {self.node}" if queue and self.node else queue or self.node

    @property
    def key(self) -> str:
        """The identity of a problem: its text changes from one sample to the next."""
        return f"{self.kind} {self.where}"


def queue_problem(kind: Fault, text: str, row: QueueRow) -> Problem:
    """Return a problem of a queue, on one nsqd or on all together."""
    return Problem(kind, text, row.topic, row.channel, row.node, row.depth)


class Bounds(NamedTuple):
    """Limits beyond which a measurement is a problem.

    ``max_depth`` limits the messages in a queue and ``max_age_s`` the time that one of them waits;
    None is no limit. A growing queue falls behind if it has more than ``behind_depth`` messages.
    ``requeue_share`` is the tolerated share of deliveries that are requeued.
    """

    max_depth: int | None = None
    behind_depth: int = 1000
    requeue_share: float = 0.1
    max_age_s: float | None = None


class EarlierTotals(NamedTuple):
    """The totals of a sample that was taken ``ago_s`` seconds earlier."""

    totals: Sequence[QueueRow]
    ago_s: float


class _Summary(NamedTuple):
    """The totals of a sample, without the rows of each nsqd, for `RecentTotals`.

    ``at_s`` is on the monotonic clock, which nobody can set.
    """

    at_s: float
    totals: Sequence[QueueRow]
    started: Mapping[str, int]
    rows: Sequence[QueueRow] = ()


def comparable_totals(first: Sample | _Summary, sample: Sample) -> Sequence[QueueRow]:
    """Return those first totals that a later sample can be compared with.

    A sum changes when an nsqd joins, leaves or restarts, so queues on such nsqd are excluded. So
    are queues that an nsqd created again: their counters there went back.
    """
    changed = {address for address, _ in first.started.items() ^ sample.started.items()}
    rows = [row for row in (*first.rows, *sample.rows) if row.node in changed]
    counts = {row.key: row.messages for row in first.rows}
    rows += (row for row in sample.rows if row.messages < counts.get(row.key, 0))
    if not rows:
        return first.totals
    excluded = {(row.topic, row.channel) for row in rows}
    return [row for row in first.totals if (row.topic, row.channel) not in excluded]


class RecentTotals:
    """Keep the totals of the last minute of successive samples."""

    def __init__(self) -> None:
        self._summaries: deque[_Summary] = deque()

    def add(self, sample: Sample) -> None:
        """Keep the totals of a sample, unless the last ones are newer than `PAST_STEP_S`."""
        summaries = self._summaries
        while summaries and sample.at_s - summaries[0].at_s > PAST_S:
            summaries.popleft()
        if not summaries or sample.at_s - summaries[-1].at_s >= PAST_STEP_S:
            summaries.append(_Summary(sample.at_s, sample.totals, sample.started))

    def before(self, sample: Sample) -> EarlierTotals | None:
        """Return the oldest totals of the same nsqd, or None if there are none yet.

        Queues of an nsqd that has restarted since are excluded.
        """
        nsqds = sample.started.keys()
        for summary in self._summaries:
            if summary.at_s < sample.at_s and summary.started.keys() == nsqds:
                totals = comparable_totals(summary, sample)
                return EarlierTotals(totals, sample.at_s - summary.at_s)
        return None


DEFAULT_BOUNDS = Bounds()


def find_problems(
    sample: Sample, earlier: EarlierTotals | None = None, bounds: Bounds = DEFAULT_BOUNDS
) -> list[Problem]:
    """Return the problems that a sample shows, the worst first."""
    if earlier is None or earlier.ago_s < LEAST_WINDOW_S:
        earlier = EarlierTotals((), 0)
    earlier_rows = {row.key: row for row in earlier.totals}
    problems = [*_of_daemons(sample), *_of_topology(sample)]
    with_channels = {row.topic for row in sample.totals if row.channel}
    paused: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)  # on each nsqd
    for row in sample.rows:
        paused[row.topic, row.channel].append(row.paused)
    for row in sample.totals:
        then = earlier_rows.get(row.key)
        window_rates = then and rates_between(then, row, earlier.ago_s)
        stuck: list[Problem] = []
        if then and window_rates and row.channel and not row.paused:
            stuck = [*_of_consumers(then, row, window_rates, earlier.ago_s)]
            problems += stuck or _of_window(then, row, window_rates, earlier.ago_s, bounds)
        rates = window_rates or row.rates
        problems += _of_queue(row, rates, row.topic in with_channels, bounds)
        if rates and rates.timed_out > 0 and not stuck:
            text = f"{rate_text(rates.timed_out)}/s time out, {row.timed_out:,} so far"
            problems.append(queue_problem(Fault.TIMEOUTS, text, row)._replace(weight=row.timed_out))
        if row.paused:
            states, text = paused[row.topic, row.channel], waiting_text(row.depth)
            if not all(states):
                text = f"on {sum(states)} of {len(states)} nsqd; {text}"
            problems.append(queue_problem(Fault.PAUSED, text, row))
    return sort_by_severity(with_disk_guards(problems, sample))


def with_disk_guards(problems: Iterable[Problem], sample: Sample) -> Iterator[Problem]:
    """Yield problems, each with the nsqd on which its remedy would lose messages."""
    topics_of_unwell = {
        address: {topic.topic_name for topic in stats.topics or ()}
        for address, _, stats in sample.reports
        if not stats.is_well
    }
    for problem in problems:
        is_paused_channel = problem.channel and problem.fault in (Fault.PAUSED, Fault.PAUSED_LONG)
        if problem.fault in UNSAFE_ON_FULL_DISK and not is_paused_channel:
            is_everywhere = not problem.topic or problem.fault is Fault.LACKING
            unwell = [
                address
                for address, topics in topics_of_unwell.items()
                if (problem.node or address) == address
                and (is_everywhere or problem.topic in topics)
            ]
            problem = problem._replace(unwell=", ".join(unwell))
        yield problem


def sort_by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Sort the worst first; of one severity the problem with the most messages comes first."""
    return sorted(problems, key=lambda p: (p.severity, -p.weight, p.topic, p.node))


def group_by_kind(problems: Iterable[Problem]) -> dict[Fault, list[Problem]]:
    """Group problems by fault; the order stays."""
    groups: dict[Fault, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.fault, []).append(problem)
    return groups


def summarize_kind(fault: Fault, problems: Sequence[Problem]) -> str:
    """Return one line about all problems of a fault: their number, and the worst."""
    count = f" ({len(problems)})" if len(problems) > 1 else ""
    where = f" {problems[0].where}" if problems[0].where else ""
    return f"{fault.word}{count}{where}: {problems[0].text}"


def _of_daemons(sample: Sample) -> Iterator[Problem]:
    gone = {node.address: node for node in sample.nodes if node.is_gone}
    for failure in sample.failures:
        node = gone.get(failure.address)
        silence = Fault.WRONG_PORT if failure.error.hint == PORTS else Fault.NO_ANSWER
        fault = silence if node is None else Fault.GONE
        text = failure.reason if node is None else gone_text(node, sample.time_s)
        yield Problem(fault, text, node=failure.address, weight=WHOLE_NODE)
    for address, _, stats in sample.reports:
        if not stats.is_well:
            yield Problem(Fault.NOT_WELL, stats.health, node=address, weight=WHOLE_NODE - 1)
    versions = Counter(report.stats.version for report in sample.reports)
    if len(versions) > 1:
        text = ", ".join(f"{count} nsqd {name}" for name, count in versions.most_common())
        yield Problem(Fault.VERSIONS_DIFFER, text)


def gone_text(node: NodeState, now_s: float) -> str:
    """Describe an nsqd that has left: why, and how many messages it had when."""
    count = sum(row.kept for row in node.rows)
    return f"{node.error}; {last_seen_text(count, node.seen_s or 0, now_s)}"


def _of_queue(
    row: QueueRow, rates: Rates | None, has_channels: bool, bounds: Bounds
) -> Iterator[Problem]:
    """Yield the problems that the total of a queue and its rates show."""
    waiting = waiting_text(row.depth)
    ingress = rates.ingress if rates else 0.0
    has_reader = row.clients or (has_channels and not row.channel)
    if row.depth and not has_reader and not row.paused and is_ephemeral(row.channel or row.topic):
        yield queue_problem(Fault.LEFTOVER, f"{waiting}, in memory only", row)
    elif row.channel and row.depth and not row.clients and not row.paused:
        growth = f", +{rate_text(ingress)}/s" if ingress > 0 else ""
        yield queue_problem(Fault.GROWS if growth else Fault.NO_CONSUMERS, waiting + growth, row)
    elif not row.channel and row.depth and not has_channels:
        yield queue_problem(Fault.NO_CHANNELS, f"{waiting} for the first channel", row)
    if bounds.max_depth is not None and row.depth > bounds.max_depth:
        yield queue_problem(Fault.DEEP, f"{waiting}, limit {bounds.max_depth:,}", row)


def _of_consumers(then: QueueRow, now: QueueRow, rates: Rates, ago_s: float) -> Iterator[Problem]:
    """Yield the problem of a channel whose consumers answered nothing between two samples.

    A requeue is an answer; a time-out is none. Messages in flight count like waiting ones, because
    a consumer may TOUCH forever.
    """
    timed_out, requeued = now.timed_out - then.timed_out, now.requeued - then.requeued
    is_busy = all(row.clients and row.depth + row.in_flight for row in (then, now))
    if not is_busy or rates.finish or requeued:
        return
    # A consumer that leaves no message waiting may be collecting a batch. If the channel has never
    # finished a message, waiting for the end of the batch would hide a hanging handler.
    finished_ever = then.messages - then.depth - then.deferred - then.in_flight
    may_collect = ago_s < BATCH_S and finished_ever > 0 and not (then.depth and now.depth)
    fault = Fault.HANGS if now.in_flight else Fault.STUCK
    if timed_out:
        fault = Fault.TIMES_OUT
    elif now.in_flight and may_collect:
        if rates.ingress:
            return
        fault = Fault.MAY_HANG
    in_flight = f", {now.in_flight:,} in flight" if now.in_flight else ""
    timeouts = f", {timed_out:,} timed out" if timed_out else ""
    text = f"{waiting_text(now.depth)}{in_flight}; 0 finished{timeouts} in {ago_s:.0f} s"
    yield queue_problem(fault, text, now)


def _of_window(
    then: QueueRow, now: QueueRow, rates: Rates, ago_s: float, bounds: Bounds
) -> Iterator[Problem]:
    """Yield the problems of a channel that two totals and the rates between them show."""
    # Not the difference of depths, which also grows when messages in flight are requeued.
    growth = rates.ingress - rates.finish
    if now.clients and now.depth > bounds.behind_depth and growth > 0:
        parts = f"{rate_text(rates.ingress)}/s in, {rate_text(rates.finish)}/s finished"
        text = f"{waiting_text(now.depth)}, +{rate_text(growth)}/s: {parts}"
        yield queue_problem(Fault.FALLS_BEHIND, text, now)
    requeued, sent = now.requeued - then.requeued, rates.egress * ago_s
    least = LEAST_REQUEUED if rates.finish else 1 if now.depth else LEAST_CIRCULATING
    if requeued >= least and requeued > bounds.requeue_share * sent:
        share = min(1.0, requeued / sent) if sent else 1.0
        yield queue_problem(Fault.REQUEUES, f"{share:.0%} of deliveries requeued", now)
    if growth > 0 and now.disk > then.disk and now.disk > bounds.behind_depth:
        yield queue_problem(Fault.ON_DISK, f"{now.disk:,} on disk, growing", now)


def _of_topology(sample: Sample) -> Iterator[Problem]:
    """Yield the differences between the nsqd of one topic.

    Ephemeral channels are not compared: they exist only where their consumers are connected.
    """
    # Of the reports, not of the rows: a filter by channel drops the rows of topics.
    addresses: defaultdict[str, set[str]] = defaultdict(set)
    for address, _, stats in sample.reports:
        for topic_stats in stats.topics or ():
            addresses[topic_stats.topic_name].add(address)
    queues: defaultdict[tuple[str, str], list[QueueRow]] = defaultdict(list)
    for row in sample.rows:
        if row.channel:
            queues[row.topic, row.channel].append(row)
    for (topic, channel), rows in queues.items():
        lacking = addresses[topic].difference(row.node for row in rows)
        if lacking and not is_ephemeral(channel):
            text = f"missing on {', '.join(sorted(lacking))}"
            yield Problem(Fault.CHANNEL_MISSING, text, topic, channel)
        has_consumers = any(row.clients for row in rows)
        for row in rows:
            if has_consumers and row.depth and not row.clients and not row.paused:
                text = f"{waiting_text(row.depth)}, consumers are connected to other nsqd"
                yield queue_problem(Fault.NO_CONSUMERS_THERE, text, row)


def find_registration_problems(
    nodes: Iterable[NodeStatus], lookupds: Sequence[str]
) -> Iterator[Problem]:
    """Yield the nsqd that some nsqlookupd lack or hide. ``lookupds`` are those that answered."""
    for node in nodes:
        missing = ", ".join(sorted(set(lookupds) - set(node.lookupds)))
        if missing and (node.lookupds or not node.error):
            text = f"not registered with {missing}"
            yield Problem(Fault.NOT_REGISTERED, text, node=node.address)
        for topic in node.tombstoned:
            text = "hidden by nsqlookupd, and still on this nsqd"
            yield Problem(Fault.TOMBSTONED, text, topic, node=node.address)
