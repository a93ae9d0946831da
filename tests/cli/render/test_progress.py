"""Progress: a line on a terminal's stderr, at most ten times a second, gone at the end."""

import io
import logging

import pytest

from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import Runtime, configure_logging


class Screen(io.StringIO):
    """A stderr that may be a terminal, and a clock."""

    is_tty, now_s = True, 100.0

    def isatty(self) -> bool:
        return self.is_tty

    def progress(self, *, quiet: bool = False, term: str = "xterm") -> Progress:
        environ, clock = {"TERM": term}, lambda: self.now_s
        return Progress(Runtime(io.StringIO(), self, environ, monotonic=clock, quiet=quiet))


def test_the_progress_line_is_throttled_redrawn_and_wiped_at_the_end() -> None:
    screen = Screen()
    rendered: list[int] = []
    with screen.progress() as progress:
        for step in range(200):
            progress.show(lambda step=step: rendered.append(step) or f"{step} messages")
            screen.now_s += 0.0011

    assert len(rendered) == 3
    first, second, third = (f"\r\x1b[K{step} messages" for step in rendered)
    assert screen.getvalue() == f"{first}{second}{third}\r\x1b[K"

    # nothing without a terminal or with --quiet
    for is_tty, quiet in ((False, False), (True, True)):
        screen = Screen()
        screen.is_tty = is_tty
        with screen.progress(quiet=quiet) as progress:
            progress.show(lambda: "1 message")
        assert screen.getvalue() == ""


def test_a_terminal_that_cannot_erase_a_line_shows_no_progress() -> None:
    screen = Screen()
    with screen.progress(term="dumb") as progress:
        progress.show(lambda: "1 message")
    assert screen.getvalue() == ""


def test_a_long_progress_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.cli.render.outcomes.terminal_width", lambda stream: 20)
    screen = Screen()
    with screen.progress() as progress:
        progress.show(lambda: "12,345 messages published")
    assert screen.getvalue() == "\r\x1b[K12,345 messages pub\r\x1b[K"


def test_a_log_line_first_wipes_the_progress_line(own_logging: None) -> None:
    screen = Screen()
    configure_logging(logging.WARNING, screen)
    with screen.progress() as progress:
        progress.show(lambda: "1 message")
        logging.getLogger("nsqtools.client").warning("lost")
    logging.getLogger("nsqtools.client").warning("done")

    lost, done = screen.getvalue().removeprefix("\r\x1b[K1 message\r\x1b[K").splitlines()
    assert (lost[24:], done[24:]) == (" warning: lost", " warning: done")


def test_a_closed_terminal_does_not_end_the_run() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Gone().progress() as progress:
        progress.show(lambda: "1 message")
