r"""``--format``: a template compiled once to a function from messages to bytes.

    {timestamp:%H:%M:%S.%f} {topic} {id} {body}\n

``{field}`` is the field, ``{field:spec}`` the field in another form, ``{{`` and ``}}`` are braces,
and the escapes are those of `escapes`. No newline is added. Fields and their forms:

    topic nsqd id attempts size     as they are; size is the length of the body in bytes
    timestamp                       nanoseconds since 1970, or any strftime format, in UTC
    body                            the bytes; ``hex``; ``base64``; ``url``; ``json``: a quoted
                                    string, with a byte that is not UTF-8 as \udcNN
    .user.id                        what jq finds in the body there, or anything else in its
                                    language that begins with a dot and has no brace and no colon;
                                    ``url``; nothing where it is null or the body is not JSON

``url`` writes what an address may not contain as ``%NN``. A template that names anything else is
refused before a connection is made.
"""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Protocol

from nsqtools.protocol.frames import WireMessage
from nsqtools.protocol.text import NS, escape_text
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import unescape

Get = Callable[[MessageLike], Any]


class Encoder(Protocol):
    """Makes the bytes to write of topic, nsqd and messages."""

    def __call__(
        self, topic: str, nsqd: str, messages: Iterable[MessageLike], *, escape: bool = False
    ) -> bytes: ...


FIELDS = ("topic", "nsqd", "id", "timestamp", "attempts", "size", "body")

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}|[{}]")


def compile_template(text: str) -> Encoder:
    """Return a function of topic, nsqd and messages that gives the bytes to write.

    With ``escape=True`` nothing in a field steers a terminal; what the template itself says does.
    Raises ``ValueError``, naming the known fields or forms, for a template that cannot work.
    """
    parts: list[bytes | str | Get] = []  # what is written, what a batch shares, what is a message's
    end = 0
    for token in _TOKEN.finditer(text):
        parts.append(unescape(text[end : token.start()]))
        end = token.end()
        if token[0] in ("{{", "}}"):
            parts.append(token[0][0].encode())
        elif token[1] is None:
            raise ValueError(f"a single {token[0]} in the template; write {token[0] * 2}")
        else:
            parts.append(_getter(token[1], token[2]))
    parts.append(unescape(text[end:]))

    def encode_many(
        topic: str, nsqd: str, messages: Iterable[MessageLike], *, escape: bool = False
    ) -> bytes:
        batch = {"topic": topic.encode(), "nsqd": nsqd.encode()}
        layout = b""
        fields: list[Get] = []
        for part in parts:
            if callable(part):
                layout += b"%b"
                fields.append(_escaped(part) if escape else part)
            else:
                shared = batch[part] if isinstance(part, str) else part
                layout += shared.replace(b"%", b"%%")
        return b"".join([layout % tuple([get(message) for get in fields]) for message in messages])

    return encode_many


_GETTERS: dict[tuple[str, str | None], Get] = {
    ("id", None): attrgetter("id"),
    ("attempts", None): lambda message: b"%d" % message.attempts,
    ("size", None): lambda message: b"%d" % len(message.body),
    ("timestamp", None): lambda message: b"%d" % message.timestamp_ns,
    ("body", None): attrgetter("body"),
    ("body", "hex"): lambda message: message.body.hex().encode(),
    ("body", "base64"): lambda message: b2a_base64(message.body, newline=False),
    ("body", "json"): lambda message: _json(message.body),
    ("body", "url"): lambda message: _url(message.body),
}


def _getter(field: str, form: str | None) -> Get | str:
    if field in ("topic", "nsqd") and form is None:
        return field
    if get := _GETTERS.get((field, form)):
        return get
    if field == "timestamp" and form is not None:
        return _moment(form)
    if field.startswith(".") and form in (None, "url"):
        return _picked(field, _url if form else None)
    is_picked = field.startswith(".")
    if field not in FIELDS and not is_picked:
        raise ValueError(f"unknown field {{{field}}}; known are {', '.join(FIELDS)}, .PATH")
    forms = "url" if is_picked else {"body": "hex, base64, url, json"}.get(field, "no other form")
    raise ValueError(f"unknown form {{{field}:{form}}}; {field} has {forms}")


def _escaped(get: Get) -> Get:
    return lambda message: escape_text(get(message))


def _moment(form: str) -> Get:
    from datetime import UTC, datetime

    def get(message: MessageLike) -> bytes:
        seconds, ns = divmod(message.timestamp_ns, NS)
        moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=ns // 1000)
        return moment.strftime(form).encode()

    get(WireMessage(0, 0, b"", b""))  # a format that fails does so now
    return get


def _json(text: bytes) -> bytes:
    return json.dumps(text.decode("utf-8", "surrogateescape")).encode()


def _url(text: bytes) -> bytes:
    from urllib.parse import quote

    return quote(text, safe="").encode()


def _picked(program: str, shown: Callable[[bytes], bytes] | None) -> Get:
    from nsqtools.records.filters import compile_pick

    pick = compile_pick(f"({program}) // empty")

    def get(message: MessageLike) -> bytes:
        try:
            found = pick(message.body) or b""
        except ValueError:
            return b""
        return shown(found) if shown is not None else found

    return get
