"""What a connection asks of the protocol that is spoken on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from nsqtools.protocol.error_codes import RequestError


class Pause(Exception):
    """Nothing continues before ``until()`` is done; then the command at ``position`` is run."""

    def __init__(self, position: int, until: Callable[[], Awaitable[object]]) -> None:
        super().__init__(position)
        self.position = position
        self.until = until


class ConnectionProtocol(Protocol):
    """A protocol on a connection."""

    def execute(self, data: bytes, position: int) -> int:
        """Run one command and return the position after it.

        May raise `RequestError`, `Incomplete`, `LineTooLong` or `Pause`.
        """

    def quick(self, data: bytes) -> bytes | None:
        """Run a read that is one frequent command, and return the answer; None if it is not.

        The answer is ``b""`` when it comes later. Called only when nothing is queued in either
        direction, without TLS and compression.
        """

    @property
    def is_waiting(self) -> bool:
        """Whether a command that was run is to be answered later."""

    def encode_error(self, error: RequestError) -> bytes:
        """Return the error as this protocol sends it."""

    def commands_done(self) -> None:
        """At least one command of a read has been run; its answers are about to be written."""

    def output_stuck(self) -> None:
        """The client does not read: nothing more fits in."""

    def output_flows(self) -> None:
        """The client reads again."""

    def closed(self) -> None:
        """The connection is over; called once."""
