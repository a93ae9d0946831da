"""The flags of the six utilities of nsq 1.3.0, and what a Go command line is in ours. Pure.

The native line means the same where that can be said; nsq-migration(7) has the differences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsqtools.cli.options.connection import split_option
from nsqtools.protocol.text import format_duration
from nsqtools.server.go_flags import FLOAT, KIND_OF, Flag

Flags = dict[str, Flag]


def _flags(*rows: tuple[Any, ...]) -> Flags:
    """Flags from rows of name, default, help, and the kind where the default does not tell it."""
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

UTILITIES: dict[str, Flags] = {
    "nsq_tail": _flags(
        ("topic", (), "NSQ topic (may be given multiple times)"),
        ("channel", "", "NSQ channel"),
        _IN_FLIGHT,
        ("n", 0, "total messages to show (will wait if starved)"),
        ("print-topic", False, "print topic name where message was received"),
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _VERSION,
    ),
    "to_nsq": _flags(
        ("topic", "", "NSQ topic to publish to"),
        ("delimiter", "\n", "character to split input from stdin"),
        ("rate", 0, "Throttle messages to n/second. 0 to disable"),
        ("nsqd-tcp-address", (), "destination nsqd TCP address (may be given multiple times)"),
        _PRODUCER,
    ),
    "nsq_stat": _flags(
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
    "nsq_to_file": _flags(
        ("topic", (), "nsq topic (may be given multiple times)"),
        ("topic-pattern", "", "only log topics matching the following pattern"),
        ("topic-refresh", 60.0, "how frequently the topic list should be refreshed"),
        ("channel", "nsq_to_file", "nsq channel"),
        _IN_FLIGHT,
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
        _NSQD,
        _LOOKUPD,
        _CONSUMER,
        _CONNECT,
        _REQUEST,
        _VERSION,
    ),
    "nsq_to_nsq": _flags(
        ("topic", (), "nsq topic (may be given multiple times)"),
        ("channel", "nsq_to_nsq", "nsq channel"),
        ("destination-topic", "", "use this destination topic for all consumed topics"),
        ("destination-nsqd-tcp-address", (), f"destination nsqd TCP address {_SEVERAL}"),
        ("require-json-field", "", "for JSON messages: only pass those with this field"),
        ("require-json-value", "", "for JSON messages: only pass this value of the field"),
        ("whitelist-json-field", (), "for JSON messages: pass this field"),
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
        ("topic", "", "nsq topic"),
        ("channel", "nsq_to_http", "nsq channel"),
        ("n", 100, "number of concurrent publishers"),
        ("sample", 1.0, "% of messages to publish (float b/w 0 -> 1)", FLOAT),
        ("post", (), "HTTP address to make a POST request to. Data in body"),
        ("get", (), "HTTP address to make a GET request to. '%s' is replaced by the data"),
        ("content-type", "application/octet-stream", "the Content-Type of POST requests"),
        ("header", (), "Custom header for HTTP requests (may be given multiple times)"),
        ("http-client-request-timeout", 20.0, "timeout for HTTP request"),
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


Given = Mapping[str, Any]


class GoFatal(Exception):
    """What the utility would refuse, in its words; the exit status is 1."""


def _need(is_met: object, otherwise: str) -> None:
    if not is_met:
        raise GoFatal(otherwise)


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _same(given: Given, *names: str) -> list[str]:
    """The flags that are options of the same name; empty ones are left out."""
    argv = []
    for name in names:
        match given[name]:
            case "" | False:
                continue
            case True:
                argv.append(f"--{name}")
            case tuple(values):
                argv += _each(f"--{name}", values)
            case float(seconds):
                argv += [f"--{name}", format_duration(seconds)]
            case value:
                argv += [f"--{name}", str(value)]
    return argv


def _check_source(given: Given, nsqd: str = "nsqd-tcp-address") -> None:
    lookupd = given["lookupd-http-address"]
    _need(given[nsqd] or lookupd, f"--{nsqd} or --lookupd-http-address required")
    _need(not (given[nsqd] and lookupd), f"use --{nsqd} or --lookupd-http-address not both")


def _source(given: Given) -> list[str]:
    same = _same(given, "nsqd-tcp-address", "lookupd-http-address", "max-in-flight")
    # there the flag, its default too, takes the place of go-nsq's option
    options = [each for each in given["consumer-opt"] if split_option(each)[0] != "max_in_flight"]
    return [*same, *_each("-X", options)]


def _tail(given: Given) -> list[str]:
    _need(given["topic"], "--topic is required")
    _check_source(given)
    argv = ["tail", *_same(given, "topic", "channel")]
    if given["n"] > 0:
        argv += ["--count", str(given["n"])]
    argv += _same(given, "print-topic")
    return [*argv, *_source(given), "--create"]


def _to_nsq(given: Given) -> list[str]:
    _need(given["topic"], "--topic is required")
    _need(given["nsqd-tcp-address"], "--nsqd-tcp-address required")
    delimiter = given["delimiter"].encode("utf-8", "surrogateescape")
    _need(len(delimiter) == 1, "--delimiter must be a single byte")
    argv = ["pub", *_same(given, "topic"), "--mode", "all"]
    if given["delimiter"] != "\n":
        argv += ["--delimiter", given["delimiter"].replace("\\", "\\\\")]
    if given["rate"] > 0:
        argv += _same(given, "rate")
    return [*argv, "--retry-timeout", "0s", *_same(given, "nsqd-tcp-address", "producer-opt")]


def _stat(given: Given) -> list[str]:
    _need(given["topic"] and given["channel"], "--topic and --channel are required")
    _need(given["interval"] > 0, "--interval should be positive")
    _check_timeouts(given)
    _need(given["count"] >= 0, "--count should be positive")
    _check_source(given, "nsqd-http-address")
    for address in (*given["nsqd-http-address"], *given["lookupd-http-address"]):
        is_url = address.startswith(("http://", "https://"))
        _need(not is_url, "address should not contain scheme")
    argv = ["stat", *_same(given, "topic", "channel", "interval")]
    if given["count"]:
        argv += _same(given, "count")
    argv += _same(given, "nsqd-http-address", "lookupd-http-address")
    return [*argv, "--timeout", format_duration(given["http-client-request-timeout"])]


def _check_timeouts(given: Given) -> None:
    for flag in ("http-client-connect-timeout", "http-client-request-timeout"):
        _need(given[flag] > 0, f"--{flag} should be positive")


LOG_LEVELS = {"debug": ["-vv"], "info": ["--verbose"], "warn": []}
LOG_LEVELS |= {level: ["--quiet"] for level in ("error", "fatal")}


def _to_file(given: Given) -> list[str]:
    _need(given["log-level"].lower() in LOG_LEVELS, "--log-level is invalid")
    _need(given["channel"], "--channel is required")
    _check_timeouts(given)
    _check_source(given)
    level = given["gzip-level"]
    _need(1 <= level <= 9, f"invalid --gzip-level value ({level}), should be 1-9")
    _need(given["topic"] or given["topic-pattern"], "--topic or --topic-pattern required")
    _need(
        given["topic"] or given["lookupd-http-address"],
        "--lookupd-http-address must be specified when no --topic specified",
    )
    _need(given["sync-interval"] > 0, "--sync-interval should be positive")
    _need(given["max-in-flight"] >= 1, "--max-in-flight should be positive")
    topics, pattern = _chosen_topics(given)
    argv = ["to-file", "--format", "raw", *_each("--topic", topics)]
    if pattern:
        argv += _same(given, "topic-pattern", "topic-refresh")
    argv += _same(given, "channel", "output-dir", "work-dir", "host-identifier")
    is_moved = given["work-dir"] not in ("", given["output-dir"])
    has_rev = given["gzip"] or given["rotate-size"] > 0 or given["rotate-interval"] > 0 or is_moved
    name = given["filename-format"]
    argv += ["--datetime-format", given["datetime-format"]]
    argv += ["--filename-format", name if has_rev else name.replace("<REV>", "")]
    # --file-mode is exact, and nsq_to_file has its modes cut by the umask.
    file_mode, folder_mode = (f"{mode & ~given['umask']:o}" for mode in (0o666, 0o770))
    argv += ["--file-mode", file_mode, "--dir-mode", folder_mode]
    if given["gzip"]:
        argv += _same(given, "gzip", "gzip-level")
    if not given["skip-empty-files"]:
        argv.append("--no-skip-empty-files")
    if given["rotate-size"] > 0:
        argv += ["--rotate-text-size", str(given["rotate-size"])]
    if given["rotate-interval"] > 0:
        argv += ["--rotate-age", format_duration(given["rotate-interval"])]
    argv += [*_same(given, "sync-interval"), *_source(given)]
    timeout = format_duration(given["http-client-request-timeout"])
    argv += ["-X", f"lookupd_poll_timeout={timeout}", *LOG_LEVELS[given["log-level"].lower()]]
    return [*argv, "--create"]


def _chosen_topics(given: Given) -> tuple[Sequence[str], str]:
    """The topics given, as far as they match the pattern; or the pattern, for those to find."""
    topics, pattern = tuple(dict.fromkeys(given["topic"])), given["topic-pattern"]
    if not (topics and pattern):
        return topics, pattern
    try:
        topics = tuple(filter(re.compile(pattern).search, topics))
    except re.error as exc:
        raise GoFatal(f"--topic-pattern {pattern!r} is not a regular expression: {exc}") from None
    _need(topics, f"no --topic matches the --topic-pattern {pattern!r}")
    return topics, ""


MODES = ("round-robin", "hostpool", "epsilon-greedy")


def _to_nsq_mirror(given: Given) -> list[str]:
    _need(given["topic"], "--topic is required")
    _check_source(given)
    _need(given["destination-nsqd-tcp-address"], "--destination-nsqd-tcp-address required")
    destination = ("destination-topic", "destination-nsqd-tcp-address")
    json_fields = ("require-json-field", "require-json-value", "whitelist-json-field")
    argv = ["to-nsq", *_same(given, "topic", "channel", *destination, *json_fields)]
    return [*argv, *_source(given), *_same(given, "producer-opt"), "--create"]


def _to_http(given: Given) -> list[str]:
    _need(given["topic"], "--topic is required")
    _check_source(given)
    _check_timeouts(given)
    gets, posts = given["get"], given["post"]
    _need(gets or posts, "--get or --post required")
    _need(not (gets and posts), "use --get or --post not both")
    are_templates = all(url.count("%s") == 1 for url in gets)
    _need(are_templates, "invalid GET address - must be a printf string")
    usual = "application/octet-stream"
    _need(posts or given["content-type"] == usual, "--content-type only used with --post")
    _need(given["content-type"], "--content-type requires a value when used")
    _need(0.0 <= given["sample"] <= 1.0, "ERROR: --sample must be between 0.0 and 1.0")
    argv = ["to-http", *_same(given, "topic", "channel")]
    argv += _each("--get", [_template(url).replace("%s", "{body:url}") for url in gets])
    argv += _each("--post", list(map(_template, posts)))
    if given["mode"] not in MODES:
        argv += ["--mode", "all"]
    argv += ["--concurrency", str(given["n"])]
    if given["sample"] < 1:
        argv += ["--sample", str(given["sample"])]
    if given["content-type"] != usual:
        argv += _same(given, "content-type")
    for name, value in _headers(given["header"]):
        argv += ["--header", f"{name}: {value}"]
    argv += _same(given, "http-client-connect-timeout", "http-client-request-timeout")
    accepted = ["2xx=retry", "200=ok"] if gets else []
    argv += ["--no-metadata", *_each("--on-status", [*accepted, "3xx=retry", "4xx=retry"])]
    return [*argv, "--redirects", "follow", *_source(given), "--create"]


NEVER_SENT = ("host", "content-length", "transfer-encoding", "trailer")  # by Go, if given so


def _headers(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The headers that Go sends, with their templates: of several of a name the last."""
    headers = {"user-agent": ("User-Agent", "nsq_to_http v1.3.0")}
    for header in given:
        name, colon, value = (part.strip() for part in header.partition(":"))
        _need(colon and name and value, "--header value format should be 'key=value'")
        headers[name.lower()] = (name, _template(value))
    return (pair for name, pair in headers.items() if name not in NEVER_SENT)


def _template(text: str) -> str:
    """Text as a template that gives it back."""
    return text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")


_IN_ORDER = (_tail, _to_nsq, _stat, _to_file, _to_nsq_mirror, _to_http)
TRANSLATORS = dict(zip(UTILITIES, _IN_ORDER, strict=True))
"""What makes the native command line, without ``nsq``, of all flags of a utility, or `GoFatal`."""
