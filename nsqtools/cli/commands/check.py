"""``nsq check``: one verdict on a cluster, for people, cron, CI and monitoring."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections import Counter
from dataclasses import asdict
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.commands.topology import read_topology
from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import LIMITS, OUTPUT, ChannelPatterns, Json, TopicPatterns
from nsqtools.cli.parsing.binding import heading, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.runtime import Session, stopping
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import escape_line, utc_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nsqtools.cluster.check import CheckState, Verdict
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.problems import Problem

MEMORY_VERSION = 1
OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


class CheckFormat(Enum):
    """Who reads the verdict."""

    text = "text"
    json = "json"
    nagios = "nagios"
    prometheus = "prometheus"


@heading("Bounds")
def check(
    topic: TopicPatterns = None,
    channel: ChannelPatterns = None,
    window: float = opt(
        "DURATION",
        "Time between the two samples, for what grows or makes no progress.",
        LIMITS,
        "10s",
    ),
    max_depth: int | None = opt("N", "A queue with more than N messages is critical.", min=0),
    behind_depth: int = opt(
        "N", "A queue of more than N messages that grows falls behind.", default=1000, min=0
    ),
    max_age: float | None = opt(
        "DURATION", "A queue with a message that waits longer is critical; needs --state."
    ),
    ignore: list[str] | None = opt(
        "GLOB", "Leave out problems: 'paused', 'no consumers test*', '* nsqd-3:4151'."
    ),
    expect: Path | None = opt("FILE", "Compare with a topology: see nsq topology export."),
    state: Path | None = opt("FILE", "Compare with the last run, which left FILE; write it again."),
    bundle: Path | None = opt(
        "FILE.tar.gz", "Write what a colleague needs to help, without secrets.", OUTPUT
    ),
    format: CheckFormat = opt(
        "text|json|nagios|prometheus", "Who reads it.", OUTPUT, CheckFormat.text
    ),
    as_json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Say what is wrong with a cluster, and what to do about it.

    Takes two samples. Each problem is a line: how severe it is, its kind, where, since when (with
    --state), and what helps. What could not be judged is named too.

    The exit status is that of monitoring plugins: 0 for no problem or notes only, 1 for warnings, 2
    when something is critical, 3 when nothing could be judged, wrong usage included.

    Examples:
        nsq check --lookupd-http-address lookup:4161
        nsq check --max-depth 100000 --state /var/lib/nsq/check.json --format nagios
        nsq check --ignore paused --ignore 'no consumers test*' --json | jq '.problems[].kind'
        nsq check --bundle cluster.tar.gz
    """
    from nsqtools.cluster.check import run_check
    from nsqtools.cluster.problems import Bounds
    from nsqtools.cluster.sampling import SampleFilter

    if as_json and format not in (CheckFormat.text, CheckFormat.json):
        raise ConfigurationError("--json and --format contradict each other")
    memory = _load(state) if state is not None else None
    expected = read_topology(expect) if expect is not None else None
    stopped = threading.Event()
    with cluster.open() as opened:
        with stopping(stopped.set) as signals:
            verdict = run_check(
                opened,
                memory,
                wanted=SampleFilter(topic or (), channel or ()),
                window_s=window,
                bounds=Bounds(max_depth, behind_depth, max_age_s=max_age),
                expected=expected,
                stopped=stopped,
            )
        if signals.received is not None:
            return signals.status()
        shown = [each for each in verdict.problems if not _is_ignored(each, ignore or ())]
        status = status_of(verdict, shown)
        form = CheckFormat.json if as_json else format
        if form is CheckFormat.json:
            write_json(runtime, check_document(verdict, shown, status))
        else:
            lines = {
                CheckFormat.text: _text,
                CheckFormat.nagios: _nagios,
                CheckFormat.prometheus: _prometheus,
            }[form](verdict, shown, status)
            runtime.write("".join(f"{each}\n" for each in lines).encode())
        if state is not None:
            memory_now = {"version": MEMORY_VERSION, **asdict(verdict.memory)}
            _replace(state, json.dumps(memory_now).encode())
        if bundle is not None:
            _write_bundle(bundle, opened, verdict)
    return status


def status_of(verdict: Verdict, shown: Sequence[Problem]) -> int:
    """The status of monitoring plugins for these problems, whose worst is the first."""
    from nsqtools.cluster.problems import Severity

    if not (shown or verdict.sample.reports):
        return UNKNOWN
    worst = shown[0].severity if shown else Severity.NOTE
    return {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNING, Severity.NOTE: OK}[worst]


def _is_ignored(problem: Problem, globs: Sequence[str]) -> bool:
    names = problem.kind, problem.key
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


# -- forms ----------------------------------------------------------------------------------------


def _text(verdict: Verdict, shown: Sequence[Problem], status: int) -> Iterator[str]:
    for problem in shown:
        yield _line(problem, verdict)
        yield f"          {problem.remedy}"
    for line in verdict.not_judged:
        yield escape_line(f"not judged: {line}")
    yield f"{WORDS[status]}: {_summary(verdict, shown)}"


def _line(problem: Problem, verdict: Verdict) -> str:
    from nsqtools.cluster.problems import format_utc

    since_s = verdict.memory.problems.get(problem.key, verdict.memory.time_s)
    since = f" (since {format_utc(since_s)})" if since_s < verdict.memory.time_s else ""
    where = f" {problem.where}" if problem.where else ""
    word = problem.severity.word.upper()
    return escape_line(f"{word:<8}  {problem.kind}{where}: {problem.text}{since}")


def _summary(verdict: Verdict, shown: Sequence[Problem]) -> str:
    counts = Counter(each.severity.word for each in shown)
    found = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no problems"
    sample = verdict.sample
    answering = f"{len(sample.reports)} nsqd"
    if len(sample.nodes) > len(sample.reports):
        answering = f"{len(sample.reports)} of {len(sample.nodes)} nsqd respond"
    return f"{found}; {answering}, {len(sample.totals)} topics and channels"


def _nagios(verdict: Verdict, shown: Sequence[Problem], status: int) -> Iterator[str]:
    depth = sum(row.depth for row in verdict.sample.totals)
    counts = Counter(each.severity.word for each in shown)
    figures = f"critical={counts['critical']} warning={counts['warning']} depth={depth}"
    first = "; ".join(f"{each.kind} {each.where}".strip() for each in shown[:3])
    text = f"NSQ {WORDS[status]} - {first or _summary(verdict, shown)}".replace("|", "/")
    yield f"{escape_line(text)} | {figures}"
    said = [f"{_line(problem, verdict)}. {problem.remedy}" for problem in shown]
    said += [f"not judged: {line}" for line in verdict.not_judged]
    yield from (escape_line(line).replace("|", "/") for line in said)  # a bar would begin figures


def _prometheus(verdict: Verdict, shown: Sequence[Problem], status: int) -> Iterator[str]:
    yield "# TYPE nsq_check_status gauge"
    yield f"nsq_check_status {status}"
    yield "# TYPE nsq_check_problems gauge"
    counts = Counter((each.severity.word, each.kind) for each in shown)
    for (severity, kind), count in counts.items():
        yield f'nsq_check_problems{{severity="{severity}",kind="{kind}"}} {count}'
    yield "# TYPE nsq_check_time_seconds gauge"
    yield f"nsq_check_time_seconds {verdict.memory.time_s:.3f}"


def check_document(verdict: Verdict, shown: Sequence[Problem], status: int) -> dict[str, Any]:
    """The verdict as JSON, the schema ``check``."""
    since = verdict.memory.problems
    return {
        "status": status,
        "problems": [
            {
                "severity": each.severity.word,
                "kind": each.kind,
                **{name: getattr(each, name) or None for name in ("topic", "channel", "node")},
                "text": each.text,
                "remedy": each.remedy,
                "since": utc_text(since.get(each.key, verdict.memory.time_s)),
            }
            for each in shown
        ],
        "not_judged": list(verdict.not_judged),
        "nodes": len(verdict.sample.reports),
        "queues": len(verdict.sample.totals),
    }


# -- files ----------------------------------------------------------------------------------------


def _load(path: Path) -> CheckState:
    """Read what the last run left; an empty memory where there is no file yet."""
    from nsqtools.cluster.check import CheckState

    try:
        document = json.loads(path.read_bytes())
        if document["version"] != MEMORY_VERSION:
            raise ValueError(f"version {document['version']}")
        nsqds = {name: int(start) for name, start in document["nsqds"].items()}
        problems = {key: float(since) for key, since in document["problems"].items()}
        counts = [
            (float(time_s), {queue: int(count) for queue, count in each.items()})
            for time_s, each in document.get("counts", ())
        ]
        asked = [str(address) for address in document.get("asked", ())]
        had = {at: (int(n), float(t)) for at, (n, t) in document.get("had", {}).items()}
        memory = CheckState(nsqds, problems, float(document["time_s"]), counts, asked, had)
        times = (
            *problems.values(),
            *(each[0] for each in counts),
            *(t for _, t in had.values()),
        )
        for time_s in (memory.time_s, *times):
            utc_text(time_s)  # in the calendar
        return memory
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


def _write_bundle(path: Path, cluster: Cluster, verdict: Verdict) -> None:
    from nsqtools import __version__
    from nsqtools.cluster.check import bundle_documents, without_secrets

    problems = verdict.problems
    status = status_of(verdict, problems)
    documents = [
        ("nsqtools", f"nsq {__version__}"),
        ("check.json", without_secrets(check_document(verdict, problems, status))),
        *bundle_documents(cluster, verdict),
    ]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, document in documents:
            text = document if isinstance(document, str) else json.dumps(document, indent=1)
            entry = tarfile.TarInfo(f"nsq-check/{name}")
            entry.size = len(content := f"{text}\n".encode())
            entry.mtime = int(verdict.memory.time_s)
            archive.addfile(entry, io.BytesIO(content))
    _replace(path, packed.getvalue(), 0o600)
