r"""Text that others wrote, made harmless for terminals and log lines: the one place that does it.

A name, body or error text of a peer can hold escape sequences that steer a terminal, controls that
reverse how a line reads, and newlines that begin a forged line. There are three forms, over one
table of characters:

    escape_line(text)   for whatever is shown in one line: messages, log lines, names, cells
    escape_text(bytes)  for bodies and whole outputs: tab and newline stay
    escape_json(text)   for JSON: the same values, written as \uNNNN

A traceback has lines of its own: `harmless_traceback` keeps these.

What is escaped is shown as Python would write it: ``\x1b``, ``\n``, ``\u202e``.
"""

from __future__ import annotations

import re

# DEL and C1 (U+009B starts a sequence on 8-bit terminals); invisible, bidirectional and tag
# characters; line and paragraph separators; surrogates, which no terminal and no UTF-8 can take
_OTHERS = (
    "\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f"
)
_IN_LINES = re.compile(f"[\x00-\x1f{_OTHERS}]")
_IN_TEXTS = re.compile(f"[\x00-\x08\x0b-\x1f{_OTHERS}]")
_IN_JSON = re.compile(f"[{_OTHERS}]")  # json escapes the others itself
_TRACEBACK = "Traceback (most recent call last):"
_SUSPECT_BYTES = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f-\xff]")


def escape_line(text: str) -> str:
    """Return text as one line in which nothing steers a terminal."""
    return _IN_LINES.sub(_as_python_writes_it, text)


def escape_text(text: bytes) -> bytes:
    r"""Return bytes in which only tab and newline are controls; what is not UTF-8 as ``\xNN``.

    Bytes without any of these are returned as they are.
    """
    if _SUSPECT_BYTES.search(text) is None:
        return text
    return _IN_TEXTS.sub(_as_python_writes_it, text.decode("utf-8", "backslashreplace")).encode()


def escape_json(text: str) -> str:
    """Return the same JSON without a character that steers a terminal."""
    return _IN_JSON.sub(_as_json_writes_it, text)


def harmless_traceback(text: str) -> str:
    """Return a traceback, indented: a message that is quoted in it begins no line of its own."""
    return "\n".join(
        line if line == _TRACEBACK else f"  {escape_line(line)}"
        for line in text.rstrip("\n").split("\n")
    )


def _as_python_writes_it(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def _as_json_writes_it(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
