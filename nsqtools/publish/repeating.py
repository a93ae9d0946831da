"""Bodies made from a text, again and again: ``--repeat`` and ``--interval``.

``{n}`` is the number of the message from 1, ``{uuid}`` a random UUID, ``{now}`` the time in RFC
3339, and ``{now:%H:%M}`` in another form. All other braces stay as they are, so that JSON need not
be escaped.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from nsqtools.errors import ConfigurationError

BATCH = 1000
STOP_CHECK_S = 0.2

_FIELD = re.compile(rb"\{(n|uuid|now)(?::([^{}]+))?\}")


def repeated(
    texts: Sequence[bytes], times: int, interval_s: float, is_stopped: Callable[[], bool]
) -> Iterator[list[bytes]]:
    """Iterate over batches of ``times`` rounds of the texts; with an interval a round each."""
    rounds = 1 if interval_s else max(1, BATCH // len(texts))
    next_s = time.monotonic()
    for first in range(1, times + 1, rounds):
        numbers = range(first, min(first + rounds, times + 1))
        yield [filled(text, number) for number in numbers for text in texts]
        next_s += interval_s
        while (left_s := next_s - time.monotonic()) > 0 and numbers.stop <= times:
            if is_stopped():
                return
            time.sleep(min(left_s, STOP_CHECK_S))
        if is_stopped():
            return


def check_template(text: bytes) -> None:
    """Raise `ConfigurationError` for a field whose form cannot be."""
    for field in _FIELD.finditer(text):
        try:
            filled(field[0], 1)
        except (ValueError, UnicodeDecodeError) as error:
            shown = field[0].decode("utf-8", "replace")
            raise ConfigurationError(
                f"cannot fill in {shown}", hint="Write {n}, {n:05d}, {uuid}, {now} or {now:%H:%M}."
            ) from error


def filled(text: bytes, number: int) -> bytes:
    """The text with its fields filled in."""

    def value(field: re.Match[bytes]) -> bytes:
        name, form = field.groups()
        if name == b"n":
            return format(number, form.decode() if form else "d").encode()
        if name == b"uuid":
            return str(uuid.uuid4()).encode()
        moment = datetime.now(UTC)
        if form:
            return moment.strftime(form.decode()).encode()
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()

    return _FIELD.sub(value, text)
