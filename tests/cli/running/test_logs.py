"""Logs: to stderr alone, as text or JSON lines, as much as -q and -v say."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from plugins.cli import GivenCommand

from nsqtools.cli.parsing import app
from nsqtools.cli.running.runtime import Session, configure_logging


@pytest.fixture
def logger(own_logging: None) -> logging.Logger:
    """One that logs through the package's."""
    return logging.getLogger("nsqtools.client")


def test_a_line_is_text_or_an_object_with_the_exception(logger: logging.Logger) -> None:
    text, json_lines = io.StringIO(), io.StringIO()
    configure_logging(logging.WARNING, text)
    logger.warning("lost %s", "127.0.0.1:4150")
    logger.info("not shown")
    configure_logging(logging.WARNING, json_lines, json=True)
    try:
        raise OSError("gone")
    except OSError:
        logger.exception("lost\n%s", "é")

    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} warning: lost 127.0.0.1:4150\n", text.getvalue())
    (line,) = json_lines.getvalue().splitlines()
    fields = json.loads(line)
    said = (fields["level"], fields["logger"], fields["message"])
    assert said == ("error", "nsqtools.client", "lost\né")
    assert "OSError: gone" in fields["exception"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", ["a", "done"]),
        ("-q", []),
        ("-v", ["a", "b", "done"]),
        ("-vv", ["a", "b", "c", "done"]),
        ("--debug", ["a", "b", "c", "done"]),
    ],
)
def test_the_options_of_a_command_say_how_much(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    logger: logging.Logger,
    line: str,
    said: list[str],
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
    assert [text.split(": ")[-1] for text in err.splitlines()] == said
