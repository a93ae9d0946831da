"""The HTTP API of nsqlookupd: what consumers ask, and what administrators change."""

from __future__ import annotations

import time

from starlette.responses import Response

from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog
from nsqtools.server.http.foundation import (
    Call,
    Handler,
    Refusal,
    empty_reply,
    json_reply,
    plain_reply,
    required,
    topic_and_channel_arguments,
    topic_argument,
)
from nsqtools.server.lookup.registrations import RegisteredNsqd, Registrations

_NEVER_NS = -6795364578871345152  # Go's zero time, as its UnixNano prints it


class NsqlookupdHTTP:
    """The handlers; each method is one endpoint."""

    def __init__(self, registrations: Registrations, log: DaemonLog) -> None:
        self._registrations = registrations
        self._log = log

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/ping"): self.ping,
            ("GET", "/info"): self.info,
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

    async def ping(self, call: Call) -> Response:
        return plain_reply("OK")

    async def info(self, call: Call) -> Response:
        return json_reply({"version": NSQ_VERSION})

    # queries

    async def lookup(self, call: Call) -> Response:
        topic = required(call.query(), "topic")
        try:
            producers = self._registrations.producers(topic, time.time_ns())
        except KeyError:
            raise Refusal(404, "TOPIC_NOT_FOUND") from None
        channels = self._registrations.channels(topic)
        return json_reply({"channels": channels, "producers": list(map(_described, producers))})

    async def topics(self, call: Call) -> Response:
        return json_reply({"topics": self._registrations.topics()})

    async def channels(self, call: Call) -> Response:
        topic = required(call.query(), "topic")
        return json_reply({"channels": self._registrations.channels(topic)})

    async def nodes(self, call: Call) -> Response:
        nodes = [
            {**_described(node.peer), "tombstones": node.tombstones, "topics": node.topics}
            for node in self._registrations.nodes(time.time_ns())
        ]
        return json_reply({"producers": nodes})

    async def debug(self, call: Call) -> Response:
        entries = {
            ":".join(registration): [
                {
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
                for peer, tombstoned_ns in producers.items()
            ]
            for registration, producers in self._registrations.entries()
            if producers
        }
        return json_reply(dict(sorted(entries.items())))

    # administration

    async def create_topic(self, call: Call) -> Response:
        topic = topic_argument(call.query())
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_topic(topic)
        return empty_reply()

    async def delete_topic(self, call: Call) -> Response:
        topic = required(call.query(), "topic")
        for _, name, channel in self._registrations.delete_topic(topic):
            what = f"channel({channel}) from topic({name})" if channel else f"topic({name})"
            self._log.info(f"DB: removing {what}")
        return empty_reply()

    async def tombstone_topic_producer(self, call: Call) -> Response:
        query = call.query()
        topic, node = required(query, "topic"), required(query, "node")
        self._log.info(f"DB: setting tombstone for producer@{node} of topic({topic})")
        self._registrations.tombstone(topic, node, time.time_ns())
        return empty_reply()

    async def create_channel(self, call: Call) -> Response:
        topic, channel = topic_and_channel_arguments(call.query())
        self._log.info(f"DB: adding channel({channel}) in topic({topic})")
        self._log.info(f"DB: adding topic({topic})")
        self._registrations.create_channel(topic, channel)
        return empty_reply()

    async def delete_channel(self, call: Call) -> Response:
        topic, channel = topic_and_channel_arguments(call.query())
        try:
            self._registrations.delete_channel(topic, channel)
        except KeyError:
            raise Refusal(404, "CHANNEL_NOT_FOUND") from None
        self._log.info(f"DB: removing channel({channel}) from topic({topic})")
        return empty_reply()


def _described(peer: RegisteredNsqd) -> dict[str, object]:
    info = peer.info
    return {
        "remote_address": peer.remote_address,
        "hostname": info.hostname,
        "broadcast_address": info.broadcast_address,
        "tcp_port": info.tcp_port,
        "http_port": info.http_port,
        "version": info.version,
    }
