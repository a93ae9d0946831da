"""What every page needs: the sample, the frame around it, and the stream that keeps it up to date.

A page is a template and a plain function from a request to its values. The function may ask nsqd
and wait for it, so it runs on a thread. The same address with ``live=1`` is a stream of events: the
page is made again for each sample, and the pieces that changed are sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from nsqtools.cluster.queue_rows import Key
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.web.context import WebContext
from nsqtools.web.pages.charts import Charts, charts_of, point_of, range_of
from nsqtools.web.pages.rendering import Addresses, Pieces, render
from nsqtools.web.pages.snapshot import Snapshot

Values = dict[str, Any]
Make = Callable[[Request], Values]
Answer = Callable[[Request], Awaitable[Response]]

KEEP_ALIVE_S = 15.0
"""An open stream says something that often: who has gone is noticed."""


class Site:
    """The pages of one console."""

    def __init__(self, context: WebContext) -> None:
        self.context = context
        self.to = Addresses(context.settings.base_path)
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot | None:
        """Return the latest sample, taken apart; None before the first."""
        sample = self.context.watcher.latest
        if sample is None:
            return None
        if self._snapshot is None or self._snapshot.sample is not sample:
            self._snapshot = Snapshot(sample)
        return self._snapshot

    def frame(
        self, request: Request, template: str, section: str, title: str, **values: Any
    ) -> Values:
        """Return what the frame of a page shows, and the page's own values."""
        snapshot = self.snapshot()
        return {
            "template": template,
            "to": self.to,
            "title": title,
            "section": section,
            "theme": _theme(request),
            "interval_s": self.context.watcher.interval_s,
            "is_slowed": self.context.watcher.is_slowed,
            "is_read_only": not self.context.user(request).may_change,
            "shows_messages": self.context.settings.show_messages,
            "sampled_s": snapshot.sampled_s if snapshot else None,
            "answering": len(snapshot.reports) if snapshot else 0,
            "silent": len(snapshot.sample.failures) if snapshot else 0,
            "is_live": True,
            "point_key": None,
            **values,
        }

    def charts(self, request: Request, key: Key, described: Mapping[str, Any]) -> Charts:
        """Return the charts of a queue or nsqd, over the range that the address asks for."""
        node, topic, channel = key
        shown = range_of(request.query_params)
        source = self.to.page("/series", node=node, topic=topic, channel=channel, range=shown)
        return charts_of(
            self.context.history,
            key,
            described,
            shown,
            source=source,
            address=lambda name: "?" + str(request.url.include_query_params(range=name).query),
        )

    def route(self, path: str, make: Make) -> Route:
        """Return the route of a page that is live."""

        async def answer(request: Request) -> Response:
            if "live" in request.query_params:
                return StreamingResponse(
                    self._events(request, make),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
                )
            _, (made, _) = await run_in_threadpool(made_of, make, request)
            return HTMLResponse(made)

        return Route(path, self.guarded(answer))

    def guarded(self, answer: Answer) -> Answer:
        """Return a view that answers with a page when it fails, or when it is refused."""

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except NsqError as error:
                statuses = {NotFoundError: 404, ConfigurationError: 400}
                return self.failed(request, error, statuses.get(type(error), 502))
            except HTTPException as error:
                return self.failed(request, NsqError(error.detail), error.status_code)

        return guarded

    def response(self, values: Values, status: int = 200) -> Response:
        """Return a page that is not live."""
        return HTMLResponse(render(values["template"], values)[0], status)

    def failed(self, request: Request, error: NsqError, status: int) -> Response:
        """Return the page of a failure."""
        titles = {404: "Not found", 403: "Refused", 400: "Not possible"}
        title = titles.get(status, "Failed")
        values = self.frame(request, "failed.html", "", title, error=error, is_live=False)
        return self.response(values, status)

    async def _events(self, request: Request, make: Make) -> AsyncIterator[str]:

        watcher = self.context.watcher
        shown, seen_ns = Pieces(), 0
        while not watcher.is_stopped:
            sample = await watcher.newer(seen_ns, KEEP_ALIVE_S)
            if sample is None:
                yield ": still here\n\n"
                continue
            seen_ns = sample.time_ns
            try:
                values, (_, pieces) = await run_in_threadpool(made_of, make, request)
            except NsqError:
                continue  # what the page was about is gone, or did not answer this time
            change = pieces.changes_since(shown)
            shown = pieces
            change["now_s"] = time.time()
            if values["point_key"] is not None:
                since_s = time.time() - 60
                change["point"] = point_of(self.context.history, values["point_key"], since_s)
            yield f"event: pieces\ndata: {json.dumps(change, ensure_ascii=True)}\n\n"


def made_of(make: Make, request: Request) -> tuple[Values, tuple[str, Pieces]]:
    """Make a page: its values, and what `render` returns."""
    values = make(request)
    return values, render(values["template"], values)


def _theme(request: Request) -> str:
    theme = request.cookies.get("nsq_theme", "")
    return theme if theme in ("dark", "light") else ""
