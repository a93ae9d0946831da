"""The basis of all pages: the sample, the frame, and the stream of updates.

A page is a template and a function from a request to its values. The function may query nsqd, so it
runs on a thread. The same address with ``live=1`` is a stream of events: the page is rendered for
each sample, and the changed parts are sent. A template marks a part with
``{% call part("name") %}<tag data-part="name">``, and the container of a variable list of parts
with ``data-list="{{ list("name") }}"``.

Two guards protect the browser against a hostile cluster, without any work in a template. Every text
passes `escape_line`, which makes control and bidirectional characters visible, and then jinja
escapes it as HTML. `lines` renders texts of several lines, such as bodies.

Pages share answers (`Recent`): for ten readers of a channel nsqd is queried once per sample, and
concurrent requests wait for the same answer. They also share output: a page and its changes are
rendered once per address, role and sample (`Rendering`), and compressed once (`Packed`). So a live
page must not contain personal data, nor a secret together with text that the reader chose, which
the compressed size would reveal.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from nsqtools import __version__
from nsqtools.cluster.history import History
from nsqtools.cluster.problems import format_utc, group_by_kind
from nsqtools.cluster.queue_rows import Key
from nsqtools.cluster.sampling import NO_SAMPLE, Sample
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import escape_line, escape_text
from nsqtools.web.actions import WebContext
from nsqtools.web.pages import figures
from nsqtools.web.pages.snapshot import Snapshot

V = TypeVar("V")
Values = dict[str, Any]
Make = Callable[["Site", Request], Values]

KEEP_ALIVE_S = 15.0
"""An open stream says something that often: who has gone is noticed."""


class Site:
    """The pages of one console."""

    def __init__(self, context: WebContext) -> None:
        self.context = context
        self.to = Addresses(context.settings.base_path)
        self._snapshot = Snapshot(NO_SAMPLE)
        self._recent = Recent()

    def snapshot(self) -> Snapshot:
        """Return the latest sample, taken apart; an empty one before the first."""
        watcher = self.context.watcher
        sample = watcher.latest
        if sample is not None and self._snapshot.sample is not sample:
            self._snapshot = Snapshot(sample, watcher.earlier(sample))
        return self._snapshot

    def recent(self, question: Hashable, ask: Callable[[V | None], V]) -> V:
        """Return what ``ask`` answered since the latest sample, or answers now."""
        return self._recent.get(question, ask, self.context.watcher.latest)

    def trend(self, key: Key, quantity: str) -> figures.Spark:
        """Return what became of a queue in the last minutes."""
        since_s = time.time() - figures.TREND_S
        return figures.spark(self.context.watcher.history.series([key], quantity, since_s=since_s))

    def frame(self, request: Request, template: str, title: str, **values: Any) -> Values:
        """Return what the frame of a page shows, and the page's own values."""
        context, snapshot = self.context, self.snapshot()
        lookupds = set(context.cluster.lookupds)
        failed = {failure.address for failure in snapshot.sample.failures}
        return {
            "template": template,
            "to": self.to,
            "trend": self.trend,
            "title": title,
            "theme": _theme(request),
            "interval_s": context.watcher.interval_s,
            "is_slowed": context.watcher.is_slowed,
            "is_read_only": not context.user(request).may_change,
            "shows_messages": context.settings.show_messages,
            "snapshot": snapshot,
            "answering": len(snapshot.reports),
            "silent": len(failed - lookupds),
            "silent_lookupds": len(failed & lookupds),
            **values,
        }

    def charts(self, request: Request, key: Key) -> figures.Charts:
        """Return the charts of a queue or nsqd, as the address asks for them."""
        node, topic, channel = key
        parameters = request.query_params
        shown, split = figures.range_of(parameters.get("range", "")), parameters.get("each", "")

        url = request.url.remove_query_params("live")  # others share what is made for a stream

        def address(**changes: str) -> str:
            return "?" + str(url.include_query_params(**changes).query)

        choices = [[(name, address(range=name), name == shown) for name in figures.RANGES]]
        if topic and not channel:
            deepest = [row.channel for row in self.snapshot().channels(topic)]
            # by name, so that the page keeps them when others become deeper
            names = ",".join([*filter(is_valid_name, deepest)][: figures.MAX_LINES])
            together = ("Together", address(each=""), not split)
            choices.insert(0, [together, ("Each channel", address(each=names), bool(split))])
        queue = {"node": node, "topic": topic, "channel": channel}
        source = self.to.page("/series", **queue, range=shown, each=split)
        return figures.Charts(self._figures(key, split), choices, source)

    def numbers(self, request: Request) -> Response:
        """Return what the charts of a page are drawn from."""
        parameters = request.query_params
        node, topic, channel = (parameters.get(name, "") for name in ("node", "topic", "channel"))
        drawn = self._figures((node, topic, channel), parameters.get("each", ""))
        shown, history = figures.range_of(parameters.get("range", "")), self.context.watcher.history
        return JSONResponse(figures.numbers_of(history, drawn, shown))

    def _figures(self, key: Key, split: str) -> Sequence[figures.Figure]:
        there = self.snapshot().channels(key[1]) if key[1] and not key[2] else []
        channels = split.split(",") if split else [row.channel for row in there]
        return figures.figures_of(key, channels, is_split=bool(split))

    def route(self, path: str, make: Make) -> Route:
        """Return the route of a page that is live, and that readers of one role share."""

        async def answer(request: Request) -> Response:
            if "live" in request.query_params:
                headers = {"X-Accel-Buffering": "no"}
                if is_packed := takes_gzip(request):
                    headers["Content-Encoding"] = "gzip"
                request.scope["nsq.events"] = self._events(request, make, is_packed)
                return Response(None, 200, headers, "text/event-stream")
            rendering = await run_in_threadpool(self._rendering, make, request)
            return packed_response(request, [rendering.page], "text/html")

        return Route(path, answer)

    def _rendering(self, make: Make, request: Request) -> Rendering:
        """Return the page as it is at the latest sample."""
        sample = self.context.watcher.latest

        def ask(_: Rendering | None) -> Rendering:
            values = make(self, request)
            page, pieces = render(values)
            return Rendering(sample, Packed(page), pieces, values.get("charts"))

        query = [item for item in request.query_params.multi_items() if item[0] != "live"]
        role = self.context.user(request).may_change
        return self._recent.get((request.url.path, *query, role, _theme(request)), ask, sample)

    def page(
        self, request: Request, template: str, title: str, status: int = 200, **values: Any
    ) -> Response:
        """Return a page that is not live, so that it may have the token of its forms."""
        values["csrf_token"] = self.context.token(request)
        return HTMLResponse(render(self.frame(request, template, title, **values))[0], status)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Return the page of a failure, or of a refusal."""
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers
            error = NsqError(error.detail)
        else:
            statuses: dict[type, int] = {NotFoundError: 404, ConfigurationError: 400}
            status, headers = statuses.get(type(error), 502), None
        if "nsq.user" not in request.scope:  # /ping, which asks for no login
            return PlainTextResponse(f"{error}\n", status, headers)
        titles = {404: "Not found", 403: "Refused", 400: "Not possible"}
        title = titles.get(status, "Failed")
        answer = self.page(request, "failed.html", title, status, error=error)
        answer.headers.update(headers or {})
        return answer

    async def _events(self, request: Request, make: Make, is_packed: bool) -> AsyncIterator[bytes]:
        def sent(piece: Packed) -> bytes:
            return piece.deflated if is_packed else piece.plain

        watcher = self.context.watcher
        current: Rendering | None = None
        seen: Sample | None = None
        if is_packed:
            yield HEAD
        while not watcher.is_stopped and await self.context.is_still(request):
            sample = await watcher.newer(seen, KEEP_ALIVE_S)
            if sample is None:
                yield sent(KEPT_ALIVE)
                continue
            seen = sample
            try:
                rendering = await run_in_threadpool(self._rendering, make, request)
            except NsqError as error:  # what the page was about is gone, or did not answer
                yield sent(Packed(f"event: failed\ndata: {escape_line(str(error))}\n\n"))
                continue
            yield sent(rendering.event_since(current, watcher.history))
            current = rendering


HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # of a gzip stream, without time and name
_END = b"\x03\0"  # an empty block that is the last one
_LEVEL = 3


class Packed:
    """A piece of text, as it is and compressed.

    It is compressed for itself and ends at a byte, so that pieces can follow one another in any
    gzip stream, whatever was in it before.
    """

    def __init__(self, text: str) -> None:
        # a hostile nsqd may send what is not text
        self.plain = text.encode("utf-8", "backslashreplace")
        packer = zlib.compressobj(_LEVEL, wbits=-zlib.MAX_WBITS)
        self.deflated = packer.compress(self.plain) + packer.flush(zlib.Z_SYNC_FLUSH)
        self.crc = zlib.crc32(self.plain)


KEPT_ALIVE = Packed(": still here\n\n")


def takes_gzip(request: Request) -> bool:
    """Tell whether an answer may be compressed."""
    return "gzip" in request.headers.get("accept-encoding", "").lower()


def packed_response(request: Request, pieces: Sequence[Packed], media_type: str) -> Response:
    """Answer with pieces, compressed where the client takes that. The first is the longest."""
    headers = {"Vary": "Accept-Encoding"}
    if not takes_gzip(request):
        return Response(b"".join(piece.plain for piece in pieces), 200, headers, media_type)
    crc = pieces[0].crc
    for piece in pieces[1:]:
        crc = zlib.crc32(piece.plain, crc)
    size = sum(len(piece.plain) for piece in pieces)
    body = b"".join(piece.deflated for piece in pieces)
    end = _END + struct.pack("<II", crc, size & 0xFFFFFFFF)
    headers["Content-Encoding"] = "gzip"
    return Response(HEAD + body + end, 200, headers, media_type)


@dataclass(slots=True, eq=False)
class Rendering:
    """A page at a sample, and the events for those who are shown an earlier one of it."""

    sample: Sample | None
    page: Packed
    pieces: Pieces
    charts: figures.Charts | None
    events: dict[float, Packed] = field(default_factory=dict)

    def event_since(self, shown: Rendering | None, history: History) -> Packed:
        """Return the event for a browser that shows another rendering, None for none yet."""
        since_s = shown.sample.time_s if shown is not None and shown.sample is not None else 0.0
        if event := self.events.get(since_s):
            return event
        change = self.pieces.changes_since(shown.pieces if shown else Pieces())
        change["now_s"] = time.time()
        if self.charts is not None:
            change["point"] = figures.point_of(history, self.charts.figures, time.time() - 60)
        event = Packed(f"event: pieces\ndata: {json.dumps(change, ensure_ascii=True)}\n\n")
        if since_s:  # the first event of a page tells the time, and may come late
            self.events[since_s] = event
        return event


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
        markup = caller()
        self.parts[name] = str(markup).strip()
        if into:
            self.lists[into].append(name)
        return markup

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


def render(values: Values) -> tuple[str, Pieces]:
    """Return a page, and its pieces."""
    pieces, template = Pieces(), environment().get_template(values["template"])
    return template.render(**values, part=pieces.part, list=pieces.list), pieces


@functools.cache
def environment() -> Environment:
    """Return the templates with what they may call."""
    templates = Environment(
        loader=PackageLoader("nsqtools.web.pages"),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = (figures.age, figures.count, figures.percent, figures.rate, figures.seconds)
    filters = (*numbers, figures.size, lines, format_utc)
    templates.filters |= {function.__name__: function for function in filters}
    templates.globals |= {function.__name__: function for function in (group_by_kind, key_of)}
    templates.globals["version"] = __version__
    for name in templates.list_templates():
        templates.get_template(name)  # now, and not while the first reader waits
    return templates


def harmless(value: Any) -> Any:
    """Return a value as a template may put it into a page."""
    return escape_line(value) if type(value) is str else value


def lines(body: bytes) -> Markup:
    """Return a body as HTML text that keeps its lines."""

    return escape(escape_text(body).decode())


def key_of(*names: str) -> str:
    """Return a name for a part, made from any names."""
    joined = "\0".join(names).encode("utf-8", "surrogatepass")
    return hashlib.sha1(joined, usedforsecurity=False).hexdigest()[:16]


class Addresses:
    """The addresses of the pages, below a base path."""

    def __init__(self, base_path: str) -> None:
        self._base = base_path

    def page(self, path: str, **query: str) -> str:
        """Return the address of a page."""
        parameters = {name: value for name, value in query.items() if value}
        return f"{self._base}{path}" + (
            f"?{urlencode(parameters, errors='replace')}" if parameters else ""
        )

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


MAX_ANSWERS = 400


@dataclass(slots=True)
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at: object = field(default_factory=object)  # which nobody asks for
    value: Any = None


class Recent:
    """Answers by question, of those that were asked last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer] = {}

    def get(self, question: Hashable, ask: Callable[[V | None], V], at: object) -> V:
        """Return what ``ask`` answered ``at`` the same object (a sample), or answers now.

        It gets the answer before. Raises as it does.
        """
        with self._lock:
            answer = self._answers.pop(question, None) or _Answer()
            self._answers[question] = answer
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
        with answer.lock:
            if answer.at is not at:
                answer.value = ask(answer.value)
                answer.at = at
            value: V = answer.value
            return value
