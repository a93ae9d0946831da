"""The shape of a message that this floor works on."""

from __future__ import annotations

from typing import Protocol


class Message(Protocol):
    """What a consumed message, a decoded frame and an archived record have in common."""

    @property
    def timestamp_ns(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def id(self) -> bytes:
        """16 bytes, hexadecimal digits as ASCII."""

    @property
    def body(self) -> bytes: ...
