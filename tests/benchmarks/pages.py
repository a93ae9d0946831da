"""The measured blocks of nsq-benchmarks(7) and of README, made of the raw data alone. Pure.

A block is the text from ``<!-- measured: NAME -->`` to ``<!-- end -->``; every figure is in one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.raw import RESULTS, Result, load

MISSING = "-"


def number(value: float | None) -> str:
    """Three digits that mean something, thousands apart."""
    if value is None:
        return MISSING
    if value >= 1000:
        step = 10 ** (len(str(int(value))) - 3)
        return f"{round(value / step) * step:,}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def times(value: float | None) -> str:
    """A ratio: two digits, one after the point below ten."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(result: Result, name: str, other: str, figure: str) -> float | None:
    """Of the medians."""
    mine, theirs = result.middle(name, figure), result.middle(other, figure)
    return mine / theirs if mine and theirs else None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def compared(result: Result, names: dict[str, str], baseline: str, unit: str = "messages/s") -> str:
    """One line a contestant, by the names to show: rate, ratio, whole process, and what it took."""
    head = ["", unit, "ratio", "whole", "CPU us", "MB", "fds"]
    rows = [
        [
            shown,
            number(result.middle(name, "rate")),
            times(ratio(result, name, baseline, "rate")),
            times(ratio(result, name, baseline, "whole_rate")),
            number(result.middle(name, "cpu_us")),
            whole(max(result.values(name, "peak_mb"), default=None)),
            whole(max(result.values(name, "descriptors"), default=None)),
        ]
        for name, shown in names.items()
        if name in result.names()
    ]
    return markdown(head, rows)


DOCUMENTS = ("man/nsq-benchmarks.7.md", "README.md")
_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render_all(checkout: Path) -> list[Path]:
    """Write both documents again; return those that changed."""
    changed = []
    for name in DOCUMENTS:
        text = (checkout / name).read_text("utf-8")
        if (made := render(text)) != text:
            (checkout / name).write_text(made, "utf-8")
            changed.append(checkout / name)
    return changed


def render(text: str, results: Path = RESULTS) -> str:
    """Return the text with every block made again; one of a part without raw data says so."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        part, make = BLOCKS[name]
        result = load(part, results)
        made = make(result) if result else f"Not measured: `tests/benchmarks report --only {part}`."
        failed = failures(result) if result else ""
        return f"{begin}{made}\n{failed}{end}"

    return _BLOCK.sub(block, text)


def failures(result: Result) -> str:
    names = dict.fromkeys(row.name for row in result.rows if row.error)
    return f"\nFailed in this run: {', '.join(names)}.\n" if names else ""


def machine(result: Result) -> str:
    facts = result.facts
    return (
        f"nsqtools {facts['nsqtools']}, {facts['at']}: {facts['cpu']}, {facts['cores']} cores, "
        f"{facts['memory_gb']} GB of memory, Linux {facts['kernel']}, Python {facts['python']}, "
        f"{facts['nsqd']}, gzip by {facts['gzip']} unless a row says otherwise. " + state(result)
    )


def state(result: Result) -> str:
    """How busy the machine was: each part says it of itself."""
    facts = result.facts
    return (
        f"Load average {facts['load_before']} before, {facts['load_after']} after; "
        f"{facts['sample_s']} s a sample."
    )


def with_state(make: Callable[[Result], str]) -> Callable[[Result], str]:
    return lambda result: f"{make(result)}\n\n{state(result)}"


def side_by_side(*tables: tuple[str, dict[str, str]]) -> Callable[[Result], str]:
    """Tables of programs beside a baseline: how each is shown, by its name."""
    return lambda result: "\n\n".join(
        compared(result, names, baseline) for baseline, names in tables
    )


consume = side_by_side(
    (
        "nsq_tail, 25 ms",
        {
            "nsq_tail": "nsq_tail",
            "nsq_tail, 25 ms": "nsq_tail, 25 ms",
            "nsq tail": "`nsq tail`",
            "nsq tail TLS": "`nsq tail --tls`",
            "nsq tail snappy": "`nsq tail --snappy`",
            "nsq tail TLS+snappy": "with both",
            "bench_reader": "bench_reader",
            "bare loop": "bare loop",
        },
    )
)
library = side_by_side(
    (
        "pynsq",
        {
            "pynsq": "pynsq",
            "go-nsq, 1 worker": "go-nsq",
            "library loop": "`for` loop",
            "run, 1 worker": "`run(handler)`",
        },
    )
)
publishing = side_by_side(
    (
        "to_nsq",
        {
            "to_nsq": "to_nsq",
            "nsq pub": "`nsq pub`",
            "bench_writer": "bench_writer",
            "bare MPUB loop": "bare MPUB loop",
            "go-nsq PublishAsync": "go-nsq",
            "PUB": "`Producer`",
            "aio PUB": "`aio.Producer`",
            "linger": "`Producer`, linger_s",
        },
    )
)
archive = side_by_side(
    ("nsq_to_file", {"nsq_to_file": "nsq_to_file", "to-file raw": "`nsq to-file`, raw"}),
    (
        "nsq_to_file gzip",
        {
            "nsq_to_file gzip": "nsq_to_file -gzip",
            "to-file raw gzip": "raw, gzip",
            "to-file raw gzip zlib": "raw, gzip level 6",
            "to-file jsonl gzip": "JSON lines, gzip",
        },
    ),
)
forward = side_by_side(
    ("nsq_to_nsq", {"nsq_to_nsq": "nsq_to_nsq", "nsq to-nsq": "`nsq to-nsq`"}),
    ("nsq_to_http", {"nsq_to_http": "nsq_to_http", "nsq to-http": "`nsq to-http`"}),
)


def latency(result: Result) -> str:
    rows = [
        (shown, timeout, *(number(result.middle(name, f)) for f in ("p50_ms", "p90_ms", "max_ms")))
        for name, shown, timeout in (
            ("nsq_tail", "nsq_tail", "250 ms, default"),
            ("nsq_tail, 25 ms", "nsq_tail", "25 ms"),
            ("nsq tail", "`nsq tail`", "25 ms, default"),
            ("nsq tail, 250 ms", "`nsq tail`", "250 ms"),
        )
    ]
    head = ("", "timeout", "p50 ms", "p90", "max")
    return markdown(head, rows)


def serving(result: Result) -> str:
    figures = {
        "publish_rate": "MPUB, messages/s",
        "publish_cpu_us": "CPU us of each",
        "consume_rate": "consume, messages/s",
        "consume_cpu_us": "CPU us of each",
        "writer_rate": "bench_writer, the same",
        "reader_rate": "bench_reader, the same",
        "queued_bytes": "bytes a queued message",
        "peak_mb": "peak MB",
    }
    rows = [
        (
            shown,
            number(result.middle("Go nsqd", name)),
            number(result.middle("nsq nsqd", name)),
            times(ratio(result, "nsq nsqd", "Go nsqd", name)),
        )
        for name, shown in figures.items()
    ]
    return markdown(("", "Go nsqd", "`nsq nsqd`", "ratio"), rows)


def startup(result: Result) -> str:
    rows = [
        (
            f"`{name}`",
            number(result.middle(name, "ms")),
            times(ratio(result, name, "python -c pass", "ms")),
        )
        for name in result.names()
    ]
    return markdown(("", "ms", "ratio"), rows)


def spark(result: Result) -> str:
    shown = {
        "spark.read.json": "`spark.read.json`",
        "nsq-archive": "`nsq-archive`, batch",
        "nsq-archive, stream": "`nsq-archive`, stream",
    }
    rows = [
        (
            label,
            number(result.middle(name, "rate")),
            times(ratio(result, name, "spark.read.json", "rate")),
        )
        for name, label in shown.items()
    ]
    waits = [
        (name, number(result.middle(name, "p50_ms")), number(result.middle(name, "p95_ms")))
        for name in ("to-file and nsq-archive", "nsq")
    ]
    tables = (
        markdown(("", "rows/s", "ratio"), rows),
        markdown(("to `foreachBatch`", "p50 ms", "p95 ms"), waits),
    )
    return "\n\n".join(tables)


JSON, JOB = "spark.read.json", "a job with dropDuplicates"
BESIDE = {
    "GROUP BY topic, hour in Spark": ("GROUP BY, table", f"GROUP BY, {JSON}", "5x"),
    "the same in DuckDB": ("GROUP BY, DuckDB", f"GROUP BY, {JSON}", "0.1 s"),
    "full scan into Parquet in Spark": ("scan, table", f"scan, {JSON}", "1.8x CPU"),
    "`nsq spark compact`": ("nsq spark compact", JOB, "1.8x, 1 GB"),
    "`nsq archive compact`": ("nsq archive compact", JOB, "1.8x, 1 GB"),
}
LANDED = {
    "a log into Parquet": ("parquet, string", "2.5 us, 26 bytes"),
    "a log into Delta": ("delta, string", "2.5 us, 26 bytes"),
    "with columns of JSON bodies": ("delta, json", "1.5 us more"),
    "`nsq to-file --store parquet`": ("to-file, parquet", "150,000/s"),
    "`nsq to-file --store delta`": ("to-file, delta", "150,000/s"),
}
PLANNED = {
    "an hour of a topic, 400 files of 3,600 members": ("400 files, a topic", "0.5 s, 100 MB"),
    "an hour of 200 topics, 1,000 such files": ("200 topics", ""),
    "10,000 logs in a bucket, the first time": ("logs in a bucket, first", ""),
    "the same, with a catalog": ("logs in a bucket", "20 requests"),
    "a Delta table of 10,000 files in a bucket": ("Delta in a bucket", "20 requests"),
    "archives in a bucket, 1,000,000 files": ("a million logs", "1 GB"),
    "a Delta table of 1,000,000 files": ("a million in Delta", "1 GB"),
}


def lake(result: Result) -> str:
    """All about tables, beside what was aimed at."""

    def of(name: str, *figures: str) -> list[str]:
        return [number(result.middle(name, figure)) for figure in figures]

    beside = [
        (
            label,
            *of(name, "s"),
            times(ratio(result, other, name, "s")),
            *of(name, "cpu_us"),
            times(ratio(result, other, name, "cpu_us")),
            *of(name, "peak_mb"),
            target,
        )
        for label, (name, other, target) in BESIDE.items()
    ]
    landed = [
        (label, *of(name, "rate", "cpu_us", "row_bytes"), target)
        for label, (name, target) in LANDED.items()
    ]
    planned = [
        (label, *of(name, "s", "cpu_s", "peak_mb", "requests"), target)
        for label, (name, target) in PLANNED.items()
    ]
    head = ("beside Spark's own", "s", "ratio", "CPU us", "ratio", "MB", "target")
    tables = (
        markdown(head, beside),
        markdown(("landing", "messages/s", "CPU us", "bytes a row", "target"), landed),
        markdown(("planning", "s", "CPU s", "MB", "requests", "target"), planned),
    )
    return "\n\n".join(tables)


def spark_publish(result: Result) -> str:
    shown = {
        "read, discard": "Parquet read, discarded",
        "publish": "the same, published",
        "publish, ledger": "and noted in a ledger",
    }
    rows = [
        (
            label,
            number(result.middle(name, "rate")),
            times(ratio(result, name, "read, discard", "rate")),
        )
        for name, label in shown.items()
    ]
    return markdown(("", "rows/s", "ratio"), rows)


def spark_query(result: Result) -> str:
    rows = []
    for name in result.names():
        query, _, other = name.partition(", ")
        if other:
            seconds = [number(result.middle(name, figure)) for figure in ("base", "sql")]
            shown = "the option" if other == "option" else f"`{other}`"
            rows.append((query, shown, *seconds, times(result.middle(name, "ratio"))))
    planned = [
        (name, number(result.middle(name, "s")), whole(result.middle(name, "tasks")))
        for name in result.names()
        if name.endswith(" files")
    ]
    tables = (
        markdown(("query", "beside", "its s", "SQL s", "ratio"), rows),
        markdown(("planned", "s", "tasks"), planned),
    )
    return "\n\n".join(tables)


def six_ratios(result: Result) -> str:
    """The rows of README, from the parts that they are of."""
    parts = {name: load(name, RESULTS) for name in ("consume", "publish", "archive", "server")}

    def row(what: str, part: str, name: str, other: str, kind: str = "") -> tuple[str, ...]:
        if (found := parts[part]) is None:
            return what, MISSING, MISSING, f"`report --only {part}`"
        cost = [number(found.middle(each, f"{kind}cpu_us")) for each in (name, other)]
        shown = times(ratio(found, name, other, f"{kind}rate"))
        return what, shown, " and ".join(cost), f"`report --only {part}`"

    rows = [
        row("`nsq tail` to nsq_tail", "consume", "nsq tail", "nsq_tail, 25 ms"),
        row("`nsq pub` to to_nsq, confirmed", "publish", "nsq pub", "to_nsq"),
        row("`nsq to-file` to nsq_to_file, plain", "archive", "to-file raw", "nsq_to_file"),
        row(
            "the same with gzip, both by zlib at level 6",
            "archive",
            "to-file raw gzip zlib",
            "nsq_to_file gzip",
        ),
        row("`for message in consumer` to pynsq", "consume", "library loop", "pynsq"),
        row("`nsq nsqd` to the Go nsqd, publish", "server", "nsq nsqd", "Go nsqd", "publish_"),
        row("the same, consume", "server", "nsq nsqd", "Go nsqd", "consume_"),
    ]
    head = ("", "ratio", "CPU us a message, ours and theirs", "measured by `tests/benchmarks`")
    return markdown(head, rows)


BLOCKS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "machine": ("consume", machine),
    "consume": ("consume", with_state(consume)),
    "library": ("consume", library),
    "publish": ("publish", with_state(publishing)),
    "archive": ("archive", with_state(archive)),
    "forward": ("forward", with_state(forward)),
    "latency": ("latency", with_state(latency)),
    "server": ("server", with_state(serving)),
    "startup": ("startup", with_state(startup)),
    "spark": ("spark", with_state(spark)),
    "lake": ("spark", with_state(lake)),
    "spark-publish": ("spark-publish", with_state(spark_publish)),
    "spark-query": ("spark-query", with_state(spark_query)),
    "six-ratios": ("consume", six_ratios),
}

CLAIMED = tuple(dict.fromkeys(part for part, _ in BLOCKS.values()))
"""The parts of a report."""


def tables(result: Result) -> str:
    """The tables of a part, or where no document has it, all contestants beside the first."""
    names = result.names()
    shared = ("machine", "six-ratios")
    made = [
        make(result)
        for name, (part, make) in BLOCKS.items()
        if part == result.part and name not in shared
    ]
    return "\n\n".join(made or [compared(result, {name: name for name in names}, names[0])])
