"""The counts of a job, for people, for programs, and as a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsqtools.errors import NsqError, OutputError
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    require_all,
    summary,
    total,
    write_document,
)


def test_the_counts_of_tasks_add_up() -> None:
    report = total(
        [
            PublishReport({"a": 1, "b": 2}, rejected=1, retried=3, seconds=2.0, reasons=["r1"] * 4),
            PublishReport(
                {"b": 4}, unknown=1, repeated=5, before=6, seconds=1.0, reasons=["r2"] * 4
            ),
        ]
    )

    assert report == PublishReport(
        {"a": 1, "b": 6}, 1, 1, 0, 3, 5, 6, 2.0, ["r1", "r1", "r1", "r1", "r2"]
    )
    assert report.confirmed == 7


def test_a_line_says_what_there_is_to_say() -> None:
    assert summary(PublishReport({"a": 3})) == "3 confirmed, 0 rejected, 0 unknown, 0 dead-lettered"
    more = PublishReport({"a": 3}, before=2, retried=1, repeated=1)
    assert summary(more).endswith("dead-lettered, 2 done before, 1 retried, up to 1 twice")


def test_rows_that_are_left_over_fail_the_job_with_their_reason() -> None:
    require_all(PublishReport({"a": 3}, rejected=2, dead_lettered=2))

    with pytest.raises(NsqError, match=r"1 rows were refused .*: row 7: too large"):
        require_all(
            PublishReport({"a": 3}, rejected=2, dead_lettered=1, reasons=["row 7: too large"])
        )
    with pytest.raises(NsqError, match=r"1 rows have an unknown fate .* by an earlier run"):
        require_all(PublishReport(unknown=1))


def test_the_document_has_all_counts(tmp_path: Path) -> None:
    write_document(tmp_path / "outcome.json", PublishReport({"a": 3}, rejected=1), is_complete=True)

    document = json.loads((tmp_path / "outcome.json").read_bytes())
    assert document["confirmed"] == 3
    assert document["topics"] == {"a": 3}
    assert (document["rejected"], document["is_complete"]) == (1, True)


def test_a_document_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write /no/such/outcome.json"):
        write_document(Path("/no/such/outcome.json"), PublishReport(), is_complete=True)
