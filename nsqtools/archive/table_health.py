"""Measure tables for ``nsq check --lake``, by their logs, manifests and footers alone.

    lake = measure_lake(["s3://bucket/lake", "/var/nsq"], time.time(), max_age_s=3600)

A place is a table, a folder of tables of topics, or a local directory of logs that land.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pyarrow import ArrowException, parquet

from nsqtools.archive.body_columns import ERROR
from nsqtools.archive.catalog import Source, iterate_sources
from nsqtools.archive.finding import (
    ArchiveFile,
    any_partition,
    find_archives,
    find_inputs,
    map_archives,
)
from nsqtools.archive.landing import DRAFTS
from nsqtools.archive.place import translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.upload import uploaded_of
from nsqtools.cluster.lake import Lake, TopicRows, WaitingLogs
from nsqtools.errors import NsqError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import NS

RECENT_S = 86_400.0
# A finished log lands within seconds. An hour is longer than an outage of a store that nobody has
# to know about.
LANDING_S = 3600.0


def measure_lake(places: Iterable[str], now_s: float, max_age_s: float | None) -> Lake:
    """Measure tables and directories. A place that cannot be read is a failure in the result."""
    topics: list[TopicRows] = []
    waiting: list[WaitingLogs] = []
    failures: list[tuple[str, str]] = []
    for place in places:
        try:
            if parse_place(place).is_remote or not (Path(place) / DRAFTS).is_dir():
                topics += _measure_tables(place, now_s)
            else:
                waiting += _waiting_logs(Path(place), now_s)
        except NsqError as exc:
            failures.append((place, str(exc)))
    return Lake(topics, waiting, failures, max_age_s)


def _measure_tables(place: str, now_s: float) -> Iterator[TopicRows]:
    inputs = find_inputs([parse_place(place)])
    tables = (*inputs.delta, *inputs.parquet)
    if not tables:
        raise NsqError(f"{place} holds no table and no logs that land in one")
    for table in tables:
        # A new table must not be next to tables of topics, whose readers would read both.
        new_place = f"{table}-wide"
        if table != parse_place(place).absolute():
            base = str(table.parent)
            new_place = f"{base}-wide{str(table)[len(base) :]}"
        files = [file for file in find_archives([str(table)]) if file.table is not None]
        by_topic: dict[str, list[Source]] = {}
        for source in iterate_sources(files, any_partition):
            by_topic.setdefault(source.topic or "", []).append(source)
        for topic, sources in sorted(by_topic.items()):
            has_one_topic = len(by_topic) == 1 and is_valid_name(topic)
            newest_s, misfits = _measure_files(sources, now_s)
            yield TopicRows(
                str(table),
                topic,
                rows=sum(source.messages for source in sources),
                newest_s=newest_s,
                misfits=misfits,
                is_delta=table in inputs.delta,
                partition_by=[name for name, _ in sources[0].extras],
                new_place=new_place if has_one_topic else "",
            )


def _measure_files(sources: Sequence[Source], now_s: float) -> tuple[float | None, int]:
    """Return the time of the newest message, and the misfits in files of the last day."""
    times = {source.key: source.spans[0].max_ts / NS for source in sources if source.is_timed}
    recent = [source for source in sources if times.get(source.key, 0) >= now_s - RECENT_S]
    misfits = sum(map_archives(_misfits_in, [source.file for source in recent]))
    return max(times.values(), default=None), misfits


def _misfits_in(archive: ArchiveFile) -> int:
    """Return how many rows of a file have an error, by its footer."""
    with translating_errors("read", archive.shown), archive.open() as file:
        try:
            metadata = parquet.read_metadata(file)
        except ArrowException as exc:
            raise NsqError(f"cannot read {archive.shown}: it is not whole Parquet") from exc
    misfits = 0
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    for column in (group.column(at) for group in groups for at in range(group.num_columns)):
        if column.path_in_schema == ERROR and column.statistics is not None:
            misfits += column.statistics.num_values
    return misfits


def _waiting_logs(directory: Path, now_s: float) -> Iterator[WaitingLogs]:
    logs = [log for log in find_archives([str(directory)]) if not log.is_in_progress]
    times = [
        log.storage.stat(log.name).modified_ns / NS
        for log in logs
        if not uploaded_of(Path(log.shown)).exists()
    ]
    if late := [time_s for time_s in times if now_s - time_s > LANDING_S]:
        yield WaitingLogs(str(directory), len(late), min(late))
