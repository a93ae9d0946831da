"""HTTP/1.1 on the wire, as much as a client that posts and discards answers needs. Pure.

A request is bytes: the head that all requests to an endpoint share, some headers, the body. Of an
answer only the status and a few headers count; its body is read to keep the connection, and
discarded. An answer that does not say where it ends, or that is too long to read, ends the
connection instead.

Trap: whatever comes from a message into a header must not become another header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from nsqtools.errors import ProtocolError

MAX_HEAD = 64 << 10
MAX_BODY = 1 << 20  # of an answer: above it a new connection is cheaper

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?\r\n")
_USUAL = re.compile(
    rb"HTTP/1\.1 (2[0-9][0-9])[^\r\n]*\r\n(?:(?!connection|transfer-encoding)[^\r\n]+\r\n)*?"
    rb"content-length: *([0-9]{1,6})\r\n(?:(?!connection|transfer-encoding|content-length)"
    rb"[^\r\n]+\r\n)*\r\n",
    re.IGNORECASE,
)
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]+")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")  # some pad the size


class Answer(NamedTuple):
    """What a server answered. ``keeps`` tells whether the connection may be used again."""

    status: int
    retry_after: str = ""
    location: str = ""
    keeps: bool = True


def is_header_name(name: str) -> bool:
    """Tell whether a header may be called so."""
    return _TOKEN.fullmatch(name) is not None


def header_value(value: bytes) -> bytes:
    """Make bytes harmless as the value of a header: nothing in it ends the line."""
    return _CONTROL.sub(b" ", value).strip()


def encode_request(head: bytes, headers: Iterable[bytes], body: bytes | None) -> bytes:
    """Return a request. ``head`` is its first line and what all requests share, ``headers`` are
    whole lines."""
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"%b%b%b\r\n%b" % (head, b"".join(headers), length, body or b"")


class AnswerReader:
    """Reads one answer after the other from a connection."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: Answer | None = None  # whose body is being read
        self._left = 0  # of the body or chunk; -1: until the connection ends
        self._is_chunked = False
        self._chunked = 0  # bytes in chunks so far

    @property
    def has_begun(self) -> bool:
        """Tell whether something of an answer has come."""
        return bool(self._data) or self._answer is not None

    def feed(self, data: bytes) -> Answer | None:
        """Take bytes; return the answer when it is complete, ``b""`` being the end of the
        connection. Raises `ProtocolError` for what is not HTTP."""
        usual = _USUAL.match(data) if not self.has_begun else None
        if usual is not None and usual.end() + int(usual[2]) == len(data):
            return Answer(int(usual[1]))  # in one piece, as nearly every answer
        if not data:
            return self._at_end()
        self._data += data
        while self._answer is None:
            if not self._read_head():
                return None
        return self._read_body()

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > MAX_HEAD:
                raise ProtocolError(f"the head of an answer is above {MAX_HEAD} bytes")
            return False
        head, self._data = self._data[: end + 2], self._data[end + 4 :]
        first = _STATUS.match(head)
        if first is None:
            raise ProtocolError(f"not an answer of HTTP/1.1: {head[:60]!r}")
        status = int(first[2])
        if status < 200:
            if status == 101:
                raise ProtocolError("the server changes the protocol unasked")
            return True  # 100 Continue and its like: the answer comes after it
        fields = _fields(head[first.end() :])
        connection = fields.get(b"connection", b"").lower()
        keeps = b"close" not in connection if first[1] == b"1" else b"keep-alive" in connection
        self._is_chunked = False
        if status in (204, 304):
            self._left = 0
        elif b"transfer-encoding" in fields:
            if fields[b"transfer-encoding"].lower() != b"chunked":
                raise ProtocolError("an answer in a transfer encoding that is not chunked")
            self._is_chunked, self._left, self._chunked = True, 0, 0
        elif b"content-length" in fields:
            length = fields[b"content-length"]
            if not length.isdigit() or len(length) > 15:
                raise ProtocolError(f"an answer with the length {length[:20]!r}")
            self._left = int(length)
        else:
            self._left = -1
        if self._left > MAX_BODY or self._left < 0:
            keeps = False
        self._answer = Answer(
            status,
            fields.get(b"retry-after", b"").decode("latin-1"),
            fields.get(b"location", b"").decode("latin-1"),
            keeps,
        )
        return True

    def _read_body(self) -> Answer | None:
        answer = self._answer
        assert answer is not None
        if not answer.keeps:
            return self._done(answer)
        if self._is_chunked:
            return self._read_chunks(answer)
        if len(self._data) < self._left:
            self._left -= len(self._data)
            self._data = b""
            return None
        self._data = self._data[self._left :]
        return self._done(answer)

    def _read_chunks(self, answer: Answer) -> Answer | None:
        while True:
            if self._left:  # of a chunk, with the line end after it
                taken = min(self._left, len(self._data))
                self._left -= taken
                self._data = self._data[taken:]
                if self._left:
                    return None
            chunk = _CHUNK.match(self._data)
            if chunk is None:
                if len(self._data) > MAX_HEAD or (b"\r\n" in self._data):
                    raise ProtocolError("an answer with a broken chunk")
                return None
            size = int(chunk[1], 16)
            self._chunked += size
            if self._chunked > MAX_BODY:
                return self._done(answer._replace(keeps=False))
            if not size:
                return self._end_of_chunks(answer, chunk.end())
            self._data = self._data[chunk.end() :]
            self._left = size + 2

    def _end_of_chunks(self, answer: Answer, start: int) -> Answer | None:
        if self._data.startswith(b"\r\n", start):
            self._data = self._data[start + 2 :]
            return self._done(answer)
        end = self._data.find(b"\r\n\r\n", start)  # trailers
        if end < 0:
            return self._done(answer) if len(self._data) > MAX_HEAD else None
        self._data = self._data[end + 4 :]
        return self._done(answer)

    def _done(self, answer: Answer) -> Answer:
        # what follows an answer that nobody asked for does not answer the next request
        is_clean = not self._data
        self._answer, self._data = None, b""
        return answer if is_clean else answer._replace(keeps=False)

    def _at_end(self) -> Answer | None:
        raise ProtocolError("the server closed the connection")


def _fields(head: bytes) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            key = name.strip().lower()
            if key == b"content-length" and fields.get(key, value.strip()) != value.strip():
                raise ProtocolError("an answer with two lengths")
            fields[key] = value.strip()
    return fields
