"""The pages of all consumers, and of one program with all its connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request

from nsqtools.errors import NotFoundError
from nsqtools.web.pages.consumers import Connection, Connections, programs_of
from nsqtools.web.pages.queue_lines import PAGE_LINES, page_number
from nsqtools.web.pages.rendering import as_asked
from nsqtools.web.pages.site import Site, Values

MAX_CONNECTIONS = 100


class ConsumerPages:
    """Makes the values of both pages. ``connections`` asks nsqd for those of all channels."""

    def __init__(self, site: Site, connections: Callable[[], Connections]) -> None:
        self._site = site
        self._connections = connections

    def all(self, request: Request) -> Values:
        """Return the values of the list of consumers."""
        text = request.query_params.get("q", "")[:200]
        programs = programs_of(self._connections().each, text)
        pages = max(1, -(-len(programs) // PAGE_LINES))
        page = min(page_number(request.query_params), pages)
        return self._site.frame(
            request,
            "consumers.html",
            "Consumers",
            "Consumers",
            text=text,
            programs=programs[(page - 1) * PAGE_LINES : page * PAGE_LINES],
            found=len(programs),
            connected=sum(len(each.connections) for each in programs),
            page=page,
            pages=pages,
        )

    def one(self, request: Request) -> Values:
        """Return the values of one program's page. Raises `NotFoundError`."""
        hostname = request.query_params.get("hostname", "")
        client_id = request.query_params.get("client_id", "")
        mine = [
            each
            for each in programs_of(self._connections().each)
            if as_asked(each.hostname) == hostname and as_asked(each.client_id) == client_id
        ]
        if not mine:
            raise NotFoundError(
                f"no consumer {client_id} of host {hostname} is connected",
                hint="It may have gone, or come back under another name.",
            )
        return self._site.frame(
            request,
            "consumer.html",
            "Consumers",
            client_id or hostname or "consumer",
            program=mine[0],
            connections=[(each, _fields(each)) for each in mine[0].connections[:MAX_CONNECTIONS]],
            now_s=time.time(),
        )


def _fields(connection: Connection) -> list[tuple[str, str]]:
    """Return all that nsqd says of a connection, for those who know its field names."""
    return [
        (name, str(value) if not isinstance(value, bool) else ("yes" if value else "no"))
        for name, value in asdict(connection.client).items()
        if name not in ("pub_counts", "state") and value != ""
    ]
