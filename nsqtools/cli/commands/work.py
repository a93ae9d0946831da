"""``nsq work``: a Python function as a service."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import MONITORING, ChannelName, ListenHTTP, Topics
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.cli.running.consuming import Create
from nsqtools.cli.running.forward_options import DeadLetterOptions
from nsqtools.cli.running.runtime import LOGGER, Session, stop_on_signals, write_stderr
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted, harmless_traceback
from nsqtools.work import Decoding


def work(
    function: Annotated[str, Argument(metavar="MODULE:FUNCTION", help="The function to call.")],
    topic: Topics,
    channel: ChannelName,
    workers: int = opt("N", "Messages handled at the same time.", default=1, min=1, max=10_000),
    decode: Decoding | None = opt("", "Pass the body as this, instead of the message."),
    dev: bool = opt("", "Reload the function when a source file changes."),
    listen_http: ListenHTTP = None,
    metrics_file: Path | None = opt(
        "FILE", "Write metrics to this file, as Prometheus text.", MONITORING
    ),
    create: Create = False,
    *,
    dead_letters: DeadLetterOptions,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Call a Python function with each message, finishing the message when it returns.

    The function is imported as gunicorn imports an application: the current directory is
    importable. An async function runs on an event loop, N messages at a time; others run on N
    threads. If it raises or returns False, the message is requeued and the consumer slows down.
    RequeueWithoutBackoff and GiveUp of nsqtools do what their names say. A message is touched while
    the function runs.

    With --decode json the parameter's annotation is the type of the body: a dataclass, a TypedDict
    or a pydantic model. A body that does not fit becomes a dead letter.

    SIGHUP imports the function again; if that fails, the previous one continues. With
    --listen-http, /live fails when every worker has exceeded nsqd's --max-msg-timeout, and /ready
    without a connection.

    Examples:
        nsq work shop.handlers:bill -t orders -c billing --workers 8
        nsq work shop.handlers:bill -t orders -c billing --max-attempts 10 \\
            --dead-letter-topic orders.dead --listen-http 0.0.0.0:8080
        nsq work shop:bill -t orders -c billing --decode json --dead-letter-file dead.jsonl --dev
    """
    from nsqtools.work.handler import user_traceback
    from nsqtools.work.worker import WorkService, WorkSettings

    if decode is not None:
        dead_letters.require("--decode")
    sys.dont_write_bytecode |= dev  # which would hide a second change in one second
    settings = WorkSettings(
        topics=topic,
        channel=channel,
        workers=workers,
        decoding=decode,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        nsqd_http_addresses=connection.nsqd_http_addresses,
        address_map=connection.address_map,
        options=connection.client_options(max_in_flight=max(200, 2 * workers)),
        max_attempts=dead_letters.max_attempts,
        dead_letter_topic=dead_letters.dead_letter_topic or "",
        dead_letter_file=dead_letters.dead_letter_file,
    )
    _share_streams()
    try:
        worker = WorkService(function, settings, report=lambda line: runtime.info(f"nsq: {line}"))
    except ConfigurationError as exc:
        if exc.__cause__ is not None and not runtime.is_json:  # what the user's code raised
            write_stderr(runtime.stderr, harmless_traceback(user_traceback(exc.__cause__)) + "\n")
        raise
    watch = ChannelWatch(topic, channel, connection, runtime, force=True)
    watch.check_topics(create=create)
    runtime.info(
        f"nsq: {function} handles {', '.join(topic)}/{channel} with {counted(workers, 'worker')}"
    )
    with (
        stop_on_signals(worker.stop, on_second=worker.abort) as signals,
        watch.idle_report(lambda: worker.handled_count, health=worker.health),
    ):
        try:
            worker.run(
                listen_http=listen_http,
                metrics_file=metrics_file,
                environ=runtime.environ,
                dev=dev,
            )
        finally:
            runtime.info(f"nsq: {worker.summary()}")
    return signals.status()


def _share_streams() -> None:
    """Log the function's records as ours are logged, and print its lines immediately."""
    root = logging.getLogger()
    if not root.handlers:
        root.handlers, level = [*LOGGER.handlers], LOGGER.level
        root.setLevel(level)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
