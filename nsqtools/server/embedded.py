"""The daemons in threads of this process, each with its own event loop: for tests and demos.

A fork does not copy threads. In a child process the daemon is still the parent's, and leaving the
``with`` block does nothing.
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

_LOCAL_DEFAULTS = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
_LOCAL_DEFAULTS["broadcast_address"] = "127.0.0.1"


class DaemonThread(Generic[D]):
    """Runs the daemon that ``make`` returns between `start` and `stop`, any number of times."""

    def __init__(self, name: str, make: Callable[[], D]) -> None:
        self._name = name
        self._make = make
        self._daemon: D | None = None
        self._clean_up: Callable[[], object] = lambda: None
        self._lock = threading.RLock()  # several threads may start and stop the daemon

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
        """The TCP address of the daemon, as ``host:port``."""
        return self.daemon.tcp_address

    @property
    def http_address(self) -> str:
        """The HTTP address of the daemon, as ``host:port``."""
        return self.daemon.http_address

    def start(self) -> None:
        """Start the daemon and return when it serves. Call `stop` in the end.

        Raises `NsqError`, ``OSError``, and ``RuntimeError`` when it is already running.
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
                self._clean_up()
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
            # `start` raises it in the thread of the caller.
            started.set_exception(exc)

    def stop(self) -> None:
        """Stop as on SIGTERM: write all unfinished messages to disk, and log failures."""
        self.end(lambda daemon: daemon.stop())

    def end(self, how: Callable[[D], Coroutine[Any, Any, object]]) -> None:
        """Await ``how(daemon)`` in its loop and end the thread. Does nothing while none runs."""
        with self._lock:
            if self._daemon is None or not self._thread.is_alive():
                return
            try:
                self.do(how)
            finally:
                # Also after a failure: the thread must not outlive the daemon.
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._daemon = None
                self._clean_up()

    def do(self, what: Callable[[D], Coroutine[Any, Any, R]]) -> R:
        """Await ``what(daemon)`` in its loop; return its result or raise its exception."""
        return asyncio.run_coroutine_threadsafe(what(self.daemon), self._loop).result()


class EmbeddedNsqd(DaemonThread[NsqdDaemon]):
    """A whole nsqd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqd's flags with underscores, durations in seconds (`NsqdOptions`). Without a
    ``data_path`` all messages are deleted at the end. ``log`` receives the log lines, which are
    dropped by default. Raises `ConfigurationError` for values that nsqd refuses, and ``TypeError``
    for unknown options and wrong types.

        with EmbeddedNsqd(msg_timeout=2) as nsqd:
            connect(nsqd.tcp_address)
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        self._options = NsqdOptions(
            **{**_LOCAL_DEFAULTS, "https_address": "127.0.0.1:0", **options}
        )
        self._keeps_data = "data_path" in options
        self._log = DaemonLog(log, self._options.log_prefix, self._options.log_level)
        super().__init__("nsqd", self._new)

    def _new(self) -> NsqdDaemon:
        if not self._keeps_data:
            directory = mkdtemp(prefix="nsqd-")
            # Also removes the directory when the process exits without `stop`.
            self._clean_up = weakref.finalize(self, _remove, directory, os.getpid())
            self._options = replace(self._options, data_path=directory)
        return NsqdDaemon(self._options, self._log)

    @property
    def https_address(self) -> str:
        """The HTTPS address as ``host:port``, ``""`` without a certificate."""
        return self.daemon.https_address

    @property
    def data_path(self) -> str:
        """The directory of the files: the option, or a new temporary one for each start."""
        return self._options.data_path

    def kill(self) -> None:
        """Stop as on SIGKILL: messages that are not on disk are lost."""
        self.end(lambda daemon: daemon.kill())


def _remove(directory: str, process: int) -> None:
    # A child of a fork runs this at its exit as well, while the parent uses the directory.
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


class EmbeddedNsqlookupd(DaemonThread[NsqlookupdDaemon]):
    """A whole nsqlookupd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqlookupd's flags with underscores, durations in seconds (`NsqlookupdOptions`).
    ``log`` receives the log lines, which are dropped by default. Raises as `EmbeddedNsqd`.

        with EmbeddedNsqlookupd() as lookupd, EmbeddedNsqd(
            lookupd_tcp_address=(lookupd.tcp_address,)
        ) as nsqd:
            ...
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        parsed = NsqlookupdOptions(**{**_LOCAL_DEFAULTS, **options})
        daemon_log = DaemonLog(log, parsed.log_prefix, parsed.log_level)
        super().__init__("nsqlookupd", lambda: NsqlookupdDaemon(parsed, daemon_log))
