"""Go's ways to write and read values as text: quoted strings and JSON.

nsqd and nsqlookupd are Go programs, so their error texts quote with ``%q``, their JSON escapes what
Go's encoder escapes, and what they are sent as JSON is read by the rules of Go's decoder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)

_ESCAPES = {
    0x07: "\\a",
    0x08: "\\b",
    0x09: "\\t",
    0x0A: "\\n",
    0x0B: "\\v",
    0x0C: "\\f",
    0x0D: "\\r",
    0x22: '\\"',
    0x5C: "\\\\",
}
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_JSON_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def quote(data: bytes) -> bytes:
    """Return the bytes as Go's ``%q`` prints them."""
    out = ['"']
    for char in data.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
            out.append(f"\\x{code - 0xDC00:02x}")
        elif code in _ESCAPES:
            out.append(_ESCAPES[code])
        elif code == 0x20 or char.isprintable():
            out.append(char)
        elif code < 0x80:
            out.append(f"\\x{code:02x}")
        else:
            out.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    out.append('"')
    return "".join(out).encode()


def go_json(value: object) -> bytes:
    """Return compact JSON with Go's escapes: keys in the given order, UTF-8 left as it is."""
    text = _ENCODER.encode(value)
    # '<' and its like can only stand inside strings, so the whole text may be translated
    return text.translate(_JSON_ESCAPES).encode("utf-8", "replace")


def go_members(data: bytes, kinds: Mapping[str, type | range]) -> dict[str, Any]:
    """Return the members of a JSON object that a Go struct with these fields would take.

    The kind of a field is its type, or for an integer the range that it has to fit in. Keys match
    in any case, the last duplicate wins, null leaves a field alone, an unknown key is ignored,
    an integer must be written as one. Raises ``ValueError`` where Go's decoder fails.
    """
    try:
        pairs = json.loads(
            data.decode("utf-8", "replace"),
            object_pairs_hook=_Pairs,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    if pairs is None:
        return {}
    if not isinstance(pairs, _Pairs):
        raise ValueError("not an object")
    members: dict[str, Any] = {}
    for key, value in pairs:
        name = key if key in kinds else key.lower()
        if name not in kinds or value is None:
            continue
        kind = kinds[name]
        if isinstance(kind, range):
            fits = type(value) is int and value in kind
        else:
            fits = type(value) is kind
        if not fits:
            raise ValueError(f"{name} has the wrong type")
        members[name] = value
    return members


class _Pairs(list[tuple[str, Any]]):
    """The members of an object with their duplicates."""


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
