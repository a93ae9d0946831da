"""How `nsq stat` prints a sample: as a table, as plain columns, or for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsqtools.cli.render.output import Cell, Form, FormKind, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_documents import (
    COLUMNS,
    Test,
    client_documents,
    document,
    sort_rows,
    time_text,
)

OPTIONAL = (
    "e2e_ms",
    "messages",
    "requeued",
    "timed_out",
    "memory",
    "disk",
    "requeue",
    "deferred",
    "finish",
    "egress",
    "ingress",
    "user_agent",
    "requeued",
    "finished",
    "messages",
    "client_id",
    "ready",
    "gc_total_runs",
    "next_gc_bytes",
    "heap_released_bytes",
    "heap_objects",
)
"""The columns that a narrow terminal does without, in this order."""

CLIENT_COLUMNS = (
    "topic",
    "channel",
    "node",
    "client_id",
    "remote_address",
    "user_agent",
    "ready",
    "in_flight",
    "messages",
    "finished",
    "requeued",
)
MEMORY_COLUMNS = (
    "node",
    "version",
    "health",
    "heap_objects",
    "heap_in_use_bytes",
    "heap_idle_bytes",
    "heap_released_bytes",
    "next_gc_bytes",
    "gc_total_runs",
)
TIMED = (FormKind.csv, FormKind.jsonl)
"""The forms in which every row has the time of its sample."""


class SamplePrinter:
    """Prints samples, one after the other, in one form; ``timed`` rows begin with their time."""

    def __init__(
        self,
        runtime: Runtime,
        view: str,
        form: Form,
        *,
        tests: Sequence[Test],
        sort: str,
        timed: bool = False,
    ) -> None:
        self._runtime = runtime
        self._view = view
        self._form = form
        self._tests = tests
        self._sort = sort
        self._timed = timed or form.kind in TIMED or "time" in form.columns
        self._is_first = True
        form.check(("time", *columns_of(view)))

    def __call__(self, sample: Sample) -> None:
        """Print a sample."""
        rows = sample.rows if self._view == "nodes" else sample.totals
        chosen = (row for row in rows if all(test(row) for test in self._tests))
        queues = sort_rows(chosen, self._sort)
        if self._form.is_document:
            answer = document(sample, queues)
            if self._view == "clients":
                answer["consumers"] = client_documents(sample.reports, queues)
            write_json(self._runtime, answer)
            return
        columns, lines = columns_of(self._view), lines_of(self._view, sample, queues)
        if self._timed:
            moment = time_text(sample.time_ns)
            if self._form.kind is None and self._runtime.stdout_is_tty:
                moment = moment[CLOCK]
            columns, lines = ("time", *columns), [(moment, *line) for line in lines]
        write_listing(
            self._runtime, columns, lines, self._form, headed=self._is_first, optional=OPTIONAL
        )
        self._is_first = False


CLOCK = slice(11, 19)  # of RFC 3339: hours, minutes and seconds


def columns_of(view: str) -> Sequence[str]:
    """The columns of a view."""
    if view == "clients":
        return CLIENT_COLUMNS
    if view == "memory":
        return MEMORY_COLUMNS
    return [name for name in COLUMNS if view == "nodes" or name != "node"]


def lines_of(view: str, sample: Sample, rows: Sequence[QueueRow]) -> list[Sequence[Cell]]:
    """The lines of a view."""
    if view == "clients":
        return _pick(client_documents(sample.reports, rows), CLIENT_COLUMNS)
    if view == "memory":
        return _pick(_memory(sample), MEMORY_COLUMNS)
    return [[_cell(COLUMNS[name](row)) for name in columns_of(view)] for row in rows]


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
