"""Options of ``nsq pub`` for a message that ``nsq schedule serve`` publishes later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nsqtools.cli.options.params import parse_moment
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import HTTP_PORT_OFFSET, Address, http_url, parse_address
from nsqtools.protocol.schedule_request import SCHEDULE_TOPIC, encode_request
from nsqtools.protocol.text import NS
from nsqtools.records.units import Moment, parse_span

if TYPE_CHECKING:
    from nsqtools.cli.running.runtime import Runtime
    from nsqtools.client.connection_settings import ConnectionSettings

# Bounds the delay that the check for a scheduler adds to a successful publish.
ASK_TIMEOUT_S = 1.0


def check_interval(text: str) -> str:
    """Check an interval and return its text, which the request contains. Raises ``ValueError``."""
    from nsqtools.schedule.request import parse_interval

    parse_interval(text, 0)
    return text


class Scheduling(OptionSet):
    """The time of a delayed or repeated message.

    Raises `ConfigurationError` for options that contradict each other.
    """

    panel = "Schedule"

    at: Moment | None = opt(
        "TIME", "Publish at this time, by nsq schedule serve.", parser=parse_moment
    )
    in_: float | None = opt("--in DURATION", "Publish after DURATION.", parser=parse_span)
    every: str | None = opt("DURATION", "Publish at this interval.", parser=check_interval)
    cron: str = opt("EXPRESSION", "Publish by a cron expression: '0 6 * * 1'.", default="")
    timezone: str = opt("ZONE", "Time zone of --cron.", default="", show_default="UTC")
    catch_up: str = opt(
        "all|last|none", "Missed occurrences to publish after an outage.", default="",
        show_default="last",
    )  # fmt: skip
    key: str = opt("KEY", "Name of the entry, for replacing and cancelling it.", default="")
    envelope: bool = opt("", "Publish the body inside JSON with the key and due time.")
    schedule_topic: str = opt("TOPIC", "Topic of the requests.", default=SCHEDULE_TOPIC)

    def check(self) -> None:
        times = [self.at is not None or self.in_ is not None, bool(self.every), bool(self.cron)]
        self.is_used = any(times)
        if self.at is not None and self.in_ is not None:
            raise ConfigurationError("give either --at or --in")
        if self.every and self.cron:
            raise ConfigurationError("give either --every or --cron")
        if self.timezone and not self.cron:
            raise ConfigurationError("--timezone is for --cron")
        if self.catch_up and not (self.every or self.cron):
            raise ConfigurationError("--catch-up is for --every and --cron")
        if (self.key or self.envelope) and not self.is_used:
            raise ConfigurationError("--key and --envelope need --at, --in, --every or --cron")

    def check_against(self, texts: Sequence[bytes], *, defers: bool, channel: str) -> None:
        """Raise `ConfigurationError` for other options of the command that contradict these."""
        if defers:
            raise ConfigurationError("--defer excludes --at, --in, --every and --cron")
        if channel:
            raise ConfigurationError("--channel excludes --at, --in, --every and --cron")
        if self.key and len(texts) != 1:
            raise ConfigurationError(
                "--key is for one message", hint="Give the text of one message as an argument."
            )

    def request_for(
        self, topic: str, select: Callable[[bytes], bytes | None] | None
    ) -> Callable[[bytes], bytes | None]:
        """Return a function that converts each body that ``select`` keeps to a request.

        Raises `ConfigurationError` for times that the scheduler would refuse.
        """
        from nsqtools.schedule.request import InvalidRequest, parse_request

        at_ns = self.at and self.at.ns
        if self.in_ is not None:
            at_ns = time.time_ns() + round(self.in_ * NS)

        def request(body: bytes) -> bytes | None:
            selected = body if select is None else select(body)
            if not selected:
                return selected
            return encode_request(
                topic,
                selected,
                at_ns=at_ns,
                every=self.every or "",
                cron=self.cron,
                timezone=self.timezone,
                catch_up=self.catch_up,
                key=self.key,
                envelope=self.envelope,
            )

        try:
            parse_request(request(b"x") or b"", default_key="", asked_ns=time.time_ns())
        except InvalidRequest as error:
            raise ConfigurationError(str(error)) from None
        return request

    def warn_without_scheduler(self, connection: ConnectionSettings, runtime: Runtime) -> None:
        """Warn of each responding nsqd on which the topic of requests has no channel."""
        for address in connection.nsqd_tcp_addresses:
            if _has_channel(parse_address(address), self.schedule_topic, connection) is False:
                runtime.info(
                    f"nsq: warning: topic {self.schedule_topic} has no channel on {address}:"
                    " start nsq schedule serve"
                )


def _has_channel(tcp: Address, topic: str, connection: ConnectionSettings) -> bool | None:
    """Ask nsqd over HTTP whether the topic has a channel. Return None without an answer.

    The HTTP port is assumed to be one above the TCP port, as by default, and this is checked.
    """
    from nsqtools.client.connection import http_access

    url = http_url(str(Address(tcp.host, min(tcp.port + HTTP_PORT_OFFSET, 65535))), 0)
    options = connection.client_options(lookupd_poll_timeout_s=ASK_TIMEOUT_S)
    try:
        with http_access(options, [url]).nsqd(url) as client:
            if client.info()["tcp_port"] != tcp.port:
                return None
            return any(stats.channels for stats in client.stats(topic).topics or ())
    except NsqError:
        return None
