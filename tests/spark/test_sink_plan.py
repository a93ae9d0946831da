"""What is refused before anything is published, and what a task is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.spark.publishing.sink_plan import SinkSettings, make_folders, sink_settings

BODY = {"body": "binary"}
ARCHIVED = {
    "topic": "string",
    "nsqd": "string",
    "id": "string",
    "timestamp": "timestamp",
    "ts_ns": "bigint",
    "attempts": "int",
    "body": "binary",
    "file": "string",
    "pos": "bigint",
}


def settings(columns: dict[str, str] = BODY, **given: str) -> SinkSettings:
    given = {"topic": "clicks"} | given
    return sink_settings({name.lower(): text for name, text in given.items()}, columns, {})


def test_the_defaults_deliver_at_least_once_with_a_small_window() -> None:
    plan = settings().plan

    assert plan.addresses == ("127.0.0.1:4150",)
    assert plan.options.retry_timeout_s == 60
    assert plan.options.retry_unknown
    assert (plan.batch_rows, plan.client_options.max_outstanding) == (500, 8)


def test_the_options_of_the_command_line_are_there() -> None:
    plan = settings(
        retryTimeout="5s", retryUnknown="false", max_outstanding="2", snappy="true"
    ).plan

    assert (plan.options.retry_timeout_s, plan.options.retry_unknown) == (5, False)
    assert (plan.client_options.max_outstanding, plan.client_options.snappy) == (2, True)


def test_every_partition_has_another_first_nsqd() -> None:
    plan = settings(nsqdTcpAddress="a:1,b:2,c:3").plan

    assert plan.rotated(0) == ("a:1", "b:2", "c:3")
    assert plan.rotated(4) == ("b:2", "c:3", "a:1")


def test_a_task_that_is_tried_again_waits_less() -> None:
    plan = settings(retryTimeout="16s").plan

    assert [plan.attempt(number).retry_timeout_s for number in range(3)] == [16, 4, 1]


def test_what_an_archive_has_can_be_published_as_it_is() -> None:
    assert sink_settings({}, ARCHIVED, {}).plan.topic is None


@pytest.mark.parametrize(
    ("columns", "complaint", "hint"),
    [
        ({}, "column 'body' is missing (columns: none)", "to_json"),
        ({"topic": "string"}, "column 'body' is missing (columns: topic)", "to_json"),
        ({"body": "int"}, "column 'body' is of type int, not binary or string", "cast"),
        ({"body": "struct<a:int>"}, "is of type struct<a:int>, not binary or string", "to_json"),
        ({**BODY, "defer_ms": "string"}, "'defer_ms' is of type string", "cast"),
        ({**BODY, "topic": "int"}, "'topic' is of type int, not string", "cast"),
        ({**BODY, "defer": "int"}, "does not use the column 'defer'", "defer_ms"),
    ],
)
def test_columns_that_cannot_be_published_are_refused(
    columns: dict[str, str], complaint: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(columns)
    assert complaint in str(caught.value)
    assert hint in caught.value.hint


def test_a_topic_must_come_from_somewhere() -> None:
    with pytest.raises(ConfigurationError, match="neither a column nor an option 'topic'"):
        sink_settings({}, BODY, {})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"topic": "a b"}, "invalid topic name 'a b'"),
        ({"rate": "100"}, "the number of parallel tasks is unknown"),
        ({"rate": "-1", "slots": "2"}, "rate=-1 must be a number >= 0"),
        ({"rate": "fast", "slots": "2"}, "'fast' is not a number"),
        ({"retryTimeout": "soon"}, "'soon' is not a duration"),
        ({"retryUnknown": "maybe"}, "retryUnknown=maybe must be one of"),
        ({"batchRows": "0"}, "batchRows=0 must be >= 1"),
        ({"ledgerPath": "ftp://h/x"}, "ledgerPath: ftp://h/x is not supported as storage"),
        ({"outcomePath": "s3://bucket"}, "outcomePath: s3://bucket: only a directory is supported"),
        ({"deadLetterPath": ""}, "deadLetterPath: an empty path"),
        ({"deadLetters": "x"}, "has no option 'deadletters'"),
        ({"path": "clicks"}, "has no option 'path'"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        settings(**given)


def test_the_rate_is_shared_by_the_tasks_that_run_at_once() -> None:
    environ = {"NSQ_SPARK_SLOTS": "4"}
    given = {"topic": "clicks", "rate": "100"}

    assert sink_settings(given, BODY, environ).plan.rate == 25
    assert sink_settings({**given, "slots": "2"}, BODY, environ).plan.rate == 50
    assert sink_settings({**given, "rate": "0"}, BODY, {}).plan.rate == 0


def test_paths_may_be_urls_of_files() -> None:
    assert settings(ledgerPath="file:///shared/ledger").plan.ledger == Path("/shared/ledger")
    assert settings(ledgerPath="ledger").plan.ledger == Path("ledger").absolute()


def test_a_batch_is_no_larger_than_nsqd_is_said_to_take() -> None:
    assert settings().plan.batch_bytes == 1 << 19
    assert settings(publish_max_body_size="10000", batchRows="100").plan.batch_bytes == 9596


def test_dead_letters_are_named_after_their_job() -> None:
    assert settings().plan.job != settings().plan.job
    assert settings(ledgerPath="/l").plan.job == settings(ledgerPath="/l").plan.job
    assert settings(ledgerPath="/l").plan.job != settings(ledgerPath="/m").plan.job
    assert settings(ledgerPath="/l").plan.job != settings(ledgerPath="/l", topic="b").plan.job


def test_directories_are_made_before_anything_is_published(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    make_folders(settings(deadLetterPath=f"{tmp_path}/a/b", outcomePath=f"{tmp_path}/c/d.json"))

    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").is_dir()
    with pytest.raises(OutputError, match=r"cannot write into .*/file"):
        make_folders(settings(deadLetterPath=str(tmp_path / "file")))


def test_a_ledger_is_for_a_topic_and_columns() -> None:
    jobs = {
        settings().ledger_job,
        settings(topic="views").ledger_job,
        settings(ledgerJob="x").ledger_job,
        settings({"body": "binary", "defer_ms": "int"}).ledger_job,
    }

    assert len(jobs) == 4
