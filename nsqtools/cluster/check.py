"""One look at a cluster for `nsq check`: two samples, who knows whom, and the run before.

    memory = Memory()                                     # or what the last run returned
    verdict = take_verdict(cluster, memory, window_s=10.0)
    verdict.problems, verdict.not_judged, verdict.memory

`bundle_documents` collects what a colleague needs to help, without secrets.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.cluster.problems import (
    DEFAULT_BOUNDS,
    LEAST_WINDOW_S,
    Bounds,
    Earlier,
    Kind,
    Problem,
    in_order,
    moment,
    problems_of,
    problems_of_nodes,
)
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.errors import ConnectionFailed, NsqError
from nsqtools.protocol.names import parse_address

PAUSED_LONG_S = 3600.0
SECRET_KEY = re.compile(r"secret|password|passwd|token|auth_identity_url|private", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True, slots=True)
class Memory:
    """What one run tells the next. Times are seconds since 1970.

    ``nsqds`` has when each nsqd started, by address; ``problems`` since when each is there.
    """

    nsqds: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, float] = field(default_factory=dict)
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found. ``not_judged`` has a line for each thing that could not be."""

    problems: tuple[Problem, ...]
    not_judged: tuple[str, ...]
    sample: Sample
    nodes: tuple[NodeStatus, ...]
    memory: Memory


def take_verdict(
    cluster: Cluster,
    memory: Memory | None = None,
    *,
    wanted: SampleFilter | None = None,
    window_s: float = 10.0,
    bounds: Bounds = DEFAULT_BOUNDS,
    stopped: threading.Event | None = None,
) -> Verdict:
    """Look at a cluster for ``window_s`` seconds; ``stopped`` ends that before.

    Raises `NotFoundError` for a topic or channel that is nowhere. A daemon that does not answer is
    a problem, not an error.
    """
    sampler = Sampler(cluster, wanted or SampleFilter(), required=False)
    first = sampler.sample()
    (stopped or threading.Event()).wait(window_s)
    sample = sampler.sample() if window_s else first
    ago_s = (sample.time_ns - first.time_ns) / 1e9
    try:
        nodes, failures = list_nodes(cluster, sampler.answering)
    except NsqError:  # nobody answers, which the sample says too
        nodes, failures = [], []
    silent = {failure.address for failure in (*failures, *sample.failures)}
    lookupds = [address for address in cluster.lookupds if address not in silent]
    unreachable = [*_unreachable(cluster, nodes)]
    announced = {problem.node for problem in unreachable}
    found = [
        *(
            problem
            for problem in problems_of(sample, Earlier(first.totals, ago_s), bounds)
            if problem.what is not Kind.NO_ANSWER or problem.node not in announced
        ),
        *unreachable,
        *problems_of_nodes(nodes, lookupds),
    ]
    found += _since(memory, sample, found) if memory is not None else ()
    return Verdict(
        tuple(in_order(found)),
        tuple(_not_judged(sample, window_s, lookupds, memory)),
        sample,
        tuple(nodes),
        _next(memory or Memory(), sample, found),
    )


def _unreachable(cluster: Cluster, nodes: Iterable[NodeStatus]) -> Iterator[Problem]:
    """Yield the nsqd that nsqlookupd announces at an address where nobody answers from here."""
    announced = {node.address: node for node in nodes if node.lookupds}

    def connect(node: NodeStatus) -> None:
        place = cluster.reachable(parse_address(node.tcp_address))
        try:
            socket.create_connection(place, cluster.timeout_s).close()
        except OSError as exc:
            raise ConnectionFailed(f"cannot connect to {place} ({exc.strerror or exc})") from exc

    answering = {address: node for address, node in announced.items() if not node.error}
    _, failures = cluster.ask(answering, connect)
    errors = {failure.address: str(failure.error) for failure in failures}
    for address, node in announced.items():
        if why := node.error or errors.get(address):
            text = f"{', '.join(node.lookupds)} announces it; {why}"
            yield Problem(Kind.UNREACHABLE, text, node=address, weight=1 << 62)


def _since(memory: Memory, sample: Sample, found: Sequence[Problem]) -> Iterator[Problem]:
    """Yield what only the run before makes a problem."""
    known = {node.address for node in sample.nodes} | {each.address for each in sample.failures}
    started = {report.address: report.stats.start_time for report in sample.reports}
    for address, start_time in memory.nsqds.items():
        if address not in known:
            text = "no nsqlookupd announces it any more"
            yield Problem(Kind.LEFT, text, node=address, weight=1 << 62)
        elif started.get(address, start_time) > start_time:
            yield Problem(Kind.RESTARTED, f"at {moment(started[address])}", node=address)
    now_s = sample.time_ns / 1e9
    for problem in found:
        since_s = memory.problems.get(problem.key, now_s)
        if problem.what is Kind.PAUSED and now_s - since_s >= PAUSED_LONG_S:
            yield Problem(
                Kind.PAUSED_LONG,
                problem.text,
                problem.topic,
                problem.channel,
                weight=problem.weight,
            )


def _not_judged(
    sample: Sample, window_s: float, lookupds: Sequence[str], memory: Memory | None
) -> Iterator[str]:
    if window_s < LEAST_WINDOW_S:
        yield f"what is stuck or grows: --window is below {LEAST_WINDOW_S:.0f} s"
    elif unknown := sum(row.rates is None for row in sample.totals):
        yield f"what is stuck or grows, of {unknown} queues: they are new, or their nsqd restarted"
    if not lookupds:
        yield "whether consumers find each nsqd: no nsqlookupd was asked, or none answered"
    if memory is None:
        yield "which nsqd left or restarted, and what is paused for long: --state was not given"


def _next(before: Memory, sample: Sample, found: Iterable[Problem]) -> Memory:
    now_s = sample.time_ns / 1e9
    started = {report.address: report.stats.start_time for report in sample.reports}
    problems = {each.key: before.problems.get(each.key, now_s) for each in found}
    return Memory({**before.nsqds, **started}, problems, now_s)


# -- a bundle for a colleague ---------------------------------------------------------------------


def bundle_documents(cluster: Cluster, verdict: Verdict) -> Iterator[tuple[str, Any]]:
    """Yield (name, document): what every daemon says of itself, without secrets."""
    from nsqtools.http.http_api import NsqdHTTPClient

    questions = {
        "info": NsqdHTTPClient.info,
        "stats": lambda client: client.stats(clients=True, memory=True),
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
    yield "time", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(verdict.sample.time_ns / 1e9))


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
