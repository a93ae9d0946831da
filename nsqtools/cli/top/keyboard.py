"""Keys of a terminal: from bytes to names, and the mode in which each key comes at once."""

from __future__ import annotations

import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
}
CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}


def parse_keys(data: bytes) -> list[str]:
    """Return the names of the keys in one read: a character, or a word such as ``page up``.

    A sequence of a key that has no name here is left out. An escape alone is the key itself.
    """
    text = data.decode("utf-8", "ignore")
    keys = []
    while text:
        length = _sequence_length(text)
        taken, text = text[:length], text[length:]
        if length > 1:
            if taken in SEQUENCES:
                keys.append(SEQUENCES[taken])
        elif taken == "\x1b":
            keys.append("escape")
        elif taken in CONTROLS:
            keys.append(CONTROLS[taken])
        elif taken.isprintable():
            keys.append(taken)
    return keys


def _sequence_length(text: str) -> int:
    """How long the escape sequence at the start is; 1 where there is none."""
    if text[:2] == "\x1bO":
        return min(3, len(text))
    if text[:2] != "\x1b[":
        return 1
    for number, character in enumerate(text[2:], 3):
        if "@" <= character <= "~":
            return number
    return len(text)


@contextmanager
def keys_at_once(fileno: int) -> Iterator[None]:
    """Inside, keys come one by one and unseen; at the end the terminal is as it was.

    ^C still interrupts. ^Z does nothing: it would leave our screen on top of the shell.
    """
    before = termios.tcgetattr(fileno)
    try:
        tty.setcbreak(fileno)
        mode = termios.tcgetattr(fileno)
        mode[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(fileno, termios.TCSANOW, mode)
        yield
    finally:
        termios.tcsetattr(fileno, termios.TCSADRAIN, before)
