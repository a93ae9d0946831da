"""The HTTP API of nsqlookupd: what consumers ask, and what administrators change."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from nsqtools.protocol.text import go_json
from nsqtools.records.prometheus import metric_lines
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog
from nsqtools.server.http.foundation import (
    EMPTY_REPLY,
    Call,
    Handler,
    Refusal,
    Reply,
    json_reply,
    metrics_reply,
    plain_reply,
    raw_json_reply,
    required,
    topic_and_channel_arguments,
    topic_argument,
)
from nsqtools.server.loop_meter import meter_of
from nsqtools.server.queues.steps import in_steps, page_in_steps
from nsqtools.server.registrations import RegisteredNsqd, Registrations, steady_ns
from nsqtools.server.stats import nsqlookupd_metrics
from nsqtools.server.tcp.client_connection import ClientConnection

_NEVER_NS = -6795364578871345152  # Go's zero time, as its UnixNano prints it


class NsqlookupdHTTP:
    """The handlers; each method is one endpoint."""

    def __init__(
        self,
        registrations: Registrations,
        connections: Collection[ClientConnection],
        log: DaemonLog,
    ) -> None:
        self._registrations = registrations
        self._connections = connections
        self._log = log

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/ping"): self.ping,
            ("GET", "/info"): self.info,
            ("GET", "/metrics"): self.metrics,
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

    def ping(self, call: Call) -> Reply:
        return plain_reply("OK")

    def info(self, call: Call) -> Reply:
        return json_reply({"version": NSQ_VERSION})

    async def metrics(self, call: Call) -> Reply:
        loop = asyncio.get_running_loop()
        families = nsqlookupd_metrics(self._registrations, len(self._connections), meter_of(loop))
        lines = metric_lines(families)
        return metrics_reply(await page_in_steps(lines, loop))

    # queries

    def lookup(self, call: Call) -> Reply:
        topic = required(call.query(), "topic")
        try:
            producers = self._registrations.producers(topic, steady_ns())
        except KeyError:
            raise Refusal(404, "TOPIC_NOT_FOUND") from None
        channels = self._registrations.channels(topic)
        described = b",".join(map(_described, producers))
        return raw_json_reply(b'{"channels":%b,"producers":[%b]}' % (go_json(channels), described))

    def topics(self, call: Call) -> Reply:
        return json_reply({"topics": self._registrations.topics()})

    def channels(self, call: Call) -> Reply:
        topic = required(call.query(), "topic")
        return json_reply({"channels": self._registrations.channels(topic)})

    def nodes(self, call: Call) -> Reply:
        nodes = [
            b'%b,"tombstones":%b,"topics":%b}'
            % (_described(node.peer)[:-1], go_json(node.tombstones), go_json(node.topics))
            for node in self._registrations.nodes(steady_ns())
        ]
        return raw_json_reply(b'{"producers":[%b]}' % b",".join(nodes))

    async def debug(self, call: Call) -> Reply:
        entries = {":".join(name): found for name, found in self._registrations.entries() if found}
        loop = asyncio.get_running_loop()
        pieces = [
            go_json(name) + b":" + go_json([_registered(*each) for each in list(found.items())])
            async for name, found in in_steps(
                sorted(entries.items(), key=lambda entry: entry[0]), loop
            )
        ]
        return raw_json_reply(b"{" + b",".join(pieces) + b"}")

    # administration

    def create_topic(self, call: Call) -> Reply:
        topic = topic_argument(call.query())
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_topic(topic)
        return EMPTY_REPLY

    def delete_topic(self, call: Call) -> Reply:
        topic = required(call.query(), "topic")
        for _, name, channel in self._registrations.delete_topic(topic):
            what = f"channel({channel}) from topic({name})" if channel else f"topic({name})"
            self._log.info(f"DB: removing {what}")
        return EMPTY_REPLY

    def tombstone_topic_producer(self, call: Call) -> Reply:
        query = call.query()
        topic, node = required(query, "topic"), required(query, "node")
        self._log.info(f"DB: setting tombstone for producer@{node} of topic({topic})")
        self._registrations.tombstone(topic, node, steady_ns())
        return EMPTY_REPLY

    def create_channel(self, call: Call) -> Reply:
        topic, channel = topic_and_channel_arguments(call.query())
        self._log.info(f"DB: adding channel({channel}) in topic({topic})")
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_channel(topic, channel)
        return EMPTY_REPLY

    def delete_channel(self, call: Call) -> Reply:
        topic, channel = topic_and_channel_arguments(call.query())
        try:
            self._registrations.delete_channel(topic, channel)
        except KeyError:
            raise Refusal(404, "CHANNEL_NOT_FOUND") from None
        self._log.info(f"DB: removing channel({channel}) from topic({topic})")
        return EMPTY_REPLY


def _registered(peer: RegisteredNsqd, tombstoned_ns: int | None) -> dict[str, object]:
    return {
        "broadcast_address": peer.info.broadcast_address,
        "hostname": peer.info.hostname,
        "http_port": peer.info.http_port,
        "id": peer.remote_address,
        "last_update": peer.last_update_ns,
        "tcp_port": peer.info.tcp_port,
        "tombstoned": tombstoned_ns is not None,
        "tombstoned_at": _NEVER_NS if tombstoned_ns is None else tombstoned_ns,
        "version": peer.info.version,
    }


def _described(peer: RegisteredNsqd) -> bytes:
    """Return the JSON object of a producer, which never changes: a hundred of them take a while."""
    if not peer.described:
        info = peer.info
        document = {
            "remote_address": peer.remote_address,
            "hostname": info.hostname,
            "broadcast_address": info.broadcast_address,
            "tcp_port": info.tcp_port,
            "http_port": info.http_port,
            "version": info.version,
        }
        peer.described = go_json(document)
    return peer.described
