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

OPTIONAL = (
    *("e2e_ms", "messages", "requeued", "timed_out", "memory", "disk", "requeue", "deferred"),
    *("finish", "egress", "ingress"),
    *("user_agent", "requeue_count", "finish_count", "message_count", "client_id"),
    *("gc_total_runs", "next_gc_bytes", "heap_released_bytes", "heap_objects"),
)
"""The columns that a narrow terminal does without, in this order."""

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
        columns, lines = table(view, sample, rows)
        if form == "csv":
            head = [("time", *columns)] if is_first else []
            stamped = [(time_text(sample.time_ns), *map(_csv_cell, line)) for line in lines]
            ByteWriter(runtime.stdout.fileno()).write(csv_text([*head, *stamped]).encode())
        else:
            write_listing(runtime, columns, lines, json=False, headed=is_first, optional=OPTIONAL)
        is_first = False

    return emit


def table(view: str, sample: Sample, rows: Sequence[QueueRow]) -> Table:
    """Column names and lines for a view."""
    if view == "clients":
        return CLIENT_COLUMNS, _pick(client_documents(sample.reports, rows), CLIENT_COLUMNS)
    if view == "memory":
        return MEMORY_COLUMNS, _pick(_memory(sample), MEMORY_COLUMNS)
    names = [name for name in COLUMNS if view == "nodes" or name != "node"]
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
