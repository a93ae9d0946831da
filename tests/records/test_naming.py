"""Names of archive files: tokens, revisions, and refused formats."""

from datetime import datetime

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.records.naming import (
    DEFAULT_FORMAT,
    FileNaming,
    Rotation,
    topic_in,
    topic_pattern,
    with_rev,
)

MOMENT = datetime(2026, 11, 21, 8, 5, 9)
DAY_BEFORE = datetime(2026, 11, 20, 23)


NAMES = {
    ("<TOPIC>.<HOST><REV>.<DATETIME>.log", ""): "clicks.web1-000003.2026-11-21_08.log",
    ("<TOPIC>/<PARTITION>/<HOST>-<PID><REV>", ""): "clicks/2026-11-20/web1-77-000003",
    ("<REV>.gz", ".gz"): "-000003.gz",
    ("<REV>", ".gz"): "-000003.gz",
}


def test_every_token_is_replaced_and_other_text_is_kept() -> None:
    def name_of(format: str, extension: str, **more: str) -> str:
        naming = FileNaming(format, host="web1", pid=77, extension=extension, **more)
        return with_rev(naming.stem("clicks", MOMENT, DAY_BEFORE), 3)

    assert {arguments: name_of(*arguments) for arguments in NAMES} == NAMES
    of_times = name_of("<DATETIME><REV>", "", datetime_format="v1-%Y-%j-Jan")
    assert of_times == "v1-2026-325-Jan-000003"
    assert FileNaming().format == "<TOPIC>.<HOST><REV>.<DATETIME>.log"  # as in nsq_to_file


SECOND = {"clicks": "clicks-000001", "clicks.log": "clicks-000001.log"}
SECOND |= {"clicks.log.gz": "clicks-000001.log.gz", "x.2026.11.gz": "x.2026.11-000001.gz"}
SECOND |= {"a.b/clicks.2026-11-21.log": "a.b/clicks.2026-11-21-000001.log"}
SECOND |= {"d<REV>/clicks.log": "d-000001/clicks.log"}


def test_a_second_file_of_the_same_name_gets_a_number() -> None:
    assert {name: with_rev(name, 1) for name in SECOND} == SECOND
    first = {name: name.replace("<REV>", "-000000") for name in SECOND}
    assert {name: with_rev(name, 0) for name in SECOND} == first


NO_FORMATS = dict.fromkeys(("/var/<TOPIC>", "../<TOPIC>", "a//b", ""), "inside its directory")
NO_FORMATS |= {".<TOPIC>": "hidden", ".a/<TOPIC>": "hidden", "<TOPIC>.part": "in progress"}
NO_FORMATS |= {"<TOPIC>\n": "control characters", "<TOPIC>\udcff": "not UTF-8"}


@pytest.mark.parametrize("format", NO_FORMATS)
def test_a_format_that_is_not_a_file_name_is_refused(format: str) -> None:
    with pytest.raises(ConfigurationError, match=NO_FORMATS[format]):
        FileNaming(format)
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        FileNaming(datetime_format="%Y\udcff")
    with pytest.raises(ConfigurationError, match="inside its directory"):
        FileNaming("<TOPIC>/log").stem("..", MOMENT, MOMENT)  # ".." is a valid topic


HOUR = 3600.0
NINE = 1_700_000_000 // 86_400 * 86_400 + 9 * HOUR  # nine o'clock UTC


def test_rotation_has_two_size_limits_and_an_interval_of_the_clock() -> None:
    assert not Rotation().is_full(1 << 60, 1 << 60)
    assert Rotation(size=100).is_full(100, 5000)
    assert not Rotation(size=100).is_full(99, 5000)
    assert Rotation(uncompressed_size=5000).is_full(99, 5000)
    assert not Rotation(uncompressed_size=5000).is_full(6000, 4999)
    assert not Rotation().is_over(0, NINE)
    hourly = Rotation(interval_s=HOUR)
    assert hourly.is_over(NINE - 1, NINE)
    assert not hourly.is_over(NINE, NINE + HOUR - 1)
    daily = Rotation(interval_s=24 * HOUR)
    midnight_in_kyiv = NINE - 9 * HOUR + 22 * HOUR
    assert daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv, utc_offset_s=2 * HOUR)
    assert not daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv)


@pytest.mark.parametrize(
    ("format", "name", "topic"),
    [
        ("<TOPIC>.", "a/clicks.web.h.2026.log", "clicks"),
        (DEFAULT_FORMAT, "clicks.web.h-000001.2026-01-01_00.log.gz", "clicks.web"),
        (DEFAULT_FORMAT, "x#ephemeral.h.2026-01-01_00.log", "x#ephemeral"),
        ("<TOPIC>/<DATETIME>/data<REV>.json", "clicks/ds=01-02/data-000001.json", "clicks"),
        ("<TOPIC>/", "web.clicks/2026/data.json", "web.clicks"),
        ("<TOPIC><REV>.log", "clicks-000001.log", "clicks"),
        ("<TOPIC>.", "README", None),
    ],
)
def test_the_topic_is_read_from_a_name(format: str, name: str, topic: str | None) -> None:
    assert topic_in(topic_pattern(format), name) == topic


@pytest.mark.parametrize(
    "format", ["data.log", "<TOPIC>.<TOPIC>.", "<TOPIC>", "logs/<TOPIC>", "<TOPIC><REV>"]
)
def test_a_format_that_does_not_show_where_the_topic_ends_is_refused(format: str) -> None:
    with pytest.raises(ConfigurationError, match="must have <TOPIC> once, and text after it"):
        topic_pattern(format)
