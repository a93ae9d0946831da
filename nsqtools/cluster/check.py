"""One diagnosis of a cluster for `nsq check`: two samples, the registrations and the previous run.

    state = None                              # or the state that the previous run returned
    verdict = judge(collect_evidence(cluster, state, window_s=10.0, ...))
    verdict.problems, verdict.not_judged, verdict.state

`collect_evidence` asks the daemons, and `judge` passes the `Evidence` to each of `DETECTORS`, which
do no input or output. `bundle_documents` collects what a colleague needs to help, without secrets.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

from nsqtools.client.connection import require_one
from nsqtools.cluster.admin import Action, AdminPlan
from nsqtools.cluster.directory import Answers, Cluster, DaemonFailure
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.cluster.lake import Lake, find_lake_problems
from nsqtools.cluster.problems import (
    LEAST_WINDOW_S,
    WHOLE_NODE,
    Bounds,
    EarlierTotals,
    Fault,
    Problem,
    comparable_totals,
    find_problems,
    find_registration_problems,
    queue_problem,
    sort_by_severity,
    with_disk_guards,
)
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.cluster.texts import clock_text, duration_text, last_seen_text, waiting_text
from nsqtools.cluster.topology import Topology, plan_topology
from nsqtools.errors import HTTPError, NotFoundError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.names import parse_address

# An hour is longer than an intervention takes, and shorter than the night over which a queue
# that somebody forgot to unpause grows.
PAUSED_LONG_S = 3600.0
# An HTTP Date has whole seconds, and the answer travels meanwhile: a smaller difference than two
# seconds can be an artifact of the measurement.
CLOCK_S = 2.0
SECRET_KEY = re.compile(r"secret|password|passwd|token|auth_identity_url|private", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")

MessageCounts = tuple[float, Mapping[str, int]]
"""A time, and the messages that each nonempty queue had received by then."""


@dataclass(frozen=True, slots=True)
class CheckState:
    """The state that a run leaves for the next. Times are seconds since 1970.

    ``nsqds`` has the start time of each nsqd, by address; ``problems`` the time since when each
    problem exists. ``counts`` has the message counts of some runs, the oldest first, if messages
    have a maximum age. ``asked`` are the nsqd given and the nsqlookupd that answered, which a state
    of 0.3.0 does not have; ``had`` has the messages of each nsqd and the time of that count.
    """

    nsqds: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, float] = field(default_factory=dict)
    time_s: float = 0.0
    counts: Sequence[MessageCounts] = ()
    asked: Sequence[str] = ()
    had: Mapping[str, tuple[int, float]] = field(default_factory=dict)


class Verdict(NamedTuple):
    """The problems, the worst first. ``not_judged`` has a line for each omission."""

    problems: tuple[Problem, ...]
    not_judged: tuple[str, ...]
    sample: Sample
    state: CheckState


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that one run has measured.

    ``sampled`` are the problems of the samples themselves. ``failures`` are daemons that did not
    answer the questions behind ``nodes`` and ``plan``; ``unreachable`` are nsqd that nsqlookupd
    announces at an address that this machine cannot connect to. ``unhealthy`` are commands whose
    /health has a problem, or that do not answer. ``lookupds`` are the nsqlookupd
    that answered, ``addresses`` the nsqd that were asked, with their aliases. ``state`` is empty
    where there is none to compare with, which ``state_gap`` explains.
    """

    sample: Sample
    sampled: Sequence[Problem]
    earlier: EarlierTotals
    window_s: float
    max_age_s: float | None
    selection: SampleFilter
    nodes: Sequence[NodeStatus]
    failures: Sequence[DaemonFailure]
    unreachable: Sequence[tuple[NodeStatus, NsqError]]
    lookupds: Sequence[str]
    answered: frozenset[str]
    addresses: frozenset[str]
    expected_nsqds: frozenset[str]
    plan: AdminPlan
    state: CheckState
    state_gap: str
    counts: Sequence[MessageCounts]
    unhealthy: Sequence[DaemonFailure]
    lake: Lake

    @property
    def silent_lookupds(self) -> list[str]:
        """The nsqlookupd that answered the previous run and not this one.

        One of them may still announce an nsqd that the others do not have.
        """
        return sorted(set(self.state.asked) - self.answered)

    @property
    def has_old_counts(self) -> bool:
        """Whether a run is recorded that is as long ago as messages may wait."""
        return bool(self.counts) and self.sample.time_s - self.counts[0][0] >= (self.max_age_s or 0)


def collect_evidence(
    cluster: Cluster,
    state: CheckState | None,
    *,
    selection: SampleFilter,
    window_s: float,
    bounds: Bounds,
    topology: Topology | None,
    services: Sequence[str],
    lake: Lake,
    stopped: threading.Event,
) -> Evidence:
    """Ask the daemons of a cluster over ``window_s`` seconds; ``stopped`` ends that early.

    ``topology`` is the state that the cluster should have. ``services`` are the HTTP addresses of
    commands with /health. ``lake`` was measured in tables.
    """
    sampler = Sampler(cluster, selection, required=False)
    first, first_s = sampler.sample(), time.monotonic()
    nodes: list[NodeStatus] = []
    failures: list[DaemonFailure] = []
    plan = AdminPlan(())
    # If no daemon answers, these raise an error that is in the sample already.
    with suppress(NsqError):
        nodes, failures = list_nodes(cluster)
    silent = {failure.address for failure in (*failures, *first.failures)}
    lookupds = [address for address in cluster.lookupds if address not in silent]
    if topology is not None:
        with suppress(NsqError):
            plan = plan_topology(cluster, topology)
    unreachable = _try_announced_addresses(cluster, nodes)
    unhealthy = cluster.ask_services(services)
    # The questions above took their time, seconds if a daemon hangs, from the window. If no nsqd
    # answered, there is nothing to compare.
    sample = first
    if window_s and first.reports:
        stopped.wait(first_s + window_s - time.monotonic())
        sample = sampler.sample()
    earlier = EarlierTotals(comparable_totals(first, sample), time.monotonic() - first_s)
    gap = ""
    if state is None:
        gap = "--state was not given"
    elif not {*state.asked} <= {*cluster.given_addresses, *cluster.lookupds}:
        gap = f"the run that left --state asked {', '.join(state.asked)}"
    previous = CheckState() if gap or state is None else state
    addresses = {node.address for node in sample.nodes}.union(
        (failure.address for failure in sample.failures), cluster.aliases
    )
    max_age_s = bounds.max_age_s
    return Evidence(
        sample=sample,
        sampled=find_problems(sample, earlier, bounds),
        earlier=earlier,
        window_s=window_s,
        max_age_s=max_age_s,
        selection=selection,
        nodes=nodes,
        failures=[*failures, *plan.failures],
        unreachable=unreachable,
        lookupds=lookupds,
        answered=frozenset((*cluster.given_addresses, *lookupds)),
        addresses=frozenset(addresses),
        expected_nsqds=frozenset() if topology is None else topology.nsqds,
        plan=plan,
        state=previous,
        state_gap=gap,
        unhealthy=unhealthy,
        lake=lake,
        counts=() if max_age_s is None else _append_counts(previous.counts, sample, max_age_s),
    )


def judge(evidence: Evidence) -> Verdict:
    """Diagnose a cluster.

    Raises `NotFoundError` for a topic or channel that no daemon has. A daemon that does not answer
    is a problem, not an error, and may have what is named.
    """
    problems = [problem for detector in DETECTORS for problem in detector(evidence)]
    # A channel that a topology names is reported once, as lacking.
    lacking = {problem.queue for problem in problems if problem.fault is Fault.LACKING}
    problems = [
        problem
        for problem in problems
        if not (problem.fault is Fault.CHANNEL_MISSING and problem.queue in lacking)
        and (not problem.topic or evidence.selection.has(*problem.queue))
    ]
    not_judged = tuple(_omissions(evidence))
    next_state = _next_state(evidence, problems)
    guarded = with_disk_guards(_with_last_counts(problems, next_state, evidence), evidence.sample)
    return Verdict(tuple(sort_by_severity(guarded)), not_judged, evidence.sample, next_state)


def _try_announced_addresses(
    cluster: Cluster, nodes: Iterable[NodeStatus]
) -> list[tuple[NodeStatus, NsqError]]:
    """Connect to each nsqd where nsqlookupd announces it; return those that cannot be reached."""
    announced = {node.tcp_address: node for node in nodes if node.lookupds}

    def connect(node: NodeStatus) -> None:
        address = cluster.reachable(parse_address(node.tcp_address))
        require_one([str(address)], cluster.timeout_s)

    failures = cluster.ask(announced, connect)[1]
    return [(announced[address], error) for address, error in failures]


# -- detectors ------------------------------------------------------------------------------------


def _find_lacking(evidence: Evidence) -> Iterator[Problem]:
    """Yield the topics and channels that a topology has and the cluster lacks."""
    daemons: dict[tuple[str, str, Action], list[str]] = {}
    for step in evidence.plan.steps:
        queue = step.topic, step.channel, step.action
        daemons.setdefault(queue, []).append(f"{step.daemon} {step.address}")
    words = {Action.CREATE: "missing", Action.PAUSE: "not paused", Action.UNPAUSE: "paused"}
    for (topic, channel, action), names in daemons.items():
        yield Problem(Fault.LACKING, f"{words[action]} on {', '.join(names)}", topic, channel)


def _find_sampled(evidence: Evidence) -> Iterator[Problem]:
    """Yield the problems of the samples, except nsqd that `_find_unreachable` yields."""
    unreachable = {node.address for node, _ in evidence.unreachable}
    time_s = evidence.sample.time_s
    for problem in evidence.sampled:
        since_s = evidence.state.problems.get(problem.key, time_s)
        if problem.fault is Fault.PAUSED and time_s - since_s >= PAUSED_LONG_S:
            problem = problem._replace(fault=Fault.PAUSED_LONG)
        is_silent = problem.fault in (Fault.NO_ANSWER, Fault.GONE)
        if not is_silent or problem.node not in unreachable:
            yield problem


def _find_unreachable(evidence: Evidence) -> Iterator[Problem]:
    for node, error in evidence.unreachable:
        text = f"announced by {', '.join(node.lookupds)}; {error}"
        yield Problem(Fault.UNREACHABLE, text, node=node.address, weight=WHOLE_NODE)


def _find_unregistered(evidence: Evidence) -> Iterator[Problem]:
    return find_registration_problems(evidence.nodes, evidence.lookupds)


def _find_returned(evidence: Evidence) -> Iterator[Problem]:
    """Yield the topics that were tombstoned in the previous run and are announced again.

    A tombstone ends after a while, and a producer creates a deleted topic again.
    """
    hidden = {(topic, node.address) for node in evidence.nodes for topic in node.tombstoned}
    topics = (row for row in evidence.sample.rows if not row.channel)
    for row in topics:
        queue = Problem(Fault.TOMBSTONED, "", row.topic, node=row.node)
        if queue.key in evidence.state.problems and (row.topic, row.node) not in hidden:
            yield queue._replace(fault=Fault.RETURNED, text="announced again since its tombstone")


def _find_clock_differences(evidence: Evidence) -> Iterator[Problem]:
    """Yield the nsqd whose clock differs from that of most machines, this one included."""
    ahead = {node.address: node.ahead_s for node in evidence.nodes if node.ahead_s is not None}
    # With a single nsqd the clock of this machine decides.
    median_s = median_low([0.0, *ahead.values()]) if len(ahead) > 1 else 0.0
    for address, ahead_s in ahead.items():
        difference_s = ahead_s - median_s
        if abs(difference_s) > CLOCK_S:
            direction = "ahead" if difference_s > 0 else "behind"
            text = f"clock {abs(difference_s):,.0f} s {direction}"
            weight = int(abs(difference_s))
            yield Problem(Fault.CLOCKS_DIFFER, text, node=address, weight=weight)


def _find_silent(evidence: Evidence) -> Iterator[Problem]:
    """Yield daemons that answered the samples and failed another question."""
    named = {problem.node for problem in evidence.sampled if not problem.topic}
    named |= {node.address for node, _ in evidence.unreachable}
    errors = {failure.address: failure.reason for failure in evidence.failures}
    errors |= {node.address: node.error for node in evidence.nodes if node.error}
    for address, error in errors.items():
        if address not in named:
            yield Problem(Fault.NO_ANSWER, error, node=address, weight=WHOLE_NODE)


def _find_unhealthy(evidence: Evidence) -> Iterator[Problem]:
    for address, error in evidence.unhealthy:
        text = error.code if isinstance(error, HTTPError) and error.code else str(error)
        yield Problem(Fault.NOT_HEALTHY, text, node=address, weight=WHOLE_NODE)


def _find_in_lake(evidence: Evidence) -> Iterator[Problem]:
    return find_lake_problems(evidence.lake, evidence.sample.time_s)


def _find_old(evidence: Evidence) -> Iterator[Problem]:
    """Yield the queues with a message that was there when the oldest counts were taken.

    nsqd does not show the age of a message, and none is looked at. But if more messages wait or are
    in flight than arrived since those counts, one of them is older, whatever their order.
    """
    if not evidence.has_old_counts:
        return
    time_s, counts = evidence.counts[0]
    age_s = evidence.sample.time_s - time_s
    age = f"{age_s:.0f}s" if age_s < 60 else duration_text(age_s)
    for name, row in _nonempty_queues(evidence.sample):
        count = counts.get(name)
        if count is not None and 0 <= row.messages - count < row.depth + row.in_flight:
            in_flight = f", {row.in_flight:,} in flight" if row.in_flight else ""
            text = f"{waiting_text(row.depth)}{in_flight}; oldest over {age}"
            yield queue_problem(Fault.OLD, text, row)


def _find_departed(evidence: Evidence) -> Iterator[Problem]:
    """Yield the nsqd of the topology or the previous run that no nsqlookupd announces."""
    if not evidence.lookupds:
        return
    expected = evidence.expected_nsqds - evidence.addresses
    texts = dict.fromkeys(sorted(expected), "no nsqlookupd announces it")
    if not evidence.silent_lookupds:
        for address in evidence.state.nsqds.keys() - evidence.addresses - expected:
            texts[address] = "no longer announced by any nsqlookupd"
    for address, text in texts.items():
        yield Problem(Fault.LEFT, text, node=address, weight=WHOLE_NODE)


def _find_restarted(evidence: Evidence) -> Iterator[Problem]:
    for address, start_s in evidence.sample.started.items():
        if start_s > evidence.state.nsqds.get(address, start_s):
            text = f"at {clock_text(start_s, evidence.sample.time_s)}"
            yield Problem(Fault.RESTARTED, text, node=address)


DETECTORS: Sequence[Callable[[Evidence], Iterator[Problem]]] = (
    _find_lacking,
    _find_sampled,
    _find_unreachable,
    _find_unregistered,
    _find_returned,
    _find_clock_differences,
    _find_silent,
    _find_unhealthy,
    _find_in_lake,
    _find_old,
    _find_departed,
    _find_restarted,
)


def _omissions(evidence: Evidence) -> Iterator[str]:
    """Yield what could not be judged, and why.

    Raises `NotFoundError` for a topic or channel that no daemon has, if all have answered.
    """
    sample, lookupds = evidence.sample, evidence.lookupds
    if not sample.reports and not sample.failures:
        yield "any queue: no nsqlookupd announces an nsqd"
    compared = {row.key for row in evidence.earlier.totals}
    if evidence.window_s < LEAST_WINDOW_S:
        yield f"stuck and growing queues: --window is below {LEAST_WINDOW_S:.0f} s"
    elif count := sum(row.key not in compared or row.rates is None for row in sample.totals):
        reason = "they were created, or one of their nsqd joined, left or restarted"
        yield f"stuck and growing among {count} queues: {reason}"
    if not lookupds:
        yield "registration of nsqd: no nsqlookupd was asked, or none responded"
    if silent := [node.address for node in sample.nodes if node.error]:
        yield f"queues of {', '.join(silent)}: no response; sums exclude them"
    if evidence.state_gap:
        yield f"departures, restarts and long pauses: {evidence.state_gap}"
    try:
        evidence.selection.check(sample.rows, sample.failures)
    except NotFoundError as exc:
        if not sample.failures:
            raise
        yield str(exc)
    if evidence.max_age_s is not None and not evidence.has_old_counts:
        yield "age of messages: no run recorded in --state is old enough"
    silent_lookupds = evidence.silent_lookupds
    doubtful = set(evidence.state.nsqds) if silent_lookupds or not lookupds else set()
    doubtful |= set() if lookupds else evidence.expected_nsqds
    if doubtful := doubtful - evidence.addresses:
        names = ", ".join(silent_lookupds)
        reason = f"{names} does not respond" if names else "no nsqlookupd responds"
        yield f"departure of {', '.join(sorted(doubtful))}: {reason}"


# -- the state for the next run -------------------------------------------------------------------


def _next_state(evidence: Evidence, problems: Iterable[Problem]) -> CheckState:
    sample, state = evidence.sample, evidence.state
    counted = {
        node.address: (sum(row.kept for row in node.rows), node.seen_s)
        for node in sample.nodes
        if node.seen_s is not None
    }
    # Of the sampled ones, too: a long pause began as a pause.
    keys = [problem.key for problem in (*problems, *evidence.sampled)]
    return CheckState(
        nsqds={**state.nsqds, **sample.started},
        problems={key: state.problems.get(key, sample.time_s) for key in keys},
        time_s=sample.time_s,
        counts=evidence.counts or state.counts,
        asked=sorted(evidence.answered.union(state.asked)),
        had={**state.had, **counted},
    )


def _append_counts(
    counts: Sequence[MessageCounts], sample: Sample, max_age_s: float
) -> Sequence[MessageCounts]:
    """Return the counts of this run after the previous ones, without those that are too old.

    Ten runs within ``max_age_s`` are kept, so the age is exact to a tenth. Of the runs that are old
    enough only the last one is needed.
    """
    now_s = sample.time_s
    # Counts of the future are from before the clock was set back.
    kept = [each for each in counts if each[0] <= now_s]
    if not kept or now_s - kept[-1][0] >= max_age_s / 10:
        kept.append((now_s, {name: row.messages for name, row in _nonempty_queues(sample)}))
    first = sum(now_s - time_s >= max_age_s for time_s, _ in kept) - 1
    return kept[max(0, first) :]


def _nonempty_queues(sample: Sample) -> Iterator[tuple[str, QueueRow]]:
    """Yield the queues of each nsqd with messages that wait or are in flight, by name.

    The name contains the start time of the nsqd, which counts messages from 0 after a restart.
    """
    started = sample.started
    for row in sample.rows:
        if row.depth + row.in_flight:
            yield f"{row.node} {started[row.node]} {row.topic}/{row.channel}", row


def _with_last_counts(
    problems: Iterable[Problem], state: CheckState, evidence: Evidence
) -> Iterator[Problem]:
    """Add the last known number of messages to the problem of an nsqd that does not respond."""
    # GONE has its own count.
    faults = Fault.NO_ANSWER, Fault.LEFT, Fault.UNREACHABLE
    for problem in problems:
        is_silent = problem.node in state.had and problem.node not in evidence.sample.started
        if problem.fault in faults and is_silent:
            count, time_s = state.had[problem.node]
            last = last_seen_text(count, time_s, evidence.sample.time_s)
            problem = problem._replace(text=f"{problem.text}; {last}")
        yield problem


# -- a bundle for a colleague ---------------------------------------------------------------------


def bundle_documents(cluster: Cluster, verdict: Verdict) -> Iterator[tuple[str, Any]]:
    """Yield (name, document): the description that each daemon gives of itself, without secrets."""
    questions: dict[str, Callable[[NsqdHTTPClient], Any]] = {
        "info": NsqdHTTPClient.info,
        "stats": lambda client: client.decode_stats(client.ask_stats(clients=True, memory=True)),
    }
    for name, question in questions.items():
        yield from _answers("nsqd", name, cluster.ask_nsqds(question, required=False))
    nodes = cluster.ask(cluster.lookupds, lambda client: client.get("/nodes"))
    yield from _answers("nsqlookupd", "nodes", nodes)
    yield "time", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(verdict.sample.time_s))


def _answers(daemon: str, name: str, asked: Answers[Any]) -> Iterator[tuple[str, Any]]:
    answers, failures = asked
    for address, answer in answers.items():
        yield f"{daemon}/{_file_name(address)}/{name}.json", without_secrets(answer)
    for failure in failures:
        yield f"{daemon}/{_file_name(failure.address)}/{name}.error", str(failure.error)


def without_secrets(document: Any) -> Any:
    """Return a copy without passwords, tokens, and the part of addresses before an ``@``."""
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
