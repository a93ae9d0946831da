"""The daemons in threads of this process, each with its own event loop: for tests and demos."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Generic, Self, TextIO, TypeVar

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.loop_meter import MeteredLoop
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
        """Return when it serves; `stop` it then. Raises `ConfigurationError`, ``OSError``."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=self._name, daemon=True
        )
        self._thread.start()
        failure = started.exception()
        if failure is not None:
            self._thread.join()
            raise failure

    def _run(self, started: Future[None]) -> None:
        with asyncio.Runner(loop_factory=MeteredLoop) as runner:
            self._loop = runner.get_loop()
            try:
                daemon = self._make()
                runner.run(daemon.start())
            except BaseException as exc:
                started.set_exception(exc)
                return
            self._daemon = daemon
            started.set_result(None)
            self._loop.run_forever()

    def stop(self) -> None:
        """Stop as on SIGTERM: everything unfinished is on disk then, or an error in the log."""
        self.end(lambda daemon: daemon.stop())

    def end(self, how: Callable[[D], Coroutine[Any, Any, object]]) -> None:
        """Await ``how`` in the daemon's loop, and end the thread. Does nothing when none runs."""
        if self._daemon is None:
            return
        try:
            self.do(how)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._daemon = None

    def do(self, what: Callable[[D], Coroutine[Any, Any, R]]) -> R:
        """Await ``what`` in the daemon's loop; return and raise as it does."""
        return asyncio.run_coroutine_threadsafe(what(self.daemon), self._loop).result()


class EmbeddedNsqd(DaemonThread[NsqdDaemon]):
    """A whole nsqd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqd's flags with underscores, durations in seconds (`NsqdOptions`). Without a
    ``data_path`` everything is forgotten at the end. ``log`` takes the log lines; the default drops
    them. Raises `ConfigurationError` for options that nsqd would refuse.

        with EmbeddedNsqd(msg_timeout=2) as nsqd:
            connect(nsqd.tcp_address)
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        self._options = NsqdOptions(**{**_HERE, "https_address": "127.0.0.1:0", **options})
        self._keeps_data = "data_path" in options
        self._directory: TemporaryDirectory[str] | None = None
        lines = DaemonLog(log, self._options.log_prefix, self._options.log_level)
        super().__init__("nsqd", lambda: NsqdDaemon(self._options, lines))

    @property
    def https_address(self) -> str:
        """Where it serves HTTPS, as ``host:port``; ``""`` without a certificate."""
        return self.daemon.https_address

    @property
    def data_path(self) -> str:
        """The directory of its files; a new temporary one at each start unless it was given."""
        return self._options.data_path

    def start(self) -> None:
        """Serve; call `stop` or `kill` at the end. Raises `ConfigurationError`, ``OSError``."""
        if not self._keeps_data:
            self._directory = TemporaryDirectory(prefix="nsqd-")
            self._options = replace(self._options, data_path=self._directory.name)
        try:
            super().start()
        except BaseException:
            self._forget()
            raise

    def kill(self) -> None:
        """Stop as on SIGKILL: what was not on disk is lost."""
        self.end(lambda daemon: daemon.kill())

    def end(self, how: Callable[[NsqdDaemon], Coroutine[Any, Any, object]]) -> None:
        """Await ``how``, end the thread, and forget a directory that is temporary."""
        super().end(how)
        self._forget()

    def _forget(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()


class EmbeddedNsqlookupd(DaemonThread[NsqlookupdDaemon]):
    """A whole nsqlookupd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqlookupd's flags with underscores, durations in seconds (`NsqlookupdOptions`).
    ``log`` takes the log lines; the default drops them. Raises `ConfigurationError` for options
    that nsqlookupd would refuse.

        with EmbeddedNsqlookupd() as lookupd, EmbeddedNsqd(
            lookupd_tcp_address=(lookupd.tcp_address,)
        ) as nsqd:
            ...
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        given = NsqlookupdOptions(**{**_HERE, **options})
        lines = DaemonLog(log, given.log_prefix, given.log_level)
        super().__init__("nsqlookupd", lambda: NsqlookupdDaemon(given, lines))
