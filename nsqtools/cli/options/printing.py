"""The options about how messages are chosen and printed, made into one value each.

A command declares ``keep: MessageFilter`` and ``printer: MessagePrinter``; what they build is plain
functions over messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nsqtools.cli.options.params import OUTPUT, Json, delimiter_option, grep_option
from nsqtools.cli.parsing.binding import From
from nsqtools.cli.running.runtime import Runtime
from nsqtools.records import filters
from nsqtools.records.envelope import encode_many
from nsqtools.records.lines import BodyForm, encode_lines
from nsqtools.records.template import compile_template

if TYPE_CHECKING:
    from nsqtools.tail.tail import Encode

FILTERS = "Filters"


def message_filter(
    grep: Annotated[
        str | None,
        grep_option(
            "Only messages whose body matches; the others are finished and not printed.",
            panel=FILTERS,
        ),
    ] = None,
    ignore_case: Annotated[
        bool, Option("--ignore-case", "-i", help="Ignore case in --grep.", rich_help_panel=FILTERS)
    ] = False,
    invert: Annotated[
        bool,
        Option(
            "--invert",
            help="Only messages whose body does not match --grep.",
            rich_help_panel=FILTERS,
        ),
    ] = False,
    sample: Annotated[
        float | None,
        Option(
            "--sample",
            parser=filters.parse_share,
            metavar="SHARE",
            help="Only this share of the messages, drawn at random (10%, 0.1).",
            rich_help_panel=FILTERS,
        ),
    ] = None,
) -> filters.Filter | None:
    """The filter that the options make; None when all messages are kept."""
    wanted = []
    if grep:
        wanted.append(filters.grep(grep, ignore_case=ignore_case, invert=invert))
    if sample is not None:
        wanted.append(filters.sample(sample, random.random))
    return filters.every(wanted) if wanted else None


MessageFilter = Annotated[filters.Filter | None, From(message_filter)]

Printer = Callable[[Runtime], "Encode"]
"""Made for a run, because it matters whether stdout is a terminal."""


def message_printer(
    json: Json = False,
    format: Annotated[
        Callable[..., bytes] | None,
        Option(
            "--format",
            "-f",
            parser=compile_template,
            metavar="TEMPLATE",
            help="Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; "
            "{timestamp:%H:%M:%S}, {body:hex|base64|json}; \\n \\t \\0 \\xNN; {{ and }} for "
            "braces.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    decode: Annotated[
        BodyForm | None,
        Option("--decode", help="Show bodies as text, hex or base64.", rich_help_panel=OUTPUT),
    ] = None,
    delimiter: Annotated[
        bytes | None,
        delimiter_option("What ends each message; \\0 for NUL, '' for nothing.", panel=OUTPUT),
    ] = None,
    print_topic: Annotated[
        bool,
        Option("--print-topic", help="Print 'TOPIC | ' before a message.", rich_help_panel=OUTPUT),
    ] = False,
) -> Printer:
    """How the options want messages printed."""
    ending = b"\n" if delimiter is None else delimiter

    def printer(runtime: Runtime) -> Encode:
        if json:
            return encode_many
        return format or lines_printer(
            runtime, delimiter=ending, form=decode, print_topic=print_topic
        )

    return printer


MessagePrinter = Annotated[Printer, From(message_printer)]


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
