"""What a channel knows of those that it works with: its consumers, and the grave of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nsqtools.server.queues.backlog import BackendError
from nsqtools.server.queues.held_messages import InFlightMessages

if TYPE_CHECKING:
    from nsqtools.server.queues.channel import Channel

Bury = Callable[["Channel", bytes, Callable[[BackendError | None], None]], None]
"""Keeps a message of a channel elsewhere, and calls back."""


class ConsumerLimit(Exception):
    """``--max-channel-consumers`` are there already."""


class ChannelConsumer(Protocol):
    """What a channel knows of the client at the other end of a connection."""

    in_flight: InFlightMessages

    @property
    def room(self) -> int:
        """How many more messages may be delivered now."""

    def deliver(self, messages: list[bytes], now_s: float) -> None:
        """Send messages, which count as in flight from now on."""

    def flush(self) -> None:
        """Send what is buffered: the channel does not flow any more."""

    def disconnect(self) -> None:
        """Close the connection: the channel is going away."""
