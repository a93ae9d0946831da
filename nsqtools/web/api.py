"""nsqadmin's API with its paths and documents, so that scripts can use either.

Intended differences from nsqadmin 1.3.0:

- An unknown topic or channel is 404 ``TOPIC_NOT_FOUND`` or ``CHANNEL_NOT_FOUND``. nsqadmin answers
  502, 200 with an empty document, or 200 with a WARNING. A topic that only nsqlookupd has is
  returned with zeros.
- In the document of a topic, the sums of a channel are a separate object. nsqadmin adds them to the
  numbers of the first nsqd. The ``min`` of a latency is the smallest value.
- Tombstoned nsqd are shown and changed too, and a new topic is created on nsqd given by address.
- A change needs ``--allow-changes``.
- The messages of errors from daemons and for invalid JSON differ.
- There is neither ``/api/graphite`` nor ``/config``.

Documents have nsqadmin's keys. They are of one nsqd, under its announced name, or have
``"node": "*"`` and sums over several. A latency of several nsqd has the mean weighted by count, and
the largest and smallest value.

A body is one JSON object, and any following text is ignored. The Content-Type does not matter, keys
may have any case, and unknown keys are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from nsqtools.cluster.admin import Action, StepResult, TopicChange
from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.cluster.inventory import registered_channels
from nsqtools.cluster.topics import announced_topics, fetch_topics, merge_names, topic_names
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.http.http_api import KnownNode, NsqdHTTPClient
from nsqtools.protocol.names import Address, is_valid_name
from nsqtools.protocol.stats import (
    ChannelStats,
    ClientStats,
    LatencyStats,
    NsqdStats,
    TopicStats,
    document_of,
    go_number,
    read_stats,
)
from nsqtools.protocol.text import go_json, go_members
from nsqtools.web.actions import WebContext

HEADERS = {
    "Content-Type": "application/json; charset=utf-8",
    "X-NSQ-Content-Type": "nsq; version=1.0",
}
CHANGES = {action.value: action for action in (Action.PAUSE, Action.UNPAUSE, Action.EMPTY)}
CODES = {"Not Found": "NOT_FOUND", "Method Not Allowed": "METHOD_NOT_ALLOWED"}

Document = dict[str, Any]


def upstream_error(kind: str, errors: Iterable[object]) -> HTTPException:
    """Return the error for no answer from any daemon of a kind."""
    texts = ", ".join(map(str, errors))
    return HTTPException(502, f"UPSTREAM_ERROR: failed to query any {kind}: {texts}")


def warning(errors: Iterable[NsqError | None]) -> str:
    """Return the text for errors of some daemons, "" without any."""
    texts = "\n".join(map(str, filter(None, errors)))
    return f"WARNING: {texts}" if texts else ""


# -- one nsqd -------------------------------------------------------------------------------------


class Nsqd(NamedTuple):
    """An nsqd with its statistics.

    ``name`` is its broadcast address and HTTP port. ``known`` has its entry at each nsqlookupd, by
    address, and ``info`` the answer of its /info.
    """

    name: str
    hostname: str
    stats: NsqdStats
    known: dict[str, KnownNode]
    info: Document


class NodeAnswers(NamedTuple):
    """The nsqd that answered, in order of host and name, and the failures of the others."""

    nsqds: list[Nsqd]
    failures: list[DaemonFailure]

    @property
    def message(self) -> str:
        """The ``message`` of the answer."""
        return warning(failure.error for failure in self.failures)


def fetch_stats(
    cluster: Cluster,
    topic: str = "",
    channel: str = "",
    *,
    clients: bool = False,
    silent: bool = False,
) -> NodeAnswers:
    """Ask every nsqd for its statistics. Raises ``HTTPException``.

    With ``silent`` the result includes nsqd that do not answer, with their nsqlookupd entries.
    """
    known, nsqds, failures = cluster.discover_nsqds()
    entries = cluster.entries(known)

    def ask(client: NsqdHTTPClient) -> tuple[Document, NsqdStats]:
        return client.info(), client.stats(topic, channel, clients=clients)

    answers, failed = cluster.ask(nsqds, ask)
    failures += failed
    result = []
    for address, (info, stats) in answers.items():
        announced = Address(info["broadcast_address"], info["http_port"])
        name = cluster.names.get(address) or str(announced)
        registered = entries.get(name, {})
        hosts = [*(entry.hostname for entry in registered.values()), str(info.get("hostname", ""))]
        result.append(Nsqd(name, hosts[0], stats, registered, info))
    names = {nsqd.name for nsqd in result}
    for name, registered in entries.items() if silent else ():
        entry = next(iter(registered.values()))
        if name not in names and entry.node.http is not None:
            version = {"version": entry.version}
            result.append(Nsqd(name, entry.hostname, read_stats(version), registered, {}))
    if failures and not result:
        raise not_found(cluster, failures)
    result.sort(key=lambda nsqd: (nsqd.hostname, nsqd.name))
    return NodeAnswers(result, failures)


def not_found(cluster: Cluster, failures: Sequence[DaemonFailure], code: str = "") -> HTTPException:
    """Return 404 if all daemons answered, and the error of the failed ones otherwise."""
    if not failures:
        return HTTPException(404, code)
    silent = [failure for failure in failures if failure.address in cluster.lookupds]
    kind = "nsqlookupd" if silent and len(silent) == len(cluster.lookupds) else "nsqd"
    return upstream_error(kind, [failure.error for failure in failures])


def topic_of(nsqd: Nsqd, topic: TopicStats, now_s: float) -> Document:
    """Return the document of a topic on one nsqd."""
    document = _queue_of(nsqd, topic.topic_name, topic)
    del document["message_bytes"]
    channels = [api_channel(nsqd, topic.topic_name, channel, now_s) for channel in topic.channels]
    return document | {"channels": channels}


def api_channel(nsqd: Nsqd, topic: str, channel: ChannelStats, now_s: float) -> Document:
    """Return the document of a channel on one nsqd."""
    clients = channel.clients and [
        api_client(nsqd.name, client, now_s) for client in channel.clients
    ]
    return _queue_of(nsqd, topic, channel) | {"clients": clients}


def _queue_of(nsqd: Nsqd, topic: str, queue: TopicStats | ChannelStats) -> Document:
    return document_of(queue) | {
        "node": nsqd.name,
        "hostname": nsqd.hostname,
        "topic_name": topic,
        "memory_depth": queue.depth - queue.backend_depth,
        "nodes": None,
        "e2e_processing_latency": latency_of(queue.e2e_processing_latency),
    }


def api_client(node: str, client: ClientStats, now_s: float) -> Document:
    """Return the document of a consumer. ``connected`` is in nanoseconds."""
    connected_ns = (int(now_s) - client.connect_ts) * 1_000_000_000
    document = document_of(client) | {"node": node, "connected": connected_ns}
    del document["state"], document["pub_counts"]
    return document


def latency_of(latency: LatencyStats) -> Document:
    """Return the latency of one nsqd, in nanoseconds."""
    percentiles = latency.percentiles and [
        {
            **dict.fromkeys(("average", "count", "max", "min"), go_number(value)),
            "count": latency.count,
            "quantile": quantile,
            "value": go_number(value),
        }
        for quantile, value in latency.percentiles
    ]
    # nsqadmin leaves these fields empty for one nsqd.
    names = {"topic": "", "channel": "", "host": ""}
    return {"count": latency.count, "percentiles": percentiles, **names}


# -- several nsqd ---------------------------------------------------------------------------------


def sum_queue(parts: Sequence[Document], template: Document, **fields: object) -> Document:
    """Return the sums of a queue over several nsqd, and its document on each nsqd.

    ``template`` is a document of the queue, for its names and keys; ``fields`` override them.
    """
    counts = [name for name, value in template.items() if type(value) is int]
    latencies = [part["e2e_processing_latency"] for part in parts]
    names = template["topic_name"], template.get("channel_name", "")
    return {
        **template,
        "node": "*",
        "hostname": "",
        **{name: sum(part[name] for part in parts) for name in counts},
        "nodes": list(parts),
        "paused": any(part["paused"] for part in parts),
        "e2e_processing_latency": sum_latencies(latencies, *names),
        **fields,
    }


def sum_topic(name: str, topics: Sequence[Document]) -> Document:
    """Return the sums of a topic over several nsqd, or none, and of its channels."""
    channels: dict[str, list[Document]] = {}
    for topic in topics:
        for channel in topic["channels"]:
            channels.setdefault(channel["channel_name"], []).append(channel)
    [empty_topic] = read_stats({"topics": [{"topic_name": name}]}).topics or ()
    sums = [sum_channel(parts) for _, parts in sorted(channels.items())]
    no_nsqd = Nsqd("", "", read_stats({}), {}, {})
    return sum_queue(topics, topic_of(no_nsqd, empty_topic, 0.0), channels=sums)


def sum_channel(channels: Sequence[Document]) -> Document:
    """Return the sums of a channel over several nsqd, with its consumers if requested."""
    clients = [client for channel in channels for client in channel["clients"] or ()]
    return sum_queue(channels, channels[0], clients=clients or None)


def sum_latencies(parts: Sequence[Document], topic: str, channel: str) -> Document:
    """Return the latencies of several nsqd as one document."""
    by_quantile: dict[float, list[Document]] = {}
    for part in parts:
        for percentile in part["percentiles"] or ():
            by_quantile.setdefault(percentile["quantile"], []).append(percentile)
    return {
        "count": sum(part["count"] for part in parts),
        "percentiles": [_mean(percentiles) for percentiles in by_quantile.values()] or None,
        "topic": topic,
        "channel": channel,
        "host": "*",
    }


def _mean(percentiles: Sequence[Document]) -> Document:
    count = sum(percentile["count"] for percentile in percentiles)
    # The minimum 0 of an nsqd without measurements must not count.
    measured = [percentile for percentile in percentiles if percentile["count"]] or percentiles
    total = sum(percentile["average"] * percentile["count"] for percentile in percentiles)
    return {
        "average": go_number(total / count) if count else 0,
        "count": count,
        "max": max(percentile["max"] for percentile in measured),
        "min": min(percentile["min"] for percentile in measured),
        "quantile": percentiles[0]["quantile"],
    }


def node_of(nsqd: Nsqd, newest: str) -> Document:
    """Return an nsqd for the list of nodes. ``newest`` is the highest version in the cluster."""
    host, _, port = nsqd.name.rpartition(":")
    entries = list(nsqd.known.values())
    topics = {topic.topic_name: False for topic in nsqd.stats.topics or () if not entries}
    for entry in entries:
        for topic in entry.topics:
            topics[topic] = topics.get(topic, False) or topic in entry.tombstoned
    addresses = [f"{lookupd}/{entry.remote_address}" for lookupd, entry in nsqd.known.items()]
    return {
        "remote_addresses": addresses or None,
        "remote_address": entries[0].remote_address if entries else "",
        "hostname": nsqd.hostname,
        "broadcast_address": host.strip("[]"),
        "tcp_port": entries[0].node.tcp.port if entries else nsqd.info.get("tcp_port", 0),
        "http_port": int(port),
        "version": nsqd.stats.version,
        "topics": [
            {"topic": topic, "tombstoned": is_hidden} for topic, is_hidden in sorted(topics.items())
        ],
        "out_of_date": nsqd.stats.version != newest,
    }


def newest_version(versions: Iterable[str]) -> str:
    """Return the highest version, "" without any."""

    def order(version: str) -> list[tuple[int, str]]:
        parts = version.replace("-", ".").split(".")
        return [(int(part[:9]), "") if part.isdecimal() else (-1, part) for part in parts]

    return max(versions, key=order, default="")


# -- queries --------------------------------------------------------------------------------------


def list_topics(context: WebContext, request: Request) -> object:
    cluster = context.cluster
    try:
        names, failures = fetch_topics(cluster)
    except NsqError as exc:
        raise upstream_error("nsqlookupd" if cluster.lookupds else "nsqd", [exc]) from exc
    if request.query_params.get("inactive") != "true":
        message = warning(failure.error for failure in failures)
        return {"topics": sorted(names), "message": message}
    # Topics of an nsqd that does not answer are not inactive.
    known, nsqds, failures = cluster.discover_nsqds()
    stats, silent = cluster.ask(nsqds, topic_names)
    idle = names.difference(merge_names(stats), announced_topics(known))
    answers, failed = registered_channels(cluster, cluster.lookupds, idle)
    channels = {
        topic: sorted({channel for answer in answers.values() for channel in answer.get(topic, ())})
        for topic in sorted(idle)
    }
    message = warning(failure.error for failure in (*failures, *silent, *failed))
    return {
        "topics": {topic: names or None for topic, names in channels.items()},
        "message": message,
    }


def show_queue(context: WebContext, request: Request) -> object:
    """Answer for a topic, or for one of its channels."""
    name, channel = request.path_params["topic"], request.path_params.get("channel", "")
    answers = fetch_stats(context.cluster, name, channel, clients=bool(channel))
    topics = [
        topic_of(nsqd, topic_stats, time.time())
        for nsqd in answers.nsqds
        for topic_stats in nsqd.stats.topics or ()
        if topic_stats.topic_name == name
    ]
    channels = [
        topic_stats
        for topic in topics
        for topic_stats in topic["channels"]
        if topic_stats["channel_name"] == channel
    ]
    if not (channels if channel else topics):
        kind = "CHANNEL" if name in fetch_topics(context.cluster)[0] else "TOPIC"
        if channel or kind == "TOPIC":
            raise not_found(context.cluster, answers.failures, f"{kind}_NOT_FOUND")
    document = sum_channel(channels) if channel else sum_topic(name, topics)
    return {**document, "message": answers.message}


def list_nodes(context: WebContext, _: Request) -> object:
    answers = fetch_stats(context.cluster, silent=True)
    newest = newest_version(nsqd.stats.version for nsqd in answers.nsqds)
    nodes = [node_of(nsqd, newest) for nsqd in answers.nsqds]
    return {"nodes": nodes, "message": answers.message}


def show_node(context: WebContext, request: Request) -> object:
    answers = fetch_stats(context.cluster, clients=True)
    name = request.path_params["node"]
    nsqd = next((nsqd for nsqd in answers.nsqds if nsqd.name == name), None)
    if nsqd is None:
        raise not_found(context.cluster, answers.failures, "NODE_NOT_FOUND")
    topics = [topic_of(nsqd, topic, time.time()) for topic in nsqd.stats.topics or ()]
    channels = [channel for topic in topics for channel in topic["channels"]]
    return {
        "node": nsqd.name,
        "topics": topics,
        "total_messages": sum(topic["message_count"] for topic in topics),
        "total_clients": sum(len(channel["clients"] or ()) for channel in channels),
        "message": answers.message,
    }


def count_messages(context: WebContext, _: Request) -> object:
    answers = fetch_stats(context.cluster)
    stats = {
        f"{topic.topic_name}:{channel.channel_name}:{nsqd.name}": {
            "node": nsqd.name,
            "topic_name": topic.topic_name,
            "channel_name": channel.channel_name,
            "message_count": channel.message_count,
        }
        for nsqd in answers.nsqds
        for topic in nsqd.stats.topics or ()
        for channel in topic.channels
    }
    return {"stats": dict(sorted(stats.items())), "message": answers.message}


# -- changes --------------------------------------------------------------------------------------


def create(context: WebContext, request: Request, body: bytes) -> str:
    fields = read_body(body)
    topic, channel = fields.get("topic", ""), fields.get("channel", "")
    if not is_valid_name(topic):
        raise HTTPException(400, "INVALID_TOPIC")
    if channel and not is_valid_name(channel):
        raise HTTPException(400, "INVALID_CHANNEL")
    names = ("", channel) if channel else ("",)
    changes = [TopicChange(action=Action.CREATE, topic=topic, channel=name) for name in names]
    return _make(context, request, *changes)


def act(context: WebContext, request: Request, body: bytes) -> str:
    action = CHANGES.get(read_body(body).get("action", ""))
    if action is None:
        raise HTTPException(400, "INVALID_ACTION")
    return _change_named(context, request, action)


def delete(context: WebContext, request: Request, _: bytes) -> str:
    return _change_named(context, request, Action.DELETE)


def tombstone(context: WebContext, request: Request, body: bytes) -> str:
    try:
        topic = read_body(body).get("topic", "")
    except HTTPException:
        raise HTTPException(400, "INVALID_BODY") from None
    if not is_valid_name(topic):
        raise HTTPException(400, "INVALID_TOPIC")
    change = TopicChange(action=Action.TOMBSTONE, topic=topic, node=request.path_params["node"])
    return _make(context, request, change)


def _change_named(context: WebContext, request: Request, action: Action) -> str:
    names = request.path_params
    for kind, name in names.items():
        if not is_valid_name(name):
            raise HTTPException(404, f"{kind.upper()}_NOT_FOUND")
    return _make(context, request, TopicChange(action=action, **names))


def _make(context: WebContext, request: Request, *changes: TopicChange) -> str:
    results: list[StepResult] = []
    for change in changes:
        try:
            results += context.act(request, change)
        except NotFoundError as exc:
            kind = "NODE" if change.node else "CHANNEL" if change.channel else "TOPIC"
            raise HTTPException(404, f"{kind}_NOT_FOUND") from exc
    errors = [error for _, error in results if error]
    if errors and len(errors) == len(results):
        raise upstream_error("nsqd", errors)
    return warning(errors)


# -- routes ---------------------------------------------------------------------------------------

ApiOperation = Callable[..., object]
ROUTES: dict[str, dict[str, ApiOperation]] = {
    "/topics": {"GET": list_topics, "POST": create},
    "/topics/{topic}": {"GET": show_queue, "POST": act, "DELETE": delete},
    "/topics/{topic}/{channel}": {"GET": show_queue, "POST": act, "DELETE": delete},
    "/nodes": {"GET": list_nodes},
    "/nodes/{node}": {"GET": show_node, "DELETE": tombstone},
    "/counter": {"GET": count_messages},
}


def routes(context: WebContext) -> Mount:
    """Return the routes of ``/api``."""
    handlers: dict[Any, Any] = {
        ConfigurationError: lambda _, error: reply({"message": str(error)}, 400),
        NsqError: lambda _, error: reply({"message": f"UPSTREAM_ERROR: {error}"}, 502),
        HTTPException: _http_error,
    }
    api_routes = [_route(context, path, answers) for path, answers in ROUTES.items()]
    return Mount("/api", Starlette(routes=api_routes, exception_handlers=handlers))


def _route(context: WebContext, path: str, answers: Mapping[str, ApiOperation]) -> Route:
    """Return a route whose answers are made on a thread, because they query the cluster.

    A change is refused before its body is read.
    """

    async def view(request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return reply(await run_in_threadpool(answers["GET"], context, request))
        context.check_changes(request)
        answer, body = answers[request.method], await request.body()
        return reply({"message": await run_in_threadpool(answer, context, request, body)})

    return Route(path, view, methods=list(answers))


def reply(document: object, status: int = 200) -> Response:
    """Return an answer with JSON, in the format of nsqadmin."""
    return Response(go_json(document), status, HEADERS)


def _http_error(_: Request, error: HTTPException) -> Response:
    # The detail of 403 is a sentence for the pages of the console.
    is_forbidden = error.status_code == 403
    message = "FORBIDDEN" if is_forbidden else CODES.get(error.detail, error.detail)
    answer = reply({"message": message}, error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def read_body(body: bytes) -> dict[str, str]:
    """Return the topic, channel and action of a body. Raises ``HTTPException``."""
    text = body.decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text:
        raise HTTPException(400, "EOF")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return go_members(text[:end].encode(), dict.fromkeys(("topic", "channel", "action"), str))
    except (ValueError, RecursionError) as exc:
        raise HTTPException(400, f"invalid JSON ({exc})") from exc
