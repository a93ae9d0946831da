r"""Backslash escapes in options: delimiters and templates are typed as ``\n``, ``\0``, ``\x1e``."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.|\Z)", re.DOTALL)
_SIMPLE = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def unescape(text: str) -> bytes:
    r"""Return the bytes that ``text`` stands for, its escapes interpreted.

    Known are ``\n \t \r \0 \\`` and ``\xNN``. Raises ``ValueError`` for any other.
    """
    parts = []
    end = 0
    for escape in _ESCAPE.finditer(text):
        parts += [argument_bytes(text[end : escape.start()]), _value(escape)]
        end = escape.end()
    parts.append(argument_bytes(text[end:]))
    return b"".join(parts)


def argument_bytes(text: str) -> bytes:
    """The bytes that were typed: Python reads those that are not UTF-8 as surrogates."""
    return text.encode("utf-8", "surrogateescape")


def _value(escape: re.Match[str]) -> bytes:
    code = escape[1]
    if code in _SIMPLE:
        return _SIMPLE[code]
    if len(code) == 3:
        return bytes.fromhex(code[1:])
    raise ValueError(f"unknown escape {escape[0]!s}; known are \\n \\t \\r \\0 \\xNN \\\\")
