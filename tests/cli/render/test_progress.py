"""Progress: a line on a terminal's stderr, at most ten times a second, gone at the end."""

from __future__ import annotations

import io
import logging

from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import Runtime


class Screen(io.StringIO):
    """A stderr that may be a terminal."""

    def __init__(self, is_tty: bool):
        super().__init__()
        self._is_tty = is_tty

    def isatty(self) -> bool:
        return self._is_tty


def runtime(screen: Screen, *, quiet: bool = False, now_s: list[float] | None = None) -> Runtime:
    clock = now_s or [100.0]
    return Runtime(io.StringIO(), screen, monotonic=lambda: clock[0], quiet=quiet)


def test_the_line_is_drawn_over_and_wiped_at_the_end() -> None:
    screen, now_s = Screen(is_tty=True), [100.0]

    with Progress(runtime(screen, now_s=now_s)) as progress:
        progress.show(lambda: "1 message")
        now_s[0] += 0.1
        progress.show(lambda: "2 messages")

    assert screen.getvalue() == "\r\x1b[K1 message\r\x1b[K2 messages\r\x1b[K"


def test_the_text_is_made_only_when_it_is_shown() -> None:
    now_s = [100.0]
    made: list[int] = []

    with Progress(runtime(Screen(is_tty=True), now_s=now_s)) as progress:
        for step in range(1000):
            progress.show(lambda step=step: made.append(step) or str(step))
            now_s[0] += 0.001

    assert len(made) == 10


def test_without_a_terminal_or_when_quiet_nothing_is_written() -> None:
    for is_tty, quiet in ((False, False), (True, True)):
        screen = Screen(is_tty)
        with Progress(runtime(screen, quiet=quiet)) as progress:
            progress.show(lambda: "1 message")
        assert screen.getvalue() == ""


def test_a_log_line_wipes_the_progress_line_first() -> None:
    screen, logger = Screen(is_tty=True), logging.getLogger("nsqtools")
    handler = logging.StreamHandler(screen)
    logger.addHandler(handler)
    try:
        with Progress(runtime(screen)) as progress:
            progress.show(lambda: "1 message")
            logging.getLogger("nsqtools.client").warning("lost")
        logging.getLogger("nsqtools.client").warning("done")
    finally:
        logger.removeHandler(handler)

    assert screen.getvalue() == "\r\x1b[K1 message\r\x1b[Klost\ndone\n"
