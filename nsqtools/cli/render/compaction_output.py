"""What a compaction shows and asks: the plan, what was made, what is to be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqtools.cli.render.output import Cell, write_json, write_listing
from nsqtools.cli.running.runtime import ExitStatus, Runtime

if TYPE_CHECKING:
    from nsqtools.archive.compaction import Compaction, Partition

PLANNED = ("topic", "date", "state", "files", "messages")
MADE = ("topic", "date", "state", "files", "read", "duplicates", "rows", "bytes")
MOST_NAMES = 20


def show_plan(runtime: Runtime, compaction: Compaction, *, json: bool) -> ExitStatus:
    """Print what a run would do."""
    rows: list[Sequence[Cell]] = [
        (*_name(each), each.state, len(each.sources), each.messages)
        for each in compaction.partitions
        if each.state != "done"
    ]
    if json:
        write_json(runtime, {"partitions": _documents(PLANNED, rows)}, indent=2)
    else:
        write_listing(runtime, PLANNED, rows, json=False)
    return ExitStatus.DONE


def show_results(
    runtime: Runtime, compaction: Compaction, deleted: Sequence[str], *, json: bool
) -> None:
    """Print what was made."""
    rows: list[Sequence[Cell]] = [
        (
            *_name(each),
            each.state,
            len(each.files),
            sum(done.read for done in each.done),
            sum(done.duplicates for done in each.done),
            sum(file.rows or 0 for file in each.files),
            sum(file.bytes for file in each.files),
        )
        for each in compaction.work
    ]
    if json:
        document = {
            "partitions": _documents(MADE, rows),
            "deleted": list(deleted),
            "misfits": sum(done.misfits for each in compaction.work for done in each.done),
        }
        write_json(runtime, document, indent=2)
    elif rows:
        write_listing(runtime, MADE, rows, json=False)


def delete_needless(runtime: Runtime, compaction: Compaction, *, yes: bool) -> list[str]:
    """Show which archives can go, ask, and delete them; return those that are gone."""
    from nsqtools.archive.compaction import delete_archive

    sources, kept = compaction.deletable()
    for path, reason in kept.items():
        runtime.tell(f"nsq: {path} stays: {reason}")
    if not sources:
        runtime.tell("nsq: no archive can be deleted")
        return []
    plan = [f"delete {each.shown} ({each.messages} messages)" for each in sources[:MOST_NAMES]]
    if (more := len(sources) - MOST_NAMES) > 0:
        plan.append(f"and {more} more")
    plan.append(
        f"{len(sources)} archives with {sum(each.messages for each in sources)} messages, "
        f"{sum(each.size for each in sources)} bytes: all of it is in verified Parquet"
    )
    if not runtime.agree(plan, "Delete them?", yes=yes):
        return []
    gone = []
    for source in sources:
        if delete_archive(source):
            gone.append(source.shown)
        else:
            runtime.tell(f"nsq: {source.shown} stays: it changed meanwhile")
    runtime.tell(f"nsq: {len(gone)} archives deleted")
    return gone


def tell_outcome(runtime: Runtime, compaction: Compaction) -> ExitStatus:
    """Tell what was done and what was not; return the exit status."""
    done = [each for partition in compaction.work for each in partition.done]
    damages = sorted({damage for each in done for damage in each.damages})
    for shown, problem in damages:
        runtime.insist(f"nsq: {shown}: {problem}")
    opened = Counter(each.slot.day for each in compaction.partitions if each.state == "open")
    for day, topics in opened.items():
        runtime.tell(f"nsq: {day} ({topics} topics) is left out: it is not over, see --grace")
    bare = sum(each.read for each in done if each.slot.day is None)
    if bare:
        runtime.tell(
            f"nsq: {bare} bare bodies have no id and no time: all were kept, without a date"
        )
    read, removed = sum(each.read for each in done), sum(each.duplicates for each in done)
    files = sum(each.file is not None for each in done)
    if misfits := sum(each.misfits for each in done):
        runtime.tell(f"nsq: {misfits} bodies did not fit their columns: _error says why")
    runtime.tell(
        f"nsq: {read} messages read, {removed} duplicates removed, {files} files written and "
        "verified"
    )
    return ExitStatus.PARTLY_DONE if damages else ExitStatus.DONE


def _name(partition: Partition) -> tuple[str | None, str | None]:
    slot = partition.slot
    return slot.topic, slot.day.isoformat() if slot.day else None


def _documents(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[dict[str, Cell]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]
