"""``nsq tail``: the messages of topics, as they come."""

from __future__ import annotations

import random
from typing import Annotated

from typer import Option

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import SAFETY, Channel, Count, ExitIdle, For, Topics
from nsqtools.cli.options.printing import MessageFilter, MessagePrinter
from nsqtools.cli.options.subscribing import Create, look_before
from nsqtools.cli.render.output import ByteWriter
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Session

INTERACTIVE = {
    # nsqd holds a message back for this long when the connection is not full; this is its minimum
    "output_buffer_timeout_s": 0.025,
    # the most that nsqd allows by default: fewer and larger batches
    "output_buffer_size": 65536,
    # every message is shown: one that nobody could show does not vanish after five attempts
    "max_attempts": 0,
    # a person waits for it
    "reconnect_base_s": 1.0,
}

Force = Annotated[
    bool,
    Option(
        "--force",
        help="Continue although the topic has no channel yet and a backlog, which would be lost.",
        rich_help_panel=SAFETY,
    ),
]


def tail(
    topic: Topics,
    channel: Channel = None,
    count: Count = None,
    exit_idle: ExitIdle = None,
    for_: For = None,
    create: Create = False,
    force: Force = False,
    *,
    printer: MessagePrinter,
    keep: MessageFilter,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Print the messages of one or more topics as they arrive.

    Runs until it is interrupted, or until a limit (-n, --exit-idle, --for) is reached. Each message
    is finished once it is printed. Without --channel the channel is ephemeral: nsqd creates it now
    and deletes it afterwards. A topic that does not exist is not created, and a backlog that an
    ephemeral channel would destroy is not touched.

    Examples:
        nsq tail -t clicks
        nsq tail -t clicks -t views --lookupd-http-address lookup:4161 --print-topic
        nsq tail -t clicks -n 10 --format '{timestamp:%H:%M:%S} {id} {body}\\n'
        nsq tail -t clicks --json --exit-idle 5s > clicks.jsonl
    """
    from nsqtools.tail.run_limits import RunLimits
    from nsqtools.tail.tail import Tail

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
        encode=printer(runtime),
        keep=keep,
        limits=RunLimits(count, exit_idle, for_),
    )
    look_before(topics, channel, connection, runtime, create=create, force=force)
    with stopping(service.stop) as signals:
        service.run()
    if service.falls_short and not signals.received:
        runtime.tell(f"nsq: {service.count} of {count} messages arrived")
        return ExitStatus.LIMIT_NOT_REACHED
    return signals.status()


def ephemeral_channel() -> str:
    """A channel of one's own, gone with its last client."""
    return f"tail{random.randrange(1_000_000):06d}#ephemeral"
