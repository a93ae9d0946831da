"""One nsqlookupd from start to stop, in the running loop."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import ExitStack

from nsqtools.protocol.lookup_v1 import MAGIC_V1, PeerInfo, encode_response
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog, version_line
from nsqtools.server.http.debug_api import pprof_handlers
from nsqtools.server.http.foundation import HTTPApi
from nsqtools.server.http.nsqlookupd_api import NsqlookupdHTTP
from nsqtools.server.http.server import HTTPServer, foreign_calls
from nsqtools.server.listen import accept, listen, real_address, real_port, report_errors
from nsqtools.server.loop_meter import meter_of
from nsqtools.server.registrations import Registrations
from nsqtools.server.settings.go_flags import seconds_to_ns
from nsqtools.server.settings.nsqlookupd_options import NsqlookupdOptions
from nsqtools.server.tcp.client_connection import ClientConnection
from nsqtools.server.tcp.lookup_protocol_v1 import LookupProtocolV1

_REFUSAL = encode_response(b"E_BAD_PROTOCOL")


class NsqlookupdDaemon:
    """Binds when it is made. Raises `ConfigurationError` with nsqlookupd's text.

    ``tcp_address`` and ``http_address`` are the real ones.
    """

    def __init__(self, options: NsqlookupdOptions, log: DaemonLog) -> None:
        log.info(version_line("nsqlookupd"))
        with ExitStack() as undo:
            self._tcp = undo.enter_context(listen(options.tcp_address))
            self._http = undo.enter_context(listen(options.http_address))
            undo.pop_all()
        self.tcp_address = real_address(self._tcp)
        self.http_address = real_address(self._http)
        self._log = log
        self._own_info = PeerInfo(
            broadcast_address=options.broadcast_address,
            hostname=socket.gethostname(),
            http_port=real_port(self._http),
            tcp_port=real_port(self._tcp),
            version=NSQ_VERSION,
        )
        self._registrations = Registrations(
            seconds_to_ns(options.inactive_producer_timeout),
            seconds_to_ns(options.tombstone_lifetime),
        )
        self._connections: set[ClientConnection] = set()

    async def start(self) -> None:
        """Serve from now on."""
        protocols = {MAGIC_V1: self._speak}
        report_errors(asyncio.get_running_loop(), self._log)
        self._tcp_server = await accept(
            self._tcp,
            lambda: ClientConnection(protocols, _REFUSAL, self._connections, self._log),
        )
        self._log.info(f"TCP: listening on {self.tcp_address}")
        handlers = {
            **NsqlookupdHTTP(self._registrations, self._connections, self._log).handlers(),
            **pprof_handlers("/debug/pprof"),
        }
        foreign = foreign_calls(self._http, self._own_info.broadcast_address)
        api = HTTPApi(handlers, self._log, foreign=foreign)
        self._http_server = HTTPServer(api, self._http)
        await self._http_server.start()
        self._log.info(f"HTTP: listening on {self.http_address}")
        meter_of(asyncio.get_running_loop()).forget()  # the start

    def owns_process(self) -> None:
        """Leave what is loaded out of garbage collections."""
        gc.freeze()

    def _speak(self, connection: ClientConnection) -> LookupProtocolV1:
        return LookupProtocolV1(connection, self._registrations, self._own_info, self._log)

    async def stop(self) -> None:
        """Close all connections. Nothing is kept: every nsqd registers again with the next one."""
        self._tcp_server.close()
        for connection in list(self._connections):
            connection.abort()
        self._log.info(f"TCP: closing {self.tcp_address}")
        await self._http_server.stop()
        self._log.info(f"HTTP: closing {self.http_address}")
        await asyncio.sleep(0)  # lets the transports close their sockets
