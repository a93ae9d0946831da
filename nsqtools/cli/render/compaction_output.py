"""What ``nsq spark compact`` shows and asks: the plan, what was made, what is to be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsqtools.cli.render.outcomes import report_damages
from nsqtools.cli.render.output import Cell, write_json, write_listing
from nsqtools.cli.running.runtime import ExitStatus, Runtime

if TYPE_CHECKING:
    from nsqtools.spark.jobs.compaction.compaction_job import Compaction, Deletable
    from nsqtools.spark.jobs.compaction.inventory import CountedFile, Slot

PLANNED = ("topic", "date", "state", "files", "messages", "reason")
MADE = ("topic", "date", "state", "files", "read", "duplicates", "rows", "bytes")
STATE_AFTER = {"new": "compacted", "merge": "merged"}
MOST_NAMES = 20


def show_plan(
    runtime: Runtime, compaction: Compaction, *, delete_archives: bool, json: bool
) -> ExitStatus:
    """Print what a run would do."""
    rows: list[Sequence[Cell]] = [
        (
            *_name(partition.slot),
            partition.state.value,
            len(partition.contents),
            partition.messages,
            partition.reason or None,
        )
        for partition in compaction.partitions
        if partition.state.value != "done"
    ]
    deletable = compaction.deletable(assume_done=True) if delete_archives else None
    if json:
        document: dict[str, Any] = {"partitions": _documents(PLANNED, rows)}
        if deletable is not None:
            document["delete"] = [str(content.path) for content in deletable.contents]
        write_json(runtime, document, indent=2)
    else:
        write_listing(runtime, PLANNED, rows, json=False)
        if deletable is not None:
            tell_deletable(runtime, deletable, "all of it would be in verified Parquet")
    return tell_changed(runtime, compaction)


def show_results(
    runtime: Runtime, compaction: Compaction, deleted: Sequence[CountedFile], *, json: bool
) -> None:
    """Print what was made."""
    rows: list[Sequence[Cell]] = [
        (
            *_name(result.partition.slot),
            STATE_AFTER[result.partition.state.value],
            len(result.partition.contents),
            result.rows_read,
            result.duplicates_removed,
            result.manifest.rows_written,
            sum(result.manifest.files.values()),
        )
        for result in compaction.results
    ]
    if json:
        names = [str(content.path) for content in deleted]
        write_json(runtime, {"partitions": _documents(MADE, rows), "deleted": names}, indent=2)
    elif rows:
        write_listing(runtime, MADE, rows, json=False)


def delete_needless(runtime: Runtime, deletable: Deletable, *, yes: bool) -> Sequence[CountedFile]:
    """Show which archives can go, ask, and delete them; return those that are gone."""
    from nsqtools.spark.jobs.compaction.compaction_job import delete

    for path, reason in deletable.kept.items():
        runtime.tell(f"nsq: {path} stays: {reason}")
    if not deletable.contents:
        runtime.tell("nsq: no archive can be deleted")
        return ()
    tell_deletable(runtime, deletable, "all of it is in verified Parquet")
    if not yes and not runtime.confirm("Delete them?"):
        runtime.tell("nsq: nothing was deleted")
        return ()
    changed = delete(deletable.contents)
    for path in changed:
        runtime.tell(f"nsq: {path} stays: it changed meanwhile")
    gone = [content for content in deletable.contents if str(content.path) not in changed]
    runtime.tell(f"nsq: {len(gone)} archives deleted")
    return gone


def tell_deletable(runtime: Runtime, deletable: Deletable, why: str) -> None:
    """Name the archives that can go; it is part of a question, and so said even with --quiet."""
    for content in deletable.contents[:MOST_NAMES]:
        runtime.insist(f"delete {content.path} ({content.total} messages)")
    if (more := len(deletable.contents) - MOST_NAMES) > 0:
        runtime.insist(f"and {more} more")
    runtime.insist(
        f"{len(deletable.contents)} archives with {deletable.messages} messages, "
        f"{deletable.bytes} bytes: {why}"
    )


def tell_outcome(runtime: Runtime, compaction: Compaction) -> ExitStatus:
    """Tell what was done and what was not; return the exit status."""
    status = tell_changed(runtime, compaction)
    results = compaction.results
    status = report_damages(runtime, compaction.damages) or status
    open_days = Counter(
        (partition.slot.day, partition.reason)
        for partition in compaction.partitions
        if partition.state.value == "open"
    )
    for (day, reason), topics in open_days.items():
        runtime.tell(f"nsq: {day} ({topics} topics) is left out: {reason}")
    bare = sum(result.rows_read for result in results if result.partition.slot.day is None)
    if bare:
        runtime.tell(
            f"nsq: {bare} bare bodies have no id and no time: all were kept, without a date"
        )
    read = sum(result.rows_read for result in results)
    removed = sum(result.duplicates_removed for result in results)
    runtime.tell(
        f"nsq: {read} messages read, {removed} duplicates removed, {len(results)} partitions "
        "written and verified"
    )
    return status


def tell_changed(runtime: Runtime, compaction: Compaction) -> ExitStatus:
    """Name the files of bare bodies that changed after they were taken."""
    for path in compaction.changed:
        runtime.tell(
            f"nsq: {path} changed after its bodies were taken: what is new in it is left out"
        )
    return ExitStatus.PARTLY_DONE if compaction.changed else ExitStatus.DONE


def _name(slot: Slot) -> tuple[str | None, str | None]:
    return slot.topic, slot.day.isoformat() if slot.day else None


def _documents(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[dict[str, Cell]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]
