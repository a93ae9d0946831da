"""The daemons in threads of this process, each with its own event loop: for tests and demos.

A child of a fork has no such threads: there a daemon is the parent's, and leaving does nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from tempfile import mkdtemp
from typing import Any, Generic, Self, TextIO, TypeVar

from nsqtools.http.loop_meter import MeteredLoop
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.nsqd_daemon import NsqdDaemon
from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon
from nsqtools.server.options import NsqdOptions, NsqlookupdOptions

D = TypeVar("D", bound=NsqdDaemon | NsqlookupdDaemon)
R = TypeVar("R")

_HERE = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
_HERE["broadcast_address"] = "127.0.0.1"


class DaemonThread(Generic[D]):
    """Runs what ``make`` returns, from `start` to `stop`; may be started again after that."""

    def __init__(self, name: str, make: Callable[[], D]) -> None:
        self._name = name
        self._make = make
        self._daemon: D | None = None
        self._forget: Callable[[], object] = lambda: None  # what only the daemon needed
        self._lock = threading.RLock()  # several threads may start and stop it

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def daemon(self) -> D:
        """The daemon. Raises ``RuntimeError`` while none is running."""
        if self._daemon is None:
            raise RuntimeError(f"this {self._name} is not running")
        return self._daemon

    @property
    def tcp_address(self) -> str:
        """Where it serves TCP, as ``host:port``."""
        return self.daemon.tcp_address

    @property
    def http_address(self) -> str:
        """Where it serves HTTP, as ``host:port``."""
        return self.daemon.http_address

    def start(self) -> None:
        """Return when it serves; `stop` it then.

        Raises `NsqError`, ``OSError``, and ``RuntimeError`` when it is running.
        """
        with self._lock:
            if self._daemon is not None:
                raise RuntimeError(f"this {self._name} is running")
            started: Future[None] = Future()
            self._thread = threading.Thread(
                target=self._run, args=(started,), name=self._name, daemon=True
            )
            self._thread.start()
            failure = started.exception()
            if failure is not None:
                self._thread.join()
                self._forget()
                raise failure

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=MeteredLoop) as runner:
                self._loop = runner.get_loop()
                daemon = self._make()
                runner.run(daemon.start())
                self._daemon = daemon
                started.set_result(None)
                self._loop.run_forever()
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    def stop(self) -> None:
        """Stop as on SIGTERM: everything unfinished is on disk then, or an error in the log."""
        self.end(lambda daemon: daemon.stop())

    def end(self, how: Callable[[D], Coroutine[Any, Any, object]]) -> None:
        """Await ``how`` in the daemon's loop, and end the thread. Does nothing when none runs."""
        with self._lock:
            if self._daemon is None or not self._thread.is_alive():
                return
            try:
                self.do(how)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._daemon = None
                self._forget()

    def do(self, what: Callable[[D], Coroutine[Any, Any, R]]) -> R:
        """Await ``what`` in the daemon's loop; return and raise as it does."""
        return asyncio.run_coroutine_threadsafe(what(self.daemon), self._loop).result()


class EmbeddedNsqd(DaemonThread[NsqdDaemon]):
    """A whole nsqd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqd's flags with underscores, durations in seconds (`NsqdOptions`). Without a
    ``data_path`` everything is forgotten at the end. ``log`` takes the log lines; the default drops
    them. Raises `ConfigurationError` for options that nsqd would refuse, ``TypeError`` for others.

        with EmbeddedNsqd(msg_timeout=2) as nsqd:
            connect(nsqd.tcp_address)
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        self._options = NsqdOptions(**{**_HERE, "https_address": "127.0.0.1:0", **options})
        self._keeps_data = "data_path" in options
        self._lines = DaemonLog(log, self._options.log_prefix, self._options.log_level)
        super().__init__("nsqd", self._new)

    def _new(self) -> NsqdDaemon:
        if not self._keeps_data:
            place = mkdtemp(prefix="nsqd-")
            self._forget = weakref.finalize(self, _remove, place, os.getpid())  # at exit, too
            self._options = replace(self._options, data_path=place)
        return NsqdDaemon(self._options, self._lines)

    @property
    def https_address(self) -> str:
        """Where it serves HTTPS, as ``host:port``; ``""`` without a certificate."""
        return self.daemon.https_address

    @property
    def data_path(self) -> str:
        """The directory of its files; a new temporary one at each start unless it was given."""
        return self._options.data_path

    def kill(self) -> None:
        """Stop as on SIGKILL: what was not on disk is lost."""
        self.end(lambda daemon: daemon.kill())


def _remove(place: str, process: int) -> None:
    if os.getpid() == process:  # a child of a fork ends, too
        shutil.rmtree(place, ignore_errors=True)


class EmbeddedNsqlookupd(DaemonThread[NsqlookupdDaemon]):
    """A whole nsqlookupd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqlookupd's flags with underscores, durations in seconds (`NsqlookupdOptions`).
    ``log`` takes the log lines; the default drops them. Raises as `EmbeddedNsqd`.

        with EmbeddedNsqlookupd() as lookupd, EmbeddedNsqd(
            lookupd_tcp_address=(lookupd.tcp_address,)
        ) as nsqd:
            ...
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        given = NsqlookupdOptions(**{**_HERE, **options})
        lines = DaemonLog(log, given.log_prefix, given.log_level)
        super().__init__("nsqlookupd", lambda: NsqlookupdDaemon(given, lines))
