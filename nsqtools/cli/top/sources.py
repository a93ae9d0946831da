"""The messages that `nsq top` shows, on a thread of their own.

Those that arrive in a topic, or some of a channel. A tail subscribes with an ephemeral channel of
its own, as `nsq tail` does, and takes nothing from other channels. A peek shows messages of a
channel and gives them back, as `nsq peek` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from nsqtools.cli.commands.tail import INTERACTIVE, ephemeral_channel
from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.client.message import Message
from nsqtools.cluster.drain import tcp_address
from nsqtools.cluster.topics import check_subscription, inspect_topic, missing
from nsqtools.protocol.text import counted, escape_line
from nsqtools.tail.tail import Tail, peek

PEEK_COUNT = 10
PEEK_IDLE_S = 1.0
MOST_BODY = 16 * 1024


class MessageSource:
    """A tail of a topic, or with a channel a peek. `run` it on a thread, `stop` it from any.

    ``show`` gets lines, escaped, and ``tell`` how it goes.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        topic: str,
        channel: str,
        show: Callable[[list[str]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._channel = channel
        self._show = show
        self._tell = tell
        self._tail: Tail | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End; what is in flight is given back."""
        self._is_stopped = True
        if self._tail is not None:
            self._tail.stop()

    def run(self) -> None:
        """Show messages until there are no more, or it is stopped. Raises `NsqError`."""
        connection = self._settings.connection
        channel = self._channel or ephemeral_channel()
        nsqds = self._addresses(channel)
        if self._channel:
            options = connection.client_options(output_buffer_timeout_s=0.025, reconnect_base_s=1.0)
            look = peek(
                self._topic,
                channel,
                PEEK_COUNT,
                lambda messages: self._show([line for each in messages for line in unfolded(each)]),
                nsqd_tcp_addresses=nsqds,
                lookupd_http_addresses=connection.lookupd_http_addresses,
                options=options,
                address_map=connection.address_map,
                idle_s=PEEK_IDLE_S,
            )
            self._tell(f"{counted(look.shown, 'message')} shown and given back")
            return
        self._tail = Tail(
            [self._topic],
            channel,
            nsqd_tcp_addresses=nsqds,
            lookupd_http_addresses=connection.lookupd_http_addresses,
            options=connection.client_options(**INTERACTIVE),
            address_map=connection.address_map,
            write=lambda data: self._show(data.decode().splitlines()),
            encode=_encode,
        )
        if not self._is_stopped:
            self._tell(f"waiting on {channel}")
            self._tail.run()
            self._tell("ended")

    def _addresses(self, channel: str) -> Sequence[str]:
        """Look before subscribing, which would create the topic; return nsqd's TCP addresses."""
        connection = self._settings.connection
        with self._settings.open() as cluster:
            report = inspect_topic(cluster, self._topic)
            if not report.asked and report.failed:
                raise report.failed[0]
            check_subscription(report, channel)
            if self._channel and channel not in report.channels:
                raise missing("channel", channel, report.channels)
            if connection.lookupd_http_addresses:
                return ()
            if connection.nsqd_tcp_addresses:
                return connection.nsqd_tcp_addresses
            found, _ = cluster.ask_nsqds(tcp_address)
            return list(found.values())


def _encode(_topic: str, _nsqd: str, messages: Iterable[Message]) -> bytes:
    return "\n".join(map(one_line, messages)).encode()


def one_line(message: Message) -> str:
    """A message in a line: when it was published, and its body."""
    return f"{_clock(message)}  {escape_line(_text(message))}"


def unfolded(message: Message) -> list[str]:
    """A message in lines: about it, then its body as it is."""
    name = escape_line(message.id.decode("latin-1"))
    attempts, size = counted(message.attempts, "attempt"), counted(len(message.body), "byte")
    body = [f"  {escape_line(line)}" for line in _text(message).split("\n")]
    return [f"{_clock(message)}  {name}  {attempts}  {size}", *body, ""]


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
