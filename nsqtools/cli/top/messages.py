"""Messages for the pane of `nsq top`: those that arrive in a topic, or some of a channel.

A tail subscribes with an ephemeral channel of its own, as `nsq tail` does, and takes nothing from
other channels. A peek shows messages of a channel and gives them back, as `nsq peek` does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Protocol

from nsqtools.cli.commands.tail import INTERACTIVE, ephemeral_channel
from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.top.console import Messages
from nsqtools.client.message import Message
from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.drain import tcp_address
from nsqtools.cluster.topics import check_subscription, inspect_topic, missing
from nsqtools.errors import NsqError
from nsqtools.protocol.text import counted, escape_line
from nsqtools.tail.peek import peek
from nsqtools.tail.tail import Tail

PEEK_COUNT = 10
PEEK_IDLE_S = 1.0
MOST_BODY = 16 * 1024
END_WAIT_S = 2.0


class Pane(Protocol):
    """What a source calls, on its own thread."""

    def show(self, lines: Sequence[str]) -> None:
        """Messages came."""

    def tell(self, text: str) -> None:
        """This is how it stands."""

    def fail(self, error: NsqError) -> None:
        """It ended with an error."""


class MessageSource:
    """One tail or peek, on a thread of its own."""

    def __init__(self, settings: ClusterSettings, what: Messages, pane: Pane) -> None:
        self._settings = settings
        self._what = what
        self._pane = pane
        self._tail: Tail | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="nsq-top-messages", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what is in flight is given back."""
        self._is_stopped = True
        if self._tail is not None:
            self._tail.stop()

    def join(self) -> None:
        """Wait until what was in flight is given back, but not for ever."""
        self._thread.join(END_WAIT_S)

    def _run(self) -> None:
        try:
            if self._what.is_peek:
                self._peek()
            else:
                self._follow()
        except NsqError as error:
            self._pane.fail(error)

    def _addresses(self, channel: str) -> Sequence[str]:
        """Look before subscribing, which would create the topic; return nsqd's TCP addresses."""
        settings, topic = self._settings.connection, self._what.topic
        with self._settings.open() as cluster:
            report = inspect_topic(cluster, topic)
            if not report.asked and report.failed:
                raise report.failed[0]
            check_subscription(report, channel)
            if self._what.is_peek and channel not in report.channels:
                raise missing("channel", channel, report.channels)
            if settings.lookupd_http_addresses:
                return ()
            return settings.nsqd_tcp_addresses or _tcp_addresses(cluster)

    def _peek(self) -> None:
        connection = self._settings.connection
        look = peek(
            self._what.topic,
            self._what.channel,
            PEEK_COUNT,
            lambda messages: self._pane.show(
                [line for each in messages for line in unfolded(each)]
            ),
            nsqd_tcp_addresses=self._addresses(self._what.channel),
            lookupd_http_addresses=connection.lookupd_http_addresses,
            options=connection.client_options(output_buffer_timeout_s=0.025, reconnect_base_s=1.0),
            address_map=connection.address_map,
            idle_s=PEEK_IDLE_S,
        )
        self._pane.tell(f"{counted(look.shown, 'message')} shown and given back")

    def _follow(self) -> None:
        connection, channel = self._settings.connection, ephemeral_channel()
        self._tail = Tail(
            [self._what.topic],
            channel,
            nsqd_tcp_addresses=self._addresses(channel),
            lookupd_http_addresses=connection.lookupd_http_addresses,
            options=connection.client_options(**INTERACTIVE),
            address_map=connection.address_map,
            write=lambda data: self._pane.show(data.decode().splitlines()),
            encode=_encode,
        )
        if self._is_stopped:
            return
        self._pane.tell(f"waiting on {channel}")
        self._tail.run()
        self._pane.tell("ended")


def _encode(_topic: str, _nsqd: str, messages: Iterable[Message]) -> bytes:
    return "\n".join(map(one_line, messages)).encode()


def one_line(message: Message) -> str:
    """A message in a line: when it was published, and its body."""
    return f"{_clock(message)}  {escape_line(_text(message))}"


def unfolded(message: Message) -> list[str]:
    """A message in lines: about it, then its body as it is."""
    attempts = counted(message.attempts, "attempt")
    head = f"{_clock(message)}  {escape_line(message.id.decode('latin-1'))}  {attempts}"
    size = counted(len(message.body), "byte")
    return [
        f"{head}  {size}",
        *(f"  {escape_line(line)}" for line in _text(message).split("\n")),
        "",
    ]


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


def _tcp_addresses(cluster: Cluster) -> list[str]:
    found, _ = cluster.ask_nsqds(tcp_address)
    return list(found.values())
