r"""Text in the forms of Go's programs, durations, and escapes for terminals.

Go's forms: nsqd and nsqlookupd are Go programs. Their error texts quote with ``%q``, their JSON has
the escapes of Go's encoder, and they read JSON by the rules of Go's decoder.

Durations (``250ms``, ``30s``, ``1h30m``, ``1.5h``) have the grammar of Go's time.ParseDuration: a
sign, then numbers, each with a unit; only 0 needs none. They fit into 64 bits of nanoseconds.
Inside the program a duration is a float of seconds, or an int of nanoseconds where its name ends in
``_ns``.

Foreign text is escaped here and nowhere else. A name, body or error text of a peer can contain
escape sequences that control a terminal, characters that reverse the direction of a line, and
newlines that begin a forged line. Three functions share one table of characters:

    escape_line(text)   for text in one line: messages, log lines, names, cells
    escape_text(bytes)  for bodies and whole outputs, which keep tab and newline
    escape_json(text)   for JSON: the same values, written as \uNNNN, also in pipes and files

`harmless_traceback` escapes a traceback and keeps its lines. Escapes are those of Python:
``\x1b``, ``\n``, ``\u202e``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)

_QUOTED = {ord(c): f"\\{by}" for c, by in zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True)}
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_JSON_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def quote(data: bytes) -> bytes:
    """Return the bytes as Go's ``%q`` prints them."""
    text = data.decode("utf-8", "surrogateescape")
    return b'"' + "".join(map(_quoted, text)).encode() + b'"'


def _quoted(char: str) -> str:
    code = ord(char)
    if char.isprintable() or code in _QUOTED:
        return _QUOTED.get(code, char)
    if code < 0x80 or 0xDC80 <= code <= 0xDCFF:  # The latter are bytes that are not UTF-8.
        return f"\\x{code & 0xFF:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def go_json(value: object) -> bytes:
    """Return compact JSON with Go's escapes: keys in the given order, UTF-8 left as it is."""
    text = _ENCODER.encode(value)
    # '<', '>' and '&' occur only inside strings, so the whole text may be translated.
    return text.translate(_JSON_ESCAPES).encode("utf-8", "replace")


def go_members(data: bytes, kinds: Mapping[str, type | range]) -> dict[str, Any]:
    """Decode a JSON object as Go decodes it into a struct with these fields.

    The kind of a field is its type, or the range of an integer. Keys match in any case, the last
    duplicate wins, null leaves a field alone, unknown keys are ignored, and an integer has no
    fraction. Raises ``ValueError`` where Go's decoder fails.
    """
    try:
        text = data.decode("utf-8", "replace")
        pairs = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
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
        if kind is str:  # Lone surrogates are replaced, because they cannot be encoded.
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        members[name] = value
    return members


def load_json(data: bytes | str) -> Any:
    """Decode strict JSON. Raises only ``ValueError``, also for too many levels and 1e999."""
    try:
        return json.loads(data, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


class _Pairs(list[tuple[str, Any]]):
    """The members of an object, including duplicate keys."""


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# -- durations and numbers ------------------------------------------------------------------------

NS = 1_000_000_000
"""Nanoseconds in a second."""

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_UNITS_NS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": NS, "m": 60 * NS}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[-+]?({_PART})+", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)


def parse_duration(text: str) -> float:
    """Return the duration in seconds. Raises ``ValueError`` with the reason."""
    if text in ("0", "+0", "-0"):
        return 0.0
    reason = "is not a duration"
    if _DURATION.fullmatch(text):
        total = sum(float(number) * _UNIT_S[unit] for number, unit in _PARTS.findall(text))
        if total < INT64.stop / NS:
            return -total if text.startswith("-") else total
        reason = "is beyond 292 years"
    elif re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text, re.ASCII):
        reason = "has no unit"
    raise ValueError(f"{text!r} {reason}; write 250ms, 30s, 5m or 1h30m")


def format_duration(seconds: float) -> str:
    """Format a duration without zero units: ``250ms``, ``1m30s``, ``1h``, ``0s``."""
    text = go_duration(round(seconds * NS)).replace("µ", "u")
    if text.endswith("m0s"):
        text = text[:-2]
    return text.removesuffix("0m") if text.endswith("h0m") else text


def go_duration(duration_ns: int) -> str:
    """Format nanoseconds as Go does on the pages of nsqd: ``1h0m0s``, ``632.134542ms``, ``0s``."""
    sign, absolute_ns = ("-", -duration_ns) if duration_ns < 0 else ("", duration_ns)
    if absolute_ns < NS:
        for unit in ("ms", "µs", "ns"):
            if absolute_ns >= _UNITS_NS[unit]:
                return f"{sign}{_decimal(absolute_ns, _UNITS_NS[unit])}{unit}"
        return "0s"
    minutes, seconds_ns = divmod(absolute_ns, _UNITS_NS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(seconds_ns, _UNITS_NS['s'])}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def plain_text(value: object) -> str:
    """Return a value as text; booleans are ``true`` and ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decimal(value: int, unit: int) -> str:
    whole, part = divmod(value, unit)
    digits = str(part).zfill(len(str(unit)) - 1).rstrip("0") if part else ""
    return f"{whole}.{digits}" if digits else str(whole)


def counted(number: int, noun: str, digits: str = "") -> str:
    """``1 file``, ``2000 files``; with "," as format of the ``digits`` ``2,000 files``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:{digits}} {noun}{ending}"


# -- foreign text ---------------------------------------------------------------------------------

# These are DEL and C1 (U+009B starts a sequence on 8-bit terminals); invisible, bidirectional and
# tag characters; line and paragraph separators; and surrogates, which UTF-8 cannot encode.
_UNSAFE = (
    "\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f"
)
# The UTF-8 form of every unsafe character begins with one of these prefixes.
_UNSAFE_PREFIXES = (
    b"\x7f",
    b"\xc2",
    b"\xd8\x9c",
    b"\xe2\x80",
    b"\xe2\x81",
    b"\xef\xbb",
    b"\xf3\xa0",
)
_IN_LINES = re.compile(f"[\x00-\x1f{_UNSAFE}]")
_IN_TEXTS = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSAFE}]")
_IN_JSON = re.compile(f"[{_UNSAFE}]")  # The json module escapes controls below 0x20 itself.
_TRACEBACK = "Traceback (most recent call last):"
_SUSPECT_BYTES = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f-\xff]")


def escape_line(text: str) -> str:
    """Return text as one line without characters that control a terminal."""
    return _IN_LINES.sub(_as_python_writes_it, text)


def escape_text(text: bytes) -> bytes:
    r"""Escape all control characters except tab and newline, and invalid UTF-8 as ``\xNN``.

    Bytes without any of these are returned unchanged.
    """
    if _SUSPECT_BYTES.search(text) is None:
        return text
    return _IN_TEXTS.sub(_as_python_writes_it, text.decode("utf-8", "backslashreplace")).encode()


def escape_json(text: str) -> str:
    """Return the same JSON without characters that control a terminal."""
    return _IN_JSON.sub(_as_json_writes_it, text)


def escape_json_lines(data: bytes) -> bytes:
    """Escape lines of JSON in UTF-8 as `escape_json` does.

    Lines without unsafe characters, which are nearly all, are returned without decoding.
    """
    if data.isascii() and b"\x7f" not in data:
        return data
    if not any(prefix in data for prefix in _UNSAFE_PREFIXES):
        return data
    return escape_json(data.decode()).encode()


def utc_text(epoch_s: float, timespec: str = "milliseconds") -> str:
    """Return seconds since 1970 in RFC 3339: ``2026-11-21T08:00:00.123Z``."""
    text = datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec=timespec)
    return text.replace("+00:00", "Z")


def format_moment(moment: datetime, form: str) -> str:
    """Return a time by a strftime format.

    For ``%s``, the seconds since 1970, strftime would take a time in UTC for local time.
    """
    if "%s" in form:
        seconds = str(math.floor(moment.timestamp()))
        form = re.sub("%.", lambda code: seconds if code[0] == "%s" else code[0], form)
    return moment.strftime(form)


def harmless_traceback(text: str) -> str:
    """Return a traceback with indented lines, so that a quoted message cannot forge a log line."""
    lines = text.rstrip("\n").split("\n")
    return "\n".join(line if line == _TRACEBACK else f"  {escape_line(line)}" for line in lines)


def _as_python_writes_it(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def _as_json_writes_it(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def json_tokens(text: str) -> list[str]:
    """Split valid JSON into tokens, which keep all digits, the order, and duplicate keys."""
    return _TOKEN.findall(text)


def indented(tokens: Sequence[str], texts: Sequence[str], max_depth: int = 1 << 30) -> str:
    """Format tokens of JSON, one line for each value; ``texts`` are their styled forms.

    Lines are indented by at most ``max_depth`` levels.
    """
    parts: list[str] = []
    depth, previous = 0, ""
    for token, text in zip(tokens, texts, strict=True):
        is_end = token in ("}", "]")
        depth -= is_end
        if previous not in ("{", "[") if is_end else previous in ("{", "[", ","):
            parts.append("\n" + "  " * min(depth, max_depth))
        parts.append(text + (" " if token == ":" else ""))
        depth += token in ("{", "[")
        previous = token
    return "".join(parts)
