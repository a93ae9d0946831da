"""``nsq peek``: a look at messages that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import LIMITS, ChannelName, ExitIdle, Topic
from nsqtools.cli.options.printing import MessageFilter, MessagePrinter
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import ByteWriter
from nsqtools.cli.running.runtime import Session
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.client.message import Message

COUNT = 5
IDLE_S = 2.0

LOOK_AT = 1000

Messages = Annotated[int, opt("--count -n N", "Messages to show.", LIMITS, min=1)]


def peek(
    topic: Topic,
    channel: ChannelName,
    count: Messages = COUNT,
    look_at: int = opt(
        "N", "With a filter, look at no more than N messages.", LIMITS, LOOK_AT, min=1
    ),
    exit_idle: ExitIdle = None,
    *,
    keep: MessageFilter,
    printer: MessagePrinter,
    connection: ConsumerConnection,
    runtime: Session,
) -> None:
    """Show some messages of a channel and requeue them.

    With --grep, --where or --sample it shows the first --count matches among at most --look-at
    messages. It stops earlier after --exit-idle (2s) without a message, and after half of nsqd's
    msg_timeout. nsqd has to deliver a message to look at it: its attempts grow by one, and the
    consumers of the channel do not get it meanwhile. Topic and channel must exist.

    Examples:
        nsq peek -t clicks -c archive
        nsq peek -t clicks -c archive -n 1 --json | jq .body
        nsq peek -t clicks -c archive -n 2 --where '.status >= 500' --look-at 5000
        nsq peek -t clicks -c archive --format '{id} {attempts} {size}\\n'
    """
    from nsqtools.client.connection import require_one
    from nsqtools.cluster.directory import open_cluster
    from nsqtools.cluster.topics import check_subscription, inspect_topic, missing
    from nsqtools.errors import NsqError
    from nsqtools.tail.tail import peek as peek_at

    with open_cluster(connection) as cluster:
        report = inspect_topic(cluster, topic)
    if not report.asked and report.failed:
        require_one(connection.nsqd_tcp_addresses, connection.client_options().dial_timeout_s)
        raise report.failed[0]
    if problem := check_subscription(report, channel, force=True):
        raise NsqError(problem, hint="Give --nsqd-http-address: a look must not create anything.")
    if channel not in report.channels:
        raise missing("channel", channel, report.channels)
    write = ByteWriter(runtime.stdout.fileno()).write

    encode = printer(runtime)

    def show(messages: Sequence[Message]) -> None:
        for message in messages:
            write(encode(message.topic, message.nsqd, [message]))

    look = peek_at(
        topic,
        channel,
        count,
        show,
        keep=keep,
        look_at=look_at,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=connection.client_options(output_buffer_timeout_s=0.025, reconnect_base_s=1.0),
        address_map=connection.address_map,
        idle_s=IDLE_S if exit_idle is None else exit_idle,
    )
    if keep is None:
        what = f"{counted(look.shown, 'message')} shown and given back"
    else:
        more = "" if look.is_whole else "; there may be more (--look-at)"
        what = f"{look.shown} shown of {counted(look.looked_at, 'message')} looked at{more}"
    runtime.tell(f"nsq: {what}; the attempts of each grew by one")
