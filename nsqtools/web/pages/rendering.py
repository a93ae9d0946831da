"""Pages from templates, and from the same templates the pieces that change while one is open.

Two guards stand between a hostile cluster and the browser, and no template has to think of either:
every text passes `escape_line` (controls and characters that reverse a line become visible), then
jinja escapes it as HTML. What is more than one line, such as a body, is made with `lines`.

A template marks a piece that changes with ``{% call part("name") %}<tag data-part="name">``, and
the container of pieces that come and go with ``data-list="{{ list("name") }}"``. A page that is
rendered once more for its open stream yields the same pieces, and only those that differ are sent.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from nsqtools import __version__
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.protocol.escaping import escape_line, escape_text
from nsqtools.protocol.names import is_valid_name
from nsqtools.web.pages import figures


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
        for name in ("age", "clock", "count", "moment", "percent", "rate", "seconds", "size")
    }
    made.filters["lines"] = lines
    made.globals |= {
        "version": __version__,
        "key_of": key_of,
        "line_paths": figures.line_paths,
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
    """Tell whether a name can stand in a path: browsers resolve ``.`` and ``..``."""
    return is_valid_name(name) and name not in (".", "..")
