"""What every page needs: the sample, the frame around it, and the stream that keeps it up to date.

A page is a template and a plain function from a request to its values. The function may ask nsqd
and wait for it, so it runs on a thread. The same address with ``live=1`` is a stream of events: the
page is made again for each sample, and the pieces that changed are sent. A template marks such a
piece with ``{% call part("name") %}<tag data-part="name">``, and the container of pieces that come
and go with ``data-list="{{ list("name") }}"``.

Two guards are between a hostile cluster and the browser, and no template has to think of either:
every text passes `escape_line` (controls and characters that reverse a line become visible), then
jinja escapes it as HTML. What is more than one line, such as a body, is made with `lines`.

Pages share answers (`Recent`): ten people who look at one channel are one question every two
seconds. The first request waits for the daemons; others meanwhile wait for the same answer. And
they share what is sent: a page and its changes are made once for an address, a role and a sample
(`Rendering`). So a page that is shared has nothing in it that is the reader's own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from nsqtools import __version__
from nsqtools.cluster.history import History
from nsqtools.cluster.problems import by_kind, moment
from nsqtools.cluster.queue_rows import Key, QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import escape_line, escape_text
from nsqtools.web.actions import WebContext
from nsqtools.web.packed import HEAD, Packed, packed_response, takes_gzip
from nsqtools.web.pages import figures
from nsqtools.web.pages.figures import (
    RANGES,
    Charts,
    Figure,
    figures_of,
    numbers_of,
    point_of,
    range_of,
)
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
        self._renderings: Recent[Rendering] = Recent(lambda: 0.0)

    def snapshot(self) -> Snapshot | None:
        """Return the latest sample, taken apart; None before the first."""
        sample = self.context.watcher.latest
        if sample is None:
            return None
        if self._snapshot is None or self._snapshot.sample is not sample:
            self._snapshot = Snapshot(sample, self.context.watcher.earlier(sample))
        return self._snapshot

    def frame(
        self, request: Request, template: str, section: str, title: str, **values: Any
    ) -> Values:
        """Return what the frame of a page shows, and the page's own values."""
        snapshot = self.snapshot()
        lookupds = set(self.context.cluster.lookupds)
        failed = {each.address for each in snapshot.sample.failures} if snapshot else set()
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
            "silent": len(failed - lookupds),
            "silent_lookupds": len(failed & lookupds),
            "is_live": True,
            "charts": None,
            **values,
        }

    def charts(self, request: Request, key: Key) -> Charts:
        """Return the charts of a queue or nsqd, as the address asks for them."""
        node, topic, channel = key
        asked = request.query_params
        shown, split = range_of(asked.get("range", "")), asked.get("each", "")

        def address(**changes: str) -> str:
            return "?" + str(request.url.include_query_params(**changes).query)

        choices = [[(name, address(range=name), name == shown) for name in RANGES]]
        if topic and not channel:
            together = ("Together", address(each=""), not split)
            choices.insert(0, [together, ("Each channel", address(each="1"), bool(split))])
        figures = self._figures(key, split)
        queue = {"node": node, "topic": topic, "channel": channel}
        source = self.to.page("/series", **queue, range=shown, each=split)
        return Charts(figures, choices, source)

    def numbers(self, asked: Mapping[str, str]) -> Values:
        """Return what the charts of a page are drawn from."""
        node, topic, channel = (asked.get(name, "") for name in ("node", "topic", "channel"))
        figures = self._figures((node, topic, channel), asked.get("each", ""))
        return numbers_of(self.context.history, figures, range_of(asked.get("range", "")))

    def _figures(self, key: Key, split: str) -> Sequence[Figure]:
        snapshot = self.snapshot()
        channels = snapshot.channels(key[1]) if snapshot and key[1] and not key[2] else []
        return figures_of(key, [row.channel for row in channels], is_split=bool(split))

    def route(self, path: str, make: Make, *, is_shared: bool = True) -> Route:
        """Return the route of a page that is live.

        Readers of one role share it, unless it holds a token or changes between samples.
        """

        async def answer(request: Request) -> Response:
            if "live" in request.query_params:
                headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
                if is_compressed := is_shared and takes_gzip(request):
                    headers["Content-Encoding"] = "gzip"
                return StreamingResponse(
                    self._events(request, make, is_shared, is_compressed),
                    media_type="text/event-stream",
                    headers=headers,
                )
            made = await run_in_threadpool(self._rendering, make, request, is_shared)
            if not is_shared:
                return HTMLResponse(made.page.plain)
            return packed_response(request, [made.page], "text/html")

        return Route(path, self.guarded(answer))

    def _rendering(self, make: Make, request: Request, is_shared: bool) -> Rendering:
        """Return the page as it is at the latest sample."""
        sample = self.context.watcher.latest

        def ask(before: Rendering | None) -> Rendering:
            if before is not None and before.sample is sample:
                return before
            values = make(request)
            page, pieces = render(values["template"], values)
            return Rendering(sample, Packed(page), pieces, values["charts"])

        if not is_shared:
            return ask(None)
        asked = [each for each in request.query_params.multi_items() if each[0] != "live"]
        role = self.context.user(request).may_change
        return self._renderings.get((request.url.path, *asked, role, _theme(request)), ask)

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

    async def _events(
        self, request: Request, make: Make, is_shared: bool, is_compressed: bool
    ) -> AsyncIterator[bytes]:

        def sent(piece: Packed) -> bytes:
            return piece.deflated if is_compressed else piece.plain

        watcher = self.context.watcher
        shown: Rendering | None = None
        seen_ns = 0
        if is_compressed:
            yield HEAD
        while not watcher.is_stopped and await self.context.is_still(request):
            sample = await watcher.newer(seen_ns, KEEP_ALIVE_S)
            if sample is None:
                yield sent(KEPT_ALIVE)
                continue
            seen_ns = sample.time_ns
            try:
                made = await run_in_threadpool(self._rendering, make, request, is_shared)
            except NsqError:
                continue  # what the page was about is gone, or did not answer this time
            yield sent(made.event_since(shown, self.context.history))
            shown = made


KEPT_ALIVE = Packed(": still here\n\n")


@dataclass(slots=True, eq=False)
class Rendering:
    """A page at a sample, and the events for those who are shown an earlier one of it."""

    sample: Sample | None
    page: Packed
    pieces: Pieces
    charts: Charts | None
    events: dict[int, Packed] = field(default_factory=dict)

    def event_since(self, shown: Rendering | None, history: History) -> Packed:
        """Return the event for a browser that shows another rendering, None for none yet."""
        since_ns = shown.sample.time_ns if shown is not None and shown.sample is not None else 0
        if made := self.events.get(since_ns):
            return made
        change = self.pieces.changes_since(shown.pieces if shown else Pieces())
        change["now_s"] = time.time()
        if self.charts is not None:
            change["point"] = point_of(history, self.charts.figures, time.time() - 60)
        made = Packed(f"event: pieces\ndata: {json.dumps(change, ensure_ascii=True)}\n\n")
        if since_ns:  # the first event of a page tells the time, and may come late
            self.events[since_ns] = made
        return made


def _theme(request: Request) -> str:
    theme = request.cookies.get("nsq_theme", "")
    return theme if theme in ("dark", "light") else ""


@dataclass(slots=True)
class Pieces:
    """The parts of one rendering by name, and the names in each list, in order."""

    parts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def part(self, name: str, into: str = "", *, caller: Callable[[], Markup]) -> Markup:
        """Keep what a template marks; ``into`` is the list it belongs to."""
        made = caller()
        self.parts[name] = str(made).strip()
        if into:
            self.lists[into].append(name)
        return made

    def list(self, name: str) -> str:
        """Begin a list."""
        self.lists[name] = []
        return name

    def changes_since(self, before: Pieces) -> dict[str, Any]:
        """Return what a browser that shows ``before`` has to know."""
        return {
            "parts": {
                name: made for name, made in self.parts.items() if before.parts.get(name) != made
            },
            "lists": {
                name: names for name, names in self.lists.items() if before.lists.get(name) != names
            },
        }


def render(template: str, values: Mapping[str, Any]) -> tuple[str, Pieces]:
    """Return a page, and its pieces."""
    pieces = Pieces()
    made = environment().get_template(template).render(**values, part=pieces.part, list=pieces.list)
    return made, pieces


@functools.cache
def environment() -> Environment:
    """Return the templates with what they may call."""

    made = Environment(
        loader=PackageLoader("nsqtools.web.pages"),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        name: getattr(figures, name)
        for name in ("age", "clock", "count", "percent", "rate", "seconds", "size")
    }
    made.filters |= {"lines": lines, "moment": moment}
    made.globals |= {
        "version": __version__,
        "by_kind": by_kind,
        "key_of": key_of,
        "queue_name": queue_name,
    }
    for name in made.list_templates():
        made.get_template(name)  # now, and not while the first reader waits
    return made


def harmless(value: Any) -> Any:
    """Return a value as a template may put it into a page."""
    return escape_line(value) if type(value) is str else value


def lines(body: bytes) -> Markup:
    """Return a body as HTML text that keeps its lines."""

    return escape(escape_text(body).decode())


def queue_name(row: QueueRow) -> Markup:
    """Return the name of a queue as HTML: topic, slash, channel."""

    name = Markup("{}").format(harmless(row.topic))
    if not row.channel:
        return name
    return name + Markup('<span class="slash">/</span>{}').format(harmless(row.channel))


def key_of(*names: str) -> str:
    """Return a name for a part, made from any names."""
    joined = "\0".join(names).encode("utf-8", "surrogatepass")
    return hashlib.sha1(joined, usedforsecurity=False).hexdigest()[:16]


class Addresses:
    """The addresses of the pages, below a base path."""

    def __init__(self, base_path: str) -> None:
        self._base = base_path.rstrip("/")

    def page(self, path: str, **query: str) -> str:
        """Return the address of a page."""
        asked = {name: value for name, value in query.items() if value}
        return f"{self._base}{path}" + (f"?{urlencode(asked, errors='replace')}" if asked else "")

    def queue(self, topic: str, channel: str = "") -> str:
        """Return the address of a topic or channel.

        It is that of nsqadmin, but for names that NSQ does not know and only a hostile cluster
        has, and dots: these go into the query, where neither slash nor dots mean anything.
        """
        if not (_is_segment(topic) and (not channel or _is_segment(channel))):
            return self.page("/topics", topic=topic, channel=channel)
        path = f"/topics/{quote(topic, safe='')}"
        return self.page(f"{path}/{quote(channel, safe='')}" if channel else path)

    def node(self, address: str) -> str:
        """Return the address of an nsqd's page."""
        return self.page("/nodes", node=address)

    def static(self, path: str) -> str:
        """Return the address of a file of ours, new with each version."""
        return self.page(f"/static/{path}", v=__version__)


def as_asked(name: str) -> str:
    """Return a name as an address can hold it: only a hostile cluster has any other."""
    return name.encode(errors="replace").decode()


def _is_segment(name: str) -> bool:
    """Tell whether a name can be in a path: browsers resolve ``.`` and ``..``."""
    return is_valid_name(name) and name not in (".", "..")


V = TypeVar("V")

MAX_ANSWERS = 200


@dataclass(slots=True)
class _Answer(Generic[V]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_s: float | None = None
    value: V | None = None


class Recent(Generic[V]):
    """Answers by question, each for ``keep_s()`` seconds. Thread-safe."""

    def __init__(self, keep_s: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer[V]] = {}

    def get(self, question: Hashable, ask: Callable[[V | None], V]) -> V:
        """Return what ``ask`` answered lately, or now; it gets the answer before. Raises as it."""
        with self._lock:
            answer = self._answers.pop(question, None) or _Answer()
            self._answers[question] = answer
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
        with answer.lock:
            now_s = time.monotonic()
            if answer.value is None or answer.at_s is None or now_s - answer.at_s >= self._keep_s():
                answer.value = ask(answer.value)
                answer.at_s = time.monotonic()
            return answer.value
