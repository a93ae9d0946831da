"""The options of ``nsq spark`` commands, and what is shown while Spark works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsqtools.cli.options.spark_options import how_far, parse_conf
from nsqtools.errors import ConfigurationError


def test_settings_of_spark_may_hold_equals_signs() -> None:
    conf = parse_conf(["spark.a=1", "spark.driver.extraJavaOptions=-Dx=y", "spark.b="])

    assert conf == {"spark.a": "1", "spark.driver.extraJavaOptions": "-Dx=y", "spark.b": ""}


@pytest.mark.parametrize("text", ["spark.a", "a=1", "=1", ""])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a setting of Spark"):
        parse_conf([text])


class Tracker:
    """As much of pyspark's ``StatusTracker`` as is asked; a stage may be over in between."""

    def __init__(self, *stages: tuple[int, int, int]) -> None:
        self._stages = stages

    def getActiveStageIds(self) -> list[int]:
        return [*range(len(self._stages)), 99]

    def getStageInfo(self, number: int) -> SimpleNamespace | None:
        if number == 99:
            return None
        names = ("numTasks", "numCompletedTasks", "numFailedTasks")
        return SimpleNamespace(
            stageId=number, **dict(zip(names, self._stages[number], strict=True))
        )


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([], ""),
        ([(40, 12, 0)], "Spark: 12 of 40 tasks of stage 0"),
        ([(40, 12, 1), (10, 3, 0)], "Spark: 15 of 50 tasks of stage 0, 1 failed and tried again"),
    ],
)
def test_the_progress_line_adds_up_what_runs(stages: list[tuple[int, int, int]], text: str) -> None:
    assert how_far(Tracker(*stages)) == text


def test_a_session_that_ends_meanwhile_shows_nothing() -> None:
    assert how_far(object()) == ""
