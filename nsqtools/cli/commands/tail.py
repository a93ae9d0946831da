"""``nsq tail``: the messages of topics, as they come.

The services are imported when it runs, for the help page does not need the client.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import OUTPUT, Channel, Count, ExitIdle, For, Json, Topics
from nsqtools.cli.options.subscribing import SAFETY, Create, look_before
from nsqtools.cli.render.output import ByteWriter
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.records import filters
from nsqtools.records.lines import BodyForm, encode_lines
from nsqtools.records.template import compile_template
from nsqtools.records.units import unescape

if TYPE_CHECKING:
    from nsqtools.tail.tail import Encode

FILTERS = "Filters"

INTERACTIVE = {
    # nsqd holds a message back for so long when the connection is not full; this is its minimum
    "output_buffer_timeout_s": 0.025,
    # the most that nsqd allows unless told otherwise: fewer and larger batches
    "output_buffer_size": 65536,
    # every message is shown: one that nobody could show is not made to vanish after five tries
    "max_attempts": 0,
    # a person waits for it
    "reconnect_base_s": 1.0,
}

Format = Annotated[
    Callable[..., bytes] | None,
    Option(
        "--format",
        "-f",
        parser=compile_template,
        metavar="TEMPLATE",
        help="Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; "
        "{timestamp:%H:%M:%S}, {body:hex|base64|json}; \\n \\t \\0 \\xNN; {{ and }} for braces.",
        rich_help_panel=OUTPUT,
    ),
]
Decode = Annotated[
    BodyForm | None,
    Option("--decode", help="Show bodies as text, hex or base64.", rich_help_panel=OUTPUT),
]
Delimiter = Annotated[
    bytes | None,
    Option(
        "--delimiter",
        "-d",
        parser=unescape,
        metavar="TEXT",
        show_default="\\n",
        help="What ends each message; \\0 for NUL, '' for nothing.",
        rich_help_panel=OUTPUT,
    ),
]
PrintTopic = Annotated[
    bool,
    Option("--print-topic", help="Put 'TOPIC | ' before each message.", rich_help_panel=OUTPUT),
]
Grep = Annotated[
    str | None,
    Option(
        "--grep",
        "-g",
        metavar="REGEX",
        help="Only bodies that contain it; the others are finished unseen.",
        rich_help_panel=FILTERS,
    ),
]
IgnoreCase = Annotated[
    bool, Option("--ignore-case", "-i", help="Ignore case in --grep.", rich_help_panel=FILTERS)
]
Invert = Annotated[
    bool, Option("--invert", help="Only bodies without --grep.", rich_help_panel=FILTERS)
]
Sample = Annotated[
    float | None,
    Option(
        "--sample",
        parser=filters.parse_share,
        metavar="SHARE",
        help="Only this share of the messages, drawn at random (10%, 0.1).",
        rich_help_panel=FILTERS,
    ),
]
Force = Annotated[
    bool,
    Option(
        "--force",
        help="Go on when the topic has no channel yet and a backlog, which would be lost.",
        rich_help_panel=SAFETY,
    ),
]


def tail(
    topic: Topics,
    channel: Channel = None,
    json: Json = False,
    format: Format = None,
    decode: Decode = None,
    delimiter: Delimiter = None,
    print_topic: PrintTopic = False,
    grep: Grep = None,
    ignore_case: IgnoreCase = False,
    invert: Invert = False,
    sample: Sample = None,
    count: Count = None,
    exit_idle: ExitIdle = None,
    for_: For = None,
    create: Create = False,
    force: Force = False,
    *,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Print the messages of one or more topics as they come.

    Runs until it is interrupted, or until a limit (-n, --exit-idle, --for) is reached. Each message
    is finished once it is printed. Without --channel the channel is ephemeral: it begins now and
    is gone afterwards. A topic that does not exist is not created, and a backlog that an ephemeral
    channel would destroy is not touched.

    Examples:
        nsq tail -t clicks
        nsq tail -t clicks -t views --lookupd-http-address lookup:4161 --print-topic
        nsq tail -t clicks -n 10 --format '{timestamp:%H:%M:%S} {id} {body}\\n'
        nsq tail -t clicks --json --exit-idle 5s > clicks.jsonl
    """
    from nsqtools.tail.run_limits import RunLimits
    from nsqtools.tail.tail import Tail

    delimiter = b"\n" if delimiter is None else delimiter
    encode = encoder(runtime, json, format, decode, delimiter, print_topic)
    keep = filters.every(
        [
            *([filters.grep(grep, ignore_case=ignore_case, invert=invert)] if grep else []),
            *([filters.sample(sample, random.random)] if sample is not None else []),
        ]
    )
    channel = channel or ephemeral_channel()
    topics = tuple(dict.fromkeys(topic))
    service = Tail(
        topics,
        channel,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=connection.client_options(**INTERACTIVE),
        address_map=connection.address_map,
        write=ByteWriter(runtime.stdout.fileno()).write,
        encode=encode,
        keep=keep,
        limits=RunLimits(count, exit_idle, for_),
    )
    look_before(topics, channel, connection, runtime, create=create, force=force)
    with stopping(service.stop) as signals:
        service.run()
    if service.falls_short and not signals.received:
        runtime.tell(f"nsq: {service.count} of {count} messages came")
        return ExitStatus.LIMIT_NOT_REACHED
    return signals.status()


def encoder(
    runtime: Runtime,
    json: bool,
    format: Encode | None,
    decode: BodyForm | None,
    delimiter: bytes,
    print_topic: bool,
) -> Encode:
    """Choose how messages are printed."""
    if json:
        from nsqtools.records.envelope import encode_many

        return encode_many
    if format is not None:
        return format
    return partial(
        encode_lines,
        delimiter=delimiter,
        form=decode,
        print_topic=print_topic,
        # on a terminal, bytes that would steer it are shown as \xNN
        escape=runtime.stdout_is_tty,
    )


def ephemeral_channel() -> str:
    """A channel of one's own, gone with its last client."""
    return f"tail{random.randrange(1_000_000):06d}#ephemeral"
