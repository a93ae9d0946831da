"""The HTTP API of nsqd: publishing, administration, /ping and /info.

Names are checked and found in nsqd's order, which the error codes show: some endpoints answer 404
for a name that could not exist, some 400, and with two spellings.
"""

from __future__ import annotations

import re
import socket
from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.requests import BodiesReader, Incomplete
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.http.foundation import (
    Call,
    Handler,
    Refusal,
    TooLarge,
    empty_reply,
    json_reply,
    plain_reply,
    required,
    text_reply,
    topic_and_channel_arguments,
)
from nsqtools.server.queues.backlog import BackendError
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.record_file import Block
from nsqtools.server.queues.topic import Topic
from nsqtools.server.settings.flag_kinds import seconds_to_ns

_FALSE = ("false", "0")  # of a boolean parameter; anything else is true
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Ports:
    """The real ports, -1 for unix sockets."""

    tcp: int
    http: int


class NsqdHTTP:
    """The handlers; each method is one endpoint."""

    def __init__(self, nsqd: NsqdQueues, ports: Ports) -> None:
        self._nsqd = nsqd
        self._options = nsqd.options
        self._ports = ports

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/ping"): self.ping,
            ("GET", "/info"): self.info,
            ("POST", "/pub"): self.publish,
            ("POST", "/mpub"): self.multi_publish,
            ("POST", "/topic/create"): self.create_topic,
            ("POST", "/topic/delete"): self.delete_topic,
            ("POST", "/topic/empty"): self.empty_topic,
            ("POST", "/topic/pause"): self.pause_topic,
            ("POST", "/topic/unpause"): self.unpause_topic,
            ("POST", "/channel/create"): self.create_channel,
            ("POST", "/channel/delete"): self.delete_channel,
            ("POST", "/channel/empty"): self.empty_channel,
            ("POST", "/channel/pause"): self.pause_channel,
            ("POST", "/channel/unpause"): self.unpause_channel,
        }

    async def ping(self, call: Call) -> Response:
        health = self._nsqd.health
        return plain_reply(health.text, 200 if health.is_well else 500)

    async def info(self, call: Call) -> Response:
        options = self._options
        return json_reply(
            {
                "version": NSQ_VERSION,
                "broadcast_address": options.broadcast_address,
                "hostname": socket.gethostname(),
                "http_port": self._ports.http,
                "tcp_port": self._ports.tcp,
                "start_time": int(self._nsqd.start_time_s),
                "max_heartbeat_interval": seconds_to_ns(options.max_heartbeat_interval),
                "max_output_buffer_size": options.max_output_buffer_size,
                "max_output_buffer_timeout": seconds_to_ns(options.max_output_buffer_timeout),
                "max_deflate_level": options.max_deflate_level,
            }
        )

    # publishing

    async def publish(self, call: Call) -> Response:
        if call.declared_length > self._options.max_msg_size:
            raise Refusal(413, "MSG_TOO_BIG")
        try:
            body = await call.body(self._options.max_msg_size)
        except TooLarge:
            raise Refusal(413, "MSG_TOO_BIG") from None
        if not body:
            raise Refusal(400, "MSG_EMPTY")
        query = call.query()
        topic = await self._publish_topic(query)
        delay_s = self._delay_s(query["defer"]) if "defer" in query else 0.0
        await self._put(topic, topic.new_messages([body]), delay_s)
        return text_reply("OK")

    async def _put(
        self,
        topic: Topic,
        messages: list[bytes],
        delay_s: float = 0.0,
        blocks: Sequence[Block] = (),
    ) -> None:
        try:
            if topic.journal is not None:
                await self._put_durably(topic, messages, delay_s, blocks)
            elif delay_s:
                topic.put_deferred(messages[0], delay_s)
            else:
                topic.put(messages, blocks)
        except BackendError:
            raise Refusal(503, "EXITING") from None

    async def _put_durably(
        self, topic: Topic, messages: list[bytes], delay_s: float, blocks: Sequence[Block]
    ) -> None:
        confirmed: Future[None] = self._nsqd.loop.create_future()

        def done(error: BackendError | None) -> None:
            if confirmed.done():  # the client has left
                return
            if error is None:
                confirmed.set_result(None)
            else:
                confirmed.set_exception(error)

        topic.put_durably(messages, delay_s, done, blocks)
        await confirmed

    def _delay_s(self, text: str) -> float:
        delay_s = int(text) / 1000 if _INTEGER.fullmatch(text) else -1.0
        if not 0 <= delay_s <= self._options.max_req_timeout:
            raise Refusal(400, "INVALID_DEFER")
        return delay_s

    async def multi_publish(self, call: Call) -> Response:
        limit = self._options.max_body_size
        if call.declared_length > limit:
            raise Refusal(413, "BODY_TOO_BIG")
        query = call.query()
        topic = await self._publish_topic(query)
        try:
            body = await call.body(limit)
        except TooLarge:
            raise Refusal(413, "BODY_TOO_BIG") from None
        is_binary = query.get("binary", "false") not in _FALSE
        bodies = self._binary_bodies(body) if is_binary else self._lines(body)
        messages, blocks = await topic.prepare_in_steps(bodies)
        if self._nsqd.topics.get(topic.name) is not topic:  # deleted while the body arrived
            raise Refusal(503, "EXITING")
        await self._put(topic, messages, blocks=blocks)
        return text_reply("OK")

    def _binary_bodies(self, body: bytes) -> list[bytes]:
        reader = BodiesReader(self._options.max_msg_size, self._options.max_body_size)
        try:
            reader.read(body, 0)
        except (RequestError, Incomplete) as exc:
            error = exc.error if isinstance(exc, Incomplete) else exc
            code = error.data.split(b" ")[0].decode() if error is not None else "E_BAD_BODY"
            raise Refusal(413, code.removeprefix("E_")) from None
        return reader.bodies

    def _lines(self, body: bytes) -> list[bytes]:
        bodies = [line for line in body.split(b"\n") if line]
        if any(len(line) > self._options.max_msg_size for line in bodies):
            raise Refusal(413, "MSG_TOO_BIG")
        return bodies

    async def _publish_topic(self, query: dict[str, str]) -> Topic:
        name = required(query, "topic")
        if not is_valid_name(name):
            raise Refusal(400, "INVALID_TOPIC")
        topic = self._nsqd.get_topic(name)
        await topic.started.wait()
        return topic

    # topics

    def _existing_topic(self, name: str) -> Topic:
        topic = self._nsqd.topics.get(name)
        if topic is None:
            raise Refusal(404, "TOPIC_NOT_FOUND")
        return topic

    async def create_topic(self, call: Call) -> Response:
        await self._publish_topic(call.query())
        return empty_reply()

    async def delete_topic(self, call: Call) -> Response:
        name = required(call.query(), "topic")
        self._existing_topic(name)
        self._nsqd.delete_topic(name)
        return empty_reply()

    async def empty_topic(self, call: Call) -> Response:
        name = required(call.query(), "topic")
        if not is_valid_name(name):
            raise Refusal(400, "INVALID_TOPIC")
        self._existing_topic(name).empty()
        return empty_reply()

    async def pause_topic(self, call: Call) -> Response:
        topic = self._existing_topic(required(call.query(), "topic"))
        topic.pause()
        await self._nsqd.topic_list.write_pause(topic.name)
        return empty_reply()

    async def unpause_topic(self, call: Call) -> Response:
        topic = self._existing_topic(required(call.query(), "topic"))
        topic.unpause()
        await self._nsqd.topic_list.write_pause(topic.name)
        return empty_reply()

    # channels

    def _topic_and_channel_name(self, call: Call) -> tuple[Topic, str]:
        topic_name, channel_name = topic_and_channel_arguments(call.query())
        return self._existing_topic(topic_name), channel_name

    def _existing_channel(self, call: Call) -> Channel:
        topic, name = self._topic_and_channel_name(call)
        channel = topic.channels.get(name)
        if channel is None:
            raise Refusal(404, "CHANNEL_NOT_FOUND")
        return channel

    async def create_channel(self, call: Call) -> Response:
        topic, name = self._topic_and_channel_name(call)
        topic.get_channel(name)
        return empty_reply()

    async def delete_channel(self, call: Call) -> Response:
        channel = self._existing_channel(call)
        self._nsqd.topics[channel.topic_name].delete_channel(channel.name)
        return empty_reply()

    async def empty_channel(self, call: Call) -> Response:
        self._existing_channel(call).empty()
        return empty_reply()

    async def pause_channel(self, call: Call) -> Response:
        channel = self._existing_channel(call)
        channel.pause()
        await self._nsqd.topic_list.write_pause(channel.topic_name)
        return empty_reply()

    async def unpause_channel(self, call: Call) -> Response:
        channel = self._existing_channel(call)
        channel.unpause()
        await self._nsqd.topic_list.write_pause(channel.topic_name)
        return empty_reply()
