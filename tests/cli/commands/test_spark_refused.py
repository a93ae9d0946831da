"""What ``nsq spark`` refuses before Spark is started, and before anything is made."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from nsqtools.cli.main import main

REMOTE = "hdfs://name/lake"
TO_LAKE = ["--output", "lake", "--checkpoint", "check"]
AWAY = "--nsqd-tcp-address=127.0.0.1:1"

ELSEWHERE = [
    ["compact", "archive", "--output", REMOTE, "--delete-archives", "--yes"],
    ["compact", REMOTE, "--output", "lake"],
    ["ingest", REMOTE, *TO_LAKE],
    ["ingest", "archive", *TO_LAKE, "--work-dir", REMOTE],
    ["ingest", "archive", "--output", REMOTE, "--checkpoint", "check"],
    ["ingest", "archive", "--output", "lake", "--checkpoint", REMOTE],
    ["ingest", "-t", "t", *TO_LAKE, "--spool-dir", REMOTE],
    ["replay", REMOTE],
    ["replay", "archive", "--ledger", REMOTE],
    ["replay", "archive", "--dead-letters", REMOTE],
    ["report", REMOTE],
    ["sql", "SELECT 1", REMOTE],
    ["sql", "--file", "query.sql", REMOTE],
    ["sql", "SELECT 1", "--archive", f"a={REMOTE}"],
    ["sql", "SELECT 1", "--parquet", f"a={REMOTE}"],
]


def test_what_cannot_be_done_is_one_line_and_makes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    own_logging: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    (tmp_path / "archive").mkdir()
    (tmp_path / "query.sql").write_text("SELECT 1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    for arguments, status, line in (
        *((arguments, 2, f"{REMOTE} is not supported") for arguments in ELSEWHERE),
        (["ingest", "nowhere", *TO_LAKE], 3, "there is no"),
        (["ingest", *TO_LAKE], 2, "give topics (-t TOPIC)"),
        (["ingest", "archive", "-t", "clicks", *TO_LAKE], 2, "give topics (-t TOPIC)"),
        (["ingest", "archive", "-c", "spark", *TO_LAKE], 2, "are for topics"),
        (["ingest", "-t", "clicks", "--skip-damaged", *TO_LAKE], 2, "are for archives"),
        (["ingest", "archive", *TO_LAKE, "--once", "--trigger", "1s"], 2, "no effect with --once"),
        (["sql", "SELECT 1", "--damage-dir", "d"], 2, "--damage-dir is for --skip-damaged"),
        (["sql", "--file", "-"], 2, "- is not UTF-8"),
        (["ingest", "s3://b/nsq", *TO_LAKE, "--work-dir", "archive"], 2, "in directories"),
        (["ingest", "archive", "-o", "s3://b/o", "--checkpoint", "s3://b/c"], 4, "to the store"),
        (["ingest", "--topic-pattern", "[", *TO_LAKE], 2, "is not a regular expression"),
        (["ingest", "--topic-pattern", "x", "-c", "x#ephemeral", *TO_LAKE], 2, "would be deleted"),
        (["ingest", "-t", "clicks", *TO_LAKE, AWAY], 4, "127.0.0.1:1 (connection refused)"),
        (["replay", "/no/such/path"], 3, "there is no /no/such/path"),
        (["replay", "archive", "--topic", "a="], 2, "invalid --topic 'a='"),
        (["replay", "archive", "--topic", "a b"], 2, "invalid topic name"),
        (["replay", "archive", "--since", "soon"], 2, "'soon' is not a time"),
        (["replay", "archive", "--tls-ca-file", "x"], 2, "TLS is not enabled"),
        (["report", "nowhere"], 3, "there is no"),
        (["report", ".", "--by", "0s"], 2, "is too short; write hour, day or 10m"),
        (["report", ".", "--gap", "0s"], 2, "is too short; write 5m or 1s"),
        (["report", ".", "--html", "page"], 2, "no nsq spark report --html any more: use --json"),
    ):
        assert main(["spark", *arguments]) == status, arguments
        out, err = capfd.readouterr()
        assert (out, line in err) == ("", True), err
        assert {path.name for path in tmp_path.iterdir()} == {"archive", "query.sql"}
