"""The measured blocks of nsq-benchmarks(7) and of README, made of the raw data alone. Pure.

A block is the text from ``<!-- measured: NAME -->`` to ``<!-- end -->``, and has every figure.
Most blocks are tables, whose columns are `Cell` and whose rows are names of contestants.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.raw import RESULTS, Result, load

MISSING = "-"

Cell = Callable[[Result, str, str], str]
"""The text of a column for a result, the name of the row, and the name of its base row."""


def number(value: float | None) -> str:
    """Three significant digits, with separated thousands."""
    if value is None:
        return MISSING
    if value >= 1000:
        step = 10 ** (len(str(int(value))) - 3)
        return f"{round(value / step) * step:,}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """A ratio of two digits, with one decimal place below ten."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(result: Result, name: str, other: str, figure: str) -> str:
    """The ratio of the medians."""
    mine, theirs = result.middle(name, figure), result.middle(other, figure)
    return times(mine / theirs if mine and theirs else None)


def median(figure: str) -> Cell:
    return lambda result, name, base: number(result.middle(name, figure))


def more(figure: str) -> Cell:
    """The ratio of the row to its base."""
    return lambda result, name, base: ratio(result, name, base, figure)


def less(figure: str) -> Cell:
    return lambda result, name, base: ratio(result, base, name, figure)


def most(figure: str) -> Cell:
    return lambda result, name, base: f"{max(result.values(name, figure), default=0):.0f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A table of some rows, each compared with its base row.

    ``rows`` are names, compared with the first, or names with the base of each; all if empty.
    ``title`` is the head of the first column.
    """

    columns: Sequence[tuple[str, Cell]]
    rows: Sequence[str] | Mapping[str, str] = ()
    base: str = ""
    title: str = ""

    def __call__(self, result: Result) -> str:
        rows = self.rows or result.names()
        bases = rows if isinstance(rows, Mapping) else dict.fromkeys(rows, self.base or rows[0])
        titles, cells = zip(*self.columns, strict=True)
        lines = ([name, *(cell(result, name, bases[name]) for cell in cells)] for name in bases)
        return markdown([self.title, *titles], list(lines))


PROGRAMS = (
    ("messages/s", median("rate")),
    ("ratio", more("rate")),
    ("whole", more("whole_rate")),
    ("CPU us", median("cpu_us")),
    ("MB", most("peak_mb")),
    ("fds", most("descriptors")),
)
TAILS = ("nsq_tail", "nsq_tail, 25 ms", "`nsq tail`")
MORE_TAILS = ("`nsq tail --tls`", "`nsq tail --snappy`", "with both", "bench_reader", "bare loop")
CONSUME = Table(PROGRAMS, (*TAILS, *MORE_TAILS), base="nsq_tail, 25 ms")
LIBRARY = Table(PROGRAMS, ("pynsq", "go-nsq", "`for` loop", "`run(handler)`"))
CLIENT_NAMES = ("`run(handler)`", "`for` loop", "`aio`, run", "pynsq")
CLIENT = Table(
    (*PROGRAMS[:2], PROGRAMS[3], ("ratio", more("cpu_us")), PROGRAMS[4]),
    {
        f"{name}, {connections}": f"go-nsq, {connections}"
        for connections in ("1", "50", "200", "1,000")
        for name in ("go-nsq", *CLIENT_NAMES)
    },
    title="connections",
)
LONE, CROWD = "go-nsq, one by one", "go-nsq, 100 goroutines"
ONE_BY_ONE = Table(
    (*PROGRAMS[:2], PROGRAMS[3], ("p50 us", median("p50_us")), ("p99", median("p99_us"))),
    {
        LONE: LONE,
        "`Producer`, one by one": LONE,
        CROWD: CROWD,
        "`Producer`, 100 threads": CROWD,
        "`aio.Producer`, 1,000 tasks": CROWD,
    },
    title="publishing 200 bytes",
)
RAW = Table(PROGRAMS, ("nsq_to_file", "`nsq to-file`, raw"))
GZIP = ("nsq_to_file -gzip", "raw, gzip", "raw, gzip level 6", "JSON lines, gzip")
TO_NSQ = Table(PROGRAMS, ("nsq_to_nsq", "`nsq to-nsq`"))
TO_HTTP = Table(PROGRAMS, ("nsq_to_http", "`nsq to-http`"))
LATENCY = Table(
    (("p50 ms", median("p50_ms")), ("p90", median("p90_ms")), ("max", median("max_ms")))
)
STARTUP = Table((("ms", median("ms")), ("ratio", more("ms"))))
SERVER = {
    "publish_rate": "MPUB, messages/s",
    "publish_cpu_us": "CPU us of each",
    "consume_rate": "consume, messages/s",
    "consume_cpu_us": "CPU us of each",
    "writer_rate": "bench_writer, the same",
    "reader_rate": "bench_reader, the same",
    "queued_bytes": "bytes a queued message",
    "peak_mb": "peak MB",
}

ROWS = (("rows/s", median("rate")), ("ratio", more("rate")))
JSON = "`spark.read.json`"
READ = Table(ROWS, (JSON, "`nsq-archive`, batch", "`nsq-archive`, stream"))
WAITED = Table(
    (("p50 ms", median("p50_ms")), ("p95 ms", median("p95_ms"))),
    ("to-file and nsq-archive", "nsq"),
    title="to `foreachBatch`",
)
PUBLISHED = ("Parquet read, discarded", "the same, published", "and noted in a ledger")
QUERIES = {
    "one topic of four": "the option",
    "last hours of a day": "the option",
    "topic and time": "the option",
    "count(*)": JSON,
    "group by topic": JSON,
}
GROUP, SCAN, JOB = "GROUP BY, spark.read.json", "scan, spark.read.json", "a job with dropDuplicates"
BESIDE_SPARK = Table(
    (
        ("s", median("s")),
        ("ratio", less("s")),
        ("CPU us", median("cpu_us")),
        ("ratio", less("cpu_us")),
        ("MB", median("peak_mb")),
    ),
    {
        "GROUP BY topic, hour in Spark": GROUP,
        "the same in DuckDB": GROUP,
        "full scan into Parquet in Spark": SCAN,
        "`nsq spark compact`": JOB,
        "`nsq archive compact`": JOB,
        "the same in DuckDB, not verified": JOB,
        "the same in Polars, not verified": JOB,
    },
    title="beside Spark's own",
)
LANDED = ("a log into Parquet", "a log into Delta", "with columns of JSON bodies")
LANDING = Table(
    (*PROGRAMS[:1], ("CPU us", median("cpu_us")), ("bytes a row", median("row_bytes"))),
    (*LANDED, *(f"`nsq to-file --store {store}`" for store in ("parquet", "delta"))),
    title="landing",
)
PLANNING = Table(
    (("s", median("s")), ("CPU s", median("cpu_s")), ("MB", median("peak_mb"))),
    ("an hour of a topic, 400 files of 3,600 members", "an hour of 200 topics, 1,000 such files"),
    title="planning",
)


def serving(result: Result) -> str:
    go, ours = "Go nsqd", "`nsq nsqd`"
    rows = []
    for figure, title in SERVER.items():
        medians = [number(result.middle(name, figure)) for name in (go, ours)]
        rows.append([title, *medians, ratio(result, ours, go, figure)])
    return markdown(("", go, ours, "ratio"), rows)


def queries(result: Result) -> str:
    rows = []
    for query, other in QUERIES.items():
        names = f"{query}, {other}", f"{query}, by SQL"
        medians = [number(result.middle(name, "s")) for name in names]
        rows.append([query, other, *medians, ratio(result, names[1], names[0], "s")])
    return markdown(("query", "beside", "its s", "SQL s", "ratio"), rows)


def six_ratios(result: Result) -> str:
    """The rows of README, each from its part."""

    def row(what: str, part: str, name: str, other: str, kind: str = "") -> list[str]:
        command = f"`report --only {part}`"
        if (measured := load(part, RESULTS)) is None:
            return [what, MISSING, MISSING, command]
        cost = [
            number(measured.middle(contestant, f"{kind}cpu_us")) for contestant in (name, other)
        ]
        return [what, ratio(measured, name, other, f"{kind}rate"), " and ".join(cost), command]

    zlib = "the same with gzip, both by zlib at level 6"
    rows = [
        row("`nsq tail` to nsq_tail", "consume", "`nsq tail`", "nsq_tail, 25 ms"),
        row("`nsq pub` to to_nsq, confirmed", "publish", "`nsq pub`", "to_nsq"),
        row("`nsq to-file` to nsq_to_file, plain", "archive", "`nsq to-file`, raw", "nsq_to_file"),
        row(zlib, "archive", "raw, gzip level 6", "nsq_to_file -gzip"),
        row("`for message in consumer` to pynsq", "consume", "`for` loop", "pynsq"),
        row("`nsq nsqd` to the Go nsqd, publish", "server", "`nsq nsqd`", "Go nsqd", "publish_"),
        row("the same, consume", "server", "`nsq nsqd`", "Go nsqd", "consume_"),
    ]
    head = ("", "ratio", "CPU us a message, ours and theirs", "measured by `tests/benchmarks`")
    return markdown(head, rows)


def machine(result: Result) -> str:
    facts = (
        "nsqtools {nsqtools}, {at}: {cpu}, {cores} cores, {memory_gb} GB of memory, "
        "Linux {kernel}, Python {python}, {nsqd}, gzip by {gzip} unless a row says otherwise. "
    )
    return facts.format_map(result.facts) + state(result)


def state(result: Result) -> str:
    """The load of the machine, as recorded by each part."""
    load = "Load average {load_before} before, {load_after} after; {sample_s} s a sample."
    return load.format_map(result.facts)


BLOCKS: dict[str, tuple[Callable[[Result], str], ...]] = {
    "machine": (machine,),
    "six-ratios": (six_ratios,),
    "consume": (CONSUME, state),
    "library": (LIBRARY,),
    "client": (CLIENT, ONE_BY_ONE, state),
    "publish": (Table(PROGRAMS), state),
    "archive": (RAW, Table(PROGRAMS, GZIP), state),
    "forward": (TO_NSQ, TO_HTTP, state),
    "latency": (LATENCY, state),
    "server": (serving, state),
    "startup": (STARTUP, state),
    "spark": (READ, WAITED, state),
    "lake": (BESIDE_SPARK, LANDING, PLANNING, state),
    "spark-publish": (Table(ROWS, PUBLISHED), state),
    "spark-query": (queries, state),
}
PART_OF = {"machine": "consume", "six-ratios": "consume", "library": "consume", "lake": "spark"}
"""The parts of blocks with another name than their part."""


def made(name: str, result: Result) -> str:
    return "\n\n".join(make(result) for make in BLOCKS[name])


def tables(result: Result) -> str:
    """All blocks of a part."""
    names = BLOCKS.keys() - {"machine", "six-ratios"}
    names = [name for name in BLOCKS if name in names and PART_OF.get(name, name) == result.part]
    return "\n\n".join(made(name, result) for name in names)


DOCUMENTS = ("man/nsq-benchmarks.7.md", "README.md")
_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render_all(checkout: Path) -> list[Path]:
    """Rewrite both documents; return the changed ones."""
    changed = []
    for path in (checkout / name for name in DOCUMENTS):
        text = path.read_text("utf-8")
        if (new := render(text)) != text:
            path.write_text(new, "utf-8")
            changed.append(path)
    return changed


def render(text: str, results: Path = RESULTS) -> str:
    """Return the text with every block renewed; a block without raw data gets a note."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        part = PART_OF.get(name, name)
        if (result := load(part, results)) is None:
            return f"{begin}Not measured: `tests/benchmarks report --only {part}`.\n{end}"
        failed = ", ".join(dict.fromkeys(row.name for row in result.rows if row.error))
        failures = f"\nFailed in this run: {failed}.\n" if failed else ""
        return f"{begin}{made(name, result)}\n{failures}{end}"

    return _BLOCK.sub(block, text)
