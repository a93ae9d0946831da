"""The options about how messages are chosen and printed, made into one value each.

A command declares ``keep: MessageFilter`` and ``printer: MessagePrinter``; what they build is plain
functions over messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated

from nsqtools.cli.options.opt import opt
from nsqtools.cli.options.params import OUTPUT, Json, delimiter_option, grep_option
from nsqtools.cli.parsing.binding import From
from nsqtools.cli.running.runtime import Runtime
from nsqtools.protocol.escaping import escape_json
from nsqtools.records import filters
from nsqtools.records.envelope import Envelope, MessageLike, encode_many
from nsqtools.records.filters import compile_pick
from nsqtools.records.lines import BodyForm, encode_lines
from nsqtools.records.template import compile_template

Encode = Callable[[str, str, Iterable[MessageLike]], bytes]
"""From topic, nsqd and messages to the bytes to write."""

FILTERS = "Filters"


def message_filter(
    grep: Annotated[
        str | None,
        grep_option("Only messages whose body matches, a regular expression.", panel=FILTERS),
    ] = None,
    ignore_case: Annotated[
        bool, opt("--ignore-case -i", "Ignore case in --grep.", FILTERS)
    ] = False,
    invert: Annotated[
        bool, opt("--invert", "Only messages whose body does not match --grep.", FILTERS)
    ] = False,
    where: Annotated[
        filters.Filter | None,
        opt(
            "--where JQ",
            "Only messages whose body is JSON for which this is true, in jq's language "
            "('.status >= 500').",
            FILTERS,
            parser=filters.where,
        ),
    ] = None,
    sample: Annotated[
        float | None,
        opt(
            "--sample SHARE",
            "Only this share of the messages, drawn at random (10%, 0.1).",
            FILTERS,
            parser=filters.parse_share,
        ),
    ] = None,
) -> filters.Filter | None:
    """The filter that the options make; None when all messages are kept."""
    wanted = []
    if grep:
        wanted.append(filters.grep(grep, ignore_case=ignore_case, invert=invert))
    if where is not None:
        wanted.append(where)
    if sample is not None:
        wanted.append(filters.sample(sample, random.random))
    return filters.every(wanted) if wanted else None


MessageFilter = Annotated[filters.Filter | None, From(message_filter)]

Pick = Annotated[
    Callable[[bytes], bytes | None] | None,
    opt(
        "--pick JQ",
        "In place of the body, what this makes of its JSON, in jq's language ('.user.id').",
        FILTERS,
        parser=compile_pick,
    ),
]

Template = Annotated[
    Callable[..., bytes] | None,
    opt(
        "--format -f TEMPLATE",
        "Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; "
        "{timestamp:%H:%M:%S}, {body:hex|base64|url|json}, {.user.id} of JSON; \\n \\t \\0 "
        "\\xNN; {{ and }} for braces.",
        OUTPUT,
        parser=compile_template,
    ),
]
Pretty = Annotated[
    bool,
    opt(
        "--pretty",
        "Indent bodies that are JSON; on a terminal they are colored in any case.",
        OUTPUT,
    ),
]

Printer = Callable[[Runtime], Encode]
"""Made for a run, because it matters whether stdout is a terminal."""


def message_printer(
    json: Json = False,
    format: Template = None,
    pick: Pick = None,
    pretty: Pretty = False,
    decode: Annotated[
        BodyForm | None, opt("--decode", "Show bodies as text, hex or base64.", OUTPUT)
    ] = None,
    delimiter: Annotated[
        bytes | None,
        delimiter_option("What ends each message; \\0 for NUL, '' for nothing.", panel=OUTPUT),
    ] = None,
    print_topic: Annotated[
        bool, opt("--print-topic", "Print 'TOPIC | ' before a message.", OUTPUT)
    ] = False,
) -> Printer:
    """How the options want messages printed."""
    ending = b"\n" if delimiter is None else delimiter

    def printer(runtime: Runtime) -> Encode:
        if json:
            encode = json_printer(runtime, pretty=pretty)
        elif format is not None:
            encode = partial(format, escape=True) if runtime.stdout_is_tty else format
        else:
            lines = lines_printer(runtime, delimiter=ending, form=decode, print_topic=print_topic)
            encode = lines if decode else readable(runtime, lines, pretty=pretty)
        return encode if pick is None else picking(runtime, encode, pick)

    return printer


MessagePrinter = Annotated[Printer, From(message_printer)]


def picking(runtime: Runtime, encode: Encode, pick: Callable[[bytes], bytes | None]) -> Encode:
    """Print what ``--pick`` finds in place of the body; a message without it is left out."""
    is_told = False

    def encode_picked(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        nonlocal is_told
        found = []
        for message in messages:
            try:
                body = pick(message.body)
            except ValueError:
                body = None
            if body is not None:
                found.append(with_body(topic, nsqd, message, body))
            elif not is_told:
                is_told = True
                runtime.tell("nsq: messages in which --pick finds nothing are not printed")
        return encode(topic, nsqd, found) if found else b""

    return encode_picked


def readable(runtime: Runtime, encode: Encode, *, pretty: bool) -> Encode:
    """Print bodies that are JSON as people read them, where that is wanted."""
    colour = runtime.colour
    if not (pretty or colour):
        return encode

    from nsqtools.cli.render.json_layout import lay_out

    def encode_readable(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        parts = []
        for message in messages:
            body = lay_out(message.body, indent=pretty, colour=colour)
            if body is None:
                parts.append(encode(topic, nsqd, [message]))
            else:  # what is laid out is harmless already, but for our own colors
                parts.append(encode(topic, nsqd, [with_body(topic, nsqd, message, MARK)]))
                parts[-1] = parts[-1].replace(MARK, body, 1)
        return b"".join(parts)

    return encode_readable


MARK = b"@@BODY@@"  # stands for a body until its line is ready; no topic contains @


def with_body(topic: str, nsqd: str, message: MessageLike, body: bytes) -> Envelope:
    """The message with another body."""
    return Envelope(topic, nsqd, message.id, message.timestamp_ns, message.attempts, body)


def json_printer(runtime: Runtime, *, pretty: bool = False) -> Encode:
    """Messages as lines of JSON, or indented."""
    colour = runtime.colour
    if not (pretty or colour):
        return harmless_json if runtime.stdout_is_tty else encode_many

    from nsqtools.cli.render.json_layout import lay_out

    def encode_laid_out(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        lines = encode_many(topic, nsqd, messages).splitlines()
        return b"".join(
            (lay_out(line, indent=pretty, colour=colour) or line) + b"\n" for line in lines
        )

    return encode_laid_out


def harmless_json(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
    """Messages as lines of JSON for a terminal: nothing in them steers it."""
    return escape_json(encode_many(topic, nsqd, messages).decode()).encode()


def lines_printer(
    runtime: Runtime,
    *,
    delimiter: bytes = b"\n",
    form: BodyForm | None = None,
    print_topic: bool = False,
) -> Encode:
    """Messages as lines; on a terminal, bytes that would steer it are shown as ``\\xNN``."""
    return partial(
        encode_lines,
        delimiter=delimiter,
        form=form,
        print_topic=print_topic,
        escape=runtime.stdout_is_tty,
    )
