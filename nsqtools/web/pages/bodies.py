"""Bodies of messages as text to read. Pure.

JSON is laid out without touching a token: numbers keep their digits, keys their order, and keys
that come twice stay twice.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_SHOWN = 64 * 1024
MAX_DEPTH = 100

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')


@dataclass(frozen=True, slots=True)
class ShownBody:
    """``kind`` is "JSON", "text" or "binary"; ``left_out`` counts the bytes that are not shown."""

    kind: str
    text: bytes
    left_out: int


def shown_body(body: bytes) -> ShownBody:
    """Return a body as it is shown. Controls in it are not escaped yet."""
    if len(body) > MAX_SHOWN:
        return ShownBody(_kind(body[:MAX_SHOWN]), body[:MAX_SHOWN], len(body) - MAX_SHOWN)
    if body.lstrip()[:1] in (b"{", b"["):
        try:
            json.loads(body, parse_int=str, parse_float=str)
            return ShownBody("JSON", laid_out(body.decode()).encode(), 0)
        except (ValueError, RecursionError):
            pass  # not JSON, or too deep to read
    return ShownBody(_kind(body), body, 0)


def _kind(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        is_cut = error.start >= MAX_SHOWN - 4 and error.reason == "unexpected end of data"
        return "text" if is_cut else "binary"
    return "text"


def laid_out(text: str) -> str:
    """Return JSON with a line for each value. The text must be valid JSON."""
    made: list[str] = []
    depth = 0
    tokens = _TOKEN.findall(text)
    for index, token in enumerate(tokens):
        after = tokens[index + 1] if index + 1 < len(tokens) else ""
        if token in "[{":
            depth += 1
            made.append(token)
            if after not in ("]", "}"):
                made.append(_break(depth))
        elif token in "]}":
            depth -= 1
            if tokens[index - 1] not in ("[", "{"):
                made.append(_break(depth))
            made.append(token)
        elif token == ",":
            made.append("," + _break(depth))
        elif token == ":":
            made.append(": ")
        else:
            made.append(token)
    return "".join(made)


def _break(depth: int) -> str:
    return "\n" + "  " * min(depth, MAX_DEPTH)
