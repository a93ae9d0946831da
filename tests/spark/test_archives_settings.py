"""The options of ``nsq-archive``, as Spark hands them over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsqtools.archive.reader import EVER, TimeRange
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    FileFormat,
    OnDamage,
    ReadSettings,
    StreamSettings,
    archive_settings,
    stream_settings,
)
from nsqtools.spark.format_options import Options


def read(**given: str) -> ReadSettings:
    options = Options("nsq-archive", {"path": "/a", **given})
    settings = archive_settings(options)
    options.end()
    return settings


def stream(**given: str) -> StreamSettings:
    return stream_settings(Options("nsq-archive", given))


def test_without_options_everything_is_read_and_damage_fails() -> None:
    settings = read()

    assert settings.paths == ("/a",)
    assert settings.within == EVER
    assert (settings.topics, settings.format) == (frozenset(), FileFormat.auto)
    assert (settings.on_damage, settings.damage_path) == (OnDamage.fail, None)
    assert stream() == StreamSettings()


def test_all_options_are_read() -> None:
    settings = read(
        paths="/b, file:///c%20d",
        workdir="/w",
        topics="a,b",
        since="2026-11-21T00:00:00Z",
        until="2026-11-22T00:00:00Z",
        format="raw",
        delimiter="\\0",
        topic="clicks",
        ondamage="report",
        damagepath="/r",
        partitionbytes="1MiB",
        minpartitions="3",
    )

    assert settings == ReadSettings(
        ("/a", "/b", "/c d"),
        Path("/w"),
        frozenset({"a", "b"}),
        within=TimeRange(1_795_219_200_000_000_000, 1_795_305_600_000_000_000),
        format=FileFormat.raw,
        delimiter=b"\0",
        topic="clicks",
        on_damage=OnDamage.report,
        damage_path=Path("/r"),
        partition_bytes=1 << 20,
        min_partitions=3,
    )
    assert stream(
        startingoffsets="latest",
        failondataloss="false",
        maxrowspertrigger="5",
        maxbytespertrigger="1KiB",
        maxfilespertrigger="2",
        pollinterval="1s",
    ) == StreamSettings(
        "latest", fail_on_data_loss=False, limits=BatchLimits(5, 1024, 2), poll_s=1.0
    )


def test_several_paths_come_as_spark_sends_them() -> None:
    options = Options("nsq-archive", {"paths": json.dumps(["/a,b", "relative"])})

    assert archive_settings(options).paths == ("/a,b", str(Path("relative").absolute()))


def test_patterns_name_what_is_there(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b"):
        (tmp_path / name).touch()

    assert read(path=str(tmp_path / "a*")).roots() == [tmp_path / "a1", tmp_path / "a2"]
    assert read(path=str(tmp_path / "c*")).roots() == [tmp_path / "c*"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"path": ""}, "needs a path"),
        ({"path": "ftp://name/x"}, "is not supported"),
        ({"path": "file://host/x"}, "is not supported"),
        ({"ondamage": "report"}, "onDamage=report needs damagePath"),
        ({"damagepath": "/r"}, "onDamage=report needs damagePath"),
        ({"ondamage": "ignore"}, "onDamage=ignore must be one of fail, report"),
        ({"format": "csv"}, "format=csv must be one of auto, raw"),
        ({"topics": "a b"}, "a b"),
        ({"delimiter": ""}, "option delimiter is empty"),
        ({"delimiter": "\\q"}, "unknown escape"),
        ({"partitionbytes": "0"}, "partitionBytes=0 must be >= 1"),
        ({"minpartitions": "0"}, "minPartitions=0 must be >= 1"),
        ({"sinc": "-2h"}, "has no option 'sinc'"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        read(**given)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"startingoffsets": "latest", "startingtimestamp": "-1h"}, "exclude each other"),
        ({"maxrowspertrigger": "many"}, "is not a whole number"),
        ({"pollinterval": "often"}, "is not a duration"),
        ({"failondataloss": "no"}, "must be one of true, false"),
    ],
)
def test_what_a_stream_cannot_mean_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        stream(**given)
