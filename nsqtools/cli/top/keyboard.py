"""Keys and clicks of a terminal: from bytes to names. Pure.

A key is its character, or a word such as ``page up``; what the mouse does is a `Click` or a wheel.
Bytes may come in any pieces: what is not whole waits for the rest. An escape alone is a key, too;
the loop calls `flush` when nothing follows it.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

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
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[Z": "back tab",
}
CONTROLS = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}

_MOUSE = re.compile(r"\x1b\[<(\d{1,4});(\d{1,5});(\d{1,5})([Mm])")  # SGR, mode 1006
_BUTTONS = {0: "left", 64: "wheel up", 65: "wheel down"}
LONGEST_SEQUENCE = 64


class Click(NamedTuple):
    """The left button at a place, counted from 0."""

    column: int
    row: int


Key = str | Click


class KeyReader:
    """Turns what is read from a terminal into keys."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._rest = ""

    @property
    def is_waiting(self) -> bool:
        """Tell whether there is the beginning of a sequence, or an escape."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Key]:
        """Return the keys that are whole. A sequence that has no name here is left out."""
        text, self._rest = self._rest + self._decoder.decode(data), ""
        keys: list[Key] = []
        while text:
            length = _sequence_length(text)
            if not length:
                self._rest = text
                break
            taken, text = text[:length], text[length:]
            key = _key(taken)
            if key is not None:
                keys.append(key)
        return keys

    def flush(self) -> list[Key]:
        """Return what waits, when nothing followed it: an escape alone is the key."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest == "\x1b" else []


def _key(text: str) -> Key | None:
    if len(text) == 1:
        if text in CONTROLS:
            return CONTROLS[text]
        return "escape" if text == "\x1b" else text if text.isprintable() else None
    mouse = _MOUSE.fullmatch(text)
    if mouse is None:
        return SEQUENCES.get(text)
    button = _BUTTONS.get(int(mouse[1]))
    if button == "left":
        return Click(int(mouse[2]) - 1, int(mouse[3]) - 1) if mouse[4] == "M" else None
    return button


def _sequence_length(text: str) -> int:
    """How long the key at the start is; 0 where the rest of it is to come."""
    if text[0] != "\x1b":
        return 1
    if len(text) == 1:
        return 0
    if text[1] == "O":
        return 3 if len(text) > 2 else 0
    if text[1] != "[":
        return 1
    for number, character in enumerate(text[2:LONGEST_SEQUENCE], 3):
        if "@" <= character <= "~":
            return number
    return LONGEST_SEQUENCE if len(text) >= LONGEST_SEQUENCE else 0
