r"""``--format``: a template compiled once to a function from messages to bytes.

    {timestamp:%H:%M:%S.%f} {topic} {id} {body}\n

``{field}`` is a field, ``{field:spec}`` a field in another form, ``{{`` and ``}}`` are braces, and
escapes are those of `unescape`. No newline is added. Fields and their forms:

    topic nsqd id attempts size     as they are; size is the length of the body in bytes
    timestamp                       nanoseconds since 1970, or any strftime format, in UTC
    body                            the bytes; ``hex``; ``base64``; ``url``; ``json``: a quoted
                                    string, with a byte that is not UTF-8 as \udcNN
    .user.id                        what jq finds in the body there, or anything else in its
                                    language that begins with a dot and has no brace and no colon;
                                    ``url``; nothing where it is null or the body is not JSON

``url`` percent-encodes characters. In the template of a URL every field except a time is encoded,
because the publisher of a message must not choose the path or the parameters of a request. There
``{body:raw}`` and ``{.user.id:raw}`` are not encoded. A template with an unknown field or form is
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
from nsqtools.protocol.text import NS, escape_text, format_moment
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import unescape

Get = Callable[[MessageLike], Any]


class Encoder(Protocol):
    """Encodes messages with their topic and nsqd."""

    def __call__(
        self, topic: str, nsqd: str, messages: Iterable[MessageLike], *, escape: bool = False
    ) -> bytes: ...


FIELDS = ("topic", "nsqd", "id", "timestamp", "attempts", "size", "body")

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}|[{}]")


def has_fields(text: str) -> bool:
    """Return whether a template has a field of the message."""
    return any(token[1] is not None for token in _TOKEN.finditer(text))


def compile_template(text: str, *, is_url: bool = False, is_strict: bool = False) -> Encoder:
    """Return the encoder of a template.

    With ``escape=True`` no field can control a terminal; the text of the template is not escaped.
    If jq fails for a body, the encoder writes nothing, or if it ``is_strict`` raises
    ``ValueError``. Raises ``ValueError`` with the valid fields or forms for an invalid template.
    """
    # Literal text is bytes, a field of the whole batch is its name, and a field of each message is
    # a function.
    parts: list[bytes | str | Get] = []
    end = 0
    for token in _TOKEN.finditer(text):
        parts.append(unescape(text[end : token.start()]))
        end = token.end()
        if token[0] in ("{{", "}}"):
            parts.append(token[0][0].encode())
        elif token[1] is None:
            raise ValueError(f"a single {token[0]} in the template; write {token[0] * 2}")
        else:
            parts.append(_getter(token[1], token[2], is_url, is_strict))
    parts.append(unescape(text[end:]))

    def encode_many(
        topic: str, nsqd: str, messages: Iterable[MessageLike], *, escape: bool = False
    ) -> bytes:
        batch = {"topic": topic.encode(), "nsqd": nsqd.encode()}
        if is_url:
            batch = {name: _url(value) for name, value in batch.items()}
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


def _getter(field: str, form: str | None, is_url: bool, is_strict: bool) -> Get | str:
    if field in ("topic", "nsqd") and form is None:
        return field
    if field == "timestamp" and form is not None:
        return _moment(form)
    is_picked = field.startswith(".")
    is_raw = is_url and form == "raw" and (is_picked or field == "body")
    plain = None if is_raw else form
    get = _GETTERS.get((field, plain))
    if is_picked and plain in (None, "url"):
        get = _picked(field, is_strict)
        is_url = is_url or plain == "url"
    if get is not None:
        return get if is_raw or not is_url or (field, form) == ("body", "url") else _in_url(get)
    if field not in FIELDS and not is_picked:
        raise ValueError(f"unknown field {{{field}}}; known are {', '.join(FIELDS)}, .PATH")
    forms = "url" if is_picked else {"body": "hex, base64, url, json"}.get(field, "no other form")
    raise ValueError(f"unknown form {{{field}:{form}}}; {field} has {forms}")


def _in_url(get: Get) -> Get:
    return lambda message: _url(get(message))


def _escaped(get: Get) -> Get:
    return lambda message: escape_text(get(message))


def _moment(form: str) -> Get:
    from datetime import UTC, datetime

    def get(message: MessageLike) -> bytes:
        seconds, ns = divmod(message.timestamp_ns, NS)
        moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=ns // 1000)
        return format_moment(moment, form).encode()

    get(WireMessage(0, 0, b"", b""))  # An invalid format fails before the first message.
    return get


def _json(text: bytes) -> bytes:
    return json.dumps(text.decode("utf-8", "surrogateescape")).encode()


def _url(text: bytes) -> bytes:
    from urllib.parse import quote

    return quote(text, safe="").encode()


def _picked(program: str, is_strict: bool) -> Get:
    from nsqtools.records.filters import compile_pick

    pick = compile_pick(program, omits_null=True)

    def get(message: MessageLike) -> bytes:
        try:
            return pick(message.body) or b""
        except ValueError:
            if is_strict:
                raise
            return b""

    return get
