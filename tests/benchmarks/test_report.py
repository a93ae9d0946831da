"""The report: what README and nsq-benchmarks(7) claim is what was measured, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.report import parts
from benchmarks.report.command import main
from benchmarks.report.pages import BLOCKS, DOCUMENTS, render
from benchmarks.report.raw import Row, load
from benchmarks.report.tables import number, times

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_has_the_figures_of_the_raw_data(document: str) -> None:
    text = (CHECKOUT / document).read_text("utf-8")

    assert render(text) == text, "run: .venv/bin/python tests/benchmarks report --render"
    assert "<!-- measured: " in text


def test_every_block_is_in_a_document() -> None:
    texts = "".join((CHECKOUT / name).read_text("utf-8") for name in DOCUMENTS)

    assert [name for name in BLOCKS if f"<!-- measured: {name} -->" not in texts] == []


def test_a_run_that_fails_is_said_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(settings: parts.Settings) -> Iterator[Row]:
        yield Row("python -c pass", 0, {"ms": 12.3456789})
        yield Row("nsq --version", 0, error="it crashed")
        yield Row("nsq --help", 0, {"ms": 24.7})

    monkeypatch.setitem(parts.PARTS, "startup", some)

    assert main(["--part", "startup", "--results", str(tmp_path)]) == 1

    result = load("startup", tmp_path)
    assert result is not None
    assert [row.figures for row in result.rows] == [{"ms": 12.346}, {}, {"ms": 24.7}]
    made = render("<!-- measured: startup -->\n<!-- end -->", tmp_path)
    assert "| `nsq --version` | - | - |" in made
    assert "| `nsq --help` | 24.7 | 2.0 |" in made
    assert "Failed in this run: nsq --version." in made
    assert "Not measured" in render("<!-- measured: spark -->\n<!-- end -->", tmp_path)


def test_a_part_whose_time_is_up_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        parts.PARTS, "startup", lambda _: (Row("a", n, {"ms": 1.0}) for n in range(9))
    )

    assert main(["--part", "startup", "--results", str(tmp_path), "--longest", "0"]) == 1

    result = load("startup", tmp_path)
    assert result is not None
    assert [row.name for row in result.rows] == ["a", "the rest"]


def test_numbers_have_the_digits_that_mean_something() -> None:
    shown = [
        number(value) for value in (None, 0.0123, 1.05, 99.94, 483.2, 1234, 483_219, 1_196_700)
    ]
    assert shown == ["-", "0.0123", "1.05", "99.9", "483", "1,230", "483,000", "1,200,000"]
    assert [times(value) for value in (None, 0.639, 3.57, 36.8)] == ["-", "0.64", "3.6", "37"]
