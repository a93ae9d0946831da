"""nsqd in a thread of this process, for tests and demonstrations."""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TextIO

from nsqtools.server.daemon import NsqdDaemon
from nsqtools.server.daemon_thread import DaemonThread
from nsqtools.server.log import Log
from nsqtools.server.settings.nsqd_options import NsqdOptions


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
        self._options = NsqdOptions(**{**defaults, **options})
        self._keeps_data = "data_path" in options
        self._directory: TemporaryDirectory[str] | None = None
        lines = Log(log, self._options.log_prefix, self._options.log_level)
        self._thread = DaemonThread("nsqd", lambda: NsqdDaemon(self._options, lines))

    @property
    def tcp_address(self) -> str:
        """Where it serves TCP, as ``host:port``."""
        return self._thread.daemon.tcp_address

    @property
    def http_address(self) -> str:
        """Where it serves HTTP, as ``host:port``."""
        return self._thread.daemon.http_address

    @property
    def https_address(self) -> str:
        """Where it serves HTTPS, as ``host:port``; ``""`` without a certificate."""
        return self._thread.daemon.https_address

    @property
    def data_path(self) -> str:
        """The directory of its files; a new temporary one at each start unless it was given."""
        return self._options.data_path

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
        if not self._keeps_data:
            self._directory = TemporaryDirectory(prefix="nsqd-")
            self._options = replace(self._options, data_path=self._directory.name)
        try:
            self._thread.start()
        except BaseException:
            self._forget()
            raise

    def stop(self) -> None:
        """Stop as on SIGTERM: everything unfinished is on disk afterwards."""
        self._thread.end(lambda daemon: daemon.stop())
        self._forget()

    def kill(self) -> None:
        """Stop as on SIGKILL: what was not on disk is lost."""
        self._thread.end(lambda daemon: daemon.kill())
        self._forget()

    def _forget(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
