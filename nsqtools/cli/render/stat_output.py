"""How `nsq stat` prints a sample: as a table, as plain columns, or for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nsqtools.cli.render.output import ByteWriter, Cell, cell_text, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_columns import COLUMNS, Test, sort_rows
from nsqtools.cluster.stats_documents import (
    client_documents,
    csv_text,
    document,
    prometheus_text,
    time_text,
)

Table = tuple[Sequence[str], list[Sequence[Cell]]]

NARROW = ("topic", "channel", "depth", "in_flight", "ingress", "egress", "finish", "clients")
"""The columns for a terminal that has no room for all; the node comes with them where asked."""

ALL_COLUMNS_WIDTH = 160

CLIENT_COLUMNS = (
    *("topic", "channel", "node", "client_id", "remote_address", "user_agent", "ready_count"),
    *("in_flight_count", "message_count", "finish_count", "requeue_count"),
)
MEMORY_COLUMNS = (
    *("node", "version", "health", "heap_objects", "heap_in_use_bytes", "heap_idle_bytes"),
    *("heap_released_bytes", "next_gc_bytes", "gc_total_runs"),
)


def printer(
    runtime: Runtime, view: str, form: str, *, tests: Sequence[Test], sort: str
) -> Callable[[Sample], None]:
    """Return the function that prints samples in one form (``""``: a table, or plain columns)."""
    is_first = True

    def rows_of(sample: Sample) -> list[QueueRow]:
        rows = sample.rows if view == "nodes" else sample.totals
        return sort_rows((row for row in rows if all(test(row) for test in tests)), sort)

    def emit(sample: Sample) -> None:
        nonlocal is_first
        if form == "prometheus":
            ByteWriter(runtime.stdout.fileno()).write(prometheus_text(sample).encode())
            return
        rows = rows_of(sample)
        if form == "json":
            answer = document(sample, rows)
            if view == "clients":
                answer["clients"] = client_documents(sample.reports, rows)
            write_json(runtime, answer)
            return
        width = runtime.width if runtime.stdout_is_tty and not form else ALL_COLUMNS_WIDTH
        columns, lines = table(view, sample, rows, width)
        if form == "csv":
            head = [("time", *columns)] if is_first else []
            stamped = [(time_text(sample.time_ns), *map(_csv_cell, line)) for line in lines]
            ByteWriter(runtime.stdout.fileno()).write(csv_text([*head, *stamped]).encode())
        else:
            write_listing(runtime, columns, lines, json=False, headed=is_first)
        is_first = False

    return emit


def table(view: str, sample: Sample, rows: Sequence[QueueRow], width: int) -> Table:
    """Column names and lines for a view, in so many columns of text."""
    if view == "clients":
        return CLIENT_COLUMNS, _pick(client_documents(sample.reports, rows), CLIENT_COLUMNS)
    if view == "memory":
        return MEMORY_COLUMNS, _pick(_memory(sample), MEMORY_COLUMNS)
    names = list(COLUMNS) if width >= ALL_COLUMNS_WIDTH else list(NARROW)
    if view == "nodes" and "node" not in names:
        names.insert(2, "node")
    elif view == "queues" and "node" in names:
        names.remove("node")
    return names, [[_cell(COLUMNS[name](row)) for name in names] for row in rows]


def _memory(sample: Sample) -> list[dict[str, Any]]:
    return [
        {
            "node": report.address,
            "version": report.stats.version,
            "health": report.stats.health,
            **(report.stats.memory or {}),
        }
        for report in sample.reports
    ]


def _pick(documents: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[Sequence[Cell]]:
    return [[_cell(document.get(column)) for column in columns] for document in documents]


def _cell(value: Cell) -> Cell:
    return None if value == "" else value


def _csv_cell(cell: Cell) -> Cell:
    return cell_text(cell) if isinstance(cell, bool) else cell
