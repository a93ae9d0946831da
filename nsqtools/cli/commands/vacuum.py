"""``nsq archive vacuum``: remove old days and the history of tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.params import SAFETY, DryRun, Json, Yes
from nsqtools.cli.options.spark_options import places_argument
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_json, write_records
from nsqtools.cli.running.runtime import ExitStatus, Session
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.archive.vacuum import Vacuum

FIGURES = ("table", "dropped_files", "dropped_messages", "files", "bytes", "log_entries")


def vacuum(
    tables: Annotated[list[Any], places_argument("Tables: directories, s3://BUCKET/PREFIX.")],
    keep: float = opt("DURATION", "How long removed files and log entries stay.", SAFETY, "30d"),
    drop_older_than: float | None = opt("DURATION", "Drop days that are older (400d).", SAFETY),
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    *,
    runtime: Session,
) -> int:
    """Remove old days, replaced files and old log entries of tables.

    Files that a compaction, a dropped day or another program removed from a Delta table stay on
    disk, so that running queries and earlier versions can read them. They are deleted once they
    were removed for --keep, with older entries of the log: then earlier versions are gone. Days
    that are dropped leave a Delta table at once, and their files later in the same way. A folder of
    Parquet has no history: the files of dropped days are deleted. Archivers may go on landing.

    Examples:
        nsq archive vacuum s3://lake/nsq --keep 7d --dry-run
        nsq archive vacuum /data/nsq --drop-older-than 400d --yes
    """
    from nsqtools.archive.finding import find_inputs
    from nsqtools.archive.vacuum import Vacuum, day_before

    inputs = find_inputs(tables)
    if inputs.archives:
        raise ConfigurationError(
            f"{inputs.archives[0]} is no table", hint="Delete old archives with find or rm."
        )
    now_s = time.time()
    first_day = None if drop_older_than is None else day_before(now_s, drop_older_than)
    jobs = [Vacuum(place, keep, now_s, first_day) for place in inputs.places]
    for job in jobs:
        job.plan()
    plan = [line for job in jobs if (line := _plan_of(job))]
    if not dry_run:
        if plan and not runtime.confirm(plan, "Remove them?", yes=yes):
            return ExitStatus.FAILED
        for job in jobs:
            job.run()
    documents = list(map(_document, jobs))
    if json:
        write_json(runtime, {"tables": documents})
    else:
        write_records(runtime, FIGURES, documents)
    return ExitStatus.DONE


def _document(vacuum: Vacuum) -> dict[str, Any]:
    return {
        "table": str(vacuum.place),
        "dropped_files": len(vacuum.dropped),
        "dropped_messages": sum(file.rows or 0 for file in vacuum.dropped),
        "files": len(vacuum.deletable),
        "bytes": sum(entry.size for entry in vacuum.deletable),
        "log_entries": len(vacuum.log),
    }


def _plan_of(vacuum: Vacuum) -> str:
    """Return the line of the plan for a table, "" if nothing is to be done."""
    parts = []
    if vacuum.dropped:
        rows = counted(sum(file.rows or 0 for file in vacuum.dropped), "message")
        files = counted(len(vacuum.dropped), "file")
        parts.append(f"drop {rows} before {vacuum.first_day} in {files}")
    if vacuum.deletable:
        size = sum(entry.size for entry in vacuum.deletable)
        parts.append(f"delete {counted(len(vacuum.deletable), 'removed file')}, {size} bytes")
    if vacuum.log:
        parts.append(f"delete {counted(len(vacuum.log), 'file')} of the log")
    return f"{vacuum.place}: {'; '.join(parts)}" if parts else ""
