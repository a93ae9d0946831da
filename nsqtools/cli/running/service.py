"""What supervises a long-running command: /metrics and /health over HTTP, a file, and systemd.

    with service(listen_http, environ, metrics=metrics, health=health) as supervised:
        supervised.ready()  # connected, or at least trying
        ...
            supervised.alive()  # every few seconds, from the loop that does the work
        supervised.stopping()

systemd passes a socket in ``NOTIFY_SOCKET`` (``Type=notify``) and with ``WatchdogSec=`` an interval
in which it wants to hear that the process is alive. Nothing else sets these, so nothing needs to be
configured. A notification that fails is never an error of the command.

Trap: only the thread that does the work may call `alive`. One that runs beside it would report a
command as alive that has been stuck for hours.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nsqtools.files.durable import replace_file
from nsqtools.records.prometheus import Metric, encode_metrics

log = logging.getLogger("nsqtools")

STUCK_AFTER_S = 60.0
METRICS_EVERY_S = 5.0
WATCHDOG_SHARE = 0.4  # of the interval: systemd recommends to be heard twice in each

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
    """Serve ``[HOST:]PORT`` while inside, if given; on loopback unless a host is given.

    The ``metrics_file`` is replaced every few seconds, as long as `Service.alive` is called, and at
    the end.

    ``metrics`` and ``health`` are called on threads of the HTTP server, once per request; health is
    whether all is well, and a line of text. Raises `ConfigurationError` for an address that cannot
    be listened on.
    """
    supervised = Service(environ, health, metrics, metrics_file)
    with ExitStack() as stack:
        stack.callback(supervised.write_metrics)
        if listen_http is not None:
            from nsqtools.cli.running.monitor_http import serving

            served = serving(listen_http, metrics, supervised.health)
            supervised.address = stack.enter_context(served)
            log.info("serving http://%s/metrics and /health", supervised.address)
        yield supervised


class Service:
    """What a command reports of itself. ``address`` is where HTTP is served, "" for nowhere."""

    def __init__(
        self,
        environ: Mapping[str, str],
        health: Health,
        metrics: Metrics,
        metrics_file: Path | None,
    ) -> None:
        self.address = ""
        self._metrics = metrics
        self._metrics_file = metrics_file
        self._next_metrics_s = 0.0
        self._problem = ""  # of the last write
        self._health = health
        self._is_ready = False
        self._alive_at = time.monotonic()
        path = environ.get("NOTIFY_SOCKET", "")
        # an abstract name is written with an @ in place of its leading NUL
        self._systemd = "\0" + path[1:] if path.startswith("@") else path
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval_us = environ.get("WATCHDOG_USEC", "")
        self._feed_every_s = int(interval_us) / 1e6 if interval_us.isdecimal() and is_ours else 0.0
        self._next_feed_s = 0.0

    def ready(self) -> None:
        """The command does its work now. Calls after the first do nothing."""
        if not self._is_ready:
            self._is_ready = True
            self._alive_at = time.monotonic()
            self._notify("READY=1")

    def alive(self) -> None:
        """The loop that does the work has taken a turn. Cheap: call it as often as you like."""
        self._alive_at = time.monotonic()
        if self._feed_every_s and self._alive_at >= self._next_feed_s:
            self._next_feed_s = self._alive_at + WATCHDOG_SHARE * self._feed_every_s
            self._notify("WATCHDOG=1")
        if self._alive_at >= self._next_metrics_s:
            self._next_metrics_s = self._alive_at + METRICS_EVERY_S
            self.write_metrics()

    def write_metrics(self) -> None:
        """Replace the file for node_exporter's textfile collector, if there is one."""
        if self._metrics_file is not None:
            self._problem = write_metrics(self._metrics_file, self._metrics(), self._problem)

    def stopping(self) -> None:
        """The command drains what it has taken, and ends."""
        self._notify("STOPPING=1")

    def _notify(self, state: str) -> None:
        """Tell systemd, by the protocol of sd_notify(3): a datagram of text to a unix socket."""
        if not self._systemd:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.sendto(state.encode(), self._systemd)
        except OSError as exc:
            log.warning("cannot notify systemd of %s (%s)", state, exc.strerror or exc)

    def health(self) -> tuple[bool, str]:
        """Return whether all is well, and a line that says what is not."""
        if not self._is_ready:
            return False, "starting"
        silent_s = time.monotonic() - self._alive_at
        if silent_s > STUCK_AFTER_S:
            return False, f"stuck: no progress for {silent_s:.0f} s"
        return self._health()


def write_metrics(path: Path, metrics: Iterable[Metric], said: str = "") -> str:
    """Replace the file at once: its readers never see a part. Return what is wrong, or nothing.

    That is logged, unless it is what was ``said`` before.
    """
    try:
        replace_file(path, encode_metrics(metrics).encode(), 0o644, is_durable=False)
    except OSError as exc:  # the work is more important
        problem = f"cannot write {path} ({exc.strerror})"
        if problem != said:
            log.warning("%s", problem)
        return problem
    return ""
