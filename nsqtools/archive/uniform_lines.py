"""Read lines of messages whose keys have constant positions, for two thirds of the CPU of JSON.

Archivers write lines of one topic and nsqd, so the lines differ only in the length of the body, as
long as times have 19 digits (the years 2001 to 2262) and attempts one. The only escapes in bodies
are those of quotes, as in bodies of JSON. Lines of any other form are left to a parser.

The checks accept only what a parser would read as the same values. Quotes and constants between the
values are at their positions, each backslash is in a body and before a quote, bodies have no other
quotes and no control characters, and all is UTF-8. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import pyarrow
from pyarrow import compute

ORIGIN = re.compile(rb'\{"topic": "([^"\\\x00-\x1f]*)", "nsqd": "([^"\\\x00-\x1f]*)", ')
_ID = b'"id": "'
_LAYOUT = (
    ("id", 16, b'", "ts": ', compute.ascii_is_alnum),
    ("ts", 19, b', "attempts": ', compute.ascii_is_decimal),
    ("attempts", 1, b', "body": "', compute.ascii_is_decimal),
)
"""The values after the origin: key, length, the bytes that follow, and a check."""
_END = b'"}'
_MIN_TIME = 10**18
_QUOTES = 20
"""Quotes of a line without those in its body."""
# A number of another type would widen each byte of the text to eight.
_QUOTE, _BACKSLASH = (pyarrow.scalar(code, pyarrow.uint8()) for code in b'"\\')
_BLANK = ord(" ")


def uniform_values(text: bytes, lines: int, keys: Collection[str]) -> dict[str, Any] | None:
    """Return the values of keys as Arrow arrays; None if the text is not so many uniform lines.

    ``text`` has less than 2 GiB and ends with a newline.
    """
    first = ORIGIN.match(text)
    prefix = first[0] + _ID if first else b""
    if first is None or text.count(b"\n" + prefix) + text.startswith(prefix) != lines:
        return None
    data = _numbers(pyarrow.py_buffer(text))
    quotes, backslashes = compute.equal(data, _QUOTE), compute.equal(data, _BACKSLASH)
    escapes = _sum(backslashes)
    is_escape = compute.and_(backslashes[:-1], quotes[1:])
    if _sum(is_escape) != escapes or _sum(quotes) != lines * _QUOTES + escapes:
        return None
    rows = _split(data)
    if len(rows) != lines:
        return None
    try:
        values, position = _fixed_values(rows, len(prefix))
        if values is None or not _have_ends(rows, position):
            return None
        if "body" in keys:
            if escapes:
                rows = _split(data.filter(compute.invert(backslashes)))
            body = compute.binary_slice(rows, position, -len(_END))
            if _min(_numbers(body.buffers()[2])) < _BLANK:
                return None
            values["body"] = body.cast(pyarrow.string())
            values["body64"] = pyarrow.nulls(lines, pyarrow.string())
        for number, key in enumerate(("topic", "nsqd"), 1):
            values[key] = pyarrow.repeat(first[number].decode(), lines)
    # Something is not UTF-8, or a time is too large.
    except (UnicodeDecodeError, pyarrow.ArrowInvalid):
        return None
    return {key: values[key] for key in keys}


def _fixed_values(rows: Any, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return the values of constant length and the position of the body; None for other values."""
    values = {}
    for key, length, separator, is_valid in _LAYOUT:
        value = compute.binary_slice(rows, position, position := position + length)
        follows = compute.binary_slice(rows, position, position := position + len(separator))
        values[key] = value.cast(pyarrow.string())
        if not _all(compute.equal(follows, separator)) or not _all(is_valid(values[key])):
            return None, position
    values["ts"] = values["ts"].cast(pyarrow.int64())
    values["attempts"] = values["attempts"].cast(pyarrow.int32())
    # JSON has no zeros before a number.
    return (values if _min(values["ts"]) >= _MIN_TIME else None), position


def _have_ends(rows: Any, position: int) -> bool:
    """Return whether bodies at a position end before a quote that is not escaped."""
    is_long = _min(compute.binary_length(rows)) >= position + len(_END)
    is_escaped = compute.ends_with(rows, b"\\" + _END)
    return is_long and _all(compute.ends_with(rows, _END)) and not _sum(is_escaped)


def _split(data: pyarrow.Array) -> Any:
    """Return the lines of a text as an array of bytes."""
    ends = pyarrow.array([0, len(data)], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.binary(), 1, [None, ends, data.buffers()[1]])
    return compute.split_pattern(text, b"\n").values[:-1]


def _numbers(data: pyarrow.Buffer) -> pyarrow.Array:
    return pyarrow.Array.from_buffers(pyarrow.uint8(), data.size, [None, data])


def _sum(mask: Any) -> int:
    return compute.sum(mask).as_py() or 0


def _min(numbers: Any) -> int:
    return int(compute.min(numbers).as_py() or 0)


def _all(mask: Any) -> bool:
    return bool(compute.all(mask).as_py())
