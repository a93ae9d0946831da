"""Translate command lines of seven programs of nsq 1.3.0 to those of nsq. Pure.

The translation has the same meaning as far as possible. nsq-migration(7) lists the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsqtools.protocol.option_names import split_option
from nsqtools.protocol.text import format_duration
from nsqtools.records.units import parse_regexp
from nsqtools.server.go_flags import FLOAT, KIND_OF, Flag

Flags = dict[str, Flag]


def _flags_of_rows(*rows: tuple[Any, ...]) -> Flags:
    """Return flags from rows of name, default, help, and kind if the default does not imply it."""
    flags = {}
    for name, default, help, *kind in rows:
        flags[name] = Flag(name, kind[0] if kind else KIND_OF[type(default)], help, default)
    return dict(sorted(flags.items()))


_SEVERAL = "(may be given multiple times)"
_NSQD = ("nsqd-tcp-address", (), f"nsqd TCP address {_SEVERAL}")
_LOOKUPD = ("lookupd-http-address", (), f"lookupd HTTP address {_SEVERAL}")
_VERSION = ("version", False, "print version string")
_IN_FLIGHT = ("max-in-flight", 200, "max number of messages to allow in flight")
_CONFIG = "http://godoc.org/github.com/nsqio/go-nsq#Config)"
_PASSED = "option to passthrough to nsq.{} (may be given multiple times, "
_CONSUMER = ("consumer-opt", (), _PASSED.format("Consumer") + _CONFIG)
_PRODUCER = ("producer-opt", (), _PASSED.format("Producer") + "see " + _CONFIG)
_CONNECT = ("http-client-connect-timeout", 2.0, "timeout for HTTP connect")
_REQUEST = ("http-client-request-timeout", 5.0, "timeout for HTTP request")
_STATUS = (
    "status-every",
    250,
    "the # of requests between logging status (per destination), 0 disables",
)
_MODE = (
    "mode",
    "hostpool",
    "the upstream request mode options: round-robin, hostpool (default), epsilon-greedy",
)

_CONSUMING = (_IN_FLIGHT, _NSQD, _LOOKUPD, _CONSUMER, _VERSION)

# Flags of nsqadmin that nsq web lacks, with their defaults.
_NOT_OF_WEB: dict[str, Any] = {
    "allow-config-from-cidr": "127.0.0.1/8",
    "config": "",
    "dev-static-dir": "",
    "graphite-url": "",
    "log-prefix": "[nsqadmin] ",
    "proxy-graphite": False,
    "statsd-counter-format": "stats.counters.%s.count",
    "statsd-gauge-format": "stats.gauges.%s",
    "statsd-interval": 60.0,
    "statsd-prefix": "nsq.%s",
}

UTILITIES: dict[str, Flags] = {
    "nsq_tail": _flags_of_rows(
        ("topic", (), "NSQ topic (may be given multiple times)"),
        ("channel", "", "NSQ channel"),
        ("n", 0, "total messages to show (will wait if starved)"),
        ("print-topic", False, "print topic name where message was received"),
        *_CONSUMING,
    ),
    "to_nsq": _flags_of_rows(
        ("topic", "", "NSQ topic to publish to"),
        ("delimiter", "\n", "character to split input from stdin"),
        ("rate", 0, "Throttle messages to n/second. 0 to disable"),
        ("nsqd-tcp-address", (), "destination nsqd TCP address (may be given multiple times)"),
        _PRODUCER,
    ),
    "nsq_stat": _flags_of_rows(
        ("topic", "", "NSQ topic"),
        ("channel", "", "NSQ channel"),
        ("interval", 2.0, "duration of time between polling/printing output"),
        ("count", 0, "number of reports"),
        ("nsqd-http-address", (), "nsqd HTTP address (may be given multiple times)"),
        _LOOKUPD,
        _CONNECT,
        _REQUEST,
        _VERSION,
    ),
    "nsq_to_file": _flags_of_rows(
        ("topic", (), "nsq topic (may be given multiple times)"),
        ("topic-pattern", "", "only log topics matching the following pattern"),
        ("topic-refresh", 60.0, "how frequently the topic list should be refreshed"),
        ("channel", "nsq_to_file", "nsq channel"),
        ("output-dir", "/tmp", "directory to write output files to"),
        ("work-dir", "", "directory for in-progress files before moving to output-dir"),
        ("datetime-format", "%Y-%m-%d_%H", "strftime compatible format for <DATETIME>"),
        (
            "filename-format",
            "<TOPIC>.<HOST><REV>.<DATETIME>.log",
            "output filename format (<TOPIC>, <HOST>, <PID>, <DATETIME>, <REV> are replaced)",
        ),
        ("host-identifier", "", "value to output in log filename in place of hostname"),
        ("gzip", False, "gzip output files."),
        ("gzip-level", 6, "gzip compression level (1-9, 1=BestSpeed, 9=BestCompression)"),
        ("skip-empty-files", False, "skip writing empty files"),
        ("rotate-size", 0, "rotate the file when it grows bigger than `rotate-size` bytes"),
        ("rotate-interval", 0.0, "rotate the file every duration"),
        ("sync-interval", 30.0, "sync file to disk every duration"),
        ("log-level", "info", "set log verbosity: debug, info, warn, error, or fatal"),
        ("log-prefix", "[nsq_to_file] ", "log message prefix"),
        _CONNECT,
        _REQUEST,
        *_CONSUMING,
    ),
    "nsq_to_nsq": _flags_of_rows(
        ("topic", (), "nsq topic (may be given multiple times)"),
        ("channel", "nsq_to_nsq", "nsq channel"),
        ("destination-topic", "", "use this destination topic for all consumed topics"),
        ("destination-nsqd-tcp-address", (), f"destination nsqd TCP address {_SEVERAL}"),
        ("require-json-field", "", "for JSON messages: only pass those with this field"),
        ("require-json-value", "", "for JSON messages: only pass this value of the field"),
        ("whitelist-json-field", (), "for JSON messages: pass this field"),
        _STATUS,
        _MODE,
        _PRODUCER,
        *_CONSUMING,
    ),
    "nsq_to_http": _flags_of_rows(
        ("topic", "", "nsq topic"),
        ("channel", "nsq_to_http", "nsq channel"),
        ("n", 100, "number of concurrent publishers"),
        ("sample", 1.0, "% of messages to publish (float b/w 0 -> 1)", FLOAT),
        ("post", (), "HTTP address to make a POST request to. Data in body"),
        ("get", (), "HTTP address to make a GET request to. '%s' is replaced by the data"),
        ("content-type", "application/octet-stream", "the Content-Type of POST requests"),
        ("header", (), "Custom header for HTTP requests (may be given multiple times)"),
        ("http-client-request-timeout", 20.0, "timeout for HTTP request"),
        _STATUS,
        _MODE,
        _CONNECT,
        *_CONSUMING,
    ),
    "nsqadmin": _flags_of_rows(
        ("http-address", "0.0.0.0:4171", "<addr>:<port> to listen on for HTTP clients"),
        ("base-path", "/", "URL base path"),
        ("admin-user", (), f"admin user {_SEVERAL}"),
        ("acl-http-header", "X-Forwarded-User", "HTTP header with the authenticated user"),
        ("notification-http-endpoint", "", "HTTP endpoint that gets notifications of actions"),
        ("http-client-tls-insecure-skip-verify", False, "do not verify TLS certificates"),
        ("http-client-tls-root-ca-file", "", "path to CA file for the HTTP client"),
        ("http-client-tls-cert", "", "path to certificate file for the HTTP client"),
        ("http-client-tls-key", "", "path to key file for the HTTP client"),
        ("log-level", "INFO", "set log verbosity: debug, info, warn, error, or fatal"),
        ("nsqd-http-address", (), f"nsqd HTTP address {_SEVERAL}"),
        _LOOKUPD,
        _CONNECT,
        _REQUEST,
        _VERSION,
        ("verbose", False, "no effect"),
        *((*row, "not supported by nsq web") for row in _NOT_OF_WEB.items()),
    ),
}


FlagValues = Mapping[str, Any]


class GoFatal(Exception):
    """A command line that the utility would refuse, with its message. The exit status is 1."""


def _need(is_met: object, message: str) -> None:
    if not is_met:
        raise GoFatal(message)


def _repeat(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _unchanged(values: FlagValues, *names: str) -> list[str]:
    """Return the flags that are options of the same name, except empty ones."""
    argv = []
    for name in names:
        match values[name]:
            case "" | False:
                continue
            case True:
                argv.append(f"--{name}")
            case tuple(texts):
                argv += _repeat(f"--{name}", texts)
            case float(seconds):
                argv += [f"--{name}", format_duration(seconds)]
            case value:
                argv += [f"--{name}", str(value)]
    return argv


def _check_source(values: FlagValues, nsqd: str = "nsqd-tcp-address") -> None:
    lookupd = values["lookupd-http-address"]
    _need(values[nsqd] or lookupd, f"--{nsqd} or --lookupd-http-address required")
    _need(not (values[nsqd] and lookupd), f"use --{nsqd} or --lookupd-http-address not both")


def _source(values: FlagValues) -> list[str]:
    argv = _unchanged(values, "nsqd-tcp-address", "lookupd-http-address", "max-in-flight")
    # In the utilities the flag overrides go-nsq's option, even with its default.
    options = [text for text in values["consumer-opt"] if split_option(text)[0] != "max_in_flight"]
    return [*argv, *_repeat("-X", options)]


def _tail(values: FlagValues) -> list[str]:
    _need(values["topic"], "--topic is required")
    _check_source(values)
    argv = ["tail", *_unchanged(values, "topic", "channel")]
    if values["n"] > 0:
        argv += ["--count", str(values["n"])]
    argv += _unchanged(values, "print-topic")
    return [*argv, *_source(values), "--create"]


def _to_nsq(values: FlagValues) -> list[str]:
    _need(values["topic"], "--topic is required")
    _need(values["nsqd-tcp-address"], "--nsqd-tcp-address required")
    delimiter = values["delimiter"].encode("utf-8", "surrogateescape")
    _need(len(delimiter) == 1, "--delimiter must be a single byte")
    argv = ["pub", *_unchanged(values, "topic"), "--mode", "all"]
    if values["delimiter"] != "\n":
        argv += ["--delimiter", values["delimiter"].replace("\\", "\\\\")]
    if values["rate"] > 0:
        argv += _unchanged(values, "rate")
    return [*argv, "--retry-timeout", "0s", *_unchanged(values, "nsqd-tcp-address", "producer-opt")]


def _stat(values: FlagValues) -> list[str]:
    _need(values["topic"] and values["channel"], "--topic and --channel are required")
    _need(values["interval"] > 0, "--interval should be positive")
    _check_timeouts(values)
    _need(values["count"] >= 0, "--count should be positive")
    _check_source(values, "nsqd-http-address")
    for address in (*values["nsqd-http-address"], *values["lookupd-http-address"]):
        is_url = address.startswith(("http://", "https://"))
        _need(not is_url, "address should not contain scheme")
    argv = ["stat", *_unchanged(values, "topic", "channel", "interval")]
    if values["count"]:
        argv += _unchanged(values, "count")
    argv += _unchanged(values, "nsqd-http-address", "lookupd-http-address")
    return [*argv, "--timeout", format_duration(values["http-client-request-timeout"])]


def _check_timeouts(values: FlagValues) -> None:
    for flag in ("http-client-connect-timeout", "http-client-request-timeout"):
        _need(values[flag] > 0, f"--{flag} should be positive")


LOG_LEVELS = {"debug": ["-vv"], "info": ["--verbose"], "warn": []}
LOG_LEVELS |= {level: ["--quiet"] for level in ("error", "fatal")}


def _to_file(values: FlagValues) -> list[str]:
    _need(values["log-level"].lower() in LOG_LEVELS, "--log-level is invalid")
    _need(values["channel"], "--channel is required")
    _check_timeouts(values)
    _check_source(values)
    level = values["gzip-level"]
    _need(1 <= level <= 9, f"invalid --gzip-level value ({level}), should be 1-9")
    _need(values["topic"] or values["topic-pattern"], "--topic or --topic-pattern required")
    _need(
        values["topic"] or values["lookupd-http-address"],
        "--lookupd-http-address must be specified when no --topic specified",
    )
    _need(values["sync-interval"] > 0, "--sync-interval should be positive")
    _need(values["max-in-flight"] >= 1, "--max-in-flight should be positive")
    topics, pattern = _matching_topics(values)
    argv = ["to-file", "--format", "raw", *_repeat("--topic", topics)]
    if pattern:
        argv += _unchanged(values, "topic-pattern", "topic-refresh")
    argv += _unchanged(values, "channel", "output-dir", "work-dir", "host-identifier")
    is_moved = values["work-dir"] not in ("", values["output-dir"])
    has_rev = (
        values["gzip"] or values["rotate-size"] > 0 or values["rotate-interval"] > 0 or is_moved
    )
    name = values["filename-format"]
    argv += ["--datetime-format", values["datetime-format"]]
    argv += ["--filename-format", name if has_rev else name.replace("<REV>", "")]
    # --file-mode is exact, but the modes of nsq_to_file are restricted by the umask.
    file_mode, folder_mode = (f"{mode & ~values['umask']:o}" for mode in (0o666, 0o770))
    argv += ["--file-mode", file_mode, "--dir-mode", folder_mode]
    if values["gzip"]:
        argv += _unchanged(values, "gzip", "gzip-level")
    if not values["skip-empty-files"]:
        argv.append("--no-skip-empty-files")
    if values["rotate-size"] > 0:
        argv += ["--rotate-text-size", str(values["rotate-size"])]
    if values["rotate-interval"] > 0:
        argv += ["--rotate-age", format_duration(values["rotate-interval"])]
    argv += [*_unchanged(values, "sync-interval"), *_source(values)]
    timeout = format_duration(values["http-client-request-timeout"])
    argv += ["-X", f"lookupd_poll_timeout={timeout}", *LOG_LEVELS[values["log-level"].lower()]]
    return [*argv, "--create"]


def _matching_topics(values: FlagValues) -> tuple[Sequence[str], str]:
    """Return the topics of --topic that match the pattern, or the pattern without --topic."""
    topics, pattern = tuple(dict.fromkeys(values["topic"])), values["topic-pattern"]
    if not (topics and pattern):
        return topics, pattern
    try:
        topics = tuple(filter(parse_regexp(pattern).search, topics))
    except ValueError as exc:
        raise GoFatal(f"--topic-pattern {pattern!r} is not a regular expression: {exc}") from None
    _need(topics, f"no --topic matches the --topic-pattern {pattern!r}")
    return topics, ""


MODES = ("round-robin", "hostpool", "epsilon-greedy")


def _to_nsq_mirror(values: FlagValues) -> list[str]:
    _need(values["topic"], "--topic is required")
    _check_source(values)
    _need(values["destination-nsqd-tcp-address"], "--destination-nsqd-tcp-address required")
    destination = ("destination-topic", "destination-nsqd-tcp-address")
    json_fields = ("require-json-field", "require-json-value", "whitelist-json-field")
    argv = ["to-nsq", *_unchanged(values, "topic", "channel", *destination, *json_fields)]
    return [*argv, *_source(values), *_unchanged(values, "producer-opt"), "--create"]


def _to_http(values: FlagValues) -> list[str]:
    _need(values["topic"], "--topic is required")
    _check_source(values)
    _check_timeouts(values)
    gets, posts = values["get"], values["post"]
    _need(gets or posts, "--get or --post required")
    _need(not (gets and posts), "use --get or --post not both")
    are_templates = all(url.count("%s") == 1 for url in gets)
    _need(are_templates, "invalid GET address - must be a printf string")
    default_type = "application/octet-stream"
    _need(posts or values["content-type"] == default_type, "--content-type only used with --post")
    _need(values["content-type"], "--content-type requires a value when used")
    _need(0.0 <= values["sample"] <= 1.0, "ERROR: --sample must be between 0.0 and 1.0")
    argv = ["to-http", *_unchanged(values, "topic", "channel")]
    argv += _repeat("--get", [_template(url).replace("%s", "{body:url}") for url in gets])
    argv += _repeat("--post", list(map(_template, posts)))
    if values["mode"] not in MODES:
        argv += ["--mode", "all"]
    argv += ["--concurrency", str(values["n"])]
    if values["sample"] < 1:
        argv += ["--sample", str(values["sample"])]
    if values["content-type"] != default_type:
        argv += _unchanged(values, "content-type")
    for name, value in _headers(values["header"]):
        argv += ["--header", f"{name}: {value}"]
    argv += _unchanged(values, "http-client-connect-timeout", "http-client-request-timeout")
    accepted = ["2xx=retry", "200=ok"] if gets else []
    argv += ["--no-metadata", *_repeat("--on-status", [*accepted, "3xx=retry", "4xx=retry"])]
    return [*argv, "--redirects", "follow", *_source(values), "--create"]


# Go ignores these headers in a request's header map.
NEVER_SENT = ("host", "content-length", "transfer-encoding", "trailer")


def _headers(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return the headers that Go sends, with their templates; of a repeated name the last."""
    headers = {"user-agent": ("User-Agent", "nsq_to_http v1.3.0")}
    for header in texts:
        name, colon, value = (part.strip() for part in header.partition(":"))
        _need(colon and name and value, "--header value format should be 'key=value'")
        headers[name.lower()] = (name, _template(value))
    return (pair for name, pair in headers.items() if name not in NEVER_SENT)


def _template(text: str) -> str:
    """Return a template that expands to ``text``."""
    return text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")


_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_OPTIONS_OF_TLS = {
    "http-client-tls-root-ca-file": "--tls-ca-file",
    "http-client-tls-cert": "--tls-cert",
    "http-client-tls-key": "--tls-key",
}


def _admin(values: FlagValues) -> list[str]:
    """Unlike nsqadmin, changes are allowed on an address of this machine alone."""
    for name, default in _NOT_OF_WEB.items():
        _need(values[name] == default, f"nsq web has no --{name} (man nsq-migration)")
    _need(
        not values["admin-user"],
        "--admin-user believes a header that anyone can send:"
        " use nsq web --allow-changes --admin-user USER --trusted-proxy CIDR",
    )
    _check_source(values, "nsqd-http-address")
    _check_timeouts(values)
    level = values["log-level"].lower()
    _need(level in LOG_LEVELS, "--log-level is invalid")
    argv = ["web", "--listen", values["http-address"]]
    if values["http-address"].rpartition(":")[0] in _LOCAL_HOSTS:
        argv.append("--allow-changes")
    argv += _unchanged(values, "acl-http-header", "notification-http-endpoint")
    argv += _unchanged(values, "nsqd-http-address", "lookupd-http-address")
    if values["base-path"] != "/":
        argv += _unchanged(values, "base-path")
    for name, option in _OPTIONS_OF_TLS.items():
        if values[name]:
            argv += [option, values[name]]
    if values["http-client-tls-insecure-skip-verify"]:
        argv.append("--tls-insecure")
    timeout = format_duration(values["http-client-request-timeout"])
    return [*argv, "--timeout", timeout, *LOG_LEVELS[level]]


_IN_ORDER = (_tail, _to_nsq, _stat, _to_file, _to_nsq_mirror, _to_http, _admin)
# Functions that translate the flags of a utility to a command line without ``nsq``. They raise
# `GoFatal`.
TRANSLATORS = dict(zip(UTILITIES, _IN_ORDER, strict=True))
