"""One look at a cluster for `nsq check`: two samples, who knows whom, and the run before.

    memory = None                                         # or what the last run returned
    verdict = run_check(cluster, memory, window_s=10.0, ...)
    verdict.problems, verdict.not_judged, verdict.memory

`bundle_documents` collects what a colleague needs to help, without secrets.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, NamedTuple

from nsqtools.client.connection import require_one
from nsqtools.cluster.admin import Action, AdminPlan
from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.cluster.problems import (
    LEAST_WINDOW_S,
    Bounds,
    EarlierTotals,
    Fault,
    Problem,
    comparable_totals,
    find_problems,
    find_registration_problems,
    format_utc,
    messages_text,
    queue_problem,
    sort_by_severity,
    waiting_text,
    with_disk_guards,
)
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.cluster.topology import Topology, plan_topology
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.names import parse_address

PAUSED_LONG_S = 3600.0
OF_STATE = "which nsqd left or restarted, and what is paused for long"
CLOCK_S = 2.0
"""Clocks are read to a second."""
SECRET_KEY = re.compile(r"secret|password|passwd|token|auth_identity_url|private", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True, slots=True)
class CheckState:
    """What one run leaves to the next. Times are seconds since 1970.

    ``nsqds`` has when each nsqd started, by address; ``problems`` since when each is there. With a
    bound for the age of messages, ``counts`` are the times of some runs, the oldest first, each
    with the messages that every queue in which some waited had got by then. ``asked`` are the nsqd
    given and the nsqlookupd that answered, which a state of 0.3.0 does not have; ``had`` has
    the messages of each nsqd, with the time they were counted.
    """

    nsqds: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, float] = field(default_factory=dict)
    time_s: float = 0.0
    counts: Sequence[tuple[float, Mapping[str, int]]] = ()
    asked: Sequence[str] = ()
    had: Mapping[str, tuple[int, float]] = field(default_factory=dict)


class Verdict(NamedTuple):
    """What was found. ``not_judged`` has a line for each thing that could not be."""

    problems: tuple[Problem, ...]
    not_judged: tuple[str, ...]
    sample: Sample
    memory: CheckState


def run_check(
    cluster: Cluster,
    memory: CheckState | None,
    *,
    wanted: SampleFilter,
    window_s: float,
    bounds: Bounds,
    expected: Topology | None,
    stopped: threading.Event,
) -> Verdict:
    """Look at a cluster for ``window_s`` seconds; ``stopped`` ends that before. ``expected`` is
    what ought to be there.

    Raises `NotFoundError` for a topic or channel that is nowhere. A daemon that does not answer is
    a problem, not an error; it may have what is named.
    """
    sampler = Sampler(cluster, wanted, required=False)
    first, first_s = sampler.sample(), time.monotonic()
    stopped.wait(window_s)
    sample = sampler.sample() if window_s else first
    earlier = EarlierTotals(comparable_totals(first, sample), time.monotonic() - first_s)
    try:
        nodes, failures = list_nodes(cluster)
    except NsqError:  # no daemon answers, which the sample says too
        nodes, failures = [], []
    silent = {failure.address for failure in (*failures, *sample.failures)}
    lookupds = [address for address in cluster.lookupds if address not in silent]
    answered = {*cluster.given, *lookupds}
    is_foreign = not set((memory or CheckState()).asked) <= {*cluster.given, *cluster.lookupds}
    before = CheckState() if memory is None or is_foreign else memory
    lacking: list[Problem] = []
    if expected is not None:
        lacking += _lacking(cluster, expected, sample, failures, is_looked_up=bool(lookupds))
    unreachable = [*_unreachable(cluster, nodes)]
    announced = {(Fault.NO_ANSWER, problem.node) for problem in unreachable}
    shown = find_problems(sample, earlier, bounds)
    found = [
        *(problem for problem in shown if (problem.fault, problem.node) not in announced),
        *unreachable,
        *find_registration_problems(nodes, lookupds),
        *_clocks(nodes),
    ]
    unwell = {node.address: node.error for node in nodes if node.error}
    named = {problem.node for problem in (*shown, *unreachable) if not problem.topic}
    for address, error in {**dict(failures), **unwell}.items():
        if address not in named:  # what else was asked of it was answered
            found.append(Problem(Fault.NO_ANSWER, str(error), node=address, weight=1 << 62))
    not_judged = [*_not_judged(sample, earlier, window_s, lookupds)]
    if memory is None:
        not_judged.append(f"{OF_STATE}: --state was not given")
    elif is_foreign:
        not_judged.append(f"{OF_STATE}: the run that left --state asked {', '.join(memory.asked)}")
    try:
        wanted.check(sample.rows, sample.failures)
    except NotFoundError as exc:
        if not sample.failures:
            raise
        not_judged.append(str(exc))
    if bounds.max_age_s is not None:
        counts = _counts(before, sample, bounds.max_age_s)
        if sample.time_s - counts[0][0] < bounds.max_age_s:
            not_judged.append("how old messages are: no run that left --state is as long ago")
        else:
            found += _old(counts[0], sample)
        before = replace(before, counts=counts)
    told = {(Fault.CHANNEL_MISSING, each.topic, each.channel) for each in lacking}
    others = (each for each in found if (each.fault, each.topic, each.channel) not in told)
    found = [*lacking, *others]
    found = [each for each in found if not each.topic or wanted.has(each.topic, each.channel)]
    # an nsqlookupd that answered then and is silent now may still have an nsqd that others lack
    missing = sorted(set(before.asked) - answered)
    may_have_left = bool(lookupds) and not missing
    unknown = set(before.nsqds) if missing or not lookupds else set()
    unknown |= expected.nsqds if expected is not None and not lookupds else set()
    known = _known_addresses(cluster, sample)
    if unknown := unknown - known:
        why = f"{', '.join(missing)} does not respond" if missing else "no nsqlookupd responds"
        not_judged.append(f"whether {', '.join(sorted(unknown))} left: {why}")
    found += _since(before, sample, found, known, may_have_left=may_have_left)
    problems = {each.key: before.problems.get(each.key, sample.time_s) for each in found}
    nsqds = {**before.nsqds, **sample.started}
    asked = sorted(answered.union(before.asked))
    had = {**before.had, **_messages_on_nodes(sample)}
    after = CheckState(nsqds, problems, sample.time_s, before.counts, asked, had)
    silent_nodes = {at: seen for at, seen in had.items() if at not in sample.started}
    found = [*with_disk_guards(_with_last_known(found, silent_nodes), sample)]
    return Verdict(tuple(sort_by_severity(found)), tuple(not_judged), sample, after)


def _messages_on_nodes(sample: Sample) -> dict[str, tuple[int, float]]:
    """Count the messages of each nsqd that answered, now or the first time."""
    return {
        node.address: (sum(row.kept for row in node.rows), node.seen_s)
        for node in sample.nodes
        if node.seen_s is not None
    }


def _with_last_known(
    problems: Iterable[Problem], had: Mapping[str, tuple[int, float]]
) -> Iterator[Problem]:
    """Yield problems, with what an nsqd had when it was last seen."""
    kinds = Fault.NO_ANSWER, Fault.LEFT, Fault.UNREACHABLE
    for problem in problems:
        if problem.fault in kinds and problem.node in had:
            count, time_s = had[problem.node]
            then = f"{messages_text(count)} when last seen {format_utc(time_s)}"
            problem = problem._replace(text=f"{problem.text}; {then}")
        yield problem


def _clocks(nodes: Iterable[NodeStatus]) -> Iterator[Problem]:
    """Yield the nsqd whose clock differs from that of most, this machine among them."""
    ahead = {node.address: node.ahead_s for node in nodes if node.ahead_s is not None}
    usual_s = median_low([0.0, *ahead.values()]) if len(ahead) > 1 else 0.0
    for address, ahead_s in ahead.items():
        apart_s = ahead_s - usual_s
        if abs(apart_s) > CLOCK_S:
            text = f"its clock is {abs(apart_s):,.0f} s {'ahead' if apart_s > 0 else 'behind'}"
            yield Problem(Fault.CLOCKS_DIFFER, text, node=address, weight=int(abs(apart_s)))


def _counts(
    memory: CheckState, sample: Sample, max_age_s: float
) -> Sequence[tuple[float, Mapping[str, int]]]:
    """Return the counts of this run after those before, from the last one that is old enough on."""
    now_s = sample.time_s
    before = [each for each in memory.counts if each[0] <= now_s]  # a clock was set back
    if not before or now_s - before[-1][0] >= max_age_s / 10:
        before.append((now_s, {name: row.messages for name, row in _waiting(sample)}))
    first = sum(now_s - time_s >= max_age_s for time_s, _ in before) - 1
    return before[max(0, first) :]


def _waiting(sample: Sample) -> Iterator[tuple[str, QueueRow]]:
    """Yield each queue with messages that wait or are in flight, on one nsqd and in one run of it:
    it counts from 0 again."""
    started = sample.started
    for row in sample.rows:
        if row.depth + row.in_flight:
            yield f"{row.node} {started[row.node]} {row.topic}/{row.channel}", row


def _old(then: tuple[float, Mapping[str, int]], sample: Sample) -> Iterator[Problem]:
    """Yield the queues with a message from before.

    Where more wait or are in flight than came since then, one of them did then: in whatever order
    nsqd hands them out, and without a look at any of them.
    """
    time_s, messages = then
    for name, row in _waiting(sample):
        had = messages.get(name)
        if had is not None and 0 <= row.messages - had < row.depth + row.in_flight:
            in_flight = f", {row.in_flight:,} in flight" if row.in_flight else ""
            text = f"{waiting_text(row.depth)}{in_flight}; one since before {format_utc(time_s)}"
            yield queue_problem(Fault.OLD, text, row)


def _lacking(
    cluster: Cluster,
    expected: Topology,
    sample: Sample,
    failures: list[DaemonFailure],
    *,
    is_looked_up: bool,
) -> Iterator[Problem]:
    """Yield what is not as a topology has it; ``failures`` get who was not asked."""
    where: dict[tuple[str, str, Action], list[str]] = {}
    try:
        plan = plan_topology(cluster, expected)
    except NsqError:  # no daemon answers, which the sample says too
        plan = AdminPlan(())
    failures += plan.failures
    for step in plan.steps:
        places = where.setdefault((step.topic, step.channel, step.action), [])
        places.append(f"{step.daemon} {step.address}")
    words = {Action.CREATE: "not", Action.PAUSE: "not paused", Action.UNPAUSE: "paused"}
    for (topic, channel, action), places in where.items():
        yield Problem(Fault.LACKING, f"{words[action]} on {', '.join(places)}", topic, channel)
    for address in (
        sorted(expected.nsqds - _known_addresses(cluster, sample)) if is_looked_up else ()
    ):
        yield Problem(Fault.LEFT, "no nsqlookupd announces it", node=address, weight=1 << 62)


def _known_addresses(cluster: Cluster, sample: Sample) -> set[str]:
    """Return the addresses of nsqd that were asked, with their other names."""
    addresses = {node.address for node in sample.nodes}
    return addresses | {failure.address for failure in sample.failures} | set(cluster.aliases)


def _unreachable(cluster: Cluster, nodes: Iterable[NodeStatus]) -> Iterator[Problem]:
    """Yield the nsqd that nsqlookupd announces at an address where nothing answers from here."""
    announced = {node.tcp_address: node for node in nodes if node.lookupds}

    def connect(node: NodeStatus) -> None:
        place = cluster.reachable(parse_address(node.tcp_address))
        require_one([str(place)], cluster.timeout_s)

    for address, error in cluster.ask(announced, connect)[1]:
        node = announced[address]
        text = f"{', '.join(node.lookupds)} announces it; {error}"
        yield Problem(Fault.UNREACHABLE, text, node=node.address, weight=1 << 62)


def _since(
    memory: CheckState,
    sample: Sample,
    found: Sequence[Problem],
    known: set[str],
    *,
    may_have_left: bool,
) -> Iterator[Problem]:
    """Yield the problems that show only in comparison with the run before."""
    named = {each.node for each in found if each.fault is Fault.LEFT} | known
    for address, start_time in memory.nsqds.items():
        if address not in named and may_have_left:
            text = "no nsqlookupd announces it any more"
            yield Problem(Fault.LEFT, text, node=address, weight=1 << 62)
        elif (start_s := sample.started.get(address, start_time)) > start_time:
            yield Problem(Fault.RESTARTED, f"at {format_utc(start_s)}", node=address)
    for problem in found:
        since_s = memory.problems.get(problem.key, sample.time_s)
        if problem.fault is Fault.PAUSED and sample.time_s - since_s >= PAUSED_LONG_S:
            yield problem._replace(fault=Fault.PAUSED_LONG)


def _not_judged(
    sample: Sample,
    earlier: EarlierTotals,
    window_s: float,
    lookupds: Sequence[str],
) -> Iterator[str]:
    if not sample.reports and not sample.failures:
        yield "anything: no nsqlookupd announces an nsqd"
    known = {row.key for row in earlier.totals}
    if window_s < LEAST_WINDOW_S:
        yield f"what is stuck or grows: --window is below {LEAST_WINDOW_S:.0f} s"
    elif unknown := sum(row.key not in known or row.rates is None for row in sample.totals):
        why = "they are new, or an nsqd of theirs came, left or restarted"
        yield f"what is stuck or grows, of {unknown} queues: {why}"
    if not lookupds:
        yield "whether consumers find each nsqd: no nsqlookupd was asked, or none answered"
    if silent := [node.address for node in sample.nodes if node.error]:
        yield f"the queues of {', '.join(silent)}: no response, and sums leave them out"


# -- a bundle for a colleague ---------------------------------------------------------------------


def bundle_documents(cluster: Cluster, verdict: Verdict) -> Iterator[tuple[str, Any]]:
    """Yield (name, document): what every daemon says of itself, without secrets."""
    questions = {
        "info": NsqdHTTPClient.info,
        "stats": lambda client: client.decode_stats(client.ask_stats(clients=True, memory=True)),
    }
    for name, question in questions.items():
        answers, failures = cluster.ask_nsqds(question, required=False)
        for address, answer in answers.items():
            yield f"nsqd/{_file_name(address)}/{name}.json", without_secrets(answer)
        for failure in failures:
            yield f"nsqd/{_file_name(failure.address)}/{name}.error", str(failure.error)
    lookups, _ = cluster.ask(cluster.lookupds, lambda client: client.get("/nodes"))
    for address, answer in lookups.items():
        yield f"nsqlookupd/{_file_name(address)}/nodes.json", without_secrets(answer)
    yield "time", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(verdict.sample.time_s))


def without_secrets(document: Any) -> Any:
    """Return a copy without passwords, tokens, and what addresses have before an ``@``."""
    if isinstance(document, dict):
        return {
            key: "***" if SECRET_KEY.search(str(key)) else without_secrets(value)
            for key, value in document.items()
        }
    if isinstance(document, list):
        return [without_secrets(value) for value in document]
    return USER_INFO.sub("***@", document) if isinstance(document, str) else document


def _file_name(address: str) -> str:
    return re.sub(r"[^\w.-]+", "_", address)
