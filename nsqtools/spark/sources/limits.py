"""Spark's read limits, and how often a source that has nothing new is asked."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
)

from nsqtools.spark.archives.settings import Limits

IDLE_SHARE = 2.0  # of the time that looking takes, to be waited before it is looked again


def default_limit(own: Limits) -> ReadLimit:
    """Return what Spark hands to ``latestOffset``: it knows one limit, and never two."""
    if own.rows is not None:
        return ReadMaxRows(own.rows)
    if own.bytes is not None:
        return ReadMaxBytes(own.bytes)
    if own.files is not None:
        return ReadMaxFiles(own.files)
    return ReadAllAvailable()


def limits_under(limit: ReadLimit, own: Limits) -> Limits:
    """Return the limits of a batch: ours, all of them, unless Spark wants everything."""
    return Limits() if isinstance(limit, ReadAllAvailable) else own


class Poll:
    """Entered to look for something new: waits before, when the last look found nothing.

    Spark asks a hundred times a second. Looking at a large archive takes long, and is done less
    often then.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._began_s = 0.0
        self._not_before_s = 0.0
        self._has_found = True

    def __enter__(self) -> Self:
        pause_s = self._not_before_s - time.monotonic()
        if not self._has_found and pause_s > 0:
            time.sleep(pause_s)
        self._began_s = time.monotonic()
        return self

    def found_something(self, has_found: bool) -> None:
        """Tell what came of it."""
        self._has_found = has_found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        took_s = time.monotonic() - self._began_s
        self._not_before_s = self._began_s + max(self._interval_s, took_s * (1 + IDLE_SHARE))
