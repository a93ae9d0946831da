"""Callbacks of the program, which run on the I/O thread: guarded, and without keeping it alive."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nsqtools.errors import NsqError
from nsqtools.protocol.arguments import check_functions

log = logging.getLogger("nsqtools")

T = TypeVar("T")


def call_guarded(name: str, callback: Callable[..., object] | None, *arguments: object) -> None:
    """Call a callback of the program, if there is one, and log what it raises."""
    if callback is not None:
        try:
            callback(*arguments)
        except BaseException:  # ``sys.exit`` in a callback must not end the I/O thread
            log.exception("%s failed", name)


def weak_callback(method: Callable[..., T]) -> Callable[..., T | None]:
    """Return a function that calls a method unless its object has been collected.

    The I/O thread calls consumers and producers by such functions, so one that a program drops is
    collected, and stops: otherwise its connections would take messages forever.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> T | None:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class ConnectionEvents:
    """The callbacks of a program for its connections. See `nsqtools.Consumer`."""

    on_connected: Callable[[str], object] | None
    on_lost: Callable[[str, NsqError], object] | None
    on_error: Callable[[NsqError], object] | None = None

    def __post_init__(self) -> None:
        check_functions(
            on_connected=self.on_connected, on_lost=self.on_lost, on_error=self.on_error
        )

    def connected(self, nsqd: str) -> None:
        """Report an established connection."""
        call_guarded("on_connected", self.on_connected, nsqd)

    def lost(self, nsqd: str, error: NsqError) -> None:
        """Report the loss of an established connection."""
        call_guarded("on_lost", self.on_lost, nsqd, error)

    def failed(self, error: NsqError) -> None:
        """Report a failed attempt, or a loss."""
        call_guarded("on_error", self.on_error, error)
