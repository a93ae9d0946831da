"""The flags of the six utilities of nsq 1.3.0: names, kinds, defaults and help."""

from __future__ import annotations

from typing import Any

from nsqtools.server.go_flags import (
    BOOL,
    DURATION,
    FLOAT,
    INT,
    STRING,
    STRINGS,
    Flag,
    FlagKind,
)

Flags = dict[str, Flag]


def _flags(*rows: tuple[str, FlagKind, Any, str]) -> Flags:
    flags = {name: Flag(name, kind, help, default) for name, kind, default, help in rows}
    return dict(sorted(flags.items()))


_NSQD = ("nsqd-tcp-address", STRINGS, (), "nsqd TCP address (may be given multiple times)")
_LOOKUPD = (
    "lookupd-http-address",
    STRINGS,
    (),
    "lookupd HTTP address (may be given multiple times)",
)
_VERSION = ("version", BOOL, False, "print version string")
_IN_FLIGHT = ("max-in-flight", INT, 200, "max number of messages to allow in flight")
_CONSUMER = (
    "consumer-opt",
    STRINGS,
    (),
    "option to passthrough to nsq.Consumer (may be given multiple times, "
    "http://godoc.org/github.com/nsqio/go-nsq#Config)",
)
_PRODUCER = (
    "producer-opt",
    STRINGS,
    (),
    "option to passthrough to nsq.Producer (may be given multiple times, see "
    "http://godoc.org/github.com/nsqio/go-nsq#Config)",
)
_CONNECT = ("http-client-connect-timeout", DURATION, 2.0, "timeout for HTTP connect")
_REQUEST = ("http-client-request-timeout", DURATION, 5.0, "timeout for HTTP request")
_STATUS = (
    "status-every",
    INT,
    250,
    "the # of requests between logging status (per destination), 0 disables",
)
_MODE = (
    "mode",
    STRING,
    "hostpool",
    "the upstream request mode options: round-robin, hostpool (default), epsilon-greedy",
)

UTILITIES: dict[str, Flags] = {
    "nsq_tail": _flags(
        ("topic", STRINGS, (), "NSQ topic (may be given multiple times)"),
        ("channel", STRING, "", "NSQ channel"),
        _IN_FLIGHT,
        ("n", INT, 0, "total messages to show (will wait if starved)"),
        ("print-topic", BOOL, False, "print topic name where message was received"),
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _VERSION,
    ),
    "to_nsq": _flags(
        ("topic", STRING, "", "NSQ topic to publish to"),
        ("delimiter", STRING, "\n", "character to split input from stdin"),
        ("rate", INT, 0, "Throttle messages to n/second. 0 to disable"),
        (
            "nsqd-tcp-address",
            STRINGS,
            (),
            "destination nsqd TCP address (may be given multiple times)",
        ),
        _PRODUCER,
    ),
    "nsq_stat": _flags(
        ("topic", STRING, "", "NSQ topic"),
        ("channel", STRING, "", "NSQ channel"),
        ("interval", DURATION, 2.0, "duration of time between polling/printing output"),
        ("count", INT, 0, "number of reports"),
        ("nsqd-http-address", STRINGS, (), "nsqd HTTP address (may be given multiple times)"),
        _LOOKUPD,
        _CONNECT,
        _REQUEST,
        _VERSION,
    ),
    "nsq_to_file": _flags(
        ("topic", STRINGS, (), "nsq topic (may be given multiple times)"),
        ("topic-pattern", STRING, "", "only log topics matching the following pattern"),
        ("topic-refresh", DURATION, 60.0, "how frequently the topic list should be refreshed"),
        ("channel", STRING, "nsq_to_file", "nsq channel"),
        _IN_FLIGHT,
        ("output-dir", STRING, "/tmp", "directory to write output files to"),
        ("work-dir", STRING, "", "directory for in-progress files before moving to output-dir"),
        ("datetime-format", STRING, "%Y-%m-%d_%H", "strftime compatible format for <DATETIME>"),
        (
            "filename-format",
            STRING,
            "<TOPIC>.<HOST><REV>.<DATETIME>.log",
            "output filename format (<TOPIC>, <HOST>, <PID>, <DATETIME>, <REV> are replaced)",
        ),
        ("host-identifier", STRING, "", "value to output in log filename in place of hostname"),
        ("gzip", BOOL, False, "gzip output files."),
        ("gzip-level", INT, 6, "gzip compression level (1-9, 1=BestSpeed, 9=BestCompression)"),
        ("skip-empty-files", BOOL, False, "skip writing empty files"),
        ("rotate-size", INT, 0, "rotate the file when it grows bigger than `rotate-size` bytes"),
        ("rotate-interval", DURATION, 0.0, "rotate the file every duration"),
        ("sync-interval", DURATION, 30.0, "sync file to disk every duration"),
        ("log-level", STRING, "info", "set log verbosity: debug, info, warn, error, or fatal"),
        ("log-prefix", STRING, "[nsq_to_file] ", "log message prefix"),
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _CONNECT,
        _REQUEST,
        _VERSION,
    ),
    "nsq_to_nsq": _flags(
        ("topic", STRINGS, (), "nsq topic (may be given multiple times)"),
        ("channel", STRING, "nsq_to_nsq", "nsq channel"),
        ("destination-topic", STRING, "", "use this destination topic for all consumed topics"),
        (
            "destination-nsqd-tcp-address",
            STRINGS,
            (),
            "destination nsqd TCP address (may be given multiple times)",
        ),
        ("require-json-field", STRING, "", "for JSON messages: only pass those with this field"),
        ("require-json-value", STRING, "", "for JSON messages: only pass this value of the field"),
        ("whitelist-json-field", STRINGS, (), "for JSON messages: pass this field"),
        _IN_FLIGHT,
        _STATUS,
        _MODE,
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _PRODUCER,
        _VERSION,
    ),
    "nsq_to_http": _flags(
        ("topic", STRING, "", "nsq topic"),
        ("channel", STRING, "nsq_to_http", "nsq channel"),
        ("n", INT, 100, "number of concurrent publishers"),
        ("sample", FLOAT, 1.0, "% of messages to publish (float b/w 0 -> 1)"),
        ("post", STRINGS, (), "HTTP address to make a POST request to. Data in body"),
        ("get", STRINGS, (), "HTTP address to make a GET request to. '%s' is replaced by the data"),
        ("content-type", STRING, "application/octet-stream", "the Content-Type of POST requests"),
        ("header", STRINGS, (), "Custom header for HTTP requests (may be given multiple times)"),
        ("http-client-request-timeout", DURATION, 20.0, "timeout for HTTP request"),
        _IN_FLIGHT,
        _STATUS,
        _MODE,
        _CONNECT,
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _VERSION,
    ),
}
