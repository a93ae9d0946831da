"""Progress: a line on a terminal's stderr, at most ten times a second, gone at the end."""

import io
import logging

from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import Runtime, configure_logging


class Screen(io.StringIO):
    """A stderr that may be a terminal, with a clock beside it."""

    is_tty, now_s = True, 100.0

    def isatty(self) -> bool:
        return self.is_tty

    def progress(self, *, quiet: bool = False) -> Progress:
        return Progress(Runtime(io.StringIO(), self, monotonic=lambda: self.now_s, quiet=quiet))


def test_the_line_is_drawn_over_made_only_when_it_is_shown_and_wiped_at_the_end() -> None:
    screen = Screen()
    made: list[int] = []
    with screen.progress() as progress:
        for step in range(200):
            progress.show(lambda step=step: made.append(step) or f"{step} messages")
            screen.now_s += 0.0011

    assert len(made) == 3
    first, second, third = (f"\r\x1b[K{step} messages" for step in made)
    assert screen.getvalue() == f"{first}{second}{third}\r\x1b[K"

    # without a terminal, or when it is to be quiet
    for is_tty, quiet in ((False, False), (True, True)):
        screen = Screen()
        screen.is_tty = is_tty
        with screen.progress(quiet=quiet) as progress:
            progress.show(lambda: "1 message")
        assert screen.getvalue() == ""


def test_a_log_line_wipes_the_progress_line_first(own_logging: None) -> None:
    screen = Screen()
    configure_logging(logging.WARNING, screen)
    with screen.progress() as progress:
        progress.show(lambda: "1 message")
        logging.getLogger("nsqtools.client").warning("lost")
    logging.getLogger("nsqtools.client").warning("done")

    lost, done = screen.getvalue().removeprefix("\r\x1b[K1 message\r\x1b[K").splitlines()
    assert (lost[24:], done[24:]) == (" warning: lost", " warning: done")


def test_a_terminal_that_is_gone_ends_no_run() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Gone().progress() as progress:
        progress.show(lambda: "1 message")
