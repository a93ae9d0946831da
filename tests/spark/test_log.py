"""Spark's log is bounded, and what is quoted from it is from the last session."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.spark import session_files
from nsqtools.spark.session_files import SparkLog, diverted, last_lines


def test_a_second_session_goes_on_in_the_file_and_is_quoted_alone(tmp_path: Path) -> None:
    path = tmp_path / "below" / "spark.log"
    for text in (b"first\n", b"second\nthird\n"):
        log = SparkLog(path)
        log.copy(io.BytesIO(text))
        log.close()

    assert last_lines(path) == ["second", "third"]
    assert "first" in path.read_text()


def test_a_log_that_has_grown_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_files, "LOG_BYTES", 1000)
    path = tmp_path / "spark.log"
    log = SparkLog(path)

    log.copy(io.BytesIO(b"x" * 99 + b"\n" + b"y" * 99 + b"\n" * 30))
    for _ in range(30):
        log.write("z" * 99 + "\n")
    log.close()

    assert {each.name for each in tmp_path.iterdir()} == {"spark.log", "spark.log.1"}
    assert all(each.stat().st_size <= 1200 for each in tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(OutputError, match="cannot write Spark's log /proc/x/y") as caught:
        SparkLog(Path("/proc/x/y"))

    assert "--spark-log" in caught.value.hint


def test_what_py4j_says_is_diverted_and_what_others_say_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # a session may be running
    log = SparkLog(tmp_path / "spark.log")
    root, record = logging.getLogger(), logging.LogRecord
    with diverted(log):
        logging.getLogger("py4j.clientserver").error("the connection is lost")
        root.handle(record("root", 40, "/x/py4j/clientserver.py", 1, "while sending", (), None))
        root.handle(record("root", 40, "/x/mine.py", 1, "mine", (), None))
    log.close()

    assert "the connection is lost" in (tmp_path / "spark.log").read_text()
    assert "while sending" in (tmp_path / "spark.log").read_text()
    assert caplog.messages == ["mine"]


def test_lines_of_a_log_that_is_not_there_are_none(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "nothing") == []
