"""nsqadmin's API with its paths and answers, for scripts that move over.

What differs from nsqadmin 1.3.0, on purpose:

- An unknown topic or channel is 404 ``TOPIC_NOT_FOUND`` or ``CHANNEL_NOT_FOUND``; nsqadmin says
  502, 200 without anything, or 200 with a WARNING. A topic that only nsqlookupd knows has zeros.
- In the answer for a topic the sums of a channel are an object of their own, and every nsqd keeps
  its numbers; nsqadmin adds them into those of the first. The smallest latency is the smallest.
- Tombstoned nsqd are shown and changed too, and a new topic is made on nsqd given by address.
- A change needs ``--allow-changes``. ``/config`` can be read and not written.
- The texts of errors of daemons and of broken JSON are ours.
- There is no graphite: ``/api/graphite`` answers as nsqadmin does without one.

A body is one JSON object, whatever follows. The Content-Type does not matter, keys may have any
case, and unknown ones are ignored.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from nsqtools.cluster.admin import Action, StepResult, TopicChange
from nsqtools.cluster.topics import topic_names
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import is_valid_name, shown_url
from nsqtools.protocol.text import go_json
from nsqtools.web import api_documents as documents
from nsqtools.web.access import as_ip
from nsqtools.web.actions import WebContext

HEADERS = {
    "Content-Type": "application/json; charset=utf-8",
    "X-NSQ-Content-Type": "nsq; version=1.0",
}
CHANGES = {each.value: each for each in (Action.PAUSE, Action.UNPAUSE, Action.EMPTY)}
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2}).{0,2}")
LOG_LEVEL = 2  # nsqadmin's number for info

View = Callable[[Request], Awaitable[Response]]


class RequestRefused(Exception):
    """Answer with a status and a code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


def reply(document: object, status: int = 200) -> Response:
    """Answer with JSON, as nsqadmin does."""
    return Response(go_json(document), status, HEADERS)


def routes(context: WebContext) -> list[BaseRoute]:
    """Return the routes of ``/api`` and ``/config``."""
    api = Api(context)
    node, topic, channel = "/nodes/{node}", "/topics/{topic}", "/topics/{topic}/{channel}"
    own = [
        Route("/topics", api.view(api.topics), methods=["GET"]),
        Route("/topics", api.change(api.create), methods=["POST"]),
        Route(topic, api.view(api.topic), methods=["GET"]),
        Route(topic, api.change(api.act), methods=["POST"]),
        Route(topic, api.change(api.delete), methods=["DELETE"]),
        Route(channel, api.view(api.channel), methods=["GET"]),
        Route(channel, api.change(api.act), methods=["POST"]),
        Route(channel, api.change(api.delete), methods=["DELETE"]),
        Route("/nodes", api.view(api.nodes), methods=["GET"]),
        Route(node, api.view(api.node), methods=["GET"]),
        Route(node, api.change(api.tombstone), methods=["DELETE"]),
        Route("/counter", api.view(api.counter), methods=["GET"]),
        Route("/graphite", api.view(api.graphite), methods=["GET"]),
    ]
    config = [Route("/{option}", api.view(api.config), methods=["GET"])]
    return [Mount("/api", _app(own)), Mount("/config", _app(config))]


def _app(own: Sequence[BaseRoute]) -> Starlette:
    handlers: dict[Any, Any] = {
        RequestRefused: _refused,
        BadBody: lambda _, error: reply({"message": str(error)}, 400),
        documents.UpstreamError: lambda _, error: reply({"message": str(error)}, 502),
        ConfigurationError: lambda _, error: reply({"message": str(error)}, 400),
        NsqError: lambda _, error: reply({"message": f"UPSTREAM_ERROR: {error}"}, 502),
    }
    allowed = _allowed(own)

    async def http_error(request: Request, error: HTTPException) -> Response:
        answer = _http_error(request, error)
        if error.status_code == 405:
            answer.headers["Allow"] = allowed(request)
        return answer

    handlers[HTTPException] = http_error
    return Starlette(routes=own, exception_handlers=handlers)


def _allowed(own: Sequence[BaseRoute]) -> Callable[[Request], str]:
    """Starlette names the methods of the first route of a path only."""

    def find(request: Request) -> str:
        methods = {"OPTIONS"}
        for route in own:
            if isinstance(route, Route) and route.matches(request.scope)[0].value:
                methods |= (route.methods or set()) - {"HEAD"}
        return ", ".join(sorted(methods))

    return find


def _http_error(_: Request, error: HTTPException) -> Response:
    codes = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 403: "FORBIDDEN"}
    return reply({"message": codes.get(error.status_code, error.detail)}, error.status_code)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return reply({"message": error.code}, error.status)


class Api:
    """The answers. Views are plain functions, which run on a thread: they ask the cluster."""

    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._cluster = context.cluster

    def view(self, answer: Callable[[Request], Any]) -> View:
        """Return the view of a question."""

        async def ask(request: Request) -> Response:
            return reply(await run_in_threadpool(answer, request))

        return ask

    def change(self, answer: Callable[[Request, bytes], str]) -> View:
        """Return the view of a change, which is refused before its body is read."""

        async def ask(request: Request) -> Response:
            self._context.check_changes(request)
            body = await request.body()
            return reply({"message": await run_in_threadpool(answer, request, body)})

        return ask

    # -- questions ----------------------------------------------------------------------------

    def topics(self, request: Request) -> object:
        query = _query(request)
        try:
            names = topic_names(self._cluster)
        except NsqError as exc:
            kind = "nsqlookupd" if self._cluster.lookupds else "nsqd"
            raise documents.UpstreamError(
                f"UPSTREAM_ERROR: failed to query any {kind}: {exc}"
            ) from exc
        if query.get("inactive") != "true":
            return {"topics": names, "message": ""}
        stats = self._cluster.stats(required=False)
        active = {each.topic_name for node in stats.nodes for each in node.stats.topics or ()}
        idle = [name for name in names if name not in active]

        def channels(client: Any) -> dict[str, list[str]]:
            return {topic: client.channels(topic) for topic in idle}

        answers, failures = self._cluster.ask(self._cluster.lookupds, channels)
        found: dict[str, set[str]] = {topic: set() for topic in idle}
        for answer in answers.values():
            for topic, names_of in answer.items():
                found[topic].update(names_of)
        return {
            "topics": {topic: sorted(each) or None for topic, each in sorted(found.items())},
            "message": documents.warning([failure.error for failure in failures]),
        }

    def topic(self, request: Request) -> object:
        name = request.path_params["topic"]
        gathered = documents.gather(self._cluster, name)
        now_s = time.time()
        parts = [documents.topic_of(nsqd, each, now_s) for nsqd, each in gathered.having(name)]
        if not parts:
            self._check_topic(name, gathered)
        return {**documents.topics_together(name, parts), "message": gathered.message}

    def channel(self, request: Request) -> object:
        name, channel = request.path_params["topic"], request.path_params["channel"]
        gathered = documents.gather(self._cluster, name, channel, clients=True)
        now_s = time.time()
        parts = [
            documents.channel_of(nsqd, name, each, now_s)
            for nsqd, topic in gathered.having(name)
            for each in topic.channels
            if each.channel_name == channel
        ]
        if not parts:
            self._check_topic(name, gathered)
            raise RequestRefused(404, "CHANNEL_NOT_FOUND")
        return {**documents.channels_together(parts), "message": gathered.message}

    def nodes(self, _: Request) -> object:
        gathered = documents.gather(self._cluster)
        newest = documents.newest_version(nsqd.stats.version for nsqd in gathered.nsqds)
        nodes = [documents.node_of(nsqd, newest) for nsqd in gathered.nsqds]
        return {"nodes": nodes, "message": gathered.message}

    def node(self, request: Request) -> object:
        gathered = documents.gather(self._cluster, clients=True)
        wanted = request.path_params["node"]
        nsqd = next((nsqd for nsqd in gathered.nsqds if nsqd.name == wanted), None)
        if nsqd is None:
            raise RequestRefused(404, "NODE_NOT_FOUND")
        now_s = time.time()
        topics = [documents.topic_of(nsqd, topic, now_s) for topic in nsqd.stats.topics or ()]
        channels = [channel for topic in topics for channel in topic["channels"]]
        return {
            "node": nsqd.name,
            "topics": topics,
            "total_messages": sum(topic["message_count"] for topic in topics),
            "total_clients": sum(len(channel["clients"] or ()) for channel in channels),
            "message": gathered.message,
        }

    def counter(self, _: Request) -> object:
        gathered = documents.gather(self._cluster)
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

    def graphite(self, request: Request) -> object:
        query = _query(request)
        if query.get("metric") != "rate":
            raise RequestRefused(400, "INVALID_ARG_METRIC")
        if "target" not in query:
            raise RequestRefused(400, "INVALID_ARG_TARGET")
        raise RequestRefused(500, "INTERNAL_ERROR")

    def config(self, request: Request) -> object:
        peer = as_ip(request.client.host if request.client else "")
        if peer is None or not peer.is_loopback:
            raise RequestRefused(403, "FORBIDDEN")
        settings, cluster = self._context.settings, self._cluster
        options = {
            "nsqlookupd_http_addresses": list(cluster.lookupds),
            "nsqd_http_addresses": list(cluster.given),
            "admin_users": list(settings.admin_users),
            "acl_http_header": settings.acl_http_header,
            "base_path": settings.base_path or "/",
            "http_address": settings.listen,
            "notification_http_endpoint": shown_url(settings.notification_http_endpoint),
            "log_level": LOG_LEVEL,
        }
        option = request.path_params["option"]
        if option not in options:
            raise RequestRefused(400, "INVALID_OPTION")
        return options[option]

    # -- changes ------------------------------------------------------------------------------

    def create(self, request: Request, body: bytes) -> str:
        fields = read_body(body)
        topic, channel = fields.get("topic", ""), fields.get("channel", "")
        if not is_valid_name(topic):
            raise RequestRefused(400, "INVALID_TOPIC")
        if channel and not is_valid_name(channel):
            raise RequestRefused(400, "INVALID_CHANNEL")
        made = self._make(request, TopicChange(action=Action.CREATE, topic=topic))
        if channel:
            change = TopicChange(action=Action.CREATE, topic=topic, channel=channel)
            made += self._make(request, change)
        return self._outcome(made)

    def act(self, request: Request, body: bytes) -> str:
        action = CHANGES.get(read_body(body).get("action", ""))
        if action is None:
            raise RequestRefused(400, "INVALID_ACTION")
        return self._outcome(self._make(request, self._named(request, action)))

    def delete(self, request: Request, _: bytes) -> str:
        return self._outcome(self._make(request, self._named(request, Action.DELETE)))

    def tombstone(self, request: Request, body: bytes) -> str:
        try:
            topic = read_body(body).get("topic", "")
        except BadBody:
            raise RequestRefused(400, "INVALID_BODY") from None
        if not is_valid_name(topic):
            raise RequestRefused(400, "INVALID_TOPIC")
        change = TopicChange(action=Action.TOMBSTONE, topic=topic, node=request.path_params["node"])
        return self._outcome(self._make(request, change))

    def _named(self, request: Request, action: Action) -> TopicChange:
        names = request.path_params
        for what in ("topic", "channel"):
            if what in names and not is_valid_name(names[what]):
                raise RequestRefused(404, f"{what.upper()}_NOT_FOUND")
        return TopicChange(action=action, topic=names["topic"], channel=names.get("channel", ""))

    def _make(self, request: Request, change: TopicChange) -> list[StepResult]:
        try:
            return self._context.act(request, change)
        except NotFoundError as exc:
            what = "NODE" if change.node else "CHANNEL" if change.channel else "TOPIC"
            raise RequestRefused(404, f"{what}_NOT_FOUND") from exc

    def _outcome(self, results: list[StepResult]) -> str:
        errors = [result.error for result in results if result.error is not None]
        if errors and len(errors) == len(results):
            raise documents.UpstreamError(
                "UPSTREAM_ERROR: failed to query any nsqd: " + ", ".join(map(str, errors))
            )
        return documents.warning(errors)

    def _check_topic(self, name: str, gathered: documents.NodeAnswers) -> None:
        """Refuse a topic that no daemon knows."""
        answers, _ = self._cluster.ask(
            self._cluster.lookupds, lambda client: name in client.topics()
        )
        if not any(answers.values()):
            if gathered.failures:
                raise documents.upstream_error(self._cluster, gathered.failures)
            raise RequestRefused(404, "TOPIC_NOT_FOUND")


def _query(request: Request) -> dict[str, str]:
    """Return the parameters, the first of each name. Raises `RequestRefused` for a bad escape."""
    text = request.scope["query_string"].decode("latin-1")
    bad = _BAD_ESCAPE.search(text)
    if bad:
        raise RequestRefused(400, f"invalid URL escape {json.dumps(bad.group())}")
    query: dict[str, str] = {}
    for key, value in parse_qsl(text, keep_blank_values=True):
        query.setdefault(key, value)
    return query


_BLANK = re.compile(r"[ \t\r\n]*")


class BadBody(Exception):
    """The body cannot be read; the text is for the caller."""


def read_body(body: bytes) -> dict[str, str]:
    """Return the texts in the object, by lower-case key. Raises `BadBody`."""
    text = body.decode("utf-8", "replace")
    begin = _BLANK.match(text)
    assert begin is not None
    if begin.end() == len(text):
        raise BadBody("EOF")
    try:
        value, _ = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, begin.end())
    except (ValueError, RecursionError) as exc:
        raise BadBody(f"invalid JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise BadBody("the JSON is not an object")
    fields: dict[str, str] = {}
    for key, each in value.items():
        if not isinstance(each, str):
            if key.lower() in ("topic", "channel", "action"):
                raise BadBody(f"{key} is not a string")
            continue
        fields[key.lower()] = each
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
