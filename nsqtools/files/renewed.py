"""What is made of files, made again when they have changed: certificates, secrets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import state_of

log = logging.getLogger("nsqtools")

T = TypeVar("T")


class Renewed(Generic[T]):
    """What ``build`` makes of files (an empty name is none). Raises what ``build`` raises.

    Any thread may ask; two at the same time may build it twice.
    """

    def __init__(self, files: Sequence[str], build: Callable[[], T]) -> None:
        self._files = tuple(filter(None, files))
        self._build = build
        self._seen = self._states()
        self._built = build()
        self._reported = ""

    def check(self) -> T:
        """Return it as its files are now. Raises `ConfigurationError` if it cannot be made."""
        now = self._states()
        if now != self._seen:
            self._built = self._build()
            self._seen = now
            self._reported = ""
        return self._built

    def get(self) -> T:
        """Return it as its files are now, or, while they cannot be used, as before.

        Certificate and key are seldom replaced in one moment.
        """
        try:
            return self.check()
        except ConfigurationError as exc:
            if str(exc) != self._reported:  # it may be asked for each request
                self._reported = str(exc)
                log.warning("%s; using what was read before", exc)
            return self._built

    def _states(self) -> list[tuple[int, ...] | None]:
        return [state_of(path) for path in self._files]
