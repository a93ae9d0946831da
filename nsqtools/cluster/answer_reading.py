"""The successive answers of one nsqd to /stats, read into rows with rates. Pure.

Of a thousand topics few change from one answer to the next. A topic whose JSON is what it was is
not read again: comparing costs a tenth of reading. `SumReader` does the same for the sums over all
nsqd. Rates are those of `queue_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from nsqtools.cluster.queue_rows import (
    QueueRow,
    Rates,
    rates_between,
    rows_of_topic,
    total,
)
from nsqtools.protocol.stats import read_topic

QUIET = Rates(**{rate.name: 0.0 for rate in fields(Rates)})


@dataclass(slots=True)
class _Topic:
    """A topic as it was read: ``base`` are the rows, and ``base_s`` the moment, from which the next
    rates are counted."""

    document: dict[str, Any]
    rows: list[QueueRow]
    base: list[QueueRow]
    base_s: float
    is_quiet: bool = False


class AnswerReader:
    """Reads the answers of one nsqd.

    Between answers less than ``least_s`` apart the rates stay as they were: the moment of an answer
    is not known exactly enough.
    """

    def __init__(self, address: str, least_s: float) -> None:
        self._address = address
        self._least_s = least_s
        self._start_time: Any = None
        self._topics: dict[str, _Topic] = {}

    def read(self, document: dict[str, Any], at_s: float) -> list[QueueRow]:
        """Return the rows of all topics and channels in an answer; other entries are skipped.

        Topics that were there before, in the same run of nsqd, have rates.
        """
        if document.get("start_time") != self._start_time:
            self._start_time = document.get("start_time")
            self._topics = {}
        before, self._topics = self._topics, {}
        topics = document.get("topics")
        rows: list[QueueRow] = []
        for each in topics if isinstance(topics, list) else ():
            if not isinstance(each, dict):
                continue
            name = str(each.get("topic_name"))
            topic = self._topic(before.get(name), each, at_s)
            self._topics[name] = topic
            rows += topic.rows
        return rows

    def _topic(self, before: _Topic | None, document: dict[str, Any], at_s: float) -> _Topic:
        if before is not None and document == before.document:
            if before.is_quiet:
                before.base_s = at_s
                return before
            rows = before.rows
        else:
            rows = [*rows_of_topic(self._address, read_topic(document))]
        if before is None:
            return _Topic(document, rows, rows, at_s)
        elapsed_s = at_s - before.base_s
        if elapsed_s < self._least_s:
            shown = {row.channel: row.rates for row in before.rows}
            rows = [replace(row, rates=shown.get(row.channel)) for row in rows]
            return _Topic(document, rows, before.base, before.base_s)
        then = {row.channel: row for row in before.base}
        rows = [
            replace(
                row,
                rates=rates_between(then[row.channel], row, elapsed_s)
                if row.channel in then
                else None,
            )
            for row in rows
        ]
        return _Topic(document, rows, rows, at_s, all(row.rates == QUIET for row in rows))


class SumReader:
    """Sums rows over all nsqd, as `queue_rows.totals` does, again and again."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[list[QueueRow], QueueRow]] = {}

    def totals(self, rows: Iterable[QueueRow]) -> list[QueueRow]:
        """Return one row for each topic and channel, in order."""
        groups: dict[tuple[str, str], list[QueueRow]] = {}
        for row in rows:
            groups.setdefault((row.topic, row.channel), []).append(row)
        sums = {}
        for key in sorted(groups):
            group, before = groups[key], self._before.get(key)
            # rows that were not read again are the same objects, which compare at once
            is_same = before is not None and before[0] == group
            sums[key] = before if before is not None and is_same else (group, total(group))
        self._before = sums
        return [row for _, row in sums.values()]
