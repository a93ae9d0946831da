"""ClientOptions: all options of a client, in one frozen dataclass.

The metadata of each field has its kind, its bounds and a line of help. ``--consumer-opt`` and
``--producer-opt``, ``nsq config show`` and the manual are generated from it, so a new field is
available everywhere. Names and bounds are go-nsq's (config.go) if go-nsq has the option. Times are
seconds here, and durations as text.

Trap: nsqd refuses an out-of-range value with a fatal error, so the bounds are checked here, before
a connection is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from nsqtools import __version__
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import parse_address, parse_patterns
from nsqtools.protocol.option_names import options_in_environment
from nsqtools.protocol.text import format_duration, parse_duration
from nsqtools.transport.stream import parse_pins

if TYPE_CHECKING:
    import ssl

LARGEST_SIZE = 0x7FFFFFFF  # the largest size that the protocol can express
# Limit of this client for delays between attempts and for backoff. go-nsq allows up to an hour.
MAX_RETRY_DELAY_S = 3600.0

THROUGHPUT: dict[str, Any] = {
    "max_in_flight": 2500,  # nsqd's default of -max-rdy-count
    "output_buffer_size": 65536,  # nsqd's default of -max-output-buffer-size
    "reconnect_base_s": 1.0,
}
"""Default options of consumers that move many messages: forwarders and ``nsq bench``."""

Kind = Literal["duration", "bool", "int", "float", "text", "choice"]


def opt(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    *,
    choices: tuple[str, ...] = (),
    kind: Kind | None = None,
    secret: bool = False,
) -> Any:
    """Declare an option. The default value implies the ``kind``: a float is a duration."""
    kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "duration", str: "text"}
    kind = "choice" if choices else kind or kinds[type(default)]
    metadata = {"kind": kind, "help": help, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=metadata | {"secret": secret}, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a Consumer or Producer. Raises `ConfigurationError` for a value out of bounds.

    Fields that end in ``_s`` are seconds. `dataclasses.replace` makes a changed copy.

    ``ssl_context`` is the program's own TLS context, for nsqd and for https addresses. It enables
    TLS and replaces the options ``tls_*``.
    """

    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    # connecting
    dial_timeout_s: float = opt(5.0, "time to connect, name resolution included", 0.001, 86_400)
    read_timeout_s: float = opt(60.0, "give up a connection silent for this long", 0.1, 300)
    write_timeout_s: float = opt(
        10.0, "give up a connection whose writes made no progress for this long", 0.1, 300
    )
    local_addr: str = opt("", "local host:port to connect from")
    reconnect_base_s: float = opt(
        8.0,
        "first delay before an nsqd given by address is tried again; doubles",
        0.01,
        MAX_RETRY_DELAY_S,
    )
    reconnect_max_s: float = opt(120.0, "longest delay between such tries", 0.01, MAX_RETRY_DELAY_S)

    # discovery
    lookupd_poll_interval_s: float = opt(60.0, "time between lookups", 0.01, 300)
    lookupd_poll_jitter: float = opt(
        0.3, "share of the interval added at random to each delay", 0, 1, kind="float"
    )
    lookupd_poll_timeout_s: float = opt(
        5.0, "time for a daemon to answer over HTTP, connecting included", 0.01, 86_400
    )
    allow_announced: str = opt(
        "",
        "addresses that nsqlookupd may announce, as patterns of HOST:PORT separated by blanks"
        " (*.internal:4150); nsqd elsewhere are left out (default: all are believed)",
    )
    lookupd_authorization: bool = opt(
        False,
        "send the auth secret to nsqlookupd as a bearer token"
        " (go-nsq's skip_lookupd_authorization=true means the same)",
    )

    # identity
    client_id: str = opt("", "name of this client (default: the short host name)")
    hostname: str = opt("", "host name to report (default: this machine's)")
    user_agent: str = opt(f"nsqtools/{__version__}", "program to report")
    topology_region: str = opt("", "region to report")
    topology_zone: str = opt("", "zone to report")

    # negotiated with nsqd
    heartbeat_interval_s: float = opt(
        30.0, "time between heartbeats, 1s to 60s; -1s disables them (producers only)", -1, 60
    )
    sample_rate: int = opt(0, "percent of messages to receive; nsqd discards the rest", 0, 99)
    output_buffer_size: int = opt(16384, "bytes nsqd buffers, 64 to 65536; -1 disables", -1, 65536)
    output_buffer_timeout_s: float = opt(
        0.0,
        "longest time nsqd holds a message in its buffer, 25ms to 30s (0: 25ms, or nsqd's own"
        " default where it refuses that); -1s, for no limit, needs output_buffer_size=-1",
        -1,
        30,
    )
    msg_timeout_s: float = opt(
        0.0, "time to answer a message before it is delivered again (0: nsqd's default)", 0, 900
    )
    tls_v1: bool = opt(False, "use TLS, and nothing else")
    tls_root_ca_file: str = opt("", "certificates to trust, PEM")
    tls_cert: str = opt("", "client certificate, PEM")
    tls_key: str = opt("", "key of the client certificate, PEM")
    tls_insecure_skip_verify: bool = opt(False, "do not verify nsqd's certificate")
    tls_min_version: Literal["ssl3.0", "tls1.0", "tls1.1", "tls1.2", "tls1.3"] = opt(
        "tls1.2",
        "lowest TLS version; a name below tls1.2 means tls1.2",
        choices=("ssl3.0", "tls1.0", "tls1.1", "tls1.2", "tls1.3"),
    )
    snappy: bool = opt(False, "compress with snappy")
    deflate: bool = opt(False, "compress with deflate")
    deflate_level: int = opt(6, "deflate level", 1, 9)
    tls_pin_sha256: str = opt(
        "",
        "SHA-256 fingerprints of the server certificates to accept, in hexadecimal, separated by"
        " blanks; verified besides everything else",
    )
    auth_secret: str = opt("", "secret for an nsqd that requires AUTH", secret=True)
    auth_secret_file: str = opt(
        "",
        "file with the secret, read again at each connection; auth_secret is used"
        " while it cannot be read",
    )
    auth_requires_tls: bool = opt(False, "never send the auth secret over a connection without TLS")

    # consuming
    max_in_flight: int = opt(200, "most messages in flight at a time, all nsqd together", 0)
    max_in_flight_bytes: int = opt(
        64 << 20,
        "most bytes of messages in flight at a time, but for one message (0: no limit)",
        0,
        1 << 40,
    )
    max_attempts: int = opt(
        5,
        "deliveries after which a program gives up a message, if it says what becomes of it then"
        " (0: never); without effect in commands, which have --max-attempts",
        0,
        65535,
    )
    default_requeue_delay_s: float = opt(90.0, "delay of a requeue, times the attempts so far", 0)
    max_requeue_delay_s: float = opt(
        900.0,
        "longest delay of such a requeue; nsqd cuts it to its --max-req-timeout",
        0,
    )
    backoff_strategy: Literal["exponential", "full_jitter"] = opt(
        "exponential", "how backoff grows", choices=("exponential", "full_jitter")
    )
    backoff_multiplier_s: float = opt(1.0, "unit of backoff", 0, MAX_RETRY_DELAY_S)
    max_backoff_duration_s: float = opt(
        120.0, "longest backoff (0: no backoff)", 0, MAX_RETRY_DELAY_S
    )
    low_rdy_idle_timeout_s: float = opt(
        10.0,
        "take RDY from a connection idle for this long, or sooner, if there is too little for all",
        1,
        300,
    )
    low_rdy_timeout_s: float = opt(
        30.0, "take RDY from any connection after this time, if others wait", 1, 300
    )
    rdy_redistribute_interval_s: float = opt(5.0, "time between redistributions", 0.001, 5)
    drain_timeout_s: float = opt(25.0, "time for running handlers when stopping", 0)

    # budgets: what a hostile or broken peer may cost
    max_msg_size: int = opt(
        64 << 20,
        "largest message to accept, in bytes; a larger one ends the connection (0: no limit)",
        0,
        LARGEST_SIZE,
    )
    max_inflated_read: int = opt(
        4 << 20,
        "bytes to which compressed data is expanded at a time; the rest waits its turn",
        1 << 16,
        LARGEST_SIZE,
    )
    max_http_body: int = opt(
        32 << 20, "largest answer to accept over HTTP, in bytes", 1 << 10, 1 << 32
    )
    max_discovered_nsqd: int = opt(
        1000,
        "most nsqd to believe that nsqlookupd announces; of more, some are drawn at random",
        1,
        1_000_000,
    )

    # publishing
    max_outstanding: int = opt(128, "publish commands that may wait for their answer", 1, 100_000)
    publish_timeout_s: float = opt(10.0, "time for a publish to be confirmed", 0.001)
    publish_max_msg_size: int = opt(
        1 << 20, "largest message nsqd takes (its --max-msg-size)", 1, LARGEST_SIZE
    )
    publish_max_body_size: int = opt(
        5 << 20, "largest batch nsqd takes (its --max-body-size)", 16, LARGEST_SIZE
    )

    def __post_init__(self) -> None:
        for name, option in CLIENT_OPTIONS.items():
            _check_bounds(name, getattr(self, option.name), option.metadata)
        if self.ssl_context is not None:
            self._check_context()
        if self.snappy and self.deflate:
            raise ConfigurationError("snappy and deflate exclude each other", hint="Take one.")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigurationError("tls_cert and tls_key are given together or not at all")
        if -1 < self.heartbeat_interval_s < 1:
            raise _out_of_bounds("heartbeat_interval", "1s to 60s, or -1s")
        if self.output_buffer_timeout_s and -1 < self.output_buffer_timeout_s < 0.025:
            raise _out_of_bounds("output_buffer_timeout", "25ms to 30s, 0, or -1s")
        if self.output_buffer_timeout_s < 0 <= self.output_buffer_size:
            raise ConfigurationError(
                "output_buffer_timeout=-1s would hold a lone message until the buffer is full",
                hint="Set output_buffer_size=-1 as well, or instead: nothing is buffered then.",
            )
        if 0 <= self.output_buffer_size < 64:
            raise _out_of_bounds("output_buffer_size", "64 to 65536, or -1")
        if 0 < self.msg_timeout_s < 1:
            raise _out_of_bounds("msg_timeout", "1s to 15m, or 0")
        if self.heartbeat_interval_s > self.read_timeout_s:
            raise ConfigurationError("heartbeat_interval must not exceed read_timeout")
        if self.local_addr:
            parse_address(self.local_addr, 0)
        parse_patterns(self.allow_announced)
        parse_pins(self.tls_pin_sha256)
        # They are read at each connection, and the program may change its directory meanwhile.
        for name in ("tls_root_ca_file", "tls_cert", "tls_key", "auth_secret_file"):
            if path := getattr(self, name):
                object.__setattr__(self, name, os.path.abspath(path))

    def _check_context(self) -> None:
        import ssl

        if not isinstance(self.ssl_context, ssl.SSLContext):
            raise ConfigurationError(f"ssl_context {self.ssl_context!r} is not an ssl.SSLContext")
        for name in TLS_SETTINGS:
            if getattr(self, name):
                raise ConfigurationError(f"ssl_context replaces {name}: set only one of them")
        object.__setattr__(self, "tls_v1", True)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        role: Literal["consumer", "producer"] = "consumer",
    ) -> ClientOptions:
        """Return the options of the environment variables of the ``nsq`` commands.

        These are ``NSQ_TLS``, ``NSQ_AUTH_SECRET_FILE`` and so on (nsq-options(7)), and for any
        other option ``NSQ_CONSUMER_OPT="msg_timeout=2m max_attempts=10"``, or NSQ_PRODUCER_OPT for
        that ``role``. An empty variable counts as unset. The configuration file is not read, and
        the addresses of the commands are left to the program. `dataclasses.replace` changes more.

        Raises `ConfigurationError` for an invalid value, and for TLS settings without NSQ_TLS.
        """
        environ = os.environ if environ is None else environ
        texts: dict[str, str] = {}
        variables: dict[str, str] = {}
        for variable, option, text in options_in_environment(environ, role):
            if texts.setdefault(option, text) != text:
                raise ConfigurationError(
                    f"{variables[option]} and {variable} contradict each other",
                    hint=f"Keep one of them: both set the client option {option}.",
                )
            variables.setdefault(option, variable)
        has_https = "https://" in environ.get("NSQ_LOOKUPD_HTTP_ADDRESS", "")
        tls = [variables[option] for option in texts if option.startswith("tls_")]
        if tls and "tls_v1" not in texts and not has_https:  # it would silently be plain text
            hint = "Set NSQ_TLS=true."
            raise ConfigurationError(f"{tls[0]} is given, but TLS is not enabled", hint=hint)
        return cls().with_options(texts)

    def with_options(self, options: Mapping[str, str]) -> ClientOptions:
        """Return a copy with options given as text, under go-nsq's names.

        A name may have ``-`` for ``_``, and an empty text enables a switch. Raises
        `ConfigurationError` for an unknown name or an invalid value.
        """
        changes = dict(read_option(name, text) for name, text in options.items())
        return replace(self, **changes)


def option_name(option: Any) -> str:
    """Return go-nsq's name of a field of `ClientOptions`."""
    name: str = option.name
    return name.removesuffix("_s")


CLIENT_OPTIONS = {
    option_name(option): option for option in fields(ClientOptions) if option.metadata
}
"""The fields that can be set as text, by go-nsq's name."""


def read_option(name: str, text: str) -> tuple[str, Any]:
    """Return the field name and value of an option given as text. Raises `ConfigurationError`."""
    from difflib import get_close_matches

    key = name.strip().replace("-", "_")
    key = {"skip_lookupd_authorization": "lookupd_authorization"}.get(key, key)
    if option := CLIENT_OPTIONS.get(key):
        value = _read_value(key, option.metadata["kind"], text.strip())
        _check_bounds(key, value, option.metadata)
        return option.name, value
    if key in _REMOVED:
        raise ConfigurationError(f"there is no {name} any more", hint=_REMOVED[key])
    similar = get_close_matches(key, CLIENT_OPTIONS, 1)
    suggestion = f"Did you mean {similar[0]}? " if similar else ""
    hint = f"{suggestion}See the list with: nsq config show"
    raise ConfigurationError(f"unknown client option {name!r}", hint=hint)


def _read_value(name: str, kind: Kind, text: str) -> Any:
    try:
        if kind == "bool":
            return _SWITCH[text.lower()]
        if kind == "duration":
            return int(text) / 1000 if text.lstrip("-").isdecimal() else parse_duration(text)
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except (ValueError, KeyError, OverflowError):
        example = {"duration": "1s", "bool": "true", "int": "N", "float": "0.3"}[kind]
        raise ConfigurationError(
            f"invalid value {text!r} for client option {name}", hint=f"Write {name}={example}."
        ) from None
    return text


_REMOVED = {
    "rdy_resend": "RDY is always sent again.",
    "connect_threads": "Eight threads serve any number of nsqd.",
}
TLS_SETTINGS = ("tls_root_ca_file", "tls_cert", "tls_insecure_skip_verify", "tls_pin_sha256")
_SWITCH = {"": True, "true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


def _check_bounds(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    kind, choices, low, high = (metadata[key] for key in ("kind", "choices", "low", "high"))
    number = int if kind in ("bool", "int") else int | float
    if not isinstance(value, str if kind in ("text", "choice") else number):
        raise ConfigurationError(
            f"client option {name} is not of type {type(value).__name__}",
            hint=f"Its type is {kind.replace('duration', 'float, seconds')}.",
        )
    if choices and value not in choices:
        raise _out_of_bounds(name, "one of " + ", ".join(choices))
    # Negated comparisons, so that NaN is out of bounds.
    if not (low is None or value >= low) or not (high is None or value <= high):
        show = format_duration if kind == "duration" else str
        upper = "" if high is None else f" to {show(high)}"
        raise _out_of_bounds(name, f"{show(low)}{upper or ' or more'}")


def _out_of_bounds(name: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"client option {name} is out of bounds", hint=f"Allowed: {allowed}.")
