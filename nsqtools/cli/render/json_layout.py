"""JSON for people: indented, and in colors. Pure.

The text is cut into tokens, which stay as they are: no number is rounded, no key is lost that comes
twice, as both would be if it were read and written again.
"""

from __future__ import annotations

import re
from json import loads

from nsqtools.protocol.text import escape_json

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')

INDENT = "  "
KEY, STRING, NUMBER, WORD, RESET = "\x1b[34m", "\x1b[32m", "\x1b[36m", "\x1b[35m", "\x1b[0m"


def lay_out(body: bytes, *, indent: bool, colour: bool) -> bytes | None:
    """Return the body laid out, harmless for a terminal; None if it is not an object or array."""
    text = body.decode("utf-8", "replace").strip()
    if text[:1] not in ("{", "["):
        return None
    try:
        loads(text)
    except (ValueError, RecursionError):
        return None
    tokens = _TOKEN.findall(text)
    painted = list(map(escape_json, tokens))
    if colour:
        after = [*tokens[1:], ""]
        painted = list(map(_paint, painted, tokens, after))
    return (_indented if indent else _joined)(tokens, painted).encode()


def _paint(shown: str, token: str, then: str) -> str:
    if token in "{}[],:":
        return shown
    if token.startswith('"'):
        style = KEY if then == ":" else STRING
    else:
        style = WORD if token in ("true", "false", "null") else NUMBER
    return f"{style}{shown}{RESET}"


def _joined(tokens: list[str], painted: list[str]) -> str:
    return "".join(
        shown + (" " if token in (",", ":") else "")
        for token, shown in zip(tokens, painted, strict=True)
    )


def _indented(tokens: list[str], painted: list[str]) -> str:
    parts: list[str] = []
    depth = 0
    for at, (token, shown) in enumerate(zip(tokens, painted, strict=True)):
        before = tokens[at - 1] if at else ""
        if token in ("}", "]"):
            depth -= 1
            if before not in ("{", "["):
                parts.append("\n" + INDENT * depth)
        elif before in ("{", "[", ","):
            parts.append("\n" + INDENT * depth)
        parts.append(shown + (" " if token == ":" else ""))
        depth += token in ("{", "[")
    return "".join(parts)
