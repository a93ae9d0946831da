"""What is suggested for what is mistyped: what was meant; habits from the Go utilities are refused.

Wording and exit status are in tests/cli/transcripts/nsq.txt.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

from nsqtools.cli.parsing import app
from nsqtools.cli.parsing.app import closest


def test_what_is_as_close_is_suggested_too() -> None:
    assert closest("uploaf", ["upload", "download"]) == ["upload"]
    assert closest("tls-k", ["tls-ca", "tls-kex", "tls-key"]) == ["tls-kex", "tls-key"]
    assert closest("x", []) == []


def test_gos_single_dash_publishes_nothing(run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path) -> None:
    (tmp_path / "clicks").write_text("a line of a file\n")
    to = ["--nsqd-tcp-address", nsqd.tcp_address]

    result = run_nsq(["pub", "-topic", str(tmp_path / "clicks"), *to], stdin=b"m1\n")

    assert result.status == 2
    assert nsqd.stats()["topics"] == []


def test_values_may_begin_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "tail --help -t -topic",  # the value of -t
        "tail --help --grep -json -tclicks -n5",
        "replay --help --since -2h -- -topic",
    ):
        assert app.run(line.split()) == 0
        assert capsys.readouterr().out.startswith("Usage: nsq ")


def test_ls_is_list_and_json_has_one_spelling_more(run_nsq: RunNsq, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\n")

    assert run_nsq(["queue", "ls", str(tmp_path)]) == run_nsq(["queue", "list", str(tmp_path)])
    verify = ["archive", "verify", str(tmp_path)]
    assert run_nsq([*verify, "-o", "json"]) == run_nsq([*verify, "--json"])
    assert json.loads(run_nsq([*verify, "--output=json"]).out)
