r"""``--format``: a template compiled once to a function from messages to bytes.

    {timestamp:%H:%M:%S.%f} {topic} {id} {body}\n

``{field}`` is the field, ``{field:spec}`` the field in another form, ``{{`` and ``}}`` are braces,
and the escapes are those of `escapes`. No newline is added. Fields and their forms:

    topic nsqd id attempts size     as they are; size is the length of the body in bytes
    timestamp                       nanoseconds since 1970, or any strftime format, in UTC
    body                            the bytes; ``hex``; ``base64``; ``json``: a quoted string, with
                                    a byte that is not UTF-8 as \udcNN

A template that names anything else is refused before a connection is made.
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from nsqtools.protocol.durations import NS
from nsqtools.protocol.message import WireMessage
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import unescape

Get = Callable[[MessageLike], Any]
Encoder = Callable[[str, str, Iterable[MessageLike]], bytes]

FIELDS = ("topic", "nsqd", "id", "timestamp", "attempts", "size", "body")

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}|[{}]")


def compile_template(text: str) -> Encoder:
    """Return a function of topic, nsqd and messages that gives the bytes to write.

    Raises ``ValueError``, naming the known fields or forms, for a template that cannot work.
    """
    literals = [b""]
    getters: list[Get | str] = []
    end = 0
    for token in _TOKEN.finditer(text):
        literals[-1] += unescape(text[end : token.start()])
        end = token.end()
        if token[0] in ("{{", "}}"):
            literals[-1] += token[0][0].encode()
        elif token[1] is None:
            raise ValueError(f"a single {token[0]} in the template; write {token[0] * 2}")
        else:
            getters.append(_getter(token[1], token[2]))
            literals.append(b"")
    literals[-1] += unescape(text[end:])

    def encode_many(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        batch = {"topic": topic.encode(), "nsqd": nsqd.encode()}
        layout, fields = _bind(literals, getters, batch)
        return b"".join([layout % tuple([get(message) for get in fields]) for message in messages])

    return encode_many


def _bind(
    literals: list[bytes], getters: list[Get | str], batch: dict[str, bytes]
) -> tuple[bytes, list[Get]]:
    """The %-layout of a batch, with what its messages share filled in, and what each one adds."""
    layout = literals[0].replace(b"%", b"%%")
    fields: list[Get] = []
    for getter, literal in zip(getters, literals[1:], strict=True):
        if isinstance(getter, str):
            layout += batch[getter].replace(b"%", b"%%")
        else:
            layout += b"%b"
            fields.append(getter)
        layout += literal.replace(b"%", b"%%")
    return layout, fields


def _getter(field: str, form: str | None) -> Get | str:
    match field, form:
        case (("topic" | "nsqd"), None):
            return field
        case (("id" | "body"), None):
            get: Get = attrgetter(field)
            return get
        case "attempts", None:
            return lambda message: b"%d" % message.attempts
        case "size", None:
            return lambda message: b"%d" % len(message.body)
        case "timestamp", None:
            return lambda message: b"%d" % message.timestamp_ns
        case "timestamp", str():
            return _moment(form)
        case "body", "hex":
            return lambda message: message.body.hex().encode()
        case "body", "base64":
            return lambda message: b2a_base64(message.body, newline=False)
        case "body", "json":
            return _quoted()
    if field not in FIELDS:
        raise ValueError(f"unknown field {{{field}}}; known are {', '.join(FIELDS)}")
    forms = {"body": "hex, base64, json"}.get(field, "no other form")
    raise ValueError(f"unknown form {{{field}:{form}}}; {field} has {forms}")


def _moment(form: str) -> Get:
    from datetime import UTC, datetime

    def get(message: MessageLike) -> bytes:
        seconds, ns = divmod(message.timestamp_ns, NS)
        moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=ns // 1000)
        return moment.strftime(form).encode()

    get(WireMessage(0, 0, b"", b""))  # a format that fails does so now
    return get


def _quoted() -> Get:
    from json import JSONEncoder

    quote = JSONEncoder().encode
    return lambda message: quote(message.body.decode("utf-8", "surrogateescape")).encode()
