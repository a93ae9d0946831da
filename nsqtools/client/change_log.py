"""Log a lasting problem once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger("nsqtools")


class ChangeLog:
    """Log a problem when it begins, changes or ends, and not each time that it is met again.

    A question that is repeated every few seconds would otherwise fill the log with one line. A key
    names the subject of a problem: a topic, an address.
    """

    def __init__(self) -> None:
        self._reported: dict[str, str] = {}

    def report(self, key: str, text: str) -> None:
        """Log the problem of a key as a warning, or at DEBUG if it was reported last time."""
        is_repeated = self._reported.get(key) == text
        log.log(logging.DEBUG if is_repeated else logging.WARNING, "%s", text)
        self._reported[key] = text

    def resolve(self, key: str, text: str = "") -> None:
        """Forget the problem of a key; log ``text`` if there was one."""
        if self._reported.pop(key, None) is not None and text:
            log.warning("%s", text)

    def retain(self, keys: Iterable[str], text: str) -> None:
        """Resolve the problems of all other keys; ``{}`` in ``text`` becomes the key."""
        for key in set(self._reported).difference(keys):
            self.resolve(key, text.format(key))
