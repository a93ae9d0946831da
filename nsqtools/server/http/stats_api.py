"""GET /stats and /config: what this nsqd says of itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import fields

from starlette.responses import Response

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.addresses import announced_host, parse_address
from nsqtools.records.prometheus import metric_lines
from nsqtools.server.daemon_log import version_line
from nsqtools.server.http.foundation import (
    Call,
    Handler,
    Refusal,
    TooLarge,
    json_reply,
    metrics_reply,
    raw_json_reply,
    text_reply,
)
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.steps import in_steps, page_in_steps
from nsqtools.server.settings.flag_kinds import LOG_LEVEL
from nsqtools.server.stats.gather import gather_stats
from nsqtools.server.stats.metrics import nsqd_metrics
from nsqtools.server.stats.text_page import stats_lines
from nsqtools.server.tcp.client_connection import ClientConnection
from nsqtools.server.tcp.protocol_v2 import ProtocolV2

_FALSE = ("false", "0")  # of a boolean parameter; anything else is true


class StatsHTTP:
    """The handlers of /stats and /config.

    ``resolved`` are option values that differ from what was given (``statsd_prefix`` expanded, real
    ports); ``set_lookupds`` connects to another list of nsqlookupd.
    """

    def __init__(
        self,
        nsqd: NsqdQueues,
        clients: Collection[ProtocolV2],
        connections: Collection[ClientConnection],
        resolved: dict[str, object],
        set_lookupds: Callable[[list[str]], None],
    ) -> None:
        self._nsqd = nsqd
        self._clients = clients
        self._connections = connections
        self._resolved = resolved
        self._set_lookupds = set_lookupds

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/stats"): self.stats,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/config/:option"): self.config,
            ("PUT", "/config/:option"): self.set_config,
        }

    async def stats(self, call: Call) -> Response:
        query = call.query()
        stats = await gather_stats(
            self._nsqd,
            self._clients,
            topic=query.get("topic", ""),
            channel=query.get("channel", ""),
            with_clients=query.get("include_clients") not in _FALSE,
            with_memory=query.get("include_mem") not in _FALSE,
        )
        if query.get("format") == "json":
            pieces = [piece async for piece in in_steps(stats.encoded(), self._nsqd.loop)]
            return raw_json_reply(b"".join(pieces))
        start_ns = int(self._nsqd.start_time_s * 1e9)
        lines = stats_lines(stats, version_line("nsqd"), time.time_ns(), start_ns)
        return text_reply(await page_in_steps(lines, self._nsqd.loop))

    async def metrics(self, call: Call) -> Response:
        lines = metric_lines(nsqd_metrics(self._nsqd, len(self._connections)))
        return metrics_reply(await page_in_steps(lines, self._nsqd.loop))

    async def config(self, call: Call) -> Response:
        return self._show(call.option)

    def _show(self, option: str) -> Response:
        if option == "log_level":
            return json_reply(LOG_LEVEL.wire(self._nsqd.log.level))
        if option in self._resolved:
            value = self._resolved[option]
        else:
            value = self._given(option)
        return text_reply(value) if isinstance(value, str) else json_reply(value)

    def _given(self, option: str) -> object:
        for field in fields(self._nsqd.options):
            if (field.metadata["key"] or field.name) == option:
                return field.metadata["kind"].wire(getattr(self._nsqd.options, field.name))
        raise Refusal(400, "INVALID_OPTION")

    async def set_config(self, call: Call) -> Response:
        try:
            body = await call.body(self._nsqd.options.max_msg_size)
        except TooLarge:
            body = b""
        if not body:
            raise Refusal(413, "INVALID_VALUE")
        if call.option == "nsqlookupd_tcp_addresses":
            addresses = _string_list(body)
            self._resolved[call.option] = addresses
            self._set_lookupds(addresses or [])
        elif call.option == "log_level":
            try:
                self._nsqd.log.level = LOG_LEVEL.parse(body.decode("latin-1"))
            except ValueError:
                raise Refusal(400, "INVALID_VALUE") from None
        else:
            raise Refusal(400, "INVALID_OPTION")
        return self._show(call.option)


def _string_list(body: bytes) -> list[str] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "INVALID_VALUE") from None
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(_is_address, value)):
        raise Refusal(400, "INVALID_VALUE")
    return value


def _is_address(item: object) -> bool:
    try:
        return isinstance(item, str) and bool(announced_host(parse_address(item).host))
    except (ConfigurationError, ValueError):
        return False
