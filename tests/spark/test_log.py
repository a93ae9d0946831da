"""Spark's log is bounded, and what is quoted from it is from the last session."""

from __future__ import annotations

import io
import logging
import tempfile
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.spark import session_files
from nsqtools.spark.session_files import SparkLog, diverted, last_lines
from nsqtools.spark.spark_settings import default_log_file


def test_a_second_session_goes_on_in_the_file_and_is_quoted_alone(tmp_path: Path) -> None:
    path = tmp_path / "below" / "spark.log"
    for text in (b"first\n", b"second\nthird\n"):
        log = SparkLog(path)
        log.copy(io.BytesIO(text))
        log.close()

    assert last_lines(path) == ["second", "third"]
    assert "first" in path.read_text()


def test_the_log_is_written_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "spark.log").symlink_to(victim)

    with pytest.raises(OutputError, match="it is a symbolic link"):
        SparkLog(tmp_path / "spark.log")

    assert victim.read_text() == "precious\n"


def test_without_a_home_the_log_is_where_nobody_else_can_put_a_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("not a directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    path = default_log_file.__wrapped__()

    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700


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
