"""The pages of `nsq web`, for people with a browser.

    site.py        the frame, the sample and its stream, templates, escaping, addresses
    queues.py, messages.py   what each page shows
    changes.py     forms, plans and results of changes
    snapshot.py, figures.py   decisions, charts and numbers as text

Every page works without a script, except for the charts. A script updates the page in place with
each sample.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from nsqtools import __version__
from nsqtools.web.pages.changes import act
from nsqtools.web.pages.messages import redrive, show_messages
from nsqtools.web.pages.queues import (
    show_consumer,
    show_consumers,
    show_lookup,
    show_nodes,
    show_queues,
)
from nsqtools.web.pages.site import Site, environment

STATIC = Path(__file__).parent / "static"


class _Versioned(StaticFiles):
    """Files whose address has the version: a browser need not ask for them again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        if scope["query_string"] == f"v={__version__}".encode() and answer.status_code == 200:
            answer.headers["Cache-Control"] = "max-age=31536000, immutable"
        return answer


PAGES = {
    "/": show_queues,
    "/topics": show_queues,
    "/topics/{topic}": show_queues,
    "/topics/{topic}/{channel}": show_queues,
    "/consumers": show_consumers,
    "/consumer": show_consumer,
    "/nodes": show_nodes,
    "/nodes/{node}": show_nodes,
    "/lookup": show_lookup,
}


def routes(site: Site) -> list[BaseRoute]:
    """Return the routes of the pages, below the base path."""
    environment()
    methods = ["GET", "POST"]
    return [
        *(site.route(path, make) for path, make in PAGES.items()),
        Route("/act", partial(act, site), methods=methods),
        Route("/messages", partial(show_messages, site), methods=methods),
        Route("/redrive", partial(redrive, site), methods=methods),
        Route("/series", site.numbers),
        Mount("/static", _Versioned(directory=STATIC)),
    ]
