"""``nsq archive erase``: erase messages from archives and tables."""

from __future__ import annotations

from typing import Annotated, Any

from nsqtools.cli.options.params import GLOBS, SELECTION, Delimiter, DryRun, Json, Yes
from nsqtools.cli.options.printing import TopicFilter
from nsqtools.cli.options.spark_options import places_argument
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_json, write_records
from nsqtools.cli.running.runtime import ExitStatus, Session
from nsqtools.protocol.text import counted
from nsqtools.records import filters
from nsqtools.records.envelope import Envelope

FIGURES = ("file", "messages", "erased")


def erase(
    paths: Annotated[
        list[Any], places_argument("Archives and tables: directories, files, s3://BUCKET/PREFIX.")
    ],
    where: Annotated[
        filters.Filter,
        opt("JQ", "Erase messages that satisfy this jq expression.", parser=filters.where),
    ],
    topic: list[str] | None = opt(
        "--topic -t GLOB", f"Erase messages of these topics only. {GLOBS}", SELECTION
    ),
    delimiter: Delimiter = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    *,
    runtime: Session,
) -> int:
    """Erase messages from archives and tables, and verify that they are gone.

    All messages are judged first; nothing changes if the expression fails for one of them, or a
    file is damaged. Then files with matches are written again: archives with their index, tables
    with all columns. The history of Delta tables is deleted, so running queries may fail and
    earlier versions are gone. At the end everything is read again. A killed run is repeated. Files
    in progress, damaged copies and files of running writers are listed, with status 6. Backups,
    versions in a bucket, dead-letter files, ledgers and nsqd are not reached.

    Examples:
        nsq archive erase /var/nsq s3://lake/nsq --where '.user == 7' --dry-run
        nsq archive erase /var/nsq -t clicks --where '.user.email == "a@example.com"' --yes
    """
    from nsqtools.archive.erasure import Erasure
    from nsqtools.archive.finding import find_inputs

    topics = TopicFilter(topic or ())

    def is_match(message: Envelope) -> bool:
        return topics(message) and where(message)

    erasure = Erasure(find_inputs(paths), is_match, b"\n" if delimiter is None else delimiter)
    if not dry_run:
        erasure.finish_earlier()
    erasure.plan()
    topics.check()
    judged, erased = erasure.messages, sum(len(matches.rows) for matches in erasure.matches)
    rows = [
        {
            "file": matches.archive.shown,
            "messages": matches.messages,
            "erased": len(matches.rows),
        }
        for matches in erasure.matches
    ]
    plan = [f"{row['file']}: erase {row['erased']} of {row['messages']}" for row in rows]
    plan += [f"{table}: delete the history" for table in erasure.inputs.delta]
    if plan and not dry_run:
        if not runtime.confirm(plan, f"Erase {counted(erased, 'message')}?", yes=yes):
            return ExitStatus.FAILED
        erasure.run()
    if json:
        figures = {"messages": erasure.messages, "erased": erased}
        write_json(runtime, {**figures, "files": rows, "unreachable": erasure.unreachable})
    else:
        write_records(runtime, FIGURES, rows)
    for path, reason in erasure.unreachable.items():
        runtime.print_error(f"nsq: {path} may keep messages: {reason}")
    done = "match" if dry_run else "erased"
    runtime.info(f"nsq: {counted(erased, 'message')} {done} of {judged} judged")
    runtime.info(
        "nsq: not reached: backups, versions in buckets, dead-letter files, ledgers and nsqd"
    )
    return ExitStatus.PARTLY_DONE if erasure.unreachable else ExitStatus.DONE
