"""Spark's jars, and its log."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.spark.failures import last_lines
from nsqtools.spark.session import session_log
from nsqtools.spark.spark_settings import beside_sparks_own, default_log_file

pytest.importorskip("pyspark")


def test_a_second_session_goes_on_in_the_file_and_is_quoted_alone(tmp_path: Path) -> None:
    path = tmp_path / "below" / "spark.log"
    assert last_lines(path) == []
    for text in ("first\n", "second\nthird\n"):
        with session_log(path) as log:
            log.write(text)

    assert last_lines(path) == ["second", "third"]
    assert "first" in path.read_text()


def test_the_log_is_written_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "spark.log").symlink_to(victim)

    with pytest.raises(OutputError, match="it is a symbolic link"):
        session_log(tmp_path / "spark.log").__enter__()

    assert victim.read_text() == "precious\n"


def test_without_a_home_the_log_is_where_no_other_user_can_put_a_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("not a directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    path = default_log_file.__wrapped__()

    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_py4j_says_is_diverted_and_what_others_say_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # a session may be running
    root, record = logging.getLogger(), logging.LogRecord
    with session_log(tmp_path / "spark.log"):
        logging.getLogger("py4j").error("the connection is lost")
        root.handle(record("root", 40, "/x/py4j/clientserver.py", 1, "while sending", (), None))
        root.handle(record("root", 40, "/x/mine.py", 1, "mine", (), None))

    log = (tmp_path / "spark.log").read_text()
    assert ("the connection is lost" in log, "while sending" in log) == (True, True)
    assert caplog.messages == ["mine"]


FETCHED = [
    "/ivy/jars/io.delta_delta-spark_4.2_2.13-4.4.0.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-databind-2.13.5.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-core-2.13.5.jar",
    "/ivy/jars/org.apache.hadoop_hadoop-aws-3.5.0.jar",
]


def test_of_jars_that_spark_has_itself_its_own_version_counts(tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    for name in ("jackson-databind-2.21.2.jar", "jackson-core-2.21.2.jar", "delta-x-1.jar"):
        (tmp_path / "jars" / name).touch()

    assert beside_sparks_own(FETCHED, tmp_path) == [FETCHED[0], FETCHED[3]]
