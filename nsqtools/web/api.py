"""nsqadmin's API with its paths and answers, for scripts that move over.

What differs from nsqadmin 1.3.0, on purpose:

- An unknown topic or channel is 404 ``TOPIC_NOT_FOUND`` or ``CHANNEL_NOT_FOUND``; nsqadmin says
  502, 200 without anything, or 200 with a WARNING. A topic that only nsqlookupd knows has zeros.
- In the answer for a topic the sums of a channel are an object of their own, and every nsqd keeps
  its numbers; nsqadmin adds them into those of the first. The smallest latency is the smallest.
- Tombstoned nsqd are shown and changed too, and a new topic is made on nsqd given by address.
- A change needs ``--allow-changes``.
- The texts of errors of daemons and of broken JSON are ours.
- There is neither ``/api/graphite`` nor ``/config``.

Documents have nsqadmin's keys. They are those of one nsqd, under the name that it
announces, or with ``"node": "*"`` sums over several. A latency that is summed has the mean weighed
by count, and the largest and smallest of the nsqd.

A body is one JSON object, whatever follows. The Content-Type does not matter, keys may have any
case, and unknown ones are ignored.
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
    """No daemon answered."""
    texts = ", ".join(map(str, errors))
    return HTTPException(502, f"UPSTREAM_ERROR: failed to query any {kind}: {texts}")


def warning(errors: Iterable[NsqError | None]) -> str:
    """Return the text for errors of some daemons, "" without any."""
    texts = "\n".join(map(str, filter(None, errors)))
    return f"WARNING: {texts}" if texts else ""


# -- one nsqd -------------------------------------------------------------------------------------


class Nsqd(NamedTuple):
    """One nsqd and what it says. ``name`` is its broadcast address and HTTP port; ``known`` what
    each nsqlookupd, by address, says of it; ``info`` what it says of itself."""

    name: str
    hostname: str
    stats: NsqdStats
    known: dict[str, KnownNode]
    info: Document


class NodeAnswers(NamedTuple):
    """The nsqd that answered, by host and name, and who did not."""

    nsqds: list[Nsqd]
    failures: list[DaemonFailure]

    @property
    def message(self) -> str:
        """What the answer has under ``message``."""
        return warning(failure.error for failure in self.failures)


def gather(
    cluster: Cluster,
    topic: str = "",
    channel: str = "",
    *,
    clients: bool = False,
    silent: bool = False,
) -> NodeAnswers:
    """Ask every nsqd for its statistics. Raises ``HTTPException``.

    With ``silent`` those that do not answer are there, too, as nsqlookupd knows them.
    """
    known, nsqds, failures = cluster.discover_nsqds()
    entries = cluster.entries(known)

    def ask(client: NsqdHTTPClient) -> tuple[Document, NsqdStats]:
        return client.info(), client.stats(topic, channel, clients=clients)

    answers, failed = cluster.ask(nsqds, ask)
    failures += failed
    found = []
    for address, (info, stats) in answers.items():
        told = Address(info["broadcast_address"], info["http_port"])
        name = cluster.names.get(address) or str(told)
        registered = entries.get(name, {})
        hosts = [*(entry.hostname for entry in registered.values()), str(info.get("hostname", ""))]
        found.append(Nsqd(name, hosts[0], stats, registered, info))
    names = {nsqd.name for nsqd in found}
    for name, registered in entries.items() if silent else ():
        entry = next(iter(registered.values()))
        if name not in names and entry.node.http is not None:
            version = {"version": entry.version}
            found.append(Nsqd(name, entry.hostname, read_stats(version), registered, {}))
    if failures and not found:
        raise not_found(cluster, failures)
    found.sort(key=lambda nsqd: (nsqd.hostname, nsqd.name))
    return NodeAnswers(found, failures)


def not_found(cluster: Cluster, failures: Sequence[DaemonFailure], code: str = "") -> HTTPException:
    """Return the error for what no daemon has, or none that answers."""
    if not failures:
        return HTTPException(404, code)
    silent = [failure for failure in failures if failure.address in cluster.lookupds]
    kind = "nsqlookupd" if silent and len(silent) == len(cluster.lookupds) else "nsqd"
    return upstream_error(kind, [failure.error for failure in failures])


def topic_of(nsqd: Nsqd, topic: TopicStats, now_s: float) -> Document:
    """A topic on one nsqd."""
    document = _queue_of(nsqd, topic.topic_name, topic)
    del document["message_bytes"]
    channels = [channel_of(nsqd, topic.topic_name, channel, now_s) for channel in topic.channels]
    return document | {"channels": channels}


def channel_of(nsqd: Nsqd, topic: str, channel: ChannelStats, now_s: float) -> Document:
    """A channel on one nsqd."""
    clients = channel.clients and [
        client_of(nsqd.name, client, now_s) for client in channel.clients
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


def client_of(node: str, client: ClientStats, now_s: float) -> Document:
    """A consumer; ``connected`` is in nanoseconds."""
    connected_ns = (int(now_s) - client.connect_ts) * 1_000_000_000
    document = document_of(client) | {"node": node, "connected": connected_ns}
    del document["state"], document["pub_counts"]
    return document


def latency_of(latency: LatencyStats) -> Document:
    """The latency of one nsqd, in nanoseconds."""
    given = latency.percentiles
    percentiles = given and [
        {
            **dict.fromkeys(("average", "count", "max", "min"), go_number(value)),
            "count": latency.count,
            "quantile": quantile,
            "value": go_number(value),
        }
        for quantile, value in given
    ]
    nowhere = {"topic": "", "channel": "", "host": ""}
    return {"count": latency.count, "percentiles": percentiles, **nowhere}


# -- several nsqd ---------------------------------------------------------------------------------


def together(parts: Sequence[Document], nothing: Document, **more: object) -> Document:
    """A queue on several nsqd: its sums, and each nsqd; ``nothing`` is the queue on none."""
    counts = [name for name, value in nothing.items() if type(value) is int]
    latencies = [part["e2e_processing_latency"] for part in parts]
    names = nothing["topic_name"], nothing.get("channel_name", "")
    return {
        **nothing,
        "node": "*",
        "hostname": "",
        **{name: sum(part[name] for part in parts) for name in counts},
        "nodes": list(parts),
        "paused": any(part["paused"] for part in parts),
        "e2e_processing_latency": latencies_together(latencies, *names),
        **more,
    }


def topics_together(name: str, topics: Sequence[Document]) -> Document:
    """A topic on several nsqd, or on none, and its channels on these."""
    channels: dict[str, list[Document]] = {}
    for topic in topics:
        for channel in topic["channels"]:
            channels.setdefault(channel["channel_name"], []).append(channel)
    [nothing] = read_stats({"topics": [{"topic_name": name}]}).topics or ()
    of_all = [channels_together(each) for _, each in sorted(channels.items())]
    none = Nsqd("", "", read_stats({}), {}, {})
    return together(topics, topic_of(none, nothing, 0.0), channels=of_all)


def channels_together(channels: Sequence[Document]) -> Document:
    """A channel on several nsqd, and its consumers where they are known."""
    clients = [client for channel in channels for client in channel["clients"] or ()]
    return together(channels, channels[0], clients=clients or None)


def latencies_together(parts: Sequence[Document], topic: str, channel: str) -> Document:
    """The latencies of several nsqd."""
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
    # an nsqd that has measured nothing says 0, which is not the smallest
    measured = [percentile for percentile in percentiles if percentile["count"]] or percentiles
    total = sum(percentile["average"] * percentile["count"] for percentile in percentiles)
    return {
        "average": go_number(total / count) if count else 0,
        "count": count,
        "max": max(each["max"] for each in measured),
        "min": min(each["min"] for each in measured),
        "quantile": percentiles[0]["quantile"],
    }


def node_of(nsqd: Nsqd, newest: str) -> Document:
    """An nsqd in the list of nodes; ``newest`` is the highest version in the cluster."""
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
    """Return the highest of some versions, "" where there are none."""

    def order(version: str) -> list[tuple[int, str]]:
        parts = version.replace("-", ".").split(".")
        return [(int(part[:9]), "") if part.isdecimal() else (-1, part) for part in parts]

    return max(versions, key=order, default="")


# -- questions ------------------------------------------------------------------------------------


def list_topics(context: WebContext, request: Request) -> object:
    cluster = context.cluster
    try:
        names, failures = fetch_topics(cluster)
    except NsqError as exc:
        raise upstream_error("nsqlookupd" if cluster.lookupds else "nsqd", [exc]) from exc
    if request.query_params.get("inactive") != "true":
        return {"topics": sorted(names), "message": warning(each.error for each in failures)}
    known, nsqds, failures = cluster.discover_nsqds()  # who is silent has topics, too
    stats, silent = cluster.ask(nsqds, topic_names)
    idle = names.difference(merge_names(stats), announced_topics(known))
    answers, failed = registered_channels(cluster, cluster.lookupds, idle)
    channels = {
        topic: sorted({channel for answer in answers.values() for channel in answer.get(topic, ())})
        for topic in sorted(idle)
    }
    message = warning(failure.error for failure in (*failures, *silent, *failed))
    return {"topics": {topic: each or None for topic, each in channels.items()}, "message": message}


def show_queue(context: WebContext, request: Request) -> object:
    """A topic, or a channel of it."""
    name, channel = request.path_params["topic"], request.path_params.get("channel", "")
    gathered = gather(context.cluster, name, channel, clients=bool(channel))
    topics = [
        topic_of(nsqd, topic_stats, time.time())
        for nsqd in gathered.nsqds
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
            raise not_found(context.cluster, gathered.failures, f"{kind}_NOT_FOUND")
    document = channels_together(channels) if channel else topics_together(name, topics)
    return {**document, "message": gathered.message}


def list_nodes(context: WebContext, _: Request) -> object:
    gathered = gather(context.cluster, silent=True)
    newest = newest_version(nsqd.stats.version for nsqd in gathered.nsqds)
    nodes = [node_of(nsqd, newest) for nsqd in gathered.nsqds]
    return {"nodes": nodes, "message": gathered.message}


def show_node(context: WebContext, request: Request) -> object:
    gathered = gather(context.cluster, clients=True)
    name = request.path_params["node"]
    nsqd = next((nsqd for nsqd in gathered.nsqds if nsqd.name == name), None)
    if nsqd is None:
        raise not_found(context.cluster, gathered.failures, "NODE_NOT_FOUND")
    topics = [topic_of(nsqd, topic, time.time()) for topic in nsqd.stats.topics or ()]
    channels = [channel for topic in topics for channel in topic["channels"]]
    return {
        "node": nsqd.name,
        "topics": topics,
        "total_messages": sum(topic["message_count"] for topic in topics),
        "total_clients": sum(len(channel["clients"] or ()) for channel in channels),
        "message": gathered.message,
    }


def count_messages(context: WebContext, _: Request) -> object:
    gathered = gather(context.cluster)
    stats = {
        f"{topic.topic_name}:{channel.channel_name}:{nsqd.name}": {
            "node": nsqd.name,
            "topic_name": topic.topic_name,
            "channel_name": channel.channel_name,
            "message_count": channel.message_count,
        }
        for nsqd in gathered.nsqds
        for topic in nsqd.stats.topics or ()
        for channel in topic.channels
    }
    return {"stats": dict(sorted(stats.items())), "message": gathered.message}


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
    for what, name in names.items():
        if not is_valid_name(name):
            raise HTTPException(404, f"{what.upper()}_NOT_FOUND")
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

Answer = Callable[..., object]
ROUTES: dict[str, dict[str, Answer]] = {
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


def _route(context: WebContext, path: str, answers: Mapping[str, Answer]) -> Route:
    """Answer on a thread: the cluster is asked. A change is refused before its body is read."""

    async def view(request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return reply(await run_in_threadpool(answers["GET"], context, request))
        context.check_changes(request)
        answer, body = answers[request.method], await request.body()
        return reply({"message": await run_in_threadpool(answer, context, request, body)})

    return Route(path, view, methods=list(answers))


def reply(document: object, status: int = 200) -> Response:
    """Answer with JSON, as nsqadmin does."""
    return Response(go_json(document), status, HEADERS)


def _http_error(_: Request, error: HTTPException) -> Response:
    is_forbidden = error.status_code == 403  # which the console says in words
    message = "FORBIDDEN" if is_forbidden else CODES.get(error.detail, error.detail)
    answer = reply({"message": message}, error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def read_body(body: bytes) -> dict[str, str]:
    """Return the topic, the channel and the action that are given. Raises ``HTTPException``."""
    text = body.decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text:
        raise HTTPException(400, "EOF")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return go_members(text[:end].encode(), dict.fromkeys(("topic", "channel", "action"), str))
    except (ValueError, RecursionError) as exc:
        raise HTTPException(400, f"invalid JSON ({exc})") from exc
