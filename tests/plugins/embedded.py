"""The embedded daemons in the clothes of `daemons.GoNsqd` and `GoNsqlookupd`, for tests of both."""

from __future__ import annotations

import io
from pathlib import Path

from plugins.http_api import Nsqd, Nsqlookupd
from plugins.ports import ReservedPort

from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd
from nsqtools.server.go_flags import flags_of, parse_flags
from nsqtools.server.options import NsqdOptions, NsqlookupdOptions


class EmbeddedServer(Nsqd):
    """`EmbeddedNsqd` with `data_path` and any further flags in nsqd's syntax."""

    name = "embedded nsqd"

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        self._options = parse_flags(flags_of(NsqdOptions, {}), flags).options
        self._ports = [ReservedPort(), ReservedPort()]  # nobody has them between two runs
        self.tcp_address, self.http_address = (
            str(self._options.get(name, f"127.0.0.1:{port.number}"))
            for name, port in zip(("tcp_address", "http_address"), self._ports, strict=True)
        )
        self.https_address = ""
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


class EmbeddedLookupServer(Nsqlookupd):
    """`EmbeddedNsqlookupd` with flags in nsqlookupd's syntax; a restart keeps its addresses."""

    name = "embedded nsqlookupd"

    def __init__(self, *flags: str) -> None:
        self._ports = [ReservedPort(), ReservedPort()]  # nobody has them between two runs
        self.tcp_address, self.http_address = (f"127.0.0.1:{each.number}" for each in self._ports)
        self._options = parse_flags(flags_of(NsqlookupdOptions, {}), flags).options
        self._log = io.StringIO()
        self._nsqlookupd: EmbeddedNsqlookupd | None = None

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def start(self) -> None:
        nsqlookupd = EmbeddedNsqlookupd(
            log=self._log,
            tcp_address=self.tcp_address,
            http_address=self.http_address,
            **self._options,
        )
        nsqlookupd.start()
        self._nsqlookupd = nsqlookupd
        self.tcp_address = nsqlookupd.tcp_address
        self.http_address = nsqlookupd.http_address

    def stop(self) -> None:
        if self._nsqlookupd is not None:
            self._nsqlookupd.stop()
            self._nsqlookupd = None

    def kill(self) -> None:
        self.stop()  # there is nothing that it could save
