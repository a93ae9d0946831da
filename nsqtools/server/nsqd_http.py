"""The HTTP API of nsqd: publishing, administration, /stats, /config, /ping and /info.

Names are checked and looked up in nsqd's order, because the error codes depend on it. For an
invalid name some endpoints answer 404 and others 400, with two different texts.
"""

from __future__ import annotations

import json
import re
import socket
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial

from nsqtools.errors import ConfigurationError
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
    text_response,
)
from nsqtools.http.loop_meter import in_steps, list_in_steps, page_in_steps
from nsqtools.protocol.frames import RequestError
from nsqtools.protocol.names import announced_host, parse_address, shown_url
from nsqtools.protocol.requests import (
    LARGE_COUNT,
    Batches,
    BodiesReader,
    Incomplete,
)
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.go_flags import LOG_LEVEL, seconds_to_ns
from nsqtools.server.protocol_v2 import ClientContext
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.topic import Topic
from nsqtools.server.stats import gather_stats, nsqd_metrics, stats_lines

_FALSE = ("false", "0")  # of a boolean parameter; all other values are true

# The largest body of /mpub that is read within one iteration of the loop. Larger ones are read in
# steps of `_STEP_BYTES`.
_MAX_BODY_AT_ONCE = 1 << 17
_STEP_BYTES = 1 << 14
_MAX_SETTING_BYTES = 1 << 15  # 2,000 addresses, which take 20 ms to check
_PUBLISHED = text_response("OK")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class NsqdHTTP:
    """The handlers. Each method is one endpoint.

    ``ports`` are the bound ports of TCP and HTTP, -1 for unix sockets. ``resolved`` are the values
    of options that differ from the options themselves: an expanded prefix and bound ports.
    """

    def __init__(
        self, context: ClientContext, ports: tuple[int, int], resolved: dict[str, object]
    ) -> None:
        self._context = context
        self._nsqd = context.nsqd
        self._options = options = context.nsqd.options
        self._ports = ports
        self._config = resolved | {
            "auth_http_addresses": [*map(shown_url, options.auth_http_address)]
        }
        for option in fields(options):
            value = option.metadata["kind"].wire(getattr(options, option.name))
            self._config.setdefault(option.metadata["key"] or option.name, value)

    def body_limits(self) -> dict[RouteHandler, int]:
        """Return the largest body of the handlers that read one."""
        options = self._options
        return {
            self.publish: options.max_msg_size,
            self.multi_publish: options.max_body_size,
            self.set_config: min(options.max_msg_size, _MAX_SETTING_BYTES),
        }

    def handlers(self) -> dict[tuple[str, str], RouteHandler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/ping"): self.ping,
            ("GET", "/info"): self.info,
            ("GET", "/stats"): self.stats,
            ("GET", "/metrics"): self.metrics,
            **DEBUG_HANDLERS,
            ("GET", "/config/:option"): self.config,
            ("PUT", "/config/:option"): self.set_config,
            ("POST", "/pub"): self.publish,
            ("POST", "/mpub"): self.multi_publish,
            ("POST", "/topic/create"): self.create_topic,
            ("POST", "/topic/delete"): self.delete_topic,
            ("POST", "/topic/empty"): self.empty_topic,
            ("POST", "/topic/pause"): partial(self.pause_topic, True),
            ("POST", "/topic/unpause"): partial(self.pause_topic, False),
            ("POST", "/channel/create"): self.create_channel,
            ("POST", "/channel/delete"): self.delete_channel,
            ("POST", "/channel/empty"): self.empty_channel,
            ("POST", "/channel/pause"): partial(self.pause_channel, True),
            ("POST", "/channel/unpause"): partial(self.pause_channel, False),
        }

    # information

    def ping(self, request: Request) -> Response:
        health = self._nsqd.health
        return plain_response(health.text, 200 if health.is_well else 500)

    def info(self, request: Request) -> Response:
        options = self._options
        return json_response(
            {
                "version": NSQ_VERSION,
                "broadcast_address": options.broadcast_address,
                "hostname": socket.gethostname(),
                "http_port": self._ports[1],
                "tcp_port": self._ports[0],
                "start_time": int(self._nsqd.start_time_s),
                "max_heartbeat_interval": seconds_to_ns(options.max_heartbeat_interval),
                "max_output_buffer_size": options.max_output_buffer_size,
                "max_output_buffer_timeout": seconds_to_ns(options.max_output_buffer_timeout),
                "max_deflate_level": options.max_deflate_level,
            }
        )

    async def stats(self, request: Request) -> Response:
        query = request.query()
        stats = await gather_stats(
            self._context,
            topic=query.get("topic", ""),
            channel=query.get("channel", ""),
            with_clients=query.get("include_clients") not in _FALSE,
            with_memory=query.get("include_mem") not in _FALSE,
        )
        if query.get("format") == "json":
            return raw_json_response(b"".join(await list_in_steps(stats.encoded())))
        start_ns = int(self._nsqd.start_time_s * 1e9)
        return text_response(await page_in_steps(stats_lines(stats, start_ns)))

    def metrics(self, request: Request) -> Awaitable[Response]:
        return metrics_response(nsqd_metrics(self._context))

    def config(self, request: Request) -> Response:
        option = request.option
        if option == "log_level":
            return json_response(LOG_LEVEL.wire(self._nsqd.log.level))
        if option not in self._config:
            raise HTTPRefusal(400, "INVALID_OPTION")
        value = self._config[option]
        return text_response(value) if isinstance(value, str) else json_response(value)

    def set_config(self, request: Request) -> Response:
        body = request.body
        if not body:
            raise HTTPRefusal(413, "INVALID_VALUE")
        if request.option == "nsqlookupd_tcp_addresses":
            addresses = _string_list(body)
            self._config[request.option] = addresses
            self._nsqd.registry.set_addresses(addresses or [])
        elif request.option == "log_level":
            try:
                self._nsqd.log.level = LOG_LEVEL.parse(body.decode("latin-1"))
            except ValueError:
                raise HTTPRefusal(400, "INVALID_VALUE") from None
        else:
            raise HTTPRefusal(400, "INVALID_OPTION")
        return self.config(request)

    # publishing

    def publish(self, request: Request) -> Response | Awaitable[Response]:
        body = request.body
        if body is None:
            raise HTTPRefusal(413, "MSG_TOO_BIG")
        if not body:
            raise HTTPRefusal(400, "MSG_EMPTY")
        topic = self._publish_topic(request)
        # A query without "&" is the topic only, and need not be parsed again.
        query = request.query() if "&" in request.query_string else {}
        delay_s = self._delay_s(query["defer"]) if "defer" in query else 0.0
        if delay_s or not topic.started.is_set():
            return self._publish_deferred(topic, body, delay_s)
        return self._respond(lambda: topic.publish([body]))

    def _respond(
        self, publish: Callable[[], Future[None] | None]
    ) -> Response | Awaitable[Response]:
        try:
            stored = publish()
        except BackendError:
            raise HTTPRefusal(503, "EXITING") from None
        return _PUBLISHED if stored is None else self._respond_later(stored)

    async def _respond_later(self, stored: Future[None]) -> Response:
        try:
            await stored
        except BackendError:
            raise HTTPRefusal(503, "EXITING") from None
        return _PUBLISHED

    def _delay_s(self, text: str) -> float:
        delay_s = int(text) / 1000 if _INTEGER.fullmatch(text) else -1.0
        if not 0 <= delay_s <= self._options.max_req_timeout:
            raise HTTPRefusal(400, "INVALID_DEFER")
        return delay_s

    def multi_publish(self, request: Request) -> Response | Awaitable[Response]:
        if request.declared_length > self._options.max_body_size:
            raise HTTPRefusal(413, "BODY_TOO_BIG")
        topic = self._publish_topic(request)
        body = request.body
        if body is None:
            raise HTTPRefusal(413, "BODY_TOO_BIG")
        is_binary = request.query().get("binary", "false") not in _FALSE
        if len(body) <= _MAX_BODY_AT_ONCE and topic.started.is_set():
            bodies = self._read_few(body, is_binary)
            if len(bodies) <= LARGE_COUNT:
                return self._respond(lambda: topic.publish(bodies))
        return self._publish_in_steps(topic, body, is_binary)

    async def _publish_deferred(self, topic: Topic, body: bytes, delay_s: float) -> Response:
        await topic.started.wait()
        response = self._respond(lambda: topic.put(topic.new_messages([body]), delay_s))
        return response if isinstance(response, Response) else await response

    async def _publish_in_steps(self, topic: Topic, body: bytes, is_binary: bool) -> Response:
        await topic.started.wait()
        read = self._read_binary if is_binary else self._read_lines
        try:
            stored = await topic.put_in_steps(*await read(body))
        except BackendError:
            raise HTTPRefusal(503, "EXITING") from None
        return _PUBLISHED if stored is None else await self._respond_later(stored)

    def _read_few(self, body: bytes, is_binary: bool) -> list[bytes]:
        """Return the messages of a small body."""
        if is_binary:
            reader = BodiesReader(self._options.max_msg_size, self._options.max_body_size)
            for _ in _read_in_steps(reader, body):
                pass
            return [body for batch in reader.batches() for body in batch]
        lines = [line for line in body.split(b"\n") if line]
        self._check_lines(lines)
        return lines

    async def _read_binary(self, body: bytes) -> tuple[int, int, Batches]:
        """Return the number, the total size and the batches of the messages."""
        reader = BodiesReader(self._options.max_msg_size, self._options.max_body_size)
        async for _ in in_steps(_read_in_steps(reader, body)):
            pass
        return reader.count, reader.size, reader.batches

    async def _read_lines(self, body: bytes) -> tuple[int, int, Batches]:
        """Return the number, the total size and the batches of the lines that are not empty."""
        count = size = 0
        async for lines in in_steps(_split_lines(body)):
            self._check_lines(lines)
            count += len(lines)
            size += sum(map(len, lines))
        return count, size, partial(_split_lines, body)

    def _check_lines(self, lines: list[bytes]) -> None:
        if max(map(len, lines), default=0) > self._options.max_msg_size:
            raise HTTPRefusal(413, "MSG_TOO_BIG")

    def _publish_topic(self, request: Request) -> Topic:
        return self._nsqd.get_topic(request.argument("topic", "INVALID_TOPIC"))

    # topics

    def _existing_topic(self, name: str) -> Topic:
        topic = self._nsqd.topics.get(name)
        if topic is None:
            raise HTTPRefusal(404, "TOPIC_NOT_FOUND")
        return topic

    async def create_topic(self, request: Request) -> None:
        await self._publish_topic(request).started.wait()

    def delete_topic(self, request: Request) -> None:
        self._nsqd.delete_topic(self._existing_topic(request.argument("topic")).name)

    def empty_topic(self, request: Request) -> None:
        self._existing_topic(request.argument("topic", "INVALID_TOPIC")).empty()

    async def pause_topic(self, is_paused: bool, request: Request) -> None:
        topic = self._existing_topic(request.argument("topic"))
        topic.set_paused(is_paused)
        await self._nsqd.write_pause(topic.name)

    # channels

    def _existing_channel(self, request: Request) -> Channel:
        topic, name = request.topic_and_channel()
        channel = self._existing_topic(topic).channels.get(name)
        if channel is None:
            raise HTTPRefusal(404, "CHANNEL_NOT_FOUND")
        return channel

    def create_channel(self, request: Request) -> None:
        topic, name = request.topic_and_channel()
        self._existing_topic(topic).get_channel(name)

    def delete_channel(self, request: Request) -> None:
        channel = self._existing_channel(request)
        self._nsqd.topics[channel.topic_name].delete_channel(channel.name)

    def empty_channel(self, request: Request) -> None:
        self._existing_channel(request).empty()

    async def pause_channel(self, is_paused: bool, request: Request) -> None:
        channel = self._existing_channel(request)
        channel.set_paused(is_paused)
        await self._nsqd.write_pause(channel.topic_name)


def _read_in_steps(reader: BodiesReader, body: bytes) -> Iterator[None]:
    """Read a binary body in steps, and yield after each. Raises `HTTPRefusal`."""
    start, end = 0, _STEP_BYTES
    while True:
        try:
            reader.read(body[start:end], 0)
            return
        except (Incomplete, RequestError) as exc:
            start += exc.position if isinstance(exc, Incomplete) else 0
            if isinstance(exc, RequestError) or start + exc.needed > len(body):
                error = exc if isinstance(exc, RequestError) else exc.error
                code = error.data.split(b" ")[0].decode() if error is not None else "E_BAD_BODY"
                raise HTTPRefusal(413, code.removeprefix("E_")) from None
            end = start + max(exc.needed, _STEP_BYTES)
        yield


def _split_lines(body: bytes) -> Iterator[list[bytes]]:
    """Yield batches of the lines that are not empty, of at least 4 KiB."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start + _STEP_BYTES // 4)
        end = end if end >= 0 else len(body)
        if lines := [line for line in body[start:end].split(b"\n") if line]:
            yield lines
        start = end + 1


def _string_list(body: bytes) -> list[str] | None:
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        if value is None or (isinstance(value, list) and all(map(_is_address, value))):
            return value
    raise HTTPRefusal(400, "INVALID_VALUE")


def _is_address(item: object) -> bool:
    try:
        return isinstance(item, str) and bool(announced_host(parse_address(item).host))
    except (ConfigurationError, ValueError):
        return False
