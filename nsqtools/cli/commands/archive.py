"""``nsq archive verify|repair|cat|info``: look at what ``nsq to-file`` (or nsq_to_file) wrote.

Damage is reported on stderr, a line each, and the exit status is 6.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Annotated

from typer import Option

from nsqtools.cli.options.params import ArchivePaths, Delimiter, Json, Since, Until, time_range
from nsqtools.cli.render.outcomes import DamageReporter
from nsqtools.cli.render.output import ByteWriter, counted, write_json, write_listing
from nsqtools.cli.running.ends import ExitStatus
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import OutputError
from nsqtools.protocol.durations import NS

LINES_A_WRITE = 1000


def verify(paths: ArchivePaths, json: Json = False, *, runtime: Session) -> int:
    """Read archives and report what is damaged.

    Every member is unpacked, every line of JSON is read, and each file is compared with its index.
    Prints a line for each problem; the exit status is 1 when there is one.

    Examples:
        nsq archive verify /var/nsq
        nsq archive verify /var/nsq --json | jq -r '.damaged[].file'
    """
    from nsqtools.archive.reader import find_archives
    from nsqtools.archive.repair import verify as verify_archive

    archives = find_archives(paths)
    verdicts = [verify_archive(archive) for archive in archives]
    damaged = [verdict for verdict in verdicts if verdict.problems]
    messages = sum(verdict.messages for verdict in verdicts)
    if json:
        found = [{"file": str(each.path), "problems": list(each.problems)} for each in damaged]
        write_json(
            runtime, {"files": len(archives), "messages": messages, "damaged": found}, indent=2
        )
    else:
        for verdict in damaged:
            for problem in verdict.problems:
                runtime.stdout.write(f"{verdict.path}: {problem}\n")
    files = counted(len(archives), "file")
    runtime.tell(f"nsq: {files}, {messages} messages, {len(damaged)} damaged")
    return ExitStatus.FAILED if damaged else ExitStatus.DONE


def repair(
    paths: ArchivePaths, delimiter: Delimiter = None, json: Json = False, *, runtime: Session
) -> int:
    """Finish files that a crash left, and repair damaged archives.

    Files in progress without a writer are cut back to their last durable message and get their
    final name. A damaged file keeps what can be read; the original is kept as .NAME.damaged.

    Examples:
        nsq archive repair /var/nsq
    """
    from nsqtools.archive.finishing import Directories, recover
    from nsqtools.archive.reader import find_archives
    from nsqtools.archive.repair import repair as repair_archive
    from nsqtools.archive.repair import verify as verify_archive

    archives = find_archives(paths)
    finished: list[str] = []
    repaired: list[dict[str, str | int]] = []
    for path in paths:
        if path.is_dir():
            for ended in recover(Directories(path.absolute(), path.absolute())):
                finished.append(str(ended))
                if not json:
                    runtime.stdout.write(f"{ended}: finished\n")
    for archive in archives:
        if archive.is_in_progress or not verify_archive(archive).problems:
            continue
        count = repair_archive(archive, b"\n" if delimiter is None else delimiter)
        repaired.append({"file": str(archive.path), "messages": count})
        if not json:
            runtime.stdout.write(f"{archive.path}: repaired, {count} messages\n")
    if json:
        write_json(runtime, {"finished": finished, "repaired": repaired}, indent=2)
    return ExitStatus.DONE


def cat(
    paths: ArchivePaths,
    bodies: Annotated[
        bool, Option("--bodies", help="Print only the bodies, each ended by --delimiter.")
    ] = False,
    delimiter: Delimiter = None,
    since: Since = None,
    until: Until = None,
    *,
    runtime: Session,
) -> int:
    """Print the messages in archives of any format and compression.

    Messages are printed as lines of JSON, as nsq tail --json does; bodies of raw files as they are.
    What is damaged is skipped and reported on stderr. Of a file in progress, what is durable is
    printed.

    Examples:
        nsq archive cat /var/nsq/clicks.*.log.gz | jq .body
        nsq archive cat /var/nsq --since -2h --bodies
    """
    from nsqtools.archive.reader import find_archives, read_messages
    from nsqtools.records.envelope import encode_many

    ending = b"\n" if delimiter is None else delimiter
    within = time_range(since, until)
    write = ByteWriter(runtime.stdout.fileno()).write
    damage = DamageReporter(runtime)
    for archive in find_archives(paths):
        messages = read_messages(archive, damage, delimiter=ending, within=within)
        lines = (
            message.body + ending
            if bodies or not message.topic
            else encode_many(message.topic, message.nsqd, [message])
            for message in messages
        )
        while some := b"".join(itertools.islice(lines, LINES_A_WRITE)):
            write(some)
    return damage.status


def info(paths: ArchivePaths, json: Json = False, *, runtime: Session) -> int:
    """List archives with their messages, topics and times.

    Examples:
        nsq archive info /var/nsq
        nsq archive info clicks.log.gz --json
    """
    from nsqtools.archive.members import scan_members
    from nsqtools.archive.reader import find_archives

    rows = []
    for archive in find_archives(paths):
        try:
            scan = scan_members(archive.path)
            size = archive.path.stat().st_size
        except OSError as exc:
            raise OutputError(f"cannot read {archive.path} ({exc.strerror})") from exc
        times = [time for m in scan.members if m.max_ts for time in (m.min_ts, m.max_ts)]
        state = "in progress" if archive.is_in_progress else scan.damage or "good"
        rows.append(
            (
                str(archive.path),
                str(sum(member.messages for member in scan.members)),
                ",".join(sorted(scan.topics)),
                _moment(min(times)) if times else "",
                _moment(max(times)) if times else "",
                str(size),
                ("jsonl" if scan.topics else "raw") + (" gzip" if scan.is_gzip else ""),
                state,
            )
        )
    columns = ("file", "messages", "topics", "first", "last", "bytes", "format", "state")
    optional = ("bytes", "format", "first", "topics")
    write_listing(runtime, columns, rows, json=json, optional=optional)
    return ExitStatus.DONE


def _moment(timestamp_ns: int) -> str:
    return datetime.fromtimestamp(timestamp_ns // NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
