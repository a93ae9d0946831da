"""The first page: every queue, the deepest first, and what is wrong."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from nsqtools.web.pages.charts import trend
from nsqtools.web.pages.queue_lines import (
    PAGE_LINES,
    SHOWN,
    SORTS,
    QueueQuery,
    lines_of,
    read_query,
)
from nsqtools.web.pages.site import Site, Values
from nsqtools.web.pages.snapshot import sums_of

EVERYTHING = ("", "", "")


def overview(site: Site, request: Request) -> Values:
    """Return the values of the page of all queues."""
    query = read_query(request.query_params)
    snapshot = site.snapshot()
    totals = snapshot.totals if snapshot else []
    lines = lines_of(totals, query)
    history = site.context.history
    words = query.text.casefold().split()
    nodes = (
        []
        if not words or not snapshot
        else [node for node in snapshot.reports if all(word in node.casefold() for word in words)]
    )
    return site.frame(
        request,
        "overview.html",
        "Queues",
        "Queues",
        search=query.text,
        cluster=snapshot.sums if snapshot else sums_of([]),
        trends={
            name: trend(history, EVERYTHING, name)
            for name in ("depth", "in_flight", "ingress", "finish", "requeue")
        },
        problems=snapshot.problems if snapshot else [],
        query=query,
        filters=[
            (name, label, lines.counts[name], query.address(show=name, page=1))
            for name, (label, _) in SHOWN.items()
        ],
        sorts=_sorts(query),
        matching_nodes=nodes[:20],
        rows=[(row, trend(history, row.key, "depth")) for row in lines.rows],
        found=lines.found,
        page=lines.page,
        pages=lines.pages,
        first=(lines.page - 1) * PAGE_LINES + 1,
    )


def _sorts(query: QueueQuery) -> dict[str, dict[str, Any]]:
    headings = {"name": "Topic / channel"} | {name: head for name, (head, _) in SORTS.items()}
    made = {}
    for name, heading in headings.items():
        is_sorted = query.sort == name
        # names begin with a, numbers with the largest
        turned = not query.is_ascending if is_sorted else name == "name"
        state = ("ascending" if query.is_ascending else "descending") if is_sorted else "none"
        address = query.address(sort=name, order="asc" if turned else "desc", page=1)
        made[name] = {"heading": heading, "state": state, "address": address}
    return made
