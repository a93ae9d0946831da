"""``nsq tail`` prints messages as they arrive; ``nsq peek`` shows messages and requeues them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from nsqtools.cli.options.connection import ClusterSettings, ConsumerConnection
from nsqtools.cli.options.params import (
    LIMITS,
    SAFETY,
    Channel,
    ChannelName,
    ExitIdle,
    Topic,
    Topics,
)
from nsqtools.cli.options.printing import MessageFilter, MessagePrinter
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import UnjudgedReporter
from nsqtools.cli.running.channel_watch import ChannelWatch, confirm_shared_channel
from nsqtools.cli.running.consuming import ConnectionNotice, Create, StopLimits
from nsqtools.cli.running.runtime import (
    ExitStatus,
    Session,
    exit_on_signals,
    hangup_signals,
    stop_on_signals,
)
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.client.message import Message

INTERACTIVE: dict[str, Any] = {
    # The maximum of nsqd's default settings, for fewer and larger batches.
    "output_buffer_size": 65536,
    # Shorter than for services, because a user is waiting.
    "reconnect_base_s": 1.0,
}


def tail(
    topic: Topics,
    channel: Channel = None,
    create: Create = False,
    force: bool = opt(
        "", "Subscribe even if a backlog would be lost, or other consumers get less.", SAFETY
    ),
    *,
    limits: StopLimits,
    printer: MessagePrinter,
    keep: MessageFilter,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Print the messages of one or more topics as they arrive.

    Runs until it is interrupted, or until a limit (-n, --until-empty, --exit-idle, --for) is
    reached. Each message is finished after it is printed, and filtered messages are finished too.
    Messages to which --where or --pick cannot be applied, because they are not JSON, are reported,
    and requeued unless the channel is ephemeral. Without --channel, an ephemeral channel is created
    for the run. A missing topic is not created without --create, and a backlog that an ephemeral
    channel would destroy is not consumed without --force.

    Examples:
        nsq tail -t clicks
        nsq tail -t clicks -t views --lookupd-http-address lookup:4161 --print-topic
        nsq tail -t clicks -n 10 --format '{timestamp:%H:%M:%S} {id} {body}\\n'
        nsq tail -t clicks --where '.page == "/cart"' --pick .user
        nsq tail -t clicks -c audit --json --until-empty > clicks.jsonl
    """
    from nsqtools.cluster.topics import UnlistedTopics
    from nsqtools.tail import End, Tail

    # nsqd deletes an ephemeral channel with its last client.
    channel = channel or f"tail{random.randrange(1_000_000):06d}#ephemeral"
    topics = tuple(dict.fromkeys(topic))
    is_watched = runtime.stderr_is_tty and not runtime.quiet
    unlisted = UnlistedTopics(connection)
    notice = ConnectionNotice(runtime, channel) if is_watched else None
    # An ephemeral channel only has copies, so requeuing would just let its queue grow.
    requeue = None if is_ephemeral(channel) else methodcaller("requeue", backoff=False)
    unjudged = UnjudgedReporter(runtime, keep, requeue)
    watch = ChannelWatch(topics, channel, connection, runtime, force=force)
    service = Tail(
        topics,
        channel,
        connection,
        options=connection.client_options(**INTERACTIVE),
        write=runtime.write,
        encode=printer(runtime, unjudged),
        keep=unjudged.keep,
        limits=limits.run_limits(),
        on_tick=notice,
        unavailable_topics=unlisted.among if limits.until_empty else None,
        subscribe_check=watch.backlog_guard,
    )
    if not watch.check_topics(create=create, may_share=force):
        return ExitStatus.FAILED
    until_empty = watch.stop_when_empty(lambda: service.connections, service.end_after_delivered)
    with (
        stop_on_signals(service.stop, additional=hangup_signals()) as signals,
        until_empty if limits.until_empty else nullcontext(),
        watch.idle_report(lambda: service.received),
    ):
        end = service.run()
    status = unjudged.sum_up()
    if notice is not None:
        notice.report_count(service.watch.count)
    if end is End.IDLE:
        unlisted.refuse(topics)
    if service.watch.falls_short and not signals.received:
        runtime.info(
            f"nsq: {service.watch.count} of {counted(limits.count or 0, 'message')} arrived"
        )
        return ExitStatus.LIMIT_NOT_REACHED
    return signals.status(otherwise=ExitStatus.DONE if requeue is None else status)


COUNT = 5
IDLE_S = 2.0

LOOK_AT = 1000


def peek(
    topic: Topic,
    channel: ChannelName,
    count: int = opt("-n N", "Messages to show.", LIMITS, COUNT, min=1),
    look_at: int = opt(
        "N", "With a filter, inspect no more than N messages.", LIMITS, LOOK_AT, min=1
    ),
    exit_idle: ExitIdle = None,
    force: bool = opt("", "Peek even if other consumers get less meanwhile.", SAFETY),
    *,
    keep: MessageFilter,
    printer: MessagePrinter,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Show some messages of a channel and requeue them.

    With --grep, --where or --sample it shows the first --count matches among at most --look-at
    messages. It stops earlier with all messages that the channel had at the start, after
    --exit-idle (2s) without a message, and after half of nsqd's msg_timeout. nsqd can show a
    message only by delivering it: its attempts grow by one, and the consumers of the channel do not
    get it meanwhile. Topic and channel must exist.

    Examples:
        nsq peek -t clicks -c archive
        nsq peek -t clicks -c archive -n 1 --json | jq .body
        nsq peek -t clicks -c archive -n 2 --where '.status >= 500' --look-at 5000
        nsq peek -t clicks -c archive --format '{id} {attempts} {size}\\n'
    """
    from nsqtools.client.connection import require_one
    from nsqtools.cluster.topics import (
        check_subscription,
        describe_queue,
        inspect_topic,
        not_found_error,
    )
    from nsqtools.errors import NsqError
    from nsqtools.tail import peek as peek_at

    with ClusterSettings(connection).open() as cluster:
        report = inspect_topic(cluster, topic)
    if not report.answered and report.failed:
        require_one(connection.nsqd_tcp_addresses, connection.client_options().dial_timeout_s)
        raise report.failed[0]
    if problem := check_subscription(report, channel, force=True):
        raise NsqError(problem, hint="Give --nsqd-http-address: peek must not create anything.")
    if channel not in report.channels:
        raise not_found_error("channel", channel, report.channels)
    depth = sum(queue.depth for queue in report.of_channel(channel))
    if not depth and not report.failed:
        runtime.info(f"nsq: {describe_queue(report, channel)}")
        return ExitStatus.DONE
    if not force and not confirm_shared_channel(report, channel, runtime):
        return ExitStatus.FAILED
    unjudged = UnjudgedReporter(runtime, keep)
    encode = printer(runtime, unjudged)

    def show(messages: Sequence[Message]) -> None:
        for message in messages:
            runtime.write(encode(message.topic, message.nsqd, [message]))

    with exit_on_signals():  # so that messages in flight are requeued
        result = peek_at(
            topic,
            channel,
            connection,
            count,
            show,
            keep=unjudged.keep,
            max_messages=look_at,
            depth=None if report.failed else depth,
            options=connection.client_options(reconnect_base_s=1.0),
            idle_s=IDLE_S if exit_idle is None else exit_idle,
        )
    unjudged.sum_up()
    if not result.received:
        runtime.info(f"nsq: no message arrived: {describe_queue(report, channel)}")
        return ExitStatus.DONE
    suffix = "" if result.is_complete else "; there may be more"
    if keep is None:
        text = f"{counted(result.shown, 'message')} shown and requeued{suffix}"
    else:
        text = f"{result.shown} shown of {counted(result.received, 'message')} inspected{suffix}"
        text += " (--look-at)" if suffix else ""
    runtime.info(f"nsq: {text}; the attempts of each grew by one")
    return ExitStatus.DONE
