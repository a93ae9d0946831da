"""The embedded daemons in the clothes of `daemons.GoNsqd` and `GoNsqlookupd`, for tests of both."""

import io
from pathlib import Path
from typing import Any

from plugins.http_api import Nsqd, Nsqlookupd, Running
from plugins.ports import ReservedPort

from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd
from nsqtools.server.go_flags import flags_of, parse_flags
from nsqtools.server.options import NsqdOptions, NsqlookupdOptions

ADDRESSES = ("tcp_address", "http_address", "https_address")


class _Embedded(Running):
    """A daemon of some kind with flags in Go's syntax; a restart keeps its addresses and its log.

    ``https_address`` is empty where there is none.
    """

    _kind: type[EmbeddedNsqd | EmbeddedNsqlookupd]

    def __init__(self, options: dict[str, Any]) -> None:
        self._ports = [ReservedPort(), ReservedPort()]
        self.tcp_address, self.http_address = (
            str(options.get(name, f"127.0.0.1:{port.number}"))
            for name, port in zip(ADDRESSES, self._ports, strict=False)
        )
        self.https_address = ""
        self._options = options
        self._log = io.StringIO()
        self._daemon: EmbeddedNsqd | EmbeddedNsqlookupd | None = None

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def start(self) -> None:
        present = {name: address for name in ADDRESSES if (address := getattr(self, name))}
        daemon = self._kind(log=self._log, **{**self._options, **present})
        daemon.start()
        self._daemon = daemon
        for name in ADDRESSES:
            setattr(self, name, getattr(daemon, name, ""))

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def kill(self) -> None:
        if isinstance(self._daemon, EmbeddedNsqd):
            self._daemon.kill()
            self._daemon = None
        self.stop()  # a nsqlookupd has nothing that it could save


class EmbeddedServer(_Embedded, Nsqd):
    """`EmbeddedNsqd` with `data_path` and any further flags in nsqd's syntax."""

    name = "embedded nsqd"
    _kind = EmbeddedNsqd

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        options = parse_flags(flags_of(NsqdOptions, {}), flags).options
        super().__init__({**options, "data_path": str(data_path)})


class EmbeddedLookupServer(_Embedded, Nsqlookupd):
    """`EmbeddedNsqlookupd` with flags in nsqlookupd's syntax."""

    name = "embedded nsqlookupd"
    _kind = EmbeddedNsqlookupd

    def __init__(self, *flags: str) -> None:
        super().__init__(parse_flags(flags_of(NsqlookupdOptions, {}), flags).options)
