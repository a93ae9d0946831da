"""Logs: to stderr alone, as text or JSON lines, as much as -q and -v say."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from plugins.cli import GivenCommand, RunNsq

from nsqtools.cli.parsing import app
from nsqtools.cli.running.runtime import Session, configure_logging, level


@pytest.fixture
def logger(own_logging: None) -> logging.Logger:
    """One that logs through the package's."""
    return logging.getLogger("nsqtools.client")


def test_a_text_line_has_time_level_and_message(logger: logging.Logger) -> None:
    stderr = io.StringIO()
    configure_logging(logging.WARNING, stderr)

    logger.warning("lost %s", "127.0.0.1:4150")
    logger.info("not shown")

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning: lost 127.0.0.1:4150\n", stderr.getvalue()
    )


def test_a_json_line_is_an_object_with_the_exception(logger: logging.Logger) -> None:
    stderr = io.StringIO()
    configure_logging(logging.WARNING, stderr, json=True)

    try:
        raise OSError("gone")
    except OSError:
        logger.exception("lost\n%s", "é")

    (line,) = stderr.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["level"] == "error"
    assert fields["logger"] == "nsqtools.client"
    assert fields["message"] == "lost\né"
    assert "OSError: gone" in fields["exception"]


@pytest.mark.parametrize(
    ("quiet", "verbose", "expected"),
    [(False, 0, "WARNING"), (False, 1, "INFO"), (False, 5, "DEBUG"), (True, 0, "ERROR")],
)
def test_how_much_is_logged(quiet: bool, verbose: int, expected: str) -> None:
    assert logging.getLevelName(level(quiet=quiet, verbose=verbose)) == expected


@pytest.mark.parametrize(
    ("line", "logged"),
    [("", ["a"]), ("-v", ["a", "b"]), ("-vv", ["a", "b", "c"]), ("--debug", ["a", "b", "c"])],
)
def test_the_options_of_a_command_set_it_up(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    logger: logging.Logger,
    line: str,
    logged: list[str],
) -> None:
    def talk(*, runtime: Session) -> None:
        logger.warning("a")
        logger.info("b")
        logger.debug("c")
        runtime.tell("done")

    given_command(talk)
    app.run(["given", *line.split()])

    out, err = capsys.readouterr()
    assert out == ""
    assert [text.split(": ")[-1] for text in err.splitlines()] == [*logged, "done"]


def test_quiet_keeps_summaries_back(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk(*, runtime: Session) -> None:
        runtime.tell("done")

    given_command(talk)
    app.run(["given", "-q"])

    assert capsys.readouterr().err == ""


def test_the_form_is_one_of_two(run_nsq: RunNsq) -> None:
    assert run_nsq(["schema", "--log-format", "json"]).status == 0
    assert run_nsq(["schema", "--log-format", "yaml"]).status == 2
