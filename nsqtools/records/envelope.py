"""A message as one line of JSON: the format that tail, archives, pub, replay and Spark share.

    {"topic": "clicks", "nsqd": "host:4150", "id": "0f..", "ts": 17.., "attempts": 1, "body": ".."}

``"body64"`` replaces ``"body"`` when the bytes are not UTF-8. Keys, their order and the separators
are fixed, a line never contains a newline, and decoding returns every byte.

Lines are concatenated by hand, and the json module only quotes strings, in C: 3.5 times as fast as
dumping a dict. The quoting function is private to json; where it is missing, the public encoder is
used, and a line takes a third longer. Decoding is strict. A ``ValueError`` has the reason only; the
caller adds the number of the line.

A dead letter in a topic is the raw body, which any consumer can read and any tool can publish. In a
file it is an envelope with the error and its time, which all readers of envelopes accept:

    {"topic": "clicks", .. "body": "..", "error": "HTTP 400 Bad Request", "failed_at": 17..}

``failed_at`` and ``ts`` are in nanoseconds since 1970.

`encode_lines` writes bodies with a delimiter, as nsq_tail prints them, and `Splitter` splits such a
stream. The delimiter is any bytes and may fall across two chunks. A chunk costs one
``bytes.split``, and only new bytes are searched, so the cost of a long record is linear.
"""

from __future__ import annotations

import codecs
import json
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from nsqtools.errors import NsqError
from nsqtools.protocol.text import INT64, escape_text

T = TypeVar("T")


class RecordFormat(Enum):
    """The format of messages in a file: the envelope of all tools, or the body and a delimiter."""

    jsonl = "jsonl"
    raw = "raw"


class BodyKind(Enum):
    """Columns for bodies in tables: text and other bytes, bytes only, or text and its fields."""

    string = "string"
    binary = "binary"
    json = "json"


class MessageLike(Protocol):
    """The common interface of consumed messages, decoded frames and archived records."""

    @property
    def timestamp_ns(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def id(self) -> bytes:
        """16 bytes, hexadecimal digits as ASCII."""

    @property
    def body(self) -> bytes: ...


quote_json = getattr(json.encoder, "encode_basestring", json.JSONEncoder(ensure_ascii=False).encode)

UINT16 = range(2**16)


class Envelope(NamedTuple):
    """A decoded line. The identity of a message is (topic, nsqd, id), because ids repeat."""

    topic: str
    nsqd: str
    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes


def encode_many(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
    """Return one line for each message, each with a newline."""
    head = f'{{"topic": {quote_json(topic)}, "nsqd": {quote_json(nsqd)}, "id": '
    lines = []
    for message in messages:
        try:
            body = f'"body": {quote_json(message.body.decode())}'
        except UnicodeDecodeError:
            body = f'"body64": "{b2a_base64(message.body, newline=False).decode()}"'
        lines.append(
            f'{head}{quote_json(message.id.decode("latin-1"))}, "ts": {message.timestamp_ns},'
            f' "attempts": {message.attempts}, {body}}}\n'
        )
    return "".join(lines).encode()


def decode(line: bytes) -> Envelope:
    """Decode one line, with or without its newline. Raises ``ValueError`` with the reason."""
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
    """Decode only the body of a line; publishing needs no other key."""
    return _body(_object(line))


def _object(line: bytes) -> dict[str, Any]:
    try:
        # json.loads accepts bytes, but it guesses UTF-16 and passes surrogates. Windows adds a BOM.
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
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
        raise ValueError('both "body" and "body64" are present')
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
    """Return the line of a dead letter, with a newline."""
    envelope = encode_many(topic, nsqd, [message])
    # A text that was not UTF-8 may contain half of a surrogate pair, which cannot be encoded.
    reason = quote_json(error.encode("utf-8", "replace").decode())
    return envelope[:-2] + f', "error": {reason}, "failed_at": {failed_at_ns}}}\n'.encode()


def decode_dead_letter(line: bytes) -> tuple[Envelope, str]:
    """Decode one line; return the message and the error of its delivery, "" if it has none.

    Raises ``ValueError`` with the reason.
    """
    message, error = decode(line), json.loads(line).get("error")
    return message, error if isinstance(error, str) else ""


class Splitter:
    """Splits a stream into records: `feed` chunks, and call `end` for the last record.

    Every byte is part of a record or of a delimiter. Without a ``delimiter`` the whole stream is
    one record. ``limit`` bounds the memory, in bytes, of a record without a delimiter. It does not
    limit the size of a message.
    """

    def __init__(self, delimiter: bytes = b"\n", *, limit: int):
        self._delimiter = delimiter
        self._limit = limit
        self._pending = bytearray()
        self._records = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that ``chunk`` completes, without their delimiters.

        Raises `NsqError` when the pending bytes exceed the limit. The check precedes the chunk, so
        that all complete records have been returned before.
        """
        self._check_limit()
        if not self._delimiter:
            self._pending += chunk
            return []
        if self._pending:
            # The pending bytes may end with the beginning of a delimiter.
            begin = max(0, len(self._pending) + 1 - len(self._delimiter))
            self._pending += chunk
            if self._pending.find(self._delimiter, begin) < 0:
                return []
            chunk, self._pending = bytes(self._pending), bytearray()
        *records, tail = chunk.split(self._delimiter)
        self._pending = bytearray(tail)
        self._records += len(records)
        return records

    def end(self) -> list[bytes]:
        """Return the record after the last delimiter, unless it is empty. Raises as `feed`."""
        self._check_limit()
        tail, self._pending = bytes(self._pending), bytearray()
        return [tail] if tail else []

    def _check_limit(self) -> None:
        if len(self._pending) > self._limit:
            raise NsqError(
                f"input record {self._records + 1} is longer than {self._limit} bytes",
                hint=f"The delimiter {self._delimiter!r} did not occur: is --delimiter right?"
                if self._delimiter
                else "nsqd accepts no message of that size.",
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
    """Return the bodies of messages, each followed by ``delimiter``.

    With ``escape`` no body can control a terminal. ``print_topic`` prefixes the topic and a bar.
    """
    bodies: Iterable[bytes] = [message.body for message in messages]
    if escape:
        bodies = map(escape_text, bodies)
    head = topic.encode() + b" | " if print_topic else b""
    return head + (delimiter + head).join(bodies) + delimiter


# Of messages in memory while they are printed or copied.
_BATCH_COUNT = 1000
_BATCH_BYTES = 4 << 20


def bounded_batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield messages in groups of at most 1,000, and a few megabytes."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) == _BATCH_COUNT or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
