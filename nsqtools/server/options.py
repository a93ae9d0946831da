"""The options of nsqd and of nsqlookupd: one field for each flag, with the daemon's name.

Durations are in seconds. The metadata of a field describes its flag and its key in a TOML file
(`setting`). The command line, the file, /config and the help are generated from this list.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, fields
from hashlib import md5
from os import PathLike
from typing import Any
from zlib import crc32

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import one_or_several
from nsqtools.server import go_flags as kinds

NOT_GO = "[not in Go's nsqd] "

NOT_REQUIRED, REQUIRED_EXCEPT_HTTP, REQUIRED = 0, 1, 2  # tls_required


def setting(default: Any, help: str, kind: kinds.FlagKind | None = None, *, key: str = "") -> Any:
    """Declare an option.

    ``kind`` is derived from the default if it is not given; a float is a duration. ``key`` is the
    key in the file if it is not the name of the field.
    """
    kind = kind or kinds.KIND_OF[type(default() if callable(default) else default)]
    metadata = {"kind": kind, "help": help, "key": key}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_TYPES: dict[str, Any] = {"int": int, "bool": int, "float": (int, float), "str": (str, PathLike)}


def check_types(options: Any) -> None:
    """Raise ``TypeError`` for a value of a wrong type, ``ValueError`` for an unknown log level."""
    for option in fields(options):
        value = getattr(options, option.name)
        if not isinstance(value, _TYPES.get(str(option.type), (str, list, tuple))):
            raise TypeError(f"{option.name} must be {option.type}, not {type(value).__name__}")
    object.__setattr__(options, "log_level", kinds.parse_log_level(options.log_level))


def default_node_id() -> int:
    """Return the node id that nsqd derives from the host name."""
    return crc32(md5(socket.gethostname().encode(), usedforsecurity=False).digest()) % 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqdOptions:
    """All options of nsqd, with its defaults; durations in seconds.

    Raises `ConfigurationError` with nsqd's own text, and as `check_types` does.
    """

    node_id: int = setting(
        default_node_id,
        "unique part for message IDs, (int) in range [0,1024) (default is hash of hostname)",
        key="id",
    )
    log_level: str = setting(
        "info", "set log verbosity: debug, info, warn, error, or fatal", kinds.LOG_LEVEL
    )
    log_prefix: str = setting("[nsqd] ", "log message prefix")

    tcp_address: str = setting(
        "0.0.0.0:4150",
        "address to listen on for TCP clients (<addr>:<port> for TCP/IP or <path> for unix socket)",
    )
    http_address: str = setting(
        "0.0.0.0:4151",
        "address to listen on for HTTP clients (<addr>:<port> for TCP/IP or <path> for unix "
        "socket)",
    )
    https_address: str = setting("0.0.0.0:4152", "<addr>:<port> to listen on for HTTPS clients")
    auth_http_address: tuple[str, ...] = setting(
        (),
        "<addr>:<port> or a full url to query auth server (may be given multiple times)",
        key="auth_http_addresses",
    )
    broadcast_address: str = setting(
        socket.gethostname,
        "address that will be registered with lookupd (defaults to the OS hostname)",
    )
    broadcast_tcp_port: int = setting(
        0,
        "TCP port that will be registered with lookupd (defaults to the TCP port that this nsqd "
        "is listening on)",
    )
    broadcast_http_port: int = setting(
        0,
        "HTTP port that will be registered with lookupd (defaults to the HTTP port that this nsqd "
        "is listening on)",
    )
    lookupd_tcp_address: tuple[str, ...] = setting(
        (), "lookupd TCP address (may be given multiple times)", key="nsqlookupd_tcp_addresses"
    )
    http_client_connect_timeout: float = setting(2.0, "timeout for HTTP connect")
    http_client_request_timeout: float = setting(5.0, "timeout for HTTP request")

    data_path: str = setting("", "path to store disk-backed messages")
    mem_queue_size: int = setting(10000, "number of messages to keep in memory (per topic/channel)")
    max_bytes_per_file: int = setting(
        104857600, "number of bytes per diskqueue file before rolling"
    )
    sync_every: int = setting(2500, "number of messages per diskqueue fsync")
    sync_timeout: float = setting(2.0, "duration of time per diskqueue fsync")
    queue_scan_worker_pool_max: int = setting(
        4, "max concurrency for checking in-flight and deferred message timeouts"
    )
    queue_scan_selection_count: int = setting(
        20,
        "number of channels to check per cycle (every 100ms) for in-flight and deferred timeouts",
    )

    msg_timeout: float = setting(60.0, "default duration to wait before auto-requeing a message")
    max_msg_timeout: float = setting(900.0, "maximum duration before a message will timeout")
    max_msg_size: int = setting(1048576, "maximum size of a single message in bytes")
    max_req_timeout: float = setting(3600.0, "maximum requeuing timeout for a message")
    max_body_size: int = setting(5242880, "maximum size of a single command body")

    max_heartbeat_interval: float = setting(
        60.0, "maximum client configurable duration of time between client heartbeats"
    )
    max_rdy_count: int = setting(2500, "maximum RDY count for a client")
    max_output_buffer_size: int = setting(
        65536, "maximum client configurable size (in bytes) for a client output buffer"
    )
    max_output_buffer_timeout: float = setting(
        30.0, "maximum client configurable duration of time between flushing to a client"
    )
    min_output_buffer_timeout: float = setting(
        0.025, "minimum client configurable duration of time between flushing to a client"
    )
    output_buffer_timeout: float = setting(
        0.25, "default duration of time between flushing data to clients"
    )
    max_channel_consumers: int = setting(
        0,
        "maximum channel consumer connection count per nsqd instance (default 0, i.e., unlimited)",
    )

    statsd_address: str = setting("", "UDP <addr>:<port> of a statsd daemon for pushing stats")
    statsd_interval: float = setting(60.0, "duration between pushing to statsd")
    statsd_mem_stats: bool = setting(True, "toggle sending memory and GC stats to statsd")
    statsd_prefix: str = setting(
        "nsq.%s", "prefix used for keys sent to statsd (%s for host replacement)"
    )
    statsd_udp_packet_size: int = setting(508, "the size in bytes of statsd UDP packets")
    statsd_exclude_ephemeral: bool = setting(
        False, "Skip ephemeral topics and channels when sending stats to statsd"
    )

    e2e_processing_latency_percentile: tuple[float, ...] = setting(
        (),
        "message processing time percentiles (as float (0, 1.0]) to track (can be specified "
        "multiple times or comma separated '1.0,0.99,0.95', default none)",
        kinds.PERCENTILES,
        key="e2e_processing_latency_percentiles",
    )
    e2e_processing_latency_window_time: float = setting(
        600.0,
        "calculate end to end latency quantiles for this duration of time (ie: 60s would only "
        "show quantile calculations from the past 60 seconds)",
    )

    tls_cert: str = setting("", "path to certificate file")
    tls_key: str = setting("", "path to key file")
    tls_client_auth_policy: str = setting(
        "", "client certificate auth policy ('require' or 'require-verify')"
    )
    tls_root_ca_file: str = setting("", "path to certificate authority file")
    tls_required: int = setting(
        NOT_REQUIRED,
        "require TLS for client connections (true, false, tcp-https)",
        kinds.TLS_REQUIRED,
    )
    tls_min_version: int = setting(
        0x0301,
        "minimum SSL/TLS version acceptable ('tls1.0', 'tls1.1', 'tls1.2' or 'tls1.3')",
        kinds.TLS_MIN_VERSION,
    )
    deflate: bool = setting(True, "enable deflate feature negotiation (client compression)")
    max_deflate_level: int = setting(
        6, "max deflate compression level a client can negotiate (> values == > nsqd CPU usage)"
    )
    snappy: bool = setting(True, "enable snappy feature negotiation (client compression)")

    durable: bool = setting(
        False,
        NOT_GO
        + "keep all messages in a SQLite database and confirm a publish when it is committed: "
        "for the job of one channel, a site without a second machine, and tests (the Go nsqd can "
        "open the data path after --recover-only; nsq-recipes(7) has the cost in disk and CPU)",
    )
    recover_only: bool = setting(
        False,
        NOT_GO + "write the database of --durable to the files of Go's nsqd, or with --durable the "
        "files to a database, and exit",
    )

    min_disk_free: int = setting(
        0, NOT_GO + "refuse publishes while the data path has fewer bytes free"
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.node_id < 1024:
            raise ConfigurationError("--node-id must be [0,1024)")
        if not 1 <= self.max_deflate_level <= 9:
            raise ConfigurationError("--max-deflate-level must be [1,9]")
        # With these values the Go nsqd panics.
        for name in ("sync_timeout", "statsd_interval", "output_buffer_timeout"):
            is_used = name != "statsd_interval" or self.statsd_address
            if getattr(self, name) <= 0 and is_used:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0")
        # The Go nsqd takes a negative size for 0.
        object.__setattr__(self, "mem_queue_size", max(0, self.mem_queue_size))
        for name in ("lookupd_tcp_address", "auth_http_address"):
            object.__setattr__(self, name, tuple(one_or_several(getattr(self, name))))
        for percentile in self.e2e_processing_latency_percentile:
            if not 0 < percentile <= 1:
                raise ConfigurationError(
                    f"invalid E2E processing latency percentile: {percentile:g}"
                )
        # The Go nsqd requests no certificate for any other text, so a typo would disable the check.
        if self.tls_client_auth_policy not in ("", "require", "require-verify"):
            raise ConfigurationError("--tls-client-auth-policy must be require or require-verify")
        is_implied = self.tls_client_auth_policy and self.tls_required == NOT_REQUIRED
        if is_implied or self.tls_required is True:  # True: from Python, as `true` of the flag
            object.__setattr__(self, "tls_required", REQUIRED)
        if self.tls_required and not self.has_tls:
            raise ConfigurationError(
                "cannot require TLS client connections without TLS key and cert"
            )

    @property
    def has_tls(self) -> bool:
        """Whether a certificate or a key is given. One without the other fails to load."""
        return bool(self.tls_cert or self.tls_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqlookupdOptions:
    """All options of nsqlookupd, with its defaults; durations in seconds.

    Raises `ConfigurationError` with nsqlookupd's own text, and as `check_types` does.
    """

    log_level: str = setting(
        "info", "set log verbosity: debug, info, warn, error, or fatal", kinds.LOG_LEVEL
    )
    log_prefix: str = setting("[nsqlookupd] ", "log message prefix")

    tcp_address: str = setting("0.0.0.0:4160", "<addr>:<port> to listen on for TCP clients")
    http_address: str = setting("0.0.0.0:4161", "<addr>:<port> to listen on for HTTP clients")
    broadcast_address: str = setting(
        socket.gethostname, "address of this lookupd node, (default to the OS hostname)"
    )

    inactive_producer_timeout: float = setting(
        300.0, "duration of time a producer will remain in the active list since its last ping"
    )
    tombstone_lifetime: float = setting(
        45.0, "duration of time a producer will remain tombstoned if registration remains"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for address in (self.tcp_address, self.http_address):
            if not address.rpartition(":")[2].isdecimal():  # nsqlookupd has no unix sockets
                raise ConfigurationError(
                    f"listen ({address}) failed - listen tcp: address {address}: "
                    "missing port in address",
                    hint="Write host:port. Port 0 takes any free port.",
                )
