"""A message as one line of JSON: the form that tail, archives, pub, replay and Spark share.

    {"topic": "clicks", "nsqd": "host:4150", "id": "0f..", "ts": 17.., "attempts": 1, "body": ".."}

``"body64"`` is there in place of ``"body"`` when the bytes are not UTF-8. Keys, their order and the
separators are fixed, a line never contains a newline, and decoding gives every byte back.

The line is put together by hand, and the json module only quotes strings, in C: 3.5 times as fast
as dumping a dict. What quotes is private to json; the public way to it takes a third longer for a
whole line, and is taken where the private name is missing. Decoding is strict; whatever reads the
lines knows their numbers and puts them before the message of the ``ValueError``.

A message that could not be delivered is the raw body in a topic, which any consumer can read and
any tool publish again. In a file it is this line and why and when delivery failed, which whatever
reads envelopes reads as well:

    {"topic": "clicks", .. "body": "..", "error": "HTTP 400 Bad Request", "failed_at": 17..}

``failed_at`` is in nanoseconds since 1970, as ``ts`` is.

Messages as plain lines: the body and a delimiter, as nsq_tail prints them, and back.

On a terminal nothing of a body may steer it.

Back, a stream of bytes is cut at the delimiter a chunk at a time. The delimiter is any bytes and
may fall across two chunks. A chunk costs one ``bytes.split``, and of bytes that wait for their
delimiter only the new ones are searched, so a long record costs no more than its length.
"""

from __future__ import annotations

import codecs
import json
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from nsqtools.errors import NsqError
from nsqtools.protocol.text import INT64, escape_text


class RecordFormat(Enum):
    """What a message becomes in a file: the envelope of all tools, or its body and a delimiter."""

    jsonl = "jsonl"
    raw = "raw"


class BodyKind(Enum):
    """What becomes of bodies in tables: text beside bytes, bytes alone, or text with columns."""

    string = "string"
    binary = "binary"
    json = "json"


class MessageLike(Protocol):
    """What a consumed message, a decoded frame and an archived record have in common."""

    @property
    def timestamp_ns(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def id(self) -> bytes:
        """16 bytes, hexadecimal digits as ASCII."""

    @property
    def body(self) -> bytes: ...


quote = getattr(json.encoder, "encode_basestring", json.JSONEncoder(ensure_ascii=False).encode)

UINT16 = range(2**16)


class Envelope(NamedTuple):
    """A decoded line. (topic, nsqd, id) is the identity of the message: ids alone repeat."""

    topic: str
    nsqd: str
    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes


def encode_many(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
    """Return one line for each message, each ended by a newline."""
    head = f'{{"topic": {quote(topic)}, "nsqd": {quote(nsqd)}, "id": '
    lines = []
    for message in messages:
        try:
            body = f'"body": {quote(message.body.decode())}'
        except UnicodeDecodeError:
            body = f'"body64": "{b2a_base64(message.body, newline=False).decode()}"'
        lines.append(
            f'{head}{quote(message.id.decode("latin-1"))}, "ts": {message.timestamp_ns},'
            f' "attempts": {message.attempts}, {body}}}\n'
        )
    return "".join(lines).encode()


def decode(line: bytes) -> Envelope:
    """Read one line, with or without its newline. Raises ``ValueError`` that says what is wrong."""
    fields = _object(line)
    return Envelope(
        _field(fields, "topic", str),
        _field(fields, "nsqd", str),
        _id(_field(fields, "id", str)),
        _within(INT64, "ts", _field(fields, "ts", int)),
        _within(UINT16, "attempts", _field(fields, "attempts", int)),
        _body(fields),
    )


def decode_body(line: bytes) -> bytes:
    """Read only the body of a line, which may lack the other keys: enough for publishing."""
    return _body(_object(line))


def _object(line: bytes) -> dict[str, Any]:
    try:
        # json.loads would take bytes too, but guesses UTF-16 and lets surrogates through.
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())  # as Windows writes it
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("not a message: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _field(fields: dict[str, Any], key: str, kind: type) -> Any:
    if key not in fields:
        raise ValueError(f'"{key}" is missing')
    if type(fields[key]) is not kind:
        raise ValueError(f'"{key}" is not {"text" if kind is str else "an integer"}')
    if kind is str:
        try:
            fields[key].encode()
        except UnicodeEncodeError:
            raise ValueError(f'"{key}" contains half of a surrogate pair') from None
    return fields[key]


def _within(bounds: range, key: str, number: int) -> int:
    if number not in bounds:
        raise ValueError(f'"{key}" is out of range: {number}')
    return number


def _id(text: str) -> bytes:
    if len(text) != 16 or max(text) > "\xff":
        raise ValueError('"id" is not 16 characters')
    return text.encode("latin-1")


def _body(fields: dict[str, Any]) -> bytes:
    if "body" in fields and "body64" in fields:
        raise ValueError('"body" and "body64" are both there')
    if "body64" in fields:
        text: str = _field(fields, "body64", str)
        try:
            return a2b_base64(text.encode("ascii"), strict_mode=True)
        except (Base64Error, UnicodeEncodeError):
            raise ValueError('"body64" is not base64') from None
    text = _field(fields, "body", str)
    return text.encode()


def encode_dead_letter(
    topic: str, nsqd: str, message: MessageLike, *, error: str, failed_at_ns: int
) -> bytes:
    """Return the line, ended by a newline."""
    envelope = encode_many(topic, nsqd, [message])
    # half of a surrogate pair, from a text that was not UTF-8, cannot be written
    reason = quote(error.encode("utf-8", "replace").decode())
    return envelope[:-2] + f', "error": {reason}, "failed_at": {failed_at_ns}}}\n'.encode()


def decode_dead_letter(line: bytes) -> tuple[Envelope, str]:
    """Read one line, with or without its newline; return the message, and why it failed, "" if that
    is not said. Raises ``ValueError`` that says what is wrong."""
    message, error = decode(line), json.loads(line).get("error")
    return message, error if isinstance(error, str) else ""


class Splitter:
    """Feed chunks, take records; at the end of the input, `end` gives the last one.

    Every byte fed is in a record or is a delimiter. ``limit`` bounds the memory that a record
    without a delimiter may take, in bytes; it says nothing about what may be published.
    """

    def __init__(self, delimiter: bytes = b"\n", *, limit: int):
        if not delimiter:
            raise ValueError("the delimiter is empty")
        self._delimiter = delimiter
        self._limit = limit
        self._pending = bytearray()
        self._records = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that ``chunk`` completes, without their delimiters.

        Raises `NsqError` when the bytes before ``chunk`` were already over the limit: what was
        complete before them has been returned.
        """
        self._check_limit()
        if self._pending:
            begin = max(0, len(self._pending) + 1 - len(self._delimiter))  # it may have begun there
            self._pending += chunk
            if self._pending.find(self._delimiter, begin) < 0:
                return []
            chunk, self._pending = bytes(self._pending), bytearray()  # one copy less
        *records, rest = chunk.split(self._delimiter)
        self._pending = bytearray(rest)
        self._records += len(records)
        return records

    def end(self) -> list[bytes]:
        """Return what followed the last delimiter, if anything did. Raises as `feed`."""
        self._check_limit()
        rest, self._pending = bytes(self._pending), bytearray()
        return [rest] if rest else []

    def _check_limit(self) -> None:
        if len(self._pending) > self._limit:
            raise NsqError(
                f"input record {self._records + 1} is longer than {self._limit} bytes",
                hint=f"No delimiter {self._delimiter!r} came: is --delimiter right?",
            )


def encode_lines(
    topic: str,
    nsqd: str,
    messages: Iterable[MessageLike],
    *,
    delimiter: bytes = b"\n",
    print_topic: bool = False,
    escape: bool = False,
) -> bytes:
    """Return the messages' bodies, each ended by ``delimiter``.

    ``escape`` makes it harmless for a terminal, and ``print_topic`` puts the topic and a bar before
    it.
    """
    bodies: Iterable[bytes] = [message.body for message in messages]
    if escape:
        bodies = map(escape_text, bodies)
    head = topic.encode() + b" | " if print_topic else b""
    return head + (delimiter + head).join(bodies) + delimiter
