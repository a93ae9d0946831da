"""Supervision of a service: /metrics and probes over HTTP, a file of metrics, and systemd.

    with service(listen_http, environ, metrics=metrics, health=health) as supervised:
        supervised.ready()  # connected or connecting
        ...
            supervised.alive()  # every few seconds, from the working loop
        supervised.stopping()

systemd passes a socket in ``NOTIFY_SOCKET`` (``Type=notify``), and with ``WatchdogSec=`` an
interval in which it expects a notification. Nothing else sets these variables, so there is no
option. A failed notification is never an error of the command.

Trap: only the working thread may call `alive`. Another thread would report a command as alive that
has been stuck for hours.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.files.durable import replace_file
from nsqtools.records.prometheus import Metric, encode_metrics

if TYPE_CHECKING:
    from ssl import SSLContext

    from nsqtools.files.opening import ReloadedValue
    from nsqtools.http.http_server import HTTPServer

log = logging.getLogger("nsqtools")

# A loop that did not call `alive` for this long is reported as stuck. Loops call it a few times a
# second.
STUCK_AFTER_S = 60.0
METRICS_INTERVAL_S = 5.0
# Share of the watchdog interval between two notifications. systemd recommends two per interval.
WATCHDOG_SHARE = 0.4

Metrics = Callable[[], Iterable[Metric]]
Health = Callable[[], tuple[bool, str]]


@contextmanager
def service(
    listen_http: str | None,
    environ: Mapping[str, str],
    *,
    metrics: Metrics,
    health: Health,
    metrics_file: Path | None = None,
) -> Iterator[Service]:
    """Serve metrics and health over HTTP, to a file, and to systemd.

    Args:
        listen_http: ``[HOST:]PORT``, by default on loopback; None for no HTTP.
        metrics: Called on threads of the HTTP server, once per request.
        health: Called likewise. Returns whether the command works, and a line of text.
        metrics_file: Replaced every few seconds by calls of `Service.alive`, and at the end.

    Raises `ConfigurationError` for an address that cannot be listened on.
    """
    supervised = Service(environ, health, metrics, metrics_file)
    with ExitStack() as stack:
        stack.callback(supervised.write_metrics)
        if listen_http is not None:
            from nsqtools.http.monitor import serving_monitor

            probes = {
                "/health": supervised.health,
                "/ready": supervised.health,
                "/live": supervised.liveness,
            }
            served = serving_monitor(listen_http, metrics, probes)
            supervised.address = stack.enter_context(served)
            log.info("serving http://%s/metrics, /health, /ready and /live", supervised.address)
        yield supervised


class Service:
    """The reports of a command about itself. ``address`` is that of HTTP, "" if not served."""

    def __init__(
        self,
        environ: Mapping[str, str],
        health: Health,
        metrics: Metrics,
        metrics_file: Path | None,
    ) -> None:
        self.address = ""
        self._metrics = metrics
        self._metrics_file = metrics_file and metrics_file.absolute()  # a handler may chdir
        self._next_metrics_s = 0.0
        # The error of the last write of the metrics file.
        self._problem = ""
        self._health = health
        self._is_ready = False
        self._alive_at = time.monotonic()
        path = environ.get("NOTIFY_SOCKET", "")
        # In the name of an abstract socket, an @ stands for the leading NUL.
        self._systemd = "\0" + path[1:] if path.startswith("@") else path
        # The variables may have been inherited from a parent process.
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval_us = environ.get("WATCHDOG_USEC", "")
        self._watchdog_interval_s = (
            int(interval_us) / 1e6 if interval_us.isdecimal() and is_ours else 0.0
        )
        self._next_watchdog_s = 0.0

    def ready(self) -> None:
        """Report the end of the start. Calls after the first do nothing."""
        if not self._is_ready:
            self._is_ready = True
            self._alive_at = time.monotonic()
            self._notify("READY=1")

    def alive(self) -> None:
        """Report an iteration of the working loop. Cheap enough for every iteration."""
        self._alive_at = time.monotonic()
        if self._watchdog_interval_s and self._alive_at >= self._next_watchdog_s:
            self._next_watchdog_s = self._alive_at + WATCHDOG_SHARE * self._watchdog_interval_s
            self._notify("WATCHDOG=1")
        if self._alive_at >= self._next_metrics_s:
            self._next_metrics_s = self._alive_at + METRICS_INTERVAL_S
            self.write_metrics()

    def write_metrics(self) -> None:
        """Replace the file for node_exporter's textfile collector, if there is one."""
        if self._metrics_file is not None:
            self._problem = write_metrics(self._metrics_file, self._metrics(), self._problem)

    def stopping(self) -> None:
        """Report that the command drains its messages and ends."""
        self._notify("STOPPING=1")

    def _notify(self, state: str) -> None:
        """Notify systemd by the protocol of sd_notify(3): a datagram of text to a unix socket."""
        if not self._systemd:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.sendto(state.encode(), self._systemd)
        except OSError as exc:
            log.warning("cannot notify systemd of %s (%s)", state, exc.strerror or exc)

    def health(self) -> tuple[bool, str]:
        """Return whether the command works, and a line of text about its state."""
        if not self._is_ready:
            return False, "starting"
        is_alive, text = self.liveness()
        return self._health() if is_alive else (False, text)

    def liveness(self) -> tuple[bool, str]:
        """Return False if only a restart helps, and a line of text about the state.

        A service that cannot reach nsqd, or still starts, is alive.
        """
        silent_s = time.monotonic() - self._alive_at
        if self._is_ready and silent_s > STUCK_AFTER_S:
            return False, f"stuck: no progress for {silent_s:.0f} s"
        return True, "alive"


def write_metrics(path: Path, metrics: Iterable[Metric], last_problem: str = "") -> str:
    """Replace the file atomically. Return the problem, "" after success.

    A problem is logged unless it equals ``last_problem``, and never ends the work.
    """
    try:
        replace_file(path, encode_metrics(metrics).encode(), 0o644, is_durable=False)
    except OSError as exc:
        problem = f"cannot write {path} ({exc.strerror})"
        if problem != last_problem:
            log.warning("%s", problem)
        return problem
    return ""


TURN_S = 1.0
"""How soon a changed file, such as a certificate, is read."""


async def serve_until(
    stopped: threading.Event,
    servers: Sequence[HTTPServer],
    on_turn: Callable[[], None],
    renew: Callable[[], object],
    certificate: ReloadedValue[SSLContext] | None,
) -> None:
    """Serve until the event is set.

    Every second ``on_turn`` is called on the serving loop, and ``renew`` on a thread: it reads
    files, which may take time. A new ``certificate`` is read on the loop, because a handshake fails
    that begins between the certificate and its key.
    """
    import asyncio

    from nsqtools.http.listen import report_errors

    report_errors(asyncio.get_running_loop(), log.error)
    for server in servers:
        await server.start()
    is_stopped = False
    while not is_stopped:
        on_turn()
        if certificate is not None:
            certificate.get()
        await asyncio.to_thread(renew)
        is_stopped = await asyncio.to_thread(stopped.wait, TURN_S)
    for server in servers:
        await server.stop()
