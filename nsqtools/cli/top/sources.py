"""The messages that `nsq top` leaves its screen to, until they end or Ctrl-C is pressed.

Those that arrive in a topic, or some of a channel. A tail subscribes with an ephemeral channel of
its own, as `nsq tail` does, and takes nothing from other channels. A peek shows messages of a
channel and gives them back, as `nsq peek` does.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from nsqtools.cli.commands.tail import INTERACTIVE, ephemeral_channel
from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.running.runtime import stopping
from nsqtools.client.message import Message
from nsqtools.cluster.drain import tcp_address
from nsqtools.cluster.topics import check_subscription, inspect_topic, missing
from nsqtools.errors import NsqError
from nsqtools.protocol.text import counted, escape_line
from nsqtools.tail.tail import Tail, peek

PEEK_COUNT = 10
PEEK_IDLE_S = 1.0
MOST_BODY = 16 * 1024

Show = Callable[[str], None]


def show_messages(
    settings: ClusterSettings, topic: str, channel: str, stdin: int, show: Show
) -> int | None:
    """Show a tail of a topic, or with a channel a peek; return the signal that ended it.

    What ends by itself or fails stays to be read until Enter is pressed.
    """
    tails: list[Tail] = []

    def stop() -> None:
        for tail in tails:
            tail.stop()

    with stopping(stop, also=(signal.SIGHUP, signal.SIGQUIT)) as signals:
        try:
            if channel:
                _peek(settings, topic, channel, show)
            else:
                tails.append(_tail(settings, topic, show))
                if signals.received is None:
                    tails[0].run()
        except NsqError as error:
            show(str(error))
            if error.hint:
                show(f"hint: {error.hint}")
        if signals.received is None:
            show("-- Enter goes back to nsq top")
        while signals.received is None and not select.select([stdin], [], [], 0.1)[0]:
            pass
        if signals.received is None:
            os.read(stdin, 1024)
    return signals.received


def _tail(settings: ClusterSettings, topic: str, show: Show) -> Tail:
    connection, channel = settings.connection, ephemeral_channel()

    def encode(_topic: str, _nsqd: str, messages: Iterable[Message]) -> bytes:
        return "\n".join(map(one_line, messages)).encode()

    nsqds = _addresses(settings, topic, channel)
    show(f"-- tail of {topic} on {channel}: Ctrl-C goes back to nsq top")
    return Tail(
        [topic],
        channel,
        nsqd_tcp_addresses=nsqds,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=connection.client_options(**INTERACTIVE),
        address_map=connection.address_map,
        write=lambda data: show(data.decode()),
        encode=encode,
    )


def _peek(settings: ClusterSettings, topic: str, channel: str, show: Show) -> None:
    connection = settings.connection
    look = peek(
        topic,
        channel,
        PEEK_COUNT,
        lambda messages: show("\n".join(map(unfolded, messages))),
        nsqd_tcp_addresses=_addresses(settings, topic, channel, must_exist=True),
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=connection.client_options(output_buffer_timeout_s=0.025, reconnect_base_s=1.0),
        address_map=connection.address_map,
        idle_s=PEEK_IDLE_S,
    )
    show(f"-- {counted(look.shown, 'message')} shown and given back")


def _addresses(
    settings: ClusterSettings, topic: str, channel: str, *, must_exist: bool = False
) -> Sequence[str]:
    """Look before subscribing, which would create the topic; return nsqd's TCP addresses."""
    connection = settings.connection
    with settings.open() as cluster:
        report = inspect_topic(cluster, topic)
        if not report.asked and report.failed:
            raise report.failed[0]
        check_subscription(report, channel)
        if must_exist and channel not in report.channels:
            raise missing("channel", channel, report.channels)
        if connection.lookupd_http_addresses:
            return ()
        if connection.nsqd_tcp_addresses:
            return connection.nsqd_tcp_addresses
        found, _ = cluster.ask_nsqds(tcp_address)
        return list(found.values())


def one_line(message: Message) -> str:
    """A message in a line: when it was published, and its body."""
    return f"{_clock(message)}  {escape_line(_text(message))}"


def unfolded(message: Message) -> str:
    """A message in lines: about it, then its body as it is."""
    name = escape_line(message.id.decode("latin-1"))
    attempts, size = counted(message.attempts, "attempt"), counted(len(message.body), "byte")
    body = "".join(f"  {escape_line(line)}\n" for line in _text(message).split("\n"))
    return f"{_clock(message)}  {name}  {attempts}  {size}\n{body}"


def _text(message: Message) -> str:
    text = bytes(message.body[:MOST_BODY]).decode("utf-8", "backslashreplace")
    more = len(message.body) - MOST_BODY
    return f"{text} ... {more} bytes more" if more > 0 else text


def _clock(message: Message) -> str:
    try:
        moment = datetime.fromtimestamp(message.timestamp_ns / 1e9)
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
    return moment.strftime("%H:%M:%S")
