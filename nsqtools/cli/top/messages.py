"""Messages on the screen of `nsq top`: `nsq tail` of a topic, or `nsq peek` of a channel."""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import replace
from typing import Any

from nsqtools.cli.commands.tail import COUNT, LOOK_AT, peek, tail
from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.options.printing import message_printer
from nsqtools.cli.running.consuming import StopLimits
from nsqtools.cli.running.runtime import Runtime, stop_on_signals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import NsqError
from nsqtools.http.http_api import NsqdHTTPClient

PRINTER = message_printer(False, None, None, False, b"\n", False)


def tail_or_peek(
    settings: ClusterSettings, topic: str, channel: str, runtime: Runtime
) -> int | None:
    """Tail a topic, or peek at a channel; return a signal that arrived, except Ctrl-C.

    When the command ends by itself or fails, its output stays until Enter is pressed.
    """
    is_over = threading.Event()

    def end() -> None:
        """End the command through its own signal handler, once it has installed one."""
        while not is_over.wait(0.05):
            if signal.getsignal(signal.SIGTERM) != signals.handle:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    with stop_on_signals(end, additional=(signal.SIGHUP, signal.SIGQUIT)) as signals:
        status = 0
        try:
            status = _run(with_tcp_addresses(settings), topic, channel, runtime)
        except NsqError as error:
            runtime.report(error)
        finally:
            is_over.set()
        runtime.stdout.flush()
        ended = signals.received or (status - 128 if status > 128 else None)
        if ended is None:
            runtime.info("nsq: Enter returns to nsq top")
            stdin = runtime.stdin.fileno()
            while (ended := signals.received) is None:
                if select.select([stdin], [], [], 0.1)[0]:
                    os.read(stdin, 1024)
                    return None
    return None if ended == signal.SIGINT else ended


def with_tcp_addresses(settings: ClusterSettings) -> ConnectionSettings:
    """Return settings with the TCP addresses of a cluster that was given by HTTP addresses."""
    connection = settings.connection
    if connection.lookupd_http_addresses or not connection.nsqd_http_addresses:
        return connection
    with settings.open() as cluster:
        answers, _ = cluster.ask_nsqds(NsqdHTTPClient.info)
        addresses = tuple(cluster.tcp_address(at, info) for at, info in answers.items())
    return replace(connection, nsqd_tcp_addresses=addresses)


def _run(connection: ConnectionSettings, topic: str, channel: str, runtime: Runtime) -> int:
    options: dict[str, Any] = {"connection": connection, "runtime": runtime}
    options |= {"printer": PRINTER, "keep": None}
    if channel:
        return peek(topic, channel, COUNT, LOOK_AT, None, False, **options)
    runtime.info(f"nsq: tail of {topic}: Ctrl-C returns to nsq top")
    limits = StopLimits(count=None, until_empty=False, exit_idle=None, for_=None)
    return tail([topic], limits=limits, create=False, force=False, channel=None, **options)
