"""The bodies of a publish: whole bytes, and within what nsqd accepts. Pure.

nsqd closes the connection over a publish that it cannot accept, and the publishes after it would
suffer, so what is known to be refused is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.commands import MAX_DELAY_S, SIZE_BYTES, mpub_size

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def whole_bodies(bodies: Iterable[ReadableBuffer]) -> list[bytes]:
    """Return the bodies as bytes, which nobody can change while they wait.

    Raises ``TypeError`` for what is not bytes.
    """
    if isinstance(bodies, str | bytes | bytearray | memoryview):
        raise TypeError("bodies must be a list of messages, not one message")
    given = list(bodies)
    if (len(given) == 1 and type(given[0]) is bytes) or set(map(type, given)) <= {bytes}:
        return given  # type: ignore[return-value]
    return [body if type(body) is bytes else _whole(body) for body in given]


def _whole(body: ReadableBuffer) -> bytes:
    if isinstance(body, str):
        raise TypeError("a message body is bytes, not str: encode it, as in body.encode()")
    try:
        return memoryview(body).tobytes()
    except TypeError:
        raise TypeError(f"a message body is bytes, not {type(body).__name__}") from None


def check_bodies(lengths: list[int], defer_s: float | None, options: ClientOptions) -> None:
    """Raise `ConfigurationError` for what nsqd would refuse as one publish."""
    limit = options.publish_max_msg_size
    if len(lengths) == 1 and defer_s is None and 0 < lengths[0] <= limit:
        return  # the usual case, once for each publish
    if not lengths:
        raise ConfigurationError("a publish needs a message")
    if min(lengths) == 0:
        raise ConfigurationError("nsqd refuses empty messages")
    if max(lengths) > limit:
        raise ConfigurationError(
            f"a message of {max(lengths)} bytes is above the limit of {limit}",
            hint="nsqd's limit is its --max-msg-size; ours is publish_max_msg_size.",
        )
    if defer_s is not None:
        if len(lengths) > 1:
            raise ConfigurationError("only single messages can be deferred")
        if not 0 <= defer_s <= MAX_DELAY_S:
            raise ConfigurationError(f"cannot defer for {defer_s} s", hint="0 to 1h is allowed.")
    elif len(lengths) > 1 and mpub_size(lengths) > options.publish_max_body_size:
        raise ConfigurationError(
            f"a batch of {sum(lengths)} bytes is above publish_max_body_size",
            hint="Split it: Producer.split does.",
        )


def in_groups(bodies: Iterable[ReadableBuffer], max_body_size: int) -> Iterator[list[bytes]]:
    """Group bodies into MPUBs that stay within a size."""
    group: list[bytes] = []
    empty = size = mpub_size(())
    for body in whole_bodies(bodies):
        added = SIZE_BYTES + len(body)
        if group and size + added > max_body_size:
            yield group
            group, size = [], empty
        group.append(body)
        size += added
    if group:
        yield group
