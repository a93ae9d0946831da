"""The options of ``nsq spark`` commands, and the progress line while Spark works."""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqtools.cli.options import spark_options
from nsqtools.cli.options.spark_options import (
    ArchiveReading,
    SparkChoice,
    parse_conf,
    stage_progress,
)
from nsqtools.files.scratch import LOCK
from nsqtools.spark.spark_settings import SparkSettings


def test_conf_values_may_contain_equals_signs_and_override_options() -> None:
    conf = parse_conf(["spark.a=1", "spark.driver.extraJavaOptions=-Dx=y", "spark.b="])
    assert conf == {"spark.a": "1", "spark.driver.extraJavaOptions": "-Dx=y", "spark.b": ""}

    conf = ["spark.master=spark://m:7077", "spark.driver.memory=4g", "spark.app.name=own"]
    chosen = {"master": "local[2]", "driver_memory": "1g", "spark_log": None}
    settings = SparkChoice(conf=conf, **chosen).settings()
    assert not settings.is_local
    assert (settings.driver_memory, settings.app_name) == ("4g", "own")


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([], ""),
        ([(40, 12, 0)], "Spark: 12 of 40 tasks of stage 0"),
        ([(40, 12, 1), (10, 3, 0)], "Spark: 15 of 50 tasks of stage 0, 1 failed and tried again"),
    ],
)
def test_the_progress_line_adds_up_the_running_stages(
    stages: list[tuple[int, int, int]], text: str
) -> None:
    """A stage may end before its information is requested."""
    infos = [
        SimpleNamespace(stageId=n, numTasks=tasks, numCompletedTasks=done, numFailedTasks=failed)
        for n, (tasks, done, failed) in enumerate(stages)
    ]
    tracker = SimpleNamespace(
        getActiveStageIds=lambda: range(len(infos) + 1), getStageInfo=[*infos, None].__getitem__
    )
    assert stage_progress(tracker) == text
    assert stage_progress(object()) == ""  # the session ended meanwhile


def test_the_damage_reports_of_a_killed_session_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spark_options, "open_spark", lambda *_: nullcontext())
    killed = tmp_path / "nsq-damage-killed"
    killed.mkdir()
    (killed / LOCK).touch()
    os.utime(killed, (0, 0))

    reading = ArchiveReading(skip_damaged=True, damage_dir=None)
    with reading.session(cast(Any, SimpleNamespace()), SparkSettings()) as opened:
        assert os.listdir(tmp_path) == [Path(str(opened.damage)).name]

    assert os.listdir(tmp_path) == []
