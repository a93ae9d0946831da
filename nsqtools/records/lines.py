"""Messages as plain lines: the body and a delimiter, as nsq_tail prints them."""

from __future__ import annotations

from collections.abc import Iterable

from nsqtools.records.decode import BodyForm, body_decoder, escape_controls
from nsqtools.records.message import Message


def encode_lines(
    topic: str,
    nsqd: str,
    messages: Iterable[Message],
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
        bodies = map(escape_controls, bodies)
    head = topic.encode() + b" | " if print_topic else b""
    return head + (delimiter + head).join(bodies) + delimiter
