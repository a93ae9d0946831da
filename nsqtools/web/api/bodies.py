"""Bodies of requests as nsqadmin reads them: one JSON object, whatever follows. Pure.

The Content-Type does not matter, keys may have any case, and unknown ones are ignored.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BLANK = re.compile(r"[ \t\r\n]*")


class BadBody(Exception):
    """The body cannot be read; the text is for the caller."""


def read_body(body: bytes) -> dict[str, str]:
    """Return the texts in the object, by lower-case key. Raises `BadBody`."""
    text = body.decode("utf-8", "replace")
    begin = _BLANK.match(text)
    assert begin is not None
    if begin.end() == len(text):
        raise BadBody("EOF")
    try:
        value, _ = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, begin.end())
    except (ValueError, RecursionError) as exc:
        raise BadBody(f"invalid JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise BadBody("the JSON is not an object")
    fields: dict[str, str] = {}
    for key, each in value.items():
        if not isinstance(each, str):
            if key.lower() in ("topic", "channel", "action"):
                raise BadBody(f"{key} is not a string")
            continue
        fields[key.lower()] = each
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
