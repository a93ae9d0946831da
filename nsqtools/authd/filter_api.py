"""The cluster over HTTP, without topics and channels that are hidden from the caller.

    /lookup /topics /channels /nodes    as nsqlookupd, of all nsqlookupd together
    /stats                              as nsqd, in JSON, the sum of all nsqd
    /metrics                            the same for Prometheus

The caller sends a secret as ``Authorization: Bearer SECRET``, by HTTP's basic authentication, or as
the parameter ``secret``. A topic that the user may not see does not exist.

Daemons are asked on threads of their own, and an answer serves everyone for a second. So neither a
hung daemon nor a busy caller costs /auth anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nsqtools.authd.auth_api import identified
from nsqtools.authd.authority import Audit, Authority, sent_secret
from nsqtools.authd.users import Client, User
from nsqtools.authd.views import (
    CHANNEL_NAME,
    TOPIC_NAME,
    Document,
    visible_lookup,
    visible_names,
    visible_nodes,
    visible_stats,
)
from nsqtools.cluster.directory import Answers, Cluster
from nsqtools.cluster.stats_documents import CHANNEL_METRICS, QUEUE_METRICS
from nsqtools.errors import HTTPError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.http.http_server import (
    Handlers,
    HTTPRefusal,
    Request,
    Response,
    json_response,
    metrics_response,
    plain_response,
)
from nsqtools.records.prometheus import Metric, metric_of

FRESH_S = 1.0
MAX_REMEMBERED = 1000  # answers, one for each topic that is looked up
WORKERS = 8

Asked = TypeVar("Asked")


class Upstream:
    """The daemons of a cluster, each asked the same question once a second at most."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="nsq-authd")
        self._answers: dict[str, tuple[float, asyncio.Future[list[Any]]]] = {}

    def close(self) -> None:
        """Wait for nobody: a question ends by its timeout."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def lookupds(self, path: str, topic: str = "") -> list[Document]:
        """Return what each nsqlookupd answers. Raises `HTTPRefusal`."""
        parameters = {"topic": topic} if topic else {}

        def question(client: NsqlookupdHTTPClient) -> Any:
            return client.get(path, **parameters)

        def ask() -> Answers[Any]:
            return self._cluster.ask(self._cluster.lookupds, question)

        return await self._fresh(f"{path} {topic}", ask)

    async def nsqds(self) -> list[Document]:
        """Return the /stats of each nsqd. Raises `HTTPRefusal`."""

        def question(client: NsqdHTTPClient) -> Document:
            return client.decode_stats(client.ask_stats(clients=True))

        def ask() -> Answers[Document]:
            nsqds, failures = self._cluster.nsqds()
            self._cluster.keep_only(nsqds)
            answers, failed = self._cluster.ask(nsqds, question)
            return answers, [*failures, *failed]

        return await self._fresh("/stats", ask)

    async def _fresh(self, key: str, ask: Callable[[], Answers[Asked]]) -> list[Asked]:
        now_s = time.monotonic()
        asked_s, answer = self._answers.get(key, (0.0, None))
        if answer is None or (answer.done() and now_s - asked_s > FRESH_S):
            loop = asyncio.get_running_loop()
            answer = loop.run_in_executor(self._workers, _documents_of, ask)
            self._answers.pop(key, None)
            self._answers[key] = now_s, answer
            while len(self._answers) > MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
        try:
            return list(await asyncio.shield(answer))
        except HTTPError as exc:
            raise HTTPRefusal(exc.status, exc.code or "UPSTREAM_FAILED") from None
        except NsqError:
            raise HTTPRefusal(502, "UPSTREAM_FAILED") from None


def _documents_of(ask: Callable[[], Answers[Any]]) -> list[Any]:
    answers, failures = ask()
    if failures and not answers:
        raise failures[0].error
    return [answer for answer in answers.values() if isinstance(answer, dict)]


class FilterApi:
    """The handlers. ``is_tls`` is whether callers speak TLS with this server."""

    def __init__(
        self, authority: Authority, audit: Audit, upstream: Upstream, *, is_tls: bool
    ) -> None:
        self._authority = authority
        self._audit = audit
        self._upstream = upstream
        self._is_tls = is_tls

    def handlers(self) -> Handlers:
        """Return the routes."""
        return {
            ("GET", "/lookup"): self._lookup,
            ("GET", "/topics"): self._topics,
            ("GET", "/channels"): self._channels,
            ("GET", "/nodes"): self._nodes,
            ("GET", "/stats"): self._stats,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/ping"): lambda request: plain_response("OK"),
        }

    async def _user(self, request: Request) -> User:
        address = request.client.host if request.client else ""
        client = Client(address, self._is_tls, request.common_name)
        secret = _secret(request)
        identity = await identified(
            self._authority, self._audit, request, request.path.strip("/"), secret, client
        )
        return identity.user

    async def _user_and_topic(self, request: Request) -> tuple[User, str]:
        user = await self._user(request)
        topic = request.argument("topic", "INVALID_ARG_TOPIC")
        if not user.sees(topic):
            raise HTTPRefusal(404, "TOPIC_NOT_FOUND")
        return user, topic

    async def _lookup(self, request: Request) -> Response:
        user, topic = await self._user_and_topic(request)
        answers = await self._upstream.lookupds("/lookup", topic)
        return json_response(visible_lookup(user, topic, answers))

    async def _topics(self, request: Request) -> Response:
        user = await self._user(request)
        answers = await self._upstream.lookupds("/topics")
        names = {name for answer in answers for name in visible_names(user, answer.get("topics"))}
        return json_response({"topics": sorted(names)})

    async def _channels(self, request: Request) -> Response:
        user, topic = await self._user_and_topic(request)
        answers = await self._upstream.lookupds("/channels", topic)
        names = {
            name
            for answer in answers
            for name in visible_names(user, answer.get("channels"), topic)
        }
        return json_response({"channels": sorted(names)})

    async def _nodes(self, request: Request) -> Response:
        user = await self._user(request)
        return json_response(visible_nodes(user, await self._upstream.lookupds("/nodes")))

    async def _stats(self, request: Request) -> Response:
        user = await self._user(request)
        query = request.query()
        document = visible_stats(user, await self._upstream.nsqds())
        if name := query.get("topic"):
            document["topics"] = [t for t in document["topics"] if t[TOPIC_NAME] == name]
        for topic in document["topics"]:
            if channel := query.get("channel"):
                topic["channels"] = [c for c in topic["channels"] if c[CHANNEL_NAME] == channel]
            if query.get("include_clients") == "false":
                topic["channels"] = [{**c, "clients": []} for c in topic["channels"]]
        return json_response(document)

    async def _metrics(self, request: Request) -> Response:
        user = await self._user(request)
        document = visible_stats(user, await self._upstream.nsqds())
        return await metrics_response(_queue_metrics(document))


def _secret(request: Request) -> str:
    """Return the secret of a caller, "" without one."""
    authorization = request.headers.get("authorization", "")
    return sent_secret(authorization) if authorization else request.query().get("secret", "")


KEY_OF_FIGURE = {
    "depth": "depth",
    "disk": "backend_depth",
    "messages": "message_count",
    "paused": "paused",
    "in_flight": "in_flight_count",
    "deferred": "deferred_count",
    "requeued": "requeue_count",
    "timed_out": "timeout_count",
    "clients": "client_count",
}
"""Names in /stats of nsqd for the figures of the metrics of `nsq web`."""


def _queue_metrics(document: Document) -> Iterator[Metric]:
    """Return the figures of a /stats document under the names that `nsq web` gives them."""
    queues: dict[str, list[tuple[Mapping[str, str], Document]]] = {"topic": [], "channel": []}
    for topic in document["topics"]:
        labels = {"topic": topic[TOPIC_NAME]}
        queues["topic"].append((labels, topic))
        for channel in topic["channels"]:
            queues["channel"].append(({**labels, "channel": channel[CHANNEL_NAME]}, channel))
    for kind, table in (("topic", QUEUE_METRICS), ("channel", CHANNEL_METRICS)):
        for name, help, figure in table:
            values = [(labels, entry.get(KEY_OF_FIGURE[figure])) for labels, entry in queues[kind]]
            samples = [(labels, int(value)) for labels, value in values if isinstance(value, int)]
            yield metric_of(f"nsq_{kind}_{name}", help, samples)
