"""The page that shows messages as they come. Off unless `WebSettings.show_messages` is set."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsqtools.errors import NotFoundError
from nsqtools.web.pages.bodies import shown_body
from nsqtools.web.pages.listening import Copies, listen
from nsqtools.web.pages.site import Site

COUNTS = (1, 10, 50, 100)
TIMES_S = (2, 5, 10, 30)


class MessagePages:
    """Answers /messages. Listening makes a channel, so it takes a form and its token."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def answer(self, request: Request) -> Response:
        """Show the form; for a form that was sent, what came."""

        if not self._site.context.settings.show_messages:
            raise HTTPException(403, "messages are not shown by this console (--show-messages)")
        fields = await self._site.context.form(request) if request.method == "POST" else None
        return await run_in_threadpool(self._page, request, fields)

    def _page(self, request: Request, fields: dict[str, str] | None) -> Response:
        topic = request.query_params.get("topic", "")
        snapshot = self._site.snapshot()
        if snapshot is None or snapshot.topic(topic) is None:
            raise NotFoundError(f"no nsqd that answers has the topic {topic}")
        count = _one_of(COUNTS, (fields or {}).get("count"), 10)
        for_s = _one_of(TIMES_S, (fields or {}).get("for_s"), 5)
        copies: Copies | None = None
        if fields is not None:
            context = self._site.context
            copies = listen(context.cluster, context.options, topic, count=count, for_s=for_s)
        values = self._site.frame(
            request,
            "messages.html",
            "Queues",
            f"Messages of {topic}",
            is_live=False,
            topic=topic,
            count=count,
            for_s=for_s,
            copies=copies,
            bodies=[(copy, shown_body(copy.body)) for copy in copies.messages] if copies else [],
            csrf_token=self._site.context.token(request),
        )
        return self._site.response(values)


def _one_of(allowed: tuple[int, ...], text: str | None, usual: int) -> int:
    return next((value for value in allowed if str(value) == text), usual)
