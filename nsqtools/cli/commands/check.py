"""``nsq check``: one verdict on a cluster, for people, cron, CI and monitoring."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.commands.topology import read_topology
from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import LIMITS, OUTPUT, ChannelPatterns, Json, TopicPatterns
from nsqtools.cli.parsing.binding import in_panel, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.runtime import Session, stop_on_signals
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import escape_line, load_json, utc_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nsqtools.cluster.check import CheckState, Verdict
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.lake import Lake
    from nsqtools.cluster.problems import Fault, Problem

STATE_VERSION = 1
# Of thousands of equal problems the worst are read; --json has all of them.
MAX_OF_A_KIND = 20
OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


class CheckFormat(Enum):
    """The reader of the verdict."""

    text = "text"
    json = "json"
    nagios = "nagios"
    prometheus = "prometheus"


@in_panel("Bounds")
def check(
    topic: TopicPatterns = None,
    channel: ChannelPatterns = None,
    window: float = opt(
        "DURATION",
        "Time between the two samples.",
        LIMITS,
        "10s",
    ),
    max_depth: int | None = opt("N", "A queue with more than N messages is critical.", min=0),
    behind_depth: int = opt(
        "N", "A queue of more than N messages that grows falls behind.", default=1000, min=0
    ),
    max_age: float | None = opt(
        "DURATION", "A queue with an older message is critical; needs --state."
    ),
    ignore: list[str] | None = opt(
        "GLOB", "Hide problems: 'paused', 'no consumers test*', '* nsqd-3:4151'."
    ),
    expect: Path | None = opt("FILE", "Compare with a topology: see nsq topology export."),
    health: list[str] | None = opt(
        "HOST:PORT", "Also ask /health of a command with --listen-http."
    ),
    lake: list[str] | None = opt(
        "PLACE", "Also judge tables, or the local directory of logs that land."
    ),
    max_lake_age: float | None = opt(
        "DURATION", "A topic of --lake whose newest message is older is critical."
    ),
    state: Path | None = opt("FILE", "Compare with the run that wrote FILE, and replace it."),
    bundle: Path | None = opt("FILE.tar.gz", "Write a support bundle, without secrets.", OUTPUT),
    format: CheckFormat = opt(
        "text|json|nagios|prometheus", "Format of the verdict.", OUTPUT, CheckFormat.text
    ),
    as_json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Diagnose a cluster: name its problems, and a remedy for each.

    Takes two samples. A problem is a line with its severity, kind, place and text, with --state
    also its age. A line with the remedy follows the problems of one kind, of which at most 20 are
    listed. "not judged" lists what could not be checked.

    The exit status is that of monitoring plugins: 0 for no problem or notes only, 1 for warnings, 2
    for critical problems, 3 if nothing could be judged or the usage is wrong.

    Examples:
        nsq check --lookupd-http-address lookup:4161
        nsq check --max-depth 100000 --state /var/lib/nsq/check.json --format nagios
        nsq check --ignore paused --ignore 'no consumers test*' --json | jq '.problems[].kind'
        nsq check --health scheduler-1:8081 --health archiver-1:8081
        nsq check --lake s3://bucket/lake --lake /var/nsq --max-lake-age 1h
        nsq check --bundle cluster.tar.gz
    """
    from nsqtools.cluster.check import collect_evidence, judge
    from nsqtools.cluster.problems import Bounds
    from nsqtools.cluster.sampling import SampleFilter

    if as_json and format not in (CheckFormat.text, CheckFormat.json):
        raise ConfigurationError("--json and --format contradict each other")
    previous = _load_state(state) if state is not None else None
    topology = read_topology(expect) if expect is not None else None
    if max_lake_age is not None and not lake:
        raise ConfigurationError("--max-lake-age needs --lake")
    tables = _measure_lake(lake or (), max_lake_age)
    stopped = threading.Event()
    with cluster.open() as opened:
        with stop_on_signals(stopped.set) as signals:
            evidence = collect_evidence(
                opened,
                previous,
                selection=SampleFilter(topic or (), channel or ()),
                window_s=window,
                bounds=Bounds(max_depth, behind_depth, max_age_s=max_age),
                topology=topology,
                services=health or (),
                lake=tables,
                stopped=stopped,
            )
            verdict = judge(evidence)
        if signals.received is not None:
            return signals.status()
        problems = [each for each in verdict.problems if not _is_ignored(each, ignore or ())]
        status = exit_status(verdict, problems)
        if as_json or format is CheckFormat.json:
            write_json(runtime, check_document(verdict, problems, status, tables))
        else:
            lines = {
                CheckFormat.text: _text,
                CheckFormat.nagios: _nagios,
                CheckFormat.prometheus: _prometheus,
            }[format](verdict, problems, status)
            runtime.write("".join(f"{line}\n" for line in lines).encode())
        if state is not None:
            document = {"version": STATE_VERSION, **asdict(verdict.state)}
            _replace(state, json.dumps(document).encode())
        if bundle is not None:
            _write_bundle(bundle, opened, verdict, tables)
    return status


def _measure_lake(places: Sequence[str], max_age_s: float | None) -> Lake:
    from nsqtools.cluster.lake import Lake

    if not places:
        return Lake()
    from nsqtools.archive.table_health import measure_lake

    return measure_lake(places, time.time(), max_age_s)


def exit_status(verdict: Verdict, problems: Sequence[Problem]) -> int:
    """Return the status of monitoring plugins for these problems, which begin with the worst."""
    from nsqtools.cluster.problems import Severity

    if not (problems or verdict.sample.reports):
        return UNKNOWN
    worst = problems[0].severity if problems else Severity.NOTE
    return {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNING, Severity.NOTE: OK}[worst]


def _is_ignored(problem: Problem, globs: Sequence[str]) -> bool:
    names = problem.kind, problem.key
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


# -- formats --------------------------------------------------------------------------------------


def _text(verdict: Verdict, problems: Sequence[Problem], status: int) -> Iterator[str]:
    groups: dict[tuple[Fault, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.fault, problem.remedy), []).append(problem)
    for (fault, remedy), group in groups.items():
        yield from (_line(problem, verdict) for problem in group[:MAX_OF_A_KIND])
        if (hidden := len(group) - MAX_OF_A_KIND) > 0:
            yield f"          and {hidden:,} more: {fault.word}"
        yield escape_line(f"          {remedy}")
    for line in verdict.not_judged:
        yield escape_line(f"not judged: {line}")
    yield f"{WORDS[status]}: {_summary(verdict, problems)}"


def _line(problem: Problem, verdict: Verdict) -> str:
    from nsqtools.cluster.texts import clock_text

    since_s = verdict.state.problems.get(problem.key, verdict.state.time_s)
    now_s = verdict.state.time_s
    since = f" (since {clock_text(since_s, now_s)})" if since_s < now_s else ""
    where = f" {problem.where}" if problem.where else ""
    word = problem.severity.word.upper()
    return escape_line(f"{word:<8}  {problem.kind}{where}: {problem.text}{since}")


def _summary(verdict: Verdict, problems: Sequence[Problem]) -> str:
    severities = Counter(problem.severity.word for problem in problems)
    counts = ", ".join(f"{count} {word}" for word, count in severities.items()) or "no problems"
    sample = verdict.sample
    nodes = f"{len(sample.reports)} nsqd"
    if len(sample.nodes) > len(sample.reports):
        nodes = f"{len(sample.reports)} of {len(sample.nodes)} nsqd respond"
    return f"{counts}; {nodes}, {len(sample.totals)} topics and channels"


def _nagios(verdict: Verdict, problems: Sequence[Problem], status: int) -> Iterator[str]:
    depth = sum(row.depth for row in verdict.sample.totals)
    counts = Counter(problem.severity.word for problem in problems)
    figures = f"critical={counts['critical']} warning={counts['warning']} depth={depth}"
    worst = "; ".join(f"{problem.kind} {problem.where}".strip() for problem in problems[:3])
    # A bar begins the figures, so no text may contain one.
    text = f"NSQ {WORDS[status]} - {worst or _summary(verdict, problems)}".replace("|", "/")
    yield f"{escape_line(text)} | {figures}"
    lines = [f"{_line(problem, verdict)}. {problem.remedy}" for problem in problems]
    lines += [f"not judged: {line}" for line in verdict.not_judged]
    yield from (escape_line(line).replace("|", "/") for line in lines)


def _prometheus(verdict: Verdict, problems: Sequence[Problem], status: int) -> Iterator[str]:
    yield "# TYPE nsq_check_status gauge"
    yield f"nsq_check_status {status}"
    yield "# TYPE nsq_check_problems gauge"
    counts = Counter((problem.severity.word, problem.kind) for problem in problems)
    for (severity, kind), count in counts.items():
        yield f'nsq_check_problems{{severity="{severity}",kind="{kind}"}} {count}'
    yield "# TYPE nsq_check_time_seconds gauge"
    yield f"nsq_check_time_seconds {verdict.state.time_s:.3f}"


def check_document(
    verdict: Verdict, problems: Sequence[Problem], status: int, lake: Lake
) -> dict[str, Any]:
    """Return the verdict as JSON, of the schema ``check``."""
    since = verdict.state.problems
    return {
        "status": status,
        "problems": [
            {
                "severity": problem.severity.word,
                "kind": problem.kind,
                "topic": problem.topic or None,
                "channel": problem.channel or None,
                "node": problem.node or None,
                "text": problem.text,
                "remedy": problem.remedy,
                "since": utc_text(since.get(problem.key, verdict.state.time_s)),
            }
            for problem in problems
        ],
        "not_judged": list(verdict.not_judged),
        "nodes": len(verdict.sample.reports),
        "queues": len(verdict.sample.totals),
        "tables": [
            {
                "place": rows.place,
                "topic": rows.topic or None,
                "rows": rows.rows,
                "misfits": rows.misfits,
                "newest": None if rows.newest_s is None else utc_text(rows.newest_s),
            }
            for rows in lake.topics
        ],
    }


# -- files ----------------------------------------------------------------------------------------


def _load_state(path: Path) -> CheckState:
    """Read the state of the previous run; an empty state if there is no file yet."""
    from nsqtools.cluster.check import CheckState

    try:
        document = load_json(path.read_bytes())
        if document["version"] != STATE_VERSION:
            raise ValueError(f"version {document['version']}")
        state = CheckState(
            nsqds={address: int(start) for address, start in document["nsqds"].items()},
            problems={key: float(since) for key, since in document["problems"].items()},
            time_s=float(document["time_s"]),
            counts=[
                (float(time_s), {queue: int(count) for queue, count in counts.items()})
                for time_s, counts in document.get("counts", ())
            ],
            asked=[str(address) for address in document.get("asked", ())],
            had={at: (int(n), float(t)) for at, (n, t) in document.get("had", {}).items()},
        )
        times = [state.time_s, *state.problems.values(), *(time_s for time_s, _ in state.counts)]
        for time_s in (*times, *(time_s for _, time_s in state.had.values())):
            utc_text(time_s)  # raises for a time that no calendar has
        return state
    except FileNotFoundError:
        return CheckState()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not a file of nsq check"
        raise ConfigurationError(f"cannot read {path}: {why}", hint="Remove it.") from exc


def _replace(path: Path, content: bytes, mode: int = 0o640) -> None:
    from nsqtools.files.durable import replace_file

    try:
        replace_file(path, content, mode)
    except OSError as exc:
        raise NsqError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _write_bundle(path: Path, cluster: Cluster, verdict: Verdict, lake: Lake) -> None:
    from nsqtools import __version__
    from nsqtools.cluster.check import bundle_documents, without_secrets

    problems = verdict.problems
    status = exit_status(verdict, problems)
    documents = [
        ("nsqtools", f"nsq {__version__}"),
        ("check.json", without_secrets(check_document(verdict, problems, status, lake))),
        *bundle_documents(cluster, verdict),
    ]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, document in documents:
            text = document if isinstance(document, str) else json.dumps(document, indent=1)
            entry = tarfile.TarInfo(f"nsq-check/{name}")
            entry.size = len(content := f"{text}\n".encode())
            entry.mtime = int(verdict.state.time_s)
            archive.addfile(entry, io.BytesIO(content))
    _replace(path, packed.getvalue(), 0o600)
