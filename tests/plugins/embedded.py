"""The embedded nsqd in the clothes of `daemons.GoNsqd`, for tests that run on both."""

from __future__ import annotations

import io
from pathlib import Path

from plugins.http_api import Nsqd

from nsqtools.server import EmbeddedNsqd
from nsqtools.server.go_flags import flags_of, parse_flags
from nsqtools.server.options import NsqdOptions


class EmbeddedServer(Nsqd):
    """`EmbeddedNsqd` with `data_path` and any further flags in nsqd's syntax."""

    name = "embedded nsqd"

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        self.tcp_address = self.http_address = self.https_address = ""
        self._options = parse_flags(flags_of(NsqdOptions, {}), flags).options
        self._log = io.StringIO()
        self._nsqd: EmbeddedNsqd | None = None

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def start(self) -> None:
        present = {
            name: address
            for name in ("tcp_address", "http_address", "https_address")
            if (address := getattr(self, name))
        }
        options = {**self._options, **present, "data_path": str(self.data_path)}
        nsqd = EmbeddedNsqd(log=self._log, **options)
        nsqd.start()
        self._nsqd = nsqd
        self.tcp_address = nsqd.tcp_address
        self.http_address = nsqd.http_address
        self.https_address = nsqd.https_address

    def stop(self) -> None:
        if self._nsqd is not None:
            self._nsqd.stop()
            self._nsqd = None

    def kill(self) -> None:
        if self._nsqd is not None:
            self._nsqd.kill()
            self._nsqd = None
