"""The options of nsqlookupd: one field a flag, as in `nsqd_options`."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from nsqtools.errors import ConfigurationError
from nsqtools.server.settings import go_flags as kinds
from nsqtools.server.settings.nsqd_options import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqlookupdOptions:
    """All options of nsqlookupd, with its defaults; durations in seconds.

    Raises `ConfigurationError` with nsqlookupd's own text.
    """

    log_level: str = setting(
        "info", kinds.LOG_LEVEL, "set log verbosity: debug, info, warn, error, or fatal"
    )
    log_prefix: str = setting("[nsqlookupd] ", kinds.STRING, "log message prefix")

    tcp_address: str = setting(
        "0.0.0.0:4160", kinds.STRING, "<addr>:<port> to listen on for TCP clients"
    )
    http_address: str = setting(
        "0.0.0.0:4161", kinds.STRING, "<addr>:<port> to listen on for HTTP clients"
    )
    broadcast_address: str = setting(
        socket.gethostname,
        kinds.STRING,
        "address of this lookupd node, (default to the OS hostname)",
    )

    inactive_producer_timeout: float = setting(
        300.0,
        kinds.DURATION,
        "duration of time a producer will remain in the active list since its last ping",
    )
    tombstone_lifetime: float = setting(
        45.0,
        kinds.DURATION,
        "duration of time a producer will remain tombstoned if registration remains",
    )

    def __post_init__(self) -> None:
        for address in (self.tcp_address, self.http_address):
            if not address.rpartition(":")[2].isdigit():  # no unix sockets here
                raise ConfigurationError(
                    f"listen ({address}) failed - listen tcp: address {address}: "
                    "missing port in address",
                    hint="Write host:port. Port 0 takes any free port.",
                )
