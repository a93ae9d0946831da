"""The options of sources and sinks are those of the page, and mean what they mean for commands."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import nsqtools
from nsqtools.archive.layout import TimeRange
from nsqtools.archive.place import LocalPlace
from nsqtools.client.connection_settings import ConnectionSettings, current_secret
from nsqtools.client.options import CLIENT_OPTIONS
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.spark.archive_format import PUSHDOWN
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    ReadSettings,
    StreamSettings,
    archive_settings,
    stream_settings,
)
from nsqtools.spark.format_options import Options, as_options, export_secrets, read_connection
from nsqtools.spark.publishing.publish_task import SinkPlan, create_output_folders, sink_plan
from nsqtools.spark.topic_stream import topic_settings

REMOTE = "hdfs://name/lake"
PAGE = Path(nsqtools.__file__).parents[1] / "man" / "nsq-spark.7.md"


def test_the_page_documents_exactly_the_options_of_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not PAGE.exists():
        pytest.skip("an installed package has no sources of its pages")
    used: set[str] = set()  # by the code, in all uses of both formats
    monkeypatch.setattr(Options, "end", lambda options: used.update(options._known.values()))
    options = Options("nsq-archive", {"path": "/archive"})
    archive_settings(options), stream_settings(options)
    options.text(PUSHDOWN)
    options.end()
    spool = {"channel": "spark", "spoolDir": "/spool"}
    topic_settings({"topic": "clicks", **spool}, {})
    topic_settings({"topicPattern": "c", "lookupdHttpAddress": "l:4161", **spool}, {})
    sink_plan({"topic": "clicks"}, {"body": "binary"}, {})
    names = {name for name in used - CLIENT_OPTIONS.keys() if "_" not in name}

    text = PAGE.read_text("utf-8")
    section = text[text.index("## Options") : text.index("### Comparison with Spark's")]
    rows = "".join(re.findall(r"^\|([^|]*)", section, re.MULTILINE))
    assert sorted(names - set(re.findall(r"`([A-Za-z]+)`", section))) == []
    assert sorted(set(re.findall(r"`([A-Za-z]+)`", rows)) - names - {"body"}) == []


def consumer(environ: Mapping[str, str] | None = None, **given: str) -> ConnectionSettings:
    options = Options("nsq", {name.lower(): text for name, text in given.items()})
    settings = read_connection(options, environ or {})
    options.end()
    return settings


def test_options_mean_the_same_as_flags_and_the_environment() -> None:
    environ = {"NSQ_NSQD_TCP_ADDRESS": "env:1,env:2 env:3"}

    assert consumer() == ConnectionSettings(nsqd_tcp_addresses=("127.0.0.1:4150",))
    assert consumer(environ).nsqd_tcp_addresses == ("env:1", "env:2", "env:3")
    assert consumer(environ, nsqdTcpAddress="a:1, b:2").nsqd_tcp_addresses == ("a:1", "b:2")
    assert consumer(environ, lookupdHttpAddress="l:1") == ConnectionSettings((), ("l:1",))
    assert consumer(environ, nsqdHttpAddress="d:1") == ConnectionSettings((), (), ("d:1",))
    tls = {"tls": "true", "tlsCaFile": "ca.pem", "tlsInsecure": "true", "tlsMinVersion": "tls1.3"}

    assert consumer(**tls, deflateLevel="3").options == {
        "tls_v1": "true",
        "tls_root_ca_file": "ca.pem",
        "tls_insecure_skip_verify": "true",
        "tls_min_version": "tls1.3",
        "deflate_level": "3",
        "deflate": "true",
    }
    for name in ("max_in_flight", "maxInFlight", "max-in-flight", "MAXINFLIGHT"):
        options = consumer(**{name: "7"}, msg_timeout="5m").client_options()
        assert (options.max_in_flight, options.msg_timeout_s) == (7, 300)
    with pytest.raises(ConfigurationError) as caught:
        consumer(maxInFlihgt="1")
    assert caught.value.hint == "Did you mean max_in_flight?"


def test_the_secret_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    environ = {"NSQ_AUTH_SECRET": "from-environment"}

    from_file = consumer(environ, authSecretFile=str(tmp_path / "secret"))

    assert from_file.client_options().auth_secret == "from-file"
    (tmp_path / "secret").write_text("from-file-later\n")
    assert current_secret(from_file.client_options()) == "from-file-later"
    assert consumer(environ).client_options().auth_secret == "from-environment"
    assert "from-file" not in repr(from_file)


def test_settings_survive_as_options_that_contain_no_secret() -> None:
    tls = {"tls_v1": "true", "tls_root_ca_file": "ca.pem"}
    secret, moved = tls | {"auth_secret": "s3cret"}, {"n:4150": "127.0.0.1:1"}
    lookupd = "http://user:s3cret@l:4161"
    settings = ConnectionSettings(("a:1", "b:2"), (lookupd,), options=secret, address_map=moved)
    environ = {"NSQ_NSQD_HTTP_ADDRESS": "of:another"}

    options = as_options(settings)
    export_secrets(settings, environ)

    assert "s3cret" not in str(options)
    absolute = secret | {"tls_root_ca_file": str(Path("ca.pem").absolute())}
    assert consumer(environ, **options) == replace(settings, options=absolute)
    with pytest.raises(ConfigurationError, match="must not be in an option"):
        consumer(environ, lookupdHttpAddress=lookupd)


def read(**given: str) -> ReadSettings:
    options = Options("nsq-archive", {"path": "/a", **given})
    settings = archive_settings(options)
    options.end()
    return settings


def stream(**given: str) -> StreamSettings:
    return stream_settings(Options("nsq-archive", given))


def test_options_are_parsed() -> None:
    reading = {
        "paths": "/b, file:///c%20d, s3a://b/lake",
        "workdir": "/w",
        "topics": "a,b",
        "since": "2026-11-21T00:00:00Z",
        "until": "2026-11-22T00:00:00Z",
        "format": "raw",
        "delimiter": "\\0",
        "topic": "clicks",
        "ondamage": "report",
        "damagepath": "/r",
        "partitionbytes": "1MiB",
        "minpartitions": "3",
    }
    assert read(**reading) == ReadSettings(
        ("/a", "/b", "/c d", "s3a://b/lake"),
        Path("/w"),
        frozenset({"a", "b"}),
        within=TimeRange(1_795_219_200_000_000_000, 1_795_305_600_000_000_000),
        raw=True,
        delimiter=b"\0",
        topic="clicks",
        damage_path=LocalPlace(Path("/r")),
        partition_bytes=1 << 20,
        min_partitions=3,
    )
    limits = {"maxrowspertrigger": "5", "maxbytespertrigger": "1KiB", "maxfilespertrigger": "2"}
    behavior = {"startingoffsets": "latest", "failondataloss": "false", "pollinterval": "1s"}
    assert stream(**limits, **behavior) == StreamSettings(
        "latest", fail_on_data_loss=False, limits=BatchLimits(5, 1024, 2), poll_s=1.0
    )
    topic_options = {"topic": "clicks, views,clicks", "channel": "spark", "spoolDir": "/spool"}
    assert topic_settings(topic_options, {}).spool.topics == ("clicks", "views")


def test_paths_are_text_json_or_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert read(paths=json.dumps(["/b,c", "d"])).paths == ("/a", "/b,c", f"{here}/d")
    for pattern in ("[x]/a", "[1]"):
        assert read(paths=f"{pattern},/b").paths == ("/a", f"{here}/{pattern}", "/b")
        assert read(paths=pattern).paths == ("/a", f"{here}/{pattern}")
    for name in ("a1", "a2", "b", "b[1]", "b1"):
        (tmp_path / name).touch()
    assert read(path=str(tmp_path / "a*")).roots() == [tmp_path / "a1", tmp_path / "a2"]
    for name in ("c*", "b[1]"):  # An existing file is not a pattern.
        assert read(path=str(tmp_path / name)).roots() == [tmp_path / name]


BODY = {"body": "binary"}
ARCHIVED = BODY | {
    **dict.fromkeys(("topic", "nsqd", "id", "file"), "string"),
    "timestamp": "timestamp",
    "ts_ns": "bigint",
    "attempts": "int",
    "pos": "bigint",
}


def sink(columns: dict[str, str] = BODY, **given: str) -> SinkPlan:
    given = {"topic": "clicks"} | given
    return sink_plan({name.lower(): text for name, text in given.items()}, columns, {})


def test_a_plan_delivers_at_least_once_by_default_and_tasks_share_a_rate() -> None:
    plan = sink()
    assert plan.addresses == ("127.0.0.1:4150",)
    assert (plan.options.retry_timeout_s, plan.options.retry_unknown) == (60, True)
    assert (plan.batch_rows, plan.client_options.max_outstanding) == (500, 8)
    assert sink_plan({}, ARCHIVED, {}).topic is None

    assert sink().batch_bytes == 1 << 19
    # Fits the limit of nsqd.
    assert sink(publish_max_body_size="10000", batchRows="100").batch_bytes == 9596

    plan = sink(retryTimeout="16s", retryUnknown="false", max_outstanding="2", snappy="true")
    assert not plan.options.retry_unknown
    assert [plan.attempt(number).retry_timeout_s for number in range(3)] == [16, 4, 1]
    assert (plan.client_options.max_outstanding, plan.client_options.snappy) == (2, True)

    plan = sink(nsqdTcpAddress="a:1,b:2,c:3")
    assert (plan.rotated(0), plan.rotated(4)) == (("a:1", "b:2", "c:3"), ("b:2", "c:3", "a:1"))
    for given, rate in (({"rate": "100"}, 25), ({"rate": "100", "slots": "2"}, 50), ({}, 0)):
        assert sink_plan(given, ARCHIVED, {"NSQ_SPARK_SLOTS": "4"}).rate == rate
    assert sink(rate="0").rate == 0


@pytest.mark.parametrize(
    ("columns", "complaint", "hint"),
    [
        ({}, "column 'body' is missing (columns: none)", "to_json"),
        ({"body": "int"}, "column 'body' is of type int, not binary or string", "cast"),
        ({"body": "struct<a:int>"}, "is of type struct<a:int>, not binary or string", "to_json"),
        ({**BODY, "defer_ms": "string"}, "'defer_ms' is of type string", "cast"),
        ({**BODY, "topic": "int"}, "'topic' is of type int, not string", "cast"),
        ({**BODY, "defer": "int"}, "does not use the column 'defer'", "defer_ms"),
    ],
)
def test_wrong_columns_are_refused(columns: dict[str, str], complaint: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sink(columns)
    assert complaint in str(caught.value)
    assert hint in caught.value.hint


def test_a_ledger_and_dead_letters_belong_to_one_job(tmp_path: Path) -> None:
    assert sink().job != sink().job
    assert sink(ledgerPath="/l").job == sink(ledgerPath="/l").job
    assert sink(ledgerPath="/l").job != sink(ledgerPath="/m").job
    assert sink(ledgerPath="/l").job != sink(ledgerPath="/l", topic="b").job
    other_plans = [
        sink(topic="b"),
        sink(ledgerJob="x"),
        sink({"body": "binary", "defer_ms": "int"}),
    ]
    assert len({plan.ledger_job for plan in [sink(), *other_plans]}) == 4

    (tmp_path / "file").write_text("")
    create_output_folders(
        sink(deadLetterPath=f"{tmp_path}/a/b", outcomePath=f"{tmp_path}/c/d.json")
    )
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").is_dir()
    with pytest.raises(OutputError, match=r"cannot write into .*/file"):
        create_output_folders(sink(deadLetterPath=str(tmp_path / "file")))


def topics(**given: str) -> None:
    topic_settings(given, {})


TOPIC = {"topic": "clicks", "channel": "spark"}
UNKNOWN_PLACE = f"{REMOTE} is not supported"


@pytest.mark.parametrize(
    ("of", "given", "complaint"),
    [
        (consumer, {"tlsCaFile": "ca.pem"}, "option tlsCaFile is given, but TLS is not enabled"),
        (consumer, {"tls": "true", "tls_v1": "false"}, "tls and option tls_v1 contradict each"),
        (consumer, {"tls": "perhaps"}, "invalid value 'perhaps' for client option tls_v1"),
        (consumer, {"snappy": "true", "deflate": "true"}, "exclude each other"),
        (consumer, {"addressMap": "a:1"}, "invalid addressMap 'a:1': not OLD=NEW"),
        (consumer, {"authSecretFile": "/nonexistent"}, "/nonexistent .No such file or directory"),
        (consumer, {"auth_secret": "s3cret"}, "a secret must not be an option"),
        (consumer, {"authSecret": "s3cret"}, "a secret must not be an option"),
        (sink, {"nsqdHttpAddress": "d:1"}, "nsqdhttpaddress"),
        (topics, {"channel": "spark"}, "needs the option 'topic'"),
        (topics, {"topic": "clicks"}, "needs the option 'channel'"),
        (topics, {"topic": "a b", "channel": "spark"}, "invalid topic name 'a b'"),
        (topics, {"topic": "clicks", "channel": "a b"}, "invalid channel name 'a b'"),
        (topics, {**TOPIC, "spoolDir": REMOTE}, f"spoolDir: {UNKNOWN_PLACE}"),
        (topics, TOPIC, "needs the option 'spoolDir'"),
        (topics, {"topic": "t", "channel": "c#ephemeral"}, "would be deleted, with its messages"),
        (topics, {**TOPIC, "spoolDir": "/s", "maxSpoolBytes": "0"}, "maxSpoolBytes=0 must be >= 1"),
        (topics, {**TOPIC, "spoolDir": "/s", "spoolrows": "1"}, "has no option 'spoolrows'"),
        (read, {"path": ""}, "needs a path"),
        (read, {"paths": REMOTE}, UNKNOWN_PLACE),
        (read, {"workdir": REMOTE}, UNKNOWN_PLACE),
        (read, {"path": "s3://b/nsq", "workdir": "/w"}, "workDir is for archives in directories"),
        (read, {"ondamage": "report", "damagepath": REMOTE}, UNKNOWN_PLACE),
        (read, {"ondamage": "report"}, "onDamage=report needs damagePath"),
        (read, {"damagepath": "/r"}, "onDamage=report needs damagePath"),
        (read, {"ondamage": "ignore"}, "onDamage=ignore must be one of fail, report"),
        (read, {"topics": "a b"}, "a b"),
        (read, {"delimiter": "\\q"}, "is not text with escapes"),
        (read, {"minpartitions": "0"}, "minPartitions=0 must be >= 1"),
        (read, {"delimiter": ""}, "option delimiter is empty"),
        (read, {"partitionbytes": "0"}, "partitionBytes=0 must be >= 1"),
        (stream, {"startingoffsets": "latest", "startingtimestamp": "-1h"}, "exclude each other"),
        (stream, {"maxrowspertrigger": "many"}, "is not a whole number"),
        (lambda: sink_plan({}, BODY, {}), {}, "neither a column nor an option 'topic'"),
        (sink, {"topic": "a b"}, "invalid topic name 'a b'"),
        (sink, {"rate": "100"}, "the number of parallel tasks is unknown"),
        (sink, {"rate": "-1", "slots": "2"}, "rate=-1 must be a number >= 0"),
        (sink, {"retryTimeout": "soon"}, "'soon' is not a duration"),
        (sink, {"ledgerPath": REMOTE}, f"ledgerPath: {UNKNOWN_PLACE}"),
        (sink, {"outcomePath": REMOTE}, f"outcomePath: {UNKNOWN_PLACE}"),
        (sink, {"outcomePath": "s3://bucket"}, "outcomePath: s3://bucket: only a directory is"),
        (sink, {"deadLetterPath": REMOTE}, f"deadLetterPath: {UNKNOWN_PLACE}"),
        (sink, {"path": "clicks"}, "has no option 'path'"),
    ],
)
def test_invalid_options_are_refused(
    of: Callable[..., object], given: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        of(**given)
    assert "s3cret" not in f"{caught.value}{caught.value.hint}"
