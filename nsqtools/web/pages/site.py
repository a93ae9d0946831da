"""The basis of all pages: the sample, the frame, and the stream of updates.

A page is a template and a function from a request to its values. The function may query nsqd, so it
runs on a thread. The same address with ``live=1`` is a stream of events: the page is rendered for
each sample, and the changed parts are sent. A template marks a part with
``{% call part("name") %}<tag data-part="name">``, and the container of a variable list of parts
with ``data-list="{{ list("name") }}"``.

Two guards protect the browser against a hostile cluster, without any work in a template. Every text
passes `escape_line`, which makes control and bidirectional characters visible, and then jinja
escapes it as HTML. `lines` renders texts of several lines, such as bodies.

Pages share answers (`RecentAnswers`): for ten readers of a channel nsqd is queried once per sample,
and concurrent requests wait for the same answer. They also share output: a page and its changes are
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
from nsqtools.cluster.problems import group_by_kind
from nsqtools.cluster.queue_rows import QueueKey
from nsqtools.cluster.sampling import NO_SAMPLE, Sample
from nsqtools.cluster.texts import clock_text, format_utc
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import escape_line, escape_text
from nsqtools.web.actions import WebContext
from nsqtools.web.pages import figures
from nsqtools.web.pages.snapshot import Snapshot

V = TypeVar("V")
PageValues = dict[str, Any]
Make = Callable[["Site", Request], PageValues]

# An open stream sends a comment at this interval. A failed write shows that the client has left.
KEEP_ALIVE_S = 15.0


class Site:
    """The pages of one console."""

    def __init__(self, context: WebContext) -> None:
        self.context = context
        self.to = Addresses(context.settings.base_path)
        self._snapshot = Snapshot(NO_SAMPLE)
        self._recent = RecentAnswers()

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the latest sample; an empty one before the first sample."""
        watcher = self.context.watcher
        sample = watcher.latest
        if sample is not None and self._snapshot.sample is not sample:
            oldest_s = watcher.ages.oldest_s
            self._snapshot = Snapshot(sample, watcher.earlier(sample), oldest_s)
        return self._snapshot

    def recent(self, question: Hashable, ask: Callable[[V | None], V]) -> V:
        """Return the answer of ``ask`` since the latest sample, or ask now."""
        return self._recent.get(question, ask, self.context.watcher.latest)

    def trend(self, key: QueueKey, quantity: str) -> figures.Spark:
        """Return the trend of a queue over the last minutes."""
        since_s = time.time() - figures.TREND_S
        return figures.spark(self.context.watcher.history.series([key], quantity, since_s=since_s))

    def frame(self, request: Request, template: str, title: str, **values: Any) -> PageValues:
        """Return the values of a page: those of the frame, and ``values``."""
        context, snapshot = self.context, self.snapshot()
        lookupds = set(context.cluster.lookupds)
        failed = {failure.address for failure in snapshot.sample.failures}
        return {
            "template": template,
            "to": self.to,
            "trend": self.trend,
            "title": title,
            "theme": theme_of(request),
            "interval_s": context.watcher.interval_s,
            "is_slowed": context.watcher.is_slowed,
            "is_read_only": not context.user(request).may_change,
            "shows_messages": context.settings.show_messages,
            "has_login": context.settings.has_login,
            "snapshot": snapshot,
            "answering": len(snapshot.reports),
            "silent": len(failed - lookupds),
            "silent_lookupds": len(failed & lookupds),
            **values,
        }

    def charts(self, request: Request, key: QueueKey) -> figures.Charts:
        """Return the charts of a queue or nsqd, by the parameters of the request."""
        node, topic, channel = key
        parameters = request.query_params
        range_name = figures.range_of(parameters.get("range", ""))
        split = parameters.get("each", "")

        # A stream shares its rendering with the page.
        url = request.url.remove_query_params("live")

        def address(**changes: str) -> str:
            return "?" + str(url.include_query_params(**changes).query)

        choices = [[(name, address(range=name), name == range_name) for name in figures.RANGES]]
        if topic and not channel:
            deepest = [row.channel for row in self.snapshot().channels(topic)]
            # The address contains the names, so the page keeps its channels when others grow.
            names = ",".join([*filter(is_valid_name, deepest)][: figures.MAX_LINES])
            together = ("Together", address(each=""), not split)
            choices.insert(0, [together, ("Each channel", address(each=names), bool(split))])
        queue = {"node": node, "topic": topic, "channel": channel}
        source = self.to.page("/series", **queue, range=range_name, each=split)
        return figures.Charts(self._figures(key, split), choices, source)

    def numbers(self, request: Request) -> Response:
        """Return the data of the charts of a page."""
        parameters = request.query_params
        node, topic, channel = (parameters.get(name, "") for name in ("node", "topic", "channel"))
        charts = self._figures((node, topic, channel), parameters.get("each", ""))
        range_name = figures.range_of(parameters.get("range", ""))
        return JSONResponse(figures.numbers_of(self.context.watcher.history, charts, range_name))

    def _figures(self, key: QueueKey, split: str) -> Sequence[figures.Figure]:
        rows = [row for row in self.snapshot().channels(key[1]) if key[2] in ("", row.channel)]
        channels = split.split(",") if split else [row.channel for row in rows]
        has_latency = any(row.latency for row in rows)
        return figures.figures_of(key, channels, is_split=bool(split), has_latency=has_latency)

    def route(self, path: str, make: Make) -> Route:
        """Return the route of a live page, which all readers with one role share."""

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
        """Return the rendering of a page at the latest sample."""
        sample = self.context.watcher.latest

        def ask(_: Rendering | None) -> Rendering:
            values = make(self, request)
            page, pieces = render_template(values)
            return Rendering(sample, Packed(page), pieces, values.get("charts"))

        query = [item for item in request.query_params.multi_items() if item[0] != "live"]
        role = self.context.user(request).may_change
        return self._recent.get((request.url.path, *query, role, theme_of(request)), ask, sample)

    def page(
        self, request: Request, template: str, title: str, status: int = 200, **values: Any
    ) -> Response:
        """Return a page that is not live. It is not shared, so it may contain the form token."""
        values["csrf_token"] = self.context.token(request)
        return HTMLResponse(
            render_template(self.frame(request, template, title, **values))[0], status
        )

    async def failed(self, request: Request, error: Exception) -> Response:
        """Return the page of an error."""
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers
            error = NsqError(error.detail)
        else:
            statuses: dict[type, int] = {NotFoundError: 404, ConfigurationError: 400}
            status, headers = statuses.get(type(error), 502), None
        # /ping needs no login, so its request has no user.
        if "nsq.user" not in request.scope:
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
            yield GZIP_HEAD
        while not watcher.is_stopped and await self.context.is_still_authorized(request):
            sample = await watcher.newer(seen, KEEP_ALIVE_S)
            if sample is None:
                yield sent(KEEP_ALIVE)
                continue
            seen = sample
            try:
                rendering = await run_in_threadpool(self._rendering, make, request)
            except NsqError as error:
                # The queue was deleted, or the nsqd of the page did not answer.
                yield sent(Packed(f"event: failed\ndata: {escape_line(str(error))}\n\n"))
                continue
            yield sent(rendering.event_since(current, watcher.history))
            current = rendering


# The header of a gzip stream without time and name, and the final empty block.
GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
GZIP_END = b"\x03\0"
_LEVEL = 3


class Packed:
    """A piece of text, plain and compressed.

    It is compressed independently and ends at a byte boundary, so pieces can be concatenated in any
    gzip stream.
    """

    def __init__(self, text: str) -> None:
        # A hostile nsqd may send invalid text.
        self.plain = text.encode("utf-8", "backslashreplace")
        packer = zlib.compressobj(_LEVEL, wbits=-zlib.MAX_WBITS)
        self.deflated = packer.compress(self.plain) + packer.flush(zlib.Z_SYNC_FLUSH)
        self.crc = zlib.crc32(self.plain)


KEEP_ALIVE = Packed(": keep-alive\n\n")


def takes_gzip(request: Request) -> bool:
    """Return whether the response may be compressed."""
    return "gzip" in request.headers.get("accept-encoding", "").lower()


def packed_response(request: Request, pieces: Sequence[Packed], media_type: str) -> Response:
    """Return a response of pieces, compressed if the client accepts it.

    The first piece should be the longest, because its checksum need not be computed again.
    """
    headers = {"Vary": "Accept-Encoding"}
    if not takes_gzip(request):
        return Response(b"".join(piece.plain for piece in pieces), 200, headers, media_type)
    crc = pieces[0].crc
    for piece in pieces[1:]:
        crc = zlib.crc32(piece.plain, crc)
    size = sum(len(piece.plain) for piece in pieces)
    body = b"".join(piece.deflated for piece in pieces)
    end = GZIP_END + struct.pack("<II", crc, size & 0xFFFFFFFF)
    headers["Content-Encoding"] = "gzip"
    return Response(GZIP_HEAD + body + end, 200, headers, media_type)


@dataclass(slots=True, eq=False)
class Rendering:
    """A page at a sample, and the events that update earlier renderings to it."""

    sample: Sample | None
    page: Packed
    pieces: Pieces
    charts: figures.Charts | None
    events: dict[float, Packed] = field(default_factory=dict)

    def event_since(self, shown: Rendering | None, history: History) -> Packed:
        """Return the event for a browser that shows another rendering (None: no rendering)."""
        since_s = shown.sample.time_s if shown is not None and shown.sample is not None else 0.0
        if event := self.events.get(since_s):
            return event
        change = self.pieces.changes_since(shown.pieces if shown else Pieces())
        change["now_s"] = time.time()
        if self.charts is not None:
            change["point"] = figures.point_of(history, self.charts.figures, time.time() - 60)
        event = Packed(f"event: pieces\ndata: {json.dumps(change, ensure_ascii=True)}\n\n")
        # The first event of a page contains the current time, so it cannot be reused.
        if since_s:
            self.events[since_s] = event
        return event


def theme_of(request: Request) -> str:
    """Return the theme that a reader has chosen, "" for that of the browser."""
    theme = request.cookies.get("nsq_theme", "")
    return theme if theme in ("dark", "light") else ""


@dataclass(slots=True)
class Pieces:
    """The parts of one rendering by name, and the names in each list, in order."""

    parts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def part(self, name: str, into: str = "", *, caller: Callable[[], Markup]) -> Markup:
        """Record a part that a template marks, and the list ``into`` that it belongs to."""
        markup = caller()
        self.parts[name] = str(markup).strip()
        if into:
            self.lists[into].append(name)
        return markup

    def list(self, name: str) -> str:
        """Begin a list."""
        self.lists[name] = []
        return name

    def changes_since(self, previous: Pieces) -> dict[str, Any]:
        """Return the changes for a browser that shows the pieces ``previous``."""
        return {
            "parts": {
                name: text for name, text in self.parts.items() if previous.parts.get(name) != text
            },
            "lists": {
                name: names
                for name, names in self.lists.items()
                if previous.lists.get(name) != names
            },
        }


def render_template(values: PageValues) -> tuple[str, Pieces]:
    """Return a page, and its pieces."""
    pieces, template = Pieces(), environment().get_template(values["template"])
    return template.render(**values, part=pieces.part, list=pieces.list), pieces


@functools.cache
def environment() -> Environment:
    """Return the templates, with the functions and filters that they use."""
    templates = Environment(
        loader=PackageLoader("nsqtools.web.pages"),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = (figures.count, figures.percent, figures.rate, figures.size)
    times = (figures.age, figures.seconds, format_utc, clock_text)
    filters = (*numbers, *times, lines)
    templates.filters |= {function.__name__: function for function in filters}
    templates.globals |= {function.__name__: function for function in (group_by_kind, key_of)}
    templates.globals["version"] = __version__
    return templates


def harmless(value: Any) -> Any:
    """Escape a text that a template puts into a page."""
    return escape_line(value) if type(value) is str else value


def lines(body: bytes) -> Markup:
    """Return a body as HTML text with its line breaks."""
    return escape(escape_text(body).decode())


def key_of(*names: str) -> str:
    """Return the name of a part, derived from arbitrary names."""
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

        It equals that of nsqadmin, except for names of dots, and invalid names, which only a
        hostile cluster has. Those are put into the query, where slashes and dots have no meaning.
        """
        if not (_is_segment(topic) and (not channel or _is_segment(channel))):
            return self.page("/topics", topic=topic, channel=channel)
        path = f"/topics/{quote(topic, safe='')}"
        return self.page(f"{path}/{quote(channel, safe='')}" if channel else path)

    def node(self, address: str) -> str:
        """Return the address of an nsqd's page."""
        return self.page("/nodes", node=address)

    def static(self, path: str) -> str:
        """Return the address of a static file. It contains the version, for caches."""
        return self.page(f"/static/{path}", v=__version__)


def sanitize_name(name: str) -> str:
    """Return a name as an address can contain it. Only a hostile cluster has other names."""
    return name.encode(errors="replace").decode()


def _is_segment(name: str) -> bool:
    """Return whether a name can be in a path. Browsers resolve ``.`` and ``..``."""
    return is_valid_name(name) and name not in (".", "..")


MAX_ANSWERS = 400


@dataclass(slots=True)
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The default equals no sample.
    at: object = field(default_factory=object)
    value: Any = None


class RecentAnswers:
    """A cache of the answers to the latest questions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer] = {}

    def get(self, question: Hashable, ask: Callable[[V | None], V], at: object) -> V:
        """Return the answer of ``ask`` for the same ``at`` (a sample), or ask now.

        ``ask`` gets the previous answer. Raises as ``ask``.
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
