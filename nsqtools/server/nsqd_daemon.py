"""One nsqd from start to stop, in the running loop.

The order is nsqd's: lock the data path, load the certificate, bind everything, load nsqd.dat, write
it, and only then accept. Clients that come early wait in the backlog of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from nsqtools.files.opening import exposure_of_secret
from nsqtools.http.http_server import HTTPRefusal, HTTPServer, Request, Response, serve_api
from nsqtools.http.listen import (
    accept,
    is_open_to_all,
    listen,
    real_address,
    real_port,
    report_errors,
    stop_listening,
)
from nsqtools.http.loop_meter import meter_of
from nsqtools.protocol.frames import ERROR, encode_frame
from nsqtools.protocol.requests import PeerInfo
from nsqtools.server.auth import AuthServers
from nsqtools.server.client_connection import ClientConnection
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog, version_line
from nsqtools.server.lookup_peers import LookupRegistry
from nsqtools.server.negotiation import server_context
from nsqtools.server.nsqd_http import NsqdHTTP
from nsqtools.server.options import REQUIRED, NsqdOptions
from nsqtools.server.protocol_v2 import ClientContext, ProtocolV2
from nsqtools.server.queues.data_path import lock_data_path
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.topic import Topic
from nsqtools.server.stats import expand_prefix, push_to_statsd

_REFUSAL = encode_frame(ERROR, b"E_BAD_PROTOCOL")


class NsqdDaemon:
    """An nsqd. The constructor binds its ports and raises `ConfigurationError` with nsqd's text.

    ``tcp_address``, ``http_address`` and ``https_address`` contain the ports that were bound, and
    are ``""`` for a listener that is disabled. ``refusal`` is the error that clients get when they
    publish or administer, ``""`` to allow both.
    """

    def __init__(self, options: NsqdOptions, log: DaemonLog, *, refusal: str = "") -> None:
        self._refusal = refusal
        self._log = log
        log.info(version_line("nsqd"))
        log.info(f"ID: {options.node_id}")
        with ExitStack() as undo:
            undo.callback(os.close, lock_data_path(Path(options.data_path)))
            self._tls_context = server_context(options)
            if options.tls_key and (problem := exposure_of_secret(Path(options.tls_key))):
                log.warn(f"TLS: {problem}")
            self._auth_servers = AuthServers(options, log) if options.auth_http_address else None
            if options.tls_client_auth_policy == "require":
                log.warn(
                    "TLS: client certificates are verified, although 'require' does not ask it"
                )
            self._tcp = self._listen(options.tcp_address, undo)
            self._http = self._listen(options.http_address, undo)
            address = options.https_address if self._tls_context is not None else ""
            self._https = self._listen(address, undo)
            self._undo = undo.pop_all()
        self.tcp_address = real_address(self._tcp)
        self.http_address = real_address(self._http)
        self.https_address = real_address(self._https)
        self._options = options
        self._info = PeerInfo(
            broadcast_address=options.broadcast_address,
            hostname=socket.gethostname(),
            http_port=options.broadcast_http_port or max(0, real_port(self._http)),
            tcp_port=options.broadcast_tcp_port or max(0, real_port(self._tcp)),
            version=NSQ_VERSION,
        )
        self._statsd_prefix = expand_prefix(options.statsd_prefix, self._info)
        self._http_servers: list[HTTPServer] = []
        self._server: asyncio.Server | None = None
        self._statsd: asyncio.Task[None] | None = None

    def _listen(self, address: str, undo: ExitStack) -> socket.socket | None:
        if not address:
            return None
        listener = listen(address)
        undo.callback(listener.close)
        if listener.family == socket.AF_UNIX:
            undo.callback(Path(address).unlink, missing_ok=True)
        return listener

    async def start(self) -> None:
        """Load the data and serve. Raises `NsqError`, ``OSError``."""
        loop = asyncio.get_running_loop()
        report_errors(loop, self._log.error)
        try:
            topics: dict[str, Topic] = {}
            registry = LookupRegistry(topics, self._options, self._log, self._info)
            nsqd = self.nsqd = NsqdQueues(
                self._options, loop, self._log, topics, registry, refusal=self._refusal
            )
            nsqd.load()
        except BaseException:
            # Release the data path and the ports, so that another nsqd can start with them.
            self._undo.close()
            raise
        self._context = ClientContext(nsqd, self._tls_context, self._auth_servers)
        nsqd.registry.set_addresses(self._options.lookupd_tcp_address)
        await self._serve_tcp()
        await self._serve_http()
        if self._options.statsd_address:
            pushing = push_to_statsd(self._context, self._statsd_prefix)
            self._statsd = asyncio.create_task(pushing)
        meter_of(loop).forget()  # the start blocks the loop, and no client waits for it

    def owns_process(self) -> None:
        """Exclude the loaded queues, and many new ones, from garbage collections."""
        self.nsqd.freeze_growth()

    async def _serve_tcp(self) -> None:
        if self._tcp is None:
            return
        context = self._context
        protocols = {b"  V2": lambda connection: ProtocolV2(connection, context)}
        self._server = await accept(
            self._tcp, lambda: ClientConnection(protocols, _REFUSAL, context.connections, self._log)
        )
        self._log.info(f"TCP: listening on {self.tcp_address}")
        if is_open_to_all(self._options.tcp_address) and not self._options.auth_http_address:
            self._log.warn(
                "every program that reaches this host can publish and consume: listening on all "
                "interfaces without --auth-http-address; --tcp-address=127.0.0.1:4150 and "
                "--http-address=127.0.0.1:4151 keep others out"
            )

    async def _serve_http(self) -> None:
        resolved: dict[str, object] = {
            "broadcast_tcp_port": self._info.tcp_port,
            "broadcast_http_port": self._info.http_port,
            "statsd_prefix": self._statsd_prefix,
        }
        ports = real_port(self._tcp), real_port(self._http)
        nsqd = NsqdHTTP(self._context, ports, resolved)
        handlers = nsqd.handlers()
        if self._refusal:
            handlers = {
                key: handler if key[0] == "GET" else self._refuse
                for key, handler in handlers.items()
            }
        https_port = max(0, real_port(self._https))
        needs_tls = self._options.tls_required == REQUIRED
        https = ("HTTPS", self._https, self._tls_context)
        for name, listener, context in (("HTTP", self._http, None), https):
            if listener is not None:
                server = await serve_api(
                    name,
                    listener,
                    handlers,
                    self._log,
                    self._info.broadcast_address,
                    tls_context=context,
                    body_limits=nsqd.body_limits(),
                    tls_required_port=https_port if needs_tls and context is None else None,
                )
                self._http_servers.append(server)

    def _refuse(self, request: Request) -> Response:
        raise HTTPRefusal(403, self._refusal)

    async def stop(self) -> bool:
        """Close all connections, write everything to disk and release the data path.

        Return whether every message is on disk.
        """
        self._log.info("NSQ: stopping subsystems")
        await self._disconnect()
        is_whole = await self.nsqd.close()
        self._undo.close()
        self._log.info("NSQ: bye")
        return is_whole

    async def kill(self) -> None:
        """Stop and write nothing, as if the process had been killed."""
        self.nsqd.abandon()
        await self._disconnect()
        self._undo.close()

    async def _disconnect(self) -> None:
        if self._server is not None:
            stop_listening(self._server)
        for connection in list(self._context.connections):
            connection.abort()
        if self._statsd is not None:
            self._statsd.cancel()
        await self.nsqd.registry.stop()
        for server in self._http_servers:
            await server.stop()
        await asyncio.sleep(0)  # lets the transports close their sockets
