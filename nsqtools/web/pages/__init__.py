"""The pages of `nsq web`, for people with a browser.

    site.py        the frame, the sample and its stream, templates, escaping, addresses
    queues.py, consumers.py, messages.py   what each page shows
    changes.py     forms, plans and results of what is done to a cluster
    snapshot.py, figures.py   decisions, charts and numbers as text

Every page is whole without a script, but for the charts. With one it is patched in place as samples
come.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from nsqtools import __version__
from nsqtools.web.actions import WebContext
from nsqtools.web.pages.changes import ChangePages, DrainPages
from nsqtools.web.pages.consumers import Connections, ConsumerPages
from nsqtools.web.pages.messages import MessagePages
from nsqtools.web.pages.queues import NodePages, QueuePages, overview
from nsqtools.web.pages.site import Recent, Site, environment

STATIC = Path(__file__).parent / "static"


class _Versioned(StaticFiles):
    """Files whose address has the version: a browser need not ask for them again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        if scope["query_string"] == f"v={__version__}".encode() and answer.status_code == 200:
            answer.headers["Cache-Control"] = "max-age=31536000, immutable"
        return answer


def routes(context: WebContext) -> list[BaseRoute]:
    """Return the routes of the pages, below the base path."""

    environment()
    site = Site(context)

    def keep_s() -> float:
        return 0.8 * context.watcher.interval_s  # each sample finds a new answer

    queues = QueuePages(site, Recent[Connections](keep_s))
    consumers = ConsumerPages(site, queues.connections)
    nodes = NodePages(site, keep_s)
    changes, drains, messages = ChangePages(site), DrainPages(site), MessagePages(site)

    def series(request: Request) -> Response:
        numbers = site.numbers(request.query_params)
        return JSONResponse(numbers, headers={"Cache-Control": "no-store"})

    return [
        site.route("/", lambda request: overview(site, request)),
        site.route(
            "/topics",
            lambda request: (
                queues.queue(request)
                if "topic" in request.query_params
                else overview(site, request)
            ),
        ),
        site.route("/topics/{topic}", queues.queue),
        site.route("/topics/{topic}/{channel}", queues.channel),
        site.route("/consumers", consumers.all),
        site.route("/consumer", consumers.one),
        site.route(
            "/nodes",
            lambda request: (
                nodes.one(request) if "node" in request.query_params else nodes.all(request)
            ),
        ),
        site.route("/nodes/{node}", nodes.one),
        site.route("/lookup", nodes.lookup),
        Route("/act", site.guarded(changes.answer), methods=["GET", "POST"]),
        Route("/messages", site.guarded(messages.answer), methods=["GET", "POST"]),
        Route("/drain", site.guarded(drains.answer), methods=["GET", "POST"]),
        Route("/draining", site.guarded(drains.stop), methods=["POST"]),
        site.route("/draining", drains.progress, is_shared=False),
        Route("/series", series),
        Mount("/static", _Versioned(directory=STATIC)),
    ]
