"""Cut a stream of bytes into records at a delimiter, a chunk at a time.

The delimiter is any bytes and may fall across two chunks. A chunk costs one ``bytes.split``, and
bytes that wait for their delimiter are joined only when it has come, so a long record costs no
more than its length.
"""

from __future__ import annotations

from nsqtools.errors import NsqError


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
