"""Habits from the Go utilities and elsewhere: understood, or refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

from nsqtools.cli.main import quick_answer
from nsqtools.cli.parsing import app
from nsqtools.errors import ConfigurationError


def test_gos_single_dash_publishes_nothing(run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path) -> None:
    (tmp_path / "clicks").write_text("a line of a file\n")
    to = ["--nsqd-tcp-address", nsqd.tcp_address]

    result = run_nsq(["pub", "-topic", str(tmp_path / "clicks"), *to], stdin=b"m1\n")

    assert result.status == 2
    assert result.err == "nsq: error: no such option: -topic\nhint: Did you mean --topic?\n"
    assert nsqd.stats()["topics"] == []


@pytest.mark.parametrize(
    ("line", "given", "meant"),
    [
        ("tail -topic clicks", "-topic", "--topic"),
        ("tail -topic=clicks", "-topic", "--topic"),
        ("tail -t clicks -nsqd-tcp-address=a:4150", "-nsqd-tcp-address", "--nsqd-tcp-address"),
        ("to-file -t clicks -output-dir d", "-output-dir", "--output-dir"),
        ("to-file -t clicks --output-dir d -gzip", "-gzip", "--gzip"),
        ("stat -no-such -topic x", "-topic", "--topic"),
        ("topic list -json", "-json", "--json"),
        ("pub -t x -no-tls", "-no-tls", "--no-tls"),
    ],
)
def test_a_long_option_with_one_dash_is_named_with_two(line: str, given: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        app.run(line.split())

    assert str(caught.value).splitlines()[0] == f"no such option: {given}"
    assert caught.value.hint == f"Did you mean {meant}?"


def test_a_value_for_a_flag_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        app.run(["to-file", "--gzip=true", "-t", "x"])

    assert caught.value.hint == "Write --gzip alone for yes, and leave it out for the default."


@pytest.mark.parametrize(
    "line",
    [
        "pub --help -vq",
        "tail --help -t -topic",  # the value of -t
        "tail --help --grep -json -tclicks -n5",
        "replay --help --since -2h -- -topic",
    ],
)
def test_short_options_and_values_may_begin_with_a_dash(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(line.split()) == 0
    assert capsys.readouterr().out.startswith("Usage: nsq ")


@pytest.mark.parametrize("line", ["-h", "help", ""])
def test_the_page_of_nsq_has_several_names(line: str) -> None:
    assert quick_answer(line.split()) == quick_answer(["--help"]) is not None


def test_version_is_a_command_too() -> None:
    assert quick_answer(["version"]) == quick_answer(["--version"]) is not None


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("topic -h", "topic --help"),
        ("help tail", "tail --help"),
        ("help topic list", "topic list --help"),
        ("completion -h", "completion --help"),
        ("help completion", "completion --help"),
    ],
)
def test_every_page_has_several_names(run_nsq: RunNsq, line: str, same: str) -> None:
    shown, expected = run_nsq(line.split()), run_nsq(same.split())

    assert shown.status == expected.status == 0
    assert shown.out == expected.out
