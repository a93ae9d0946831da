"""What no native command does: files that grow in sight, nsq_stat's columns, -n of each topic."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.compat.translation import GoFatal
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.logs import configure_logging
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.protocol.text import format_duration

if TYPE_CHECKING:
    from nsqtools.cluster.sampling import Sample

Given = Mapping[str, Any]

LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}
HEADER_EVERY = 25


def option_of(text: str) -> tuple[str, str]:
    """Return name and value of a client's option: ``key,value``, ``key=value`` or ``key``."""
    end = min((text.index(mark) for mark in ",=" if mark in text), default=len(text))
    return text[:end].strip().replace("-", "_"), text[end + 1 :].strip()


def connection_of(given: Given) -> ConnectionSettings:
    """Where to consume, and with which client options. Raises `ConfigurationError`."""
    options = dict(map(option_of, given["consumer-opt"]))
    options["max_in_flight"] = str(given["max-in-flight"])
    if "http-client-request-timeout" in given:
        options["lookupd_poll_timeout"] = format_duration(given["http-client-request-timeout"])
    return ConnectionSettings(given["nsqd-tcp-address"], given["lookupd-http-address"], (), options)


def tail_each(given: Given, runtime: Runtime) -> int:
    """nsq_tail of several topics with -n: it ends when one of them has shown so many."""
    from nsqtools.cli.commands.tail import INTERACTIVE, ephemeral_channel
    from nsqtools.cli.options.printing import lines_printer
    from nsqtools.cli.options.subscribing import look_before
    from nsqtools.cli.render.output import ByteWriter
    from nsqtools.tail.run_limits import RunLimits
    from nsqtools.tail.tail import Tail

    connection = connection_of(given)
    topics = tuple(dict.fromkeys(given["topic"]))
    channel = given["channel"] or ephemeral_channel()
    service = Tail(
        topics,
        channel,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=connection.client_options(**INTERACTIVE),
        write=ByteWriter(runtime.stdout.fileno()).write,
        encode=lines_printer(runtime, print_topic=given["print-topic"]),
        limits=RunLimits(given["n"], is_each_topic=True),
    )
    look_before(topics, channel, connection, runtime, create=True, force=False)
    with stopping(service.stop) as signals:
        service.run()
    return signals.status()


def print_stat(given: Given, runtime: Runtime) -> int:
    """nsq_stat's table."""
    from nsqtools.cluster.directory import open_cluster
    from nsqtools.cluster.sampling import SampleFilter, Sampler

    options = {"lookupd_poll_timeout": format_duration(given["http-client-request-timeout"])}
    connection = ConnectionSettings(
        (), given["lookupd-http-address"], given["nsqd-http-address"], options
    )
    with open_cluster(connection) as cluster:
        sampler = Sampler(cluster, SampleFilter((given["topic"],), (given["channel"],)))
        with stopping(sampler.stop):
            for number, sample in enumerate(
                sampler.samples(given["interval"], given["count"] or None)
            ):
                for failure in sample.failures:
                    runtime.tell(f"nsq_stat: {failure.error}")
                if number % HEADER_EVERY == 0:
                    runtime.stdout.write(STAT_HEADER)
                runtime.stdout.write(stat_line(sample))
                runtime.stdout.flush()
    return 0


STAT_HEADER = (
    "------rate------+----------------depth----------------"
    "+--------------metadata---------------\n"
    + "{:>7} {:>7} | {:>7} {:>7} {:>7} {:>5} {:>5} | {:>7} {:>7} {:>12} {:>7}\n".format(
        "ingress",
        "egress",
        "total",
        "mem",
        "disk",
        "inflt",
        "def",
        "req",
        "t-o",
        "msgs",
        "clients",
    )
)


def stat_line(sample: Sample) -> str:
    """One line of nsq_stat."""
    rows = sample.totals
    if not rows:
        return ""  # the channel is away for the moment
    row, rates = rows[0], rows[0].rates
    numbers = (
        *((int(rates.ingress), int(rates.egress)) if rates is not None else (0, 0)),
        row.depth,
        row.memory,
        row.disk,
        row.in_flight,
        row.deferred,
        row.requeued,
        row.timed_out,
        row.messages,
        row.clients,
    )
    form = "{:7d} {:7d} | {:7d} {:7d} {:7d} {:5d} {:5d} | {:7d} {:7d} {:12d} {:7d}\n"
    return form.format(*numbers)


# -- nsq_to_file --------------------------------------------------------------------------------


def write_files(given: Given, runtime: Runtime) -> int:
    """nsq_to_file."""
    from nsqtools.forward.file_sink import FileSink
    from nsqtools.forward.forwarder import Forwarder, ForwardSettings
    from nsqtools.forward.growing_file import GrowingFileSettings
    from nsqtools.forward.topic_sources import SourceSettings
    from nsqtools.records.naming import FileNaming

    configure_logging(LEVELS[given["log-level"].lower()], runtime.stderr, json=False)
    connection = connection_of(given)
    output_dir = Path(given["output-dir"])
    topics, pattern = chosen_topics(given)
    files = GrowingFileSettings(
        output_dir,
        Path(given["work-dir"] or output_dir),
        FileNaming(
            given["filename-format"],
            given["datetime-format"],
            host=host_of(given["host-identifier"]),
            pid=os.getpid(),
            extension=".gz" if given["gzip"] else "",
        ),
        given["gzip-level"] if given["gzip"] else 0,
        max(0, given["rotate-size"]),
        max(0.0, given["rotate-interval"]),
        given["skip-empty-files"],
    )
    sink = FileSink(files, given["sync-interval"], topics)
    source = SourceSettings(
        topics,
        given["channel"],
        connection,
        connection.client_options(output_buffer_timeout_s=0.025),
        pattern,
        max(0.1, given["topic-refresh"]),
    )
    forwarder = Forwarder(source, sink, ForwardSettings())
    with stopping(forwarder.stop):
        before = signal.signal(signal.SIGHUP, lambda number, frame: sink.rotate())
        try:
            forwarder.run()
        finally:
            signal.signal(signal.SIGHUP, before)
    return 0


def chosen_topics(given: Given) -> tuple[tuple[str, ...], str | None]:
    """The topics given, as far as they match the pattern; or the pattern, for those to find."""
    pattern = given["topic-pattern"]
    topics = tuple(dict.fromkeys(given["topic"]))
    if not pattern:
        return topics, None
    if not topics:
        return (), pattern
    try:
        matches = re.compile(pattern).search
    except re.error as exc:
        raise GoFatal(f"--topic-pattern {pattern!r} is not a regular expression: {exc}") from None
    chosen = tuple(filter(matches, topics))
    if not chosen:
        raise GoFatal(f"no --topic matches the --topic-pattern {pattern!r}")
    return chosen, None


def host_of(identifier: str) -> str:
    """What <HOST> stands for."""
    hostname = socket.gethostname()
    short = hostname.partition(".")[0]
    if not identifier:
        return short
    return identifier.replace("<SHORT_HOST>", short).replace("<HOSTNAME>", hostname)
