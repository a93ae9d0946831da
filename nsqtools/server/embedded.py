"""nsqd in a thread of this process, for tests and demonstrations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TextIO

from nsqtools.server.daemon import NsqdDaemon
from nsqtools.server.log import Log
from nsqtools.server.options import NsqdOptions


class EmbeddedNsqd:
    """A whole nsqd on free ports of 127.0.0.1, ready when the ``with`` block starts.

    ``options`` are nsqd's flags with underscores, durations in seconds (`NsqdOptions`). Without a
    ``data_path`` everything is forgotten at the end. ``log`` takes the log lines; the default drops
    them. Raises `ConfigurationError` for options that nsqd would refuse.

        with EmbeddedNsqd(msg_timeout=2) as nsqd:
            connect(nsqd.tcp_address)
    """

    def __init__(self, *, log: TextIO | None = None, **options: Any) -> None:
        defaults = {
            "tcp_address": "127.0.0.1:0",
            "http_address": "127.0.0.1:0",
            "https_address": "127.0.0.1:0",
            "broadcast_address": "127.0.0.1",
        }
        self._directory: TemporaryDirectory[str] | None = None
        if "data_path" not in options:
            self._directory = TemporaryDirectory(prefix="nsqd-")
            options["data_path"] = self._directory.name
        self._options = NsqdOptions(**{**defaults, **options})
        self._log = Log(log, self._options.log_prefix, self._options.log_level)
        self._daemon: NsqdDaemon | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def tcp_address(self) -> str:
        """Where it serves TCP, as ``host:port``."""
        return self._running.tcp_address

    @property
    def http_address(self) -> str:
        """Where it serves HTTP, as ``host:port``."""
        return self._running.http_address

    @property
    def https_address(self) -> str:
        """Where it serves HTTPS, as ``host:port``; ``""`` without a certificate."""
        return self._running.https_address

    @property
    def data_path(self) -> str:
        """The directory of its files."""
        return self._options.data_path

    @property
    def _running(self) -> NsqdDaemon:
        if self._daemon is None:
            raise RuntimeError("this EmbeddedNsqd is not running")
        return self._daemon

    def __enter__(self) -> EmbeddedNsqd:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve; call `stop` or `kill` at the end. Raises `ConfigurationError`, ``OSError``."""
        started = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run, args=(started, failure), name="nsqd", daemon=True
        )
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            self._forget()
            raise failure[0]

    def _run(self, started: threading.Event, failure: list[BaseException]) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            try:
                self._daemon = NsqdDaemon(self._options, self._log)
                runner.run(self._daemon.start())
            except BaseException as exc:
                failure.append(exc)
                return
            finally:
                started.set()
            self._loop.run_forever()

    def stop(self) -> None:
        """Stop as on SIGTERM: everything unfinished is on disk afterwards."""
        self._end(lambda daemon: daemon.stop())

    def kill(self) -> None:
        """Stop as on SIGKILL: what was not on disk is lost."""
        self._end(lambda daemon: daemon.kill())

    def _end(self, how: Callable[[NsqdDaemon], Coroutine[Any, Any, None]]) -> None:
        if self._daemon is None or self._loop is None or self._thread is None:
            return
        daemon, loop = self._daemon, self._loop
        try:
            asyncio.run_coroutine_threadsafe(how(daemon), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            self._forget()

    def _forget(self) -> None:
        self._daemon = None
        if self._directory is not None:
            self._directory.cleanup()
