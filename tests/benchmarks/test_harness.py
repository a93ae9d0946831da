"""The benchmarks run: every contestant does its work, and a report has the figures.

The speed itself is not tested.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import parts, stops
from benchmarks.__main__ import main
from benchmarks.contestants import CLIENTS, CONSUMERS, ONE_BY_ONE, PRODUCERS, Contestant
from benchmarks.measure import drain, publish, publish_one_by_one
from benchmarks.pages import BLOCKS, DOCUMENTS, render
from benchmarks.raw import Row, load
from plugins.daemons import GoNsqd

CHECKOUT = Path(__file__).parents[2]
MESSAGES = 2000
RELIABLE = [
    contestant for contestant in CONSUMERS if not (contestant.leaves or "--tls" in contestant.line)
]
RELIABLE += [contestant for contestant in CLIENTS if "aio" in contestant.line]


@pytest.mark.parametrize(
    ("measure", "entered"),
    [
        (drain, RELIABLE),
        (publish, [contestant for contestant in PRODUCERS if not contestant.is_endless]),
    ],
    ids=["drain", "publish"],
)
def test_contestants_work(nsqd: GoNsqd, measure: parts.Measure, entered: list[Contestant]) -> None:
    for contestant in entered:
        assert measure(nsqd, contestant, MESSAGES)["rate"] > 0, contestant.name


@pytest.mark.parametrize("line", ONE_BY_ONE.values(), ids=list(ONE_BY_ONE))
def test_publishing_one_by_one_is_measured(nsqd: GoNsqd, line: str) -> None:
    contestant = Contestant("lone", line.replace("{seconds}", "0.1"))

    assert publish_one_by_one(nsqd, contestant, 0.1)["p50_us"] > 0


def test_landing_is_measured() -> None:
    """Also check that everything imported by the benchmarks of tables and Spark exists."""
    pytest.importorskip("pyspark")
    from benchmarks import lake, planning, spark

    assert planning.planning
    assert spark.beside_spark
    assert all(row.figures["row_bytes"] > 0 for row in lake.landing(500, 1))


def test_a_message_passes_few_modules() -> None:
    stops_of_commands = stops.measure()

    assert {
        name: modules
        for name, modules in stops_of_commands.items()
        if len(modules) > stops.MOST[name]
    } == {}


def test_a_producer_that_stops_early_is_an_error(nsqd: GoNsqd) -> None:
    idle = Contestant("idle", "library_programs.py fail")
    with pytest.raises(RuntimeError, match="stopped at 0 of 2000"):
        publish(nsqd, idle, MESSAGES)


def test_the_documents_have_the_figures_of_the_raw_data() -> None:
    texts = "".join((CHECKOUT / name).read_text("utf-8") for name in DOCUMENTS)

    assert render(texts) == texts, "run: .venv/bin/python tests/benchmarks report --render"
    assert [name for name in BLOCKS if f"<!-- measured: {name} -->" not in texts] == []


def test_a_failed_run_is_reported_and_ends_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(seconds: float, rounds: int) -> Iterator[Row]:
        yield Row("`python -c pass`", 0, {"ms": 12.3456789})
        yield Row("`nsq --version`", 0, error="it crashed")
        yield Row("`nsq --help`", 0, {"ms": 24.7})

    monkeypatch.setitem(parts.PARTS, "startup", some)

    assert main(["startup", "--save", str(tmp_path)]) == 1
    assert "| `nsq --help` | 24.7 | 2.0 |" in capsys.readouterr().out

    result = load("startup", tmp_path)
    assert [row.figures for row in result.rows] == [{"ms": 12.346}, {}, {"ms": 24.7}]
    rendered = render("<!-- measured: startup -->\n<!-- end -->", tmp_path)
    assert "| `nsq --version` | - | - |" in rendered
    assert "Failed in this run: `nsq --version`." in rendered
    assert "Not measured" in render("<!-- measured: spark -->\n<!-- end -->", tmp_path)


def test_a_late_part_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (Row("a", n, {"ms": 1.0}) for n in range(9))
    monkeypatch.setitem(parts.PARTS, "startup", lambda *_: endless)

    assert main(["startup", "--save", str(tmp_path), "--longest", "0"]) == 1

    result = load("startup", tmp_path)
    assert [row.name for row in result.rows] == ["a", "the rest"]
