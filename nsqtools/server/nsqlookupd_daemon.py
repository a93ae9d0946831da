"""nsqlookupd: its TCP protocol V1, its HTTP API, and the daemon.

As in `protocol_v2`, a handler of a TCP command gets the command line and returns the position after
the body.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import ClassVar

from nsqtools.http.debug_pages import DEBUG_HANDLERS
from nsqtools.http.http_server import (
    HTTPRefusal,
    Request,
    Response,
    RouteHandler,
    json_response,
    metrics_response,
    plain_response,
    raw_json_response,
    serve_api,
)
from nsqtools.http.listen import (
    accept,
    listen,
    real_address,
    real_port,
    report_errors,
    stop_listening,
)
from nsqtools.http.loop_meter import in_steps, meter_of
from nsqtools.protocol import requests
from nsqtools.protocol.commands import sized
from nsqtools.protocol.frames import RequestError
from nsqtools.protocol.requests import (
    MAGIC_V1,
    PeerInfo,
    read_identify,
    read_trimmed_request,
    topic_and_channel,
)
from nsqtools.protocol.text import go_duration, go_json
from nsqtools.records.prometheus import metric_of
from nsqtools.server.client_connection import ClientConnection, ConnectionProtocol
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog, version_line
from nsqtools.server.go_flags import seconds_to_ns
from nsqtools.server.options import NsqlookupdOptions
from nsqtools.server.registrations import RegisteredNsqd, Registrations, steady_ns
from nsqtools.server.stats import Families, loop_metrics, single

_OK = sized(b"OK")


class LookupProtocolV1(ConnectionProtocol):
    """The commands of one nsqd."""

    def __init__(self, connection: ClientConnection, daemon: NsqlookupdDaemon) -> None:
        self._connection = connection
        self._own_info = daemon.own_info
        self._registrations = daemon.registrations
        self._log = daemon.log
        self._peer: RegisteredNsqd | None = None

    def execute(self, data: bytes, position: int) -> int:
        """Execute the command at a position."""
        request = read_trimmed_request(data, position)
        handler = self._handlers.get(request.words[0])
        if handler is None:
            raise RequestError("E_INVALID", b"invalid command " + request.words[0])
        return handler(self, request)

    def encode_error(self, error: RequestError) -> bytes:
        """Return the error as a response."""
        return sized(error.data)

    def closed(self) -> None:
        """Remove the nsqd, and keep the names of its topics and channels."""
        address = self._connection.remote_address
        self._log.info(f"PROTOCOL(V1): [{address}] exiting ioloop")
        if self._peer is not None:
            self._registrations.disconnect(self._peer)

    # commands

    def _ping(self, request: requests.CommandLine) -> int:
        if self._peer is not None:
            previous_ns, self._peer.last_update_ns = self._peer.last_update_ns, steady_ns()
            interval = go_duration(self._peer.last_update_ns - previous_ns)
            self._log.info(f"CLIENT({self._peer.remote_address}): pinged (last ping {interval})")
        self._connection.send(_OK)
        return request.position

    def _identify(self, request: requests.CommandLine) -> int:
        if self._peer is not None:
            raise RequestError("E_INVALID", "cannot IDENTIFY again")
        info, position = read_identify(request)
        address = self._connection.remote_address
        self._log.info(
            f"CLIENT({address}): IDENTIFY Address:{info.broadcast_address} TCP:{info.tcp_port} "
            f"HTTP:{info.http_port} Version:{info.version}"
        )
        self._peer = RegisteredNsqd(address, info)
        self._registrations.identify(self._peer)
        self._connection.send(sized(self._own_info.encode()))
        return position

    def _register(self, request: requests.CommandLine) -> int:
        """Execute REGISTER or UNREGISTER."""
        if self._peer is None:
            raise RequestError("E_INVALID", "client must IDENTIFY")
        topic, channel = topic_and_channel(request)
        command, registrations = request.words[0], self._registrations
        change = registrations.register if command == b"REGISTER" else registrations.unregister
        change(self._peer, topic, channel)
        category = "channel" if channel else "topic"
        self._log.info(
            f"DB: client({self._connection.remote_address}) {command.decode()} "
            f"category:{category} key:{topic} subkey:{channel}"
        )
        self._connection.send(_OK)
        return request.position

    _handlers: ClassVar[dict[bytes, Callable[[LookupProtocolV1, requests.CommandLine], int]]] = {
        b"PING": _ping,
        b"IDENTIFY": _identify,
        b"REGISTER": _register,
        b"UNREGISTER": _register,
    }


def nsqlookupd_metrics(daemon: NsqlookupdDaemon) -> Families:
    """Yield the metrics of an nsqlookupd."""
    entries = list(daemon.registrations.entries())
    topics = [
        ({"topic": name.key}, producers) for name, producers in entries if name.category == "topic"
    ]
    yield single("nsqlookupd_topics", "Topics registered.", len(topics))
    count = sum(name.category == "channel" for name, _ in entries)
    yield single("nsqlookupd_channels", "Channels registered.", count)
    yield single("nsqlookupd_producers", "Active nsqd.", len(daemon.registrations.active()))
    producer_counts = ((labels, len(producers)) for labels, producers in topics)
    yield metric_of("nsqlookupd_topic_producers", "Registered nsqd of a topic.", producer_counts)
    counts = (
        (labels, sum(tombstoned_ns is not None for tombstoned_ns in producers.values()))
        for labels, producers in topics
    )
    tombstones = ((labels, count) for labels, count in counts if count)
    yield metric_of("nsqlookupd_topic_tombstones", "Of these, tombstoned.", tombstones)
    yield single("nsqlookupd_connections", "TCP connections.", len(daemon.connections))
    yield from loop_metrics("nsqlookupd", meter_of(asyncio.get_running_loop()))


_NEVER_NS = -6795364578871345152  # UnixNano() of Go's zero time


class NsqlookupdHTTP:
    """The handlers. Each method is one endpoint."""

    def __init__(self, daemon: NsqlookupdDaemon) -> None:
        self._daemon = daemon
        self._registrations = daemon.registrations
        self._log = daemon.log

    def handlers(self) -> dict[tuple[str, str], RouteHandler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/ping"): self.ping,
            ("GET", "/info"): self.info,
            ("GET", "/metrics"): self.metrics,
            **DEBUG_HANDLERS,
            ("GET", "/debug"): self.debug,
            ("GET", "/lookup"): self.lookup,
            ("GET", "/topics"): self.topics,
            ("GET", "/channels"): self.channels,
            ("GET", "/nodes"): self.nodes,
            ("POST", "/topic/create"): self.create_topic,
            ("POST", "/topic/delete"): self.delete_topic,
            ("POST", "/topic/tombstone"): self.tombstone_topic_producer,
            ("POST", "/channel/create"): self.create_channel,
            ("POST", "/channel/delete"): self.delete_channel,
        }

    def ping(self, request: Request) -> Response:
        return plain_response("OK")

    def info(self, request: Request) -> Response:
        return json_response({"version": NSQ_VERSION})

    def metrics(self, request: Request) -> Awaitable[Response]:
        return metrics_response(nsqlookupd_metrics(self._daemon))

    # queries

    def lookup(self, request: Request) -> Response:
        topic = request.argument("topic")
        try:
            producers = self._registrations.producers(topic)
        except KeyError:
            raise HTTPRefusal(404, "TOPIC_NOT_FOUND") from None
        channels = self._registrations.channels(topic)
        encoded = b",".join(map(_encode_producer, producers))
        return raw_json_response(b'{"channels":%b,"producers":[%b]}' % (go_json(channels), encoded))

    def topics(self, request: Request) -> Response:
        return json_response({"topics": self._registrations.topics()})

    def channels(self, request: Request) -> Response:
        topic = request.argument("topic")
        return json_response({"channels": self._registrations.channels(topic)})

    async def nodes(self, request: Request) -> Response:
        nodes = [
            b'%b,"tombstones":%b,"topics":%b}'
            % (_encode_producer(peer)[:-1], go_json([*topics.values()]), go_json([*topics]))
            async for peer, topics in in_steps((await self._registrations.nodes()).items())
        ]
        return raw_json_response(b'{"producers":[%b]}' % b",".join(nodes))

    async def debug(self, request: Request) -> Response:
        entries = {
            ":".join(name): producers
            for name, producers in self._registrations.entries()
            if producers
        }
        pieces = [
            b"%b:%b"
            % (go_json(name), go_json([_debug_entry(*item) for item in entries[name].items()]))
            async for name in in_steps(sorted(entries))
        ]
        return raw_json_response(b"{%b}" % b",".join(pieces))

    # administration

    def create_topic(self, request: Request) -> None:
        topic = request.argument("topic", "INVALID_ARG_TOPIC")
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_topic(topic)

    def delete_topic(self, request: Request) -> None:
        topic = request.argument("topic")
        self._log.info(f"DB: removing topic({topic})")
        self._registrations.delete_topic(topic)

    def tombstone_topic_producer(self, request: Request) -> None:
        topic, node = request.argument("topic"), request.argument("node")
        self._log.info(f"DB: setting tombstone for producer@{node} of topic({topic})")
        self._registrations.tombstone(topic, node)

    def create_channel(self, request: Request) -> None:
        topic, channel = request.topic_and_channel()
        self._log.info(f"DB: adding channel({channel}) in topic({topic})")
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_channel(topic, channel)

    def delete_channel(self, request: Request) -> None:
        topic, channel = request.topic_and_channel()
        try:
            self._registrations.delete_channel(topic, channel)
        except KeyError:
            raise HTTPRefusal(404, "CHANNEL_NOT_FOUND") from None
        self._log.info(f"DB: removing channel({channel}) from topic({topic})")


def _debug_entry(peer: RegisteredNsqd, tombstoned_ns: int | None) -> dict[str, object]:
    document = {
        "id": peer.remote_address,
        "last_update": peer.last_update_ns,
        "tombstoned": tombstoned_ns is not None,
        "tombstoned_at": _NEVER_NS if tombstoned_ns is None else tombstoned_ns,
    }
    return dict(sorted({**peer.info._asdict(), **document}.items()))  # Go sorts the keys of a map


def _encode_producer(peer: RegisteredNsqd) -> bytes:
    """Return the JSON object of a producer, which never changes and is encoded once."""
    if not peer.encoded:
        info = peer.info
        document = {
            "remote_address": peer.remote_address,
            "hostname": info.hostname,
            "broadcast_address": info.broadcast_address,
            "tcp_port": info.tcp_port,
            "http_port": info.http_port,
            "version": info.version,
        }
        peer.encoded = go_json(document)
    return peer.encoded


_REFUSAL = sized(b"E_BAD_PROTOCOL")


class NsqlookupdDaemon:
    """An nsqlookupd. The constructor binds its ports.

    It raises `ConfigurationError` with nsqlookupd's text. ``tcp_address`` and ``http_address``
    contain the ports that were bound.
    """

    def __init__(self, options: NsqlookupdOptions, log: DaemonLog) -> None:
        log.info(version_line("nsqlookupd"))
        with ExitStack() as undo:
            self._tcp = undo.enter_context(listen(options.tcp_address))
            self._http = undo.enter_context(listen(options.http_address))
            undo.pop_all()
        self.tcp_address = real_address(self._tcp)
        self.http_address = real_address(self._http)
        self.log = log
        self.own_info = PeerInfo(
            broadcast_address=options.broadcast_address,
            hostname=socket.gethostname(),
            http_port=real_port(self._http),
            tcp_port=real_port(self._tcp),
            version=NSQ_VERSION,
        )
        self.registrations = Registrations(
            seconds_to_ns(options.inactive_producer_timeout),
            seconds_to_ns(options.tombstone_lifetime),
        )
        self.connections: set[ClientConnection] = set()

    async def start(self) -> None:
        """Start to serve."""
        loop = asyncio.get_running_loop()
        protocols = {MAGIC_V1: lambda connection: LookupProtocolV1(connection, self)}
        report_errors(loop, self.log.error)
        self._tcp_server = await accept(
            self._tcp, lambda: ClientConnection(protocols, _REFUSAL, self.connections, self.log)
        )
        self.log.info(f"TCP: listening on {self.tcp_address}")
        handlers = NsqlookupdHTTP(self).handlers()
        broadcast = self.own_info.broadcast_address
        self._http_server = await serve_api("HTTP", self._http, handlers, self.log, broadcast)
        meter_of(loop).forget()  # the start blocks the loop, and no client waits for it

    def owns_process(self) -> None:
        """Exclude the loaded modules from garbage collections."""
        gc.freeze()

    async def stop(self) -> bool:
        """Close all connections. Nothing is written: every nsqd registers again later."""
        stop_listening(self._tcp_server)
        for connection in list(self.connections):
            connection.abort()
        self.log.info(f"TCP: closing {self.tcp_address}")
        await self._http_server.stop()
        self.log.info(f"HTTP: closing {self.http_address}")
        await asyncio.sleep(0)  # lets the transports close their sockets
        return True
