"""``nsq compat``: links, explanations, and refusals before anything runs."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.cli import SpawnNsq

from nsqtools.cli.commands import compat
from nsqtools.cli.commands.compat import go_main
from nsqtools.cli.commands.go_utilities import UTILITIES
from nsqtools.cli.commands.shells import make_links
from nsqtools.cli.main import UTILITIES as NAMES
from nsqtools.cli.running.runtime import ReaderGone
from nsqtools.errors import ConfigurationError, OutputError


def test_links_point_to_the_program_and_replace_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nsq"
    program.touch()
    monkeypatch.setattr(sys, "argv", [str(program)])
    links = tmp_path / "bin"
    links.mkdir()

    assert {link.name for link in make_links(links)} == set(UTILITIES) == set(NAMES)
    assert {link.resolve() for link in links.iterdir()} == {program}
    assert make_links(links) == []

    (links / "nsq_tail").unlink()
    (links / "nsq_tail").write_text("another program")
    with pytest.raises(OutputError, match="nsq_tail exists and is not such a link"):
        make_links(links)
    assert (links / "nsq_tail").read_text() == "another program"

    monkeypatch.setattr(sys, "argv", ["/lib/nsqtools/__main__.py"])  # as with python -m
    with pytest.raises(ConfigurationError, match=r"__main__\.py is not the program nsq"):
        make_links(links)


def test_a_path_that_is_not_text_is_explained_as_it_is(spawn_nsq: SpawnNsq) -> None:
    flags = ["-topic=t", "-nsqd-tcp-address=a:1", "-output-dir=/data/\udcff"]
    # as Python's stdout is in most locales; in the locale C it accepts everything
    locale = {"PYTHONIOENCODING": "utf-8:strict"}
    out, err = spawn_nsq(["compat", "explain", "nsq_to_file", *flags], env=locale).communicate()
    assert (b"--output-dir '/data/\xff' " in out, err) == (True, b"")


def test_a_closed_stdout_raises_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mock(side_effect=ReaderGone("stdout was closed by its reader"))
    monkeypatch.setattr(compat, "print_stat", gone)
    with pytest.raises(BrokenPipeError):
        go_main("nsq_stat", ["-topic=t", "-channel=c", "-nsqd-http-address=127.0.0.1:1"])


def test_flag_values_that_only_the_go_programs_accept_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for program, flags, complaint in (
        ("nsq_to_file", ["-sync-interval=0"], "--sync-interval should be positive"),
        ("nsq_to_file", ["-topic-pattern=("], "is not a regular expression"),
        ("to_nsq", ["-topic=bad topic"], "bad topic"),
        ("nsq_to_file", ["-consumer-opt=typo,1"], "unknown client option 'typo'"),
    ):
        assert go_main(program, ["-topic=t", "-nsqd-tcp-address=127.0.0.1:1", *flags]) == 1, flags
        assert complaint in capsys.readouterr().err
