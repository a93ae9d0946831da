"""Messages as plain lines: the body and a delimiter, as nsq_tail prints them.

Bodies can be shown in another form (``--decode utf8|hex|base64``), and on a terminal nothing of
them may steer it.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable
from enum import Enum

from nsqtools.protocol.escaping import escape_text
from nsqtools.records.envelope import MessageLike


class BodyForm(Enum):
    """How a body is shown."""

    utf8 = "utf8"
    hex = "hex"
    base64 = "base64"


def utf8(body: bytes) -> bytes:
    r"""The body as UTF-8 text, each byte that is not UTF-8 as ``\xNN``."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return body.decode("utf-8", "backslashreplace").encode()
    return body


def body_decoder(form: BodyForm) -> Callable[[bytes], bytes]:
    """The function that shows a body in ``form``."""
    match form:
        case BodyForm.utf8:
            return utf8
        case BodyForm.hex:
            return lambda body: body.hex().encode()
        case BodyForm.base64:
            return lambda body: b2a_base64(body, newline=False)


def encode_lines(
    topic: str,
    nsqd: str,
    messages: Iterable[MessageLike],
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
        bodies = map(escape_text, bodies)
    head = topic.encode() + b" | " if print_topic else b""
    return head + (delimiter + head).join(bodies) + delimiter
