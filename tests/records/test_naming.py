"""Names of archive files: tokens, revisions, and what is refused."""

from __future__ import annotations

from datetime import datetime

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.records.naming import FileNaming, Rotation, with_rev

MOMENT = datetime(2026, 11, 21, 8, 5, 9)
DAY_BEFORE = datetime(2026, 11, 20, 23)


@pytest.mark.parametrize(
    ("format", "fields", "name"),
    [
        ("<TOPIC>.<HOST><REV>.<DATETIME>.log", {}, "clicks.web1-000003.2026-11-21_08.log"),
        ("<TOPIC>/<PARTITION>/<HOST>-<PID><REV>", {}, "clicks/2026-11-20/web1-77-000003"),
        ("<DATETIME><REV>", {"datetime_format": "v1-%Y-%j-Jan"}, "v1-2026-325-Jan-000003"),
        ("<REV>.gz", {"extension": ".gz"}, "-000003.gz"),
        ("<REV>", {"extension": ".gz"}, "-000003.gz"),
    ],
)
def test_every_token_has_its_value_and_the_rest_stays(
    format: str, fields: dict[str, str], name: str
) -> None:
    naming = FileNaming(format, host="web1", pid=77, **fields)  # type: ignore[arg-type]
    assert with_rev(naming.stem("clicks", MOMENT, DAY_BEFORE), 3) == name
    assert FileNaming().format == "<TOPIC>.<HOST><REV>.<DATETIME>.log"  # that of nsq_to_file


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("clicks.log", "clicks-000001.log"),
        ("clicks.log.gz", "clicks-000001.log.gz"),
        ("clicks", "clicks-000001"),
        ("a.b/clicks.2026-11-21.log", "a.b/clicks.2026-11-21-000001.log"),
        ("d<REV>/clicks.log", "d-000001/clicks.log"),
        ("x.2026.11.gz", "x.2026.11-000001.gz"),
    ],
)
def test_a_second_file_of_a_name_gets_a_number(name: str, second: str) -> None:
    assert with_rev(name, 1) == second
    assert with_rev(name, 0) == name.replace("<REV>", "-000000")


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ("/var/<TOPIC>", "inside its directory"),
        ("../<TOPIC>", "inside its directory"),
        ("a//b", "inside its directory"),
        (".<TOPIC>", "hidden"),
        (".a/<TOPIC>", "hidden"),
        ("<TOPIC>\n", "control characters"),
        ("<TOPIC>.part", "in progress"),
        ("", "inside its directory"),
    ],
)
def test_a_format_that_names_no_file_is_refused(format: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        FileNaming(format)
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        FileNaming(datetime_format="%Y\udcff")
    with pytest.raises(ConfigurationError, match="inside its directory"):
        FileNaming("<TOPIC>/log").stem("..", MOMENT, MOMENT)  # which is a valid topic


HOUR = 3600.0
NINE = 1_700_000_000 // 86_400 * 86_400 + 9 * HOUR  # nine o'clock UTC


def test_sizes_on_disk_and_before_compression_are_limits_of_their_own() -> None:
    assert not Rotation().is_full(1 << 60, 1 << 60)
    assert Rotation(size=100).is_full(100, 5000)
    assert not Rotation(size=100).is_full(99, 5000)
    assert Rotation(uncompressed_size=5000).is_full(99, 5000)
    assert not Rotation(uncompressed_size=5000).is_full(6000, 4999)


def test_an_interval_is_aligned_to_the_clock() -> None:
    assert not Rotation().is_over(0, NINE)
    hourly = Rotation(interval_s=HOUR)
    assert hourly.is_over(NINE - 1, NINE)
    assert not hourly.is_over(NINE, NINE + HOUR - 1)
    daily = Rotation(interval_s=24 * HOUR)
    midnight_in_kyiv = NINE - 9 * HOUR + 22 * HOUR
    assert daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv, utc_offset_s=2 * HOUR)
    assert not daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv)
