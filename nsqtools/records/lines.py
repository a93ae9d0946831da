"""Messages as plain lines: the body and a delimiter, as nsq_tail prints them, and back.

Bodies can be shown in another form (``--decode utf8|hex|base64``), and on a terminal nothing of
them may steer it.

Back, a stream of bytes is cut at the delimiter a chunk at a time. The delimiter is any bytes and
may fall across two chunks. A chunk costs one ``bytes.split``, and bytes that wait for their
delimiter are joined only when it has come, so a long record costs no more than its length.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable
from enum import Enum

from nsqtools.errors import NsqError
from nsqtools.protocol.text import escape_text
from nsqtools.records.envelope import MessageLike


class Splitter:
    """Feed chunks, take records; at the end of the input, `end` gives the last one.

    Every byte fed is in a record or is a delimiter. ``limit`` bounds the memory that a record
    without a delimiter may take, in bytes; it says nothing about what may be published.
    """

    def __init__(self, delimiter: bytes = b"\n", *, limit: int):
        if not delimiter:
            raise ValueError("the delimiter is empty")
        self._delimiter = delimiter
        self._overlap = len(delimiter) - 1
        self._limit = limit
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._records = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that ``chunk`` completes, without their delimiters.

        Raises `NsqError` when the bytes before ``chunk`` were already over the limit: what was
        complete before them has been returned.
        """
        self._check_limit()
        if self._pending and not self._completes(chunk):
            self._keep(chunk)
            return []
        whole = b"".join([*self._pending, chunk]) if self._pending else chunk
        *records, rest = whole.split(self._delimiter)
        self._pending, self._pending_size = [], 0
        self._keep(rest)
        self._records += len(records)
        return records

    def end(self) -> list[bytes]:
        """Return what followed the last delimiter, if anything did. Raises as `feed`."""
        self._check_limit()
        rest = b"".join(self._pending)
        self._pending, self._pending_size = [], 0
        return [rest] if rest else []

    def _keep(self, part: bytes) -> None:
        if part:
            self._pending.append(part)
            self._pending_size += len(part)

    def _completes(self, chunk: bytes) -> bool:
        """Whether a delimiter ends in ``chunk``; it may have begun in what is pending."""
        if not self._overlap:
            return self._delimiter in chunk
        before = b""
        for part in reversed(self._pending):
            before = part[-self._overlap :] + before
            if len(before) >= self._overlap:
                break
        return self._delimiter in before + chunk

    def _check_limit(self) -> None:
        if self._pending_size > self._limit:
            raise NsqError(
                f"input record {self._records + 1} is longer than {self._limit} bytes",
                hint=f"No delimiter {self._delimiter!r} came: is --delimiter right?",
            )


class BodyForm(Enum):
    """How a body is shown."""

    utf8 = "utf8"
    hex = "hex"
    base64 = "base64"


def utf8(body: bytes) -> bytes:
    r"""The body as UTF-8 text, each byte that is not UTF-8 as ``\xNN``."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return body.decode("utf-8", "backslashreplace").encode()
    return body


def body_decoder(form: BodyForm) -> Callable[[bytes], bytes]:
    """The function that shows a body in ``form``."""
    match form:
        case BodyForm.utf8:
            return utf8
        case BodyForm.hex:
            return lambda body: body.hex().encode()
        case BodyForm.base64:
            return lambda body: b2a_base64(body, newline=False)


def encode_lines(
    topic: str,
    nsqd: str,
    messages: Iterable[MessageLike],
    *,
    delimiter: bytes = b"\n",
    form: BodyForm | None = None,
    print_topic: bool = False,
    escape: bool = False,
) -> bytes:
    """Return the messages' bodies, each ended by ``delimiter``.

    ``form`` is how a body is shown (None: as it is), ``escape`` makes it harmless for a terminal,
    and ``print_topic`` puts the topic and a bar before it.
    """
    bodies: Iterable[bytes] = [message.body for message in messages]
    if form is not None:
        bodies = map(body_decoder(form), bodies)
    if escape:
        bodies = map(escape_text, bodies)
    head = topic.encode() + b" | " if print_topic else b""
    return head + (delimiter + head).join(bodies) + delimiter
