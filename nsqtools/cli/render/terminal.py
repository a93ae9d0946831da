"""Two questions about a terminal: may the text be coloured, and how wide may it be.

Small and free of imports besides ``os``, because the front door asks them too.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing would triple the front door's time
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

WIDEST = 100


def wants_colour(environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Tell whether to colour: a non-empty NO_COLOR wins, then FORCE_COLOR, then the terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_tty and environ.get("TERM") != "dumb"


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that ``stream`` is, and `WIDEST` where it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDEST
    except OSError:
        return WIDEST
