"""``nsq archive``: look at what ``nsq to-file`` (or nsq_to_file) wrote, and bring it into tables.

Damage is reported on stderr, a line each, and the exit status is 6. ``verify`` prints it, with
status 1.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.params import (
    ArchivePaths,
    Count,
    Delimiter,
    Json,
    Since,
    Until,
    time_range,
)
from nsqtools.cli.options.printing import (
    ArchivedTopics,
    MessageFilter,
    Pick,
    Pretty,
    Template,
    TopicFilter,
    message_printer,
)
from nsqtools.cli.options.tables import BodyOptions, TableFormat
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import (
    DamageReporter,
    UnjudgedReporter,
    report_timeless,
    report_unfit,
)
from nsqtools.cli.render.output import (
    ListingForm,
    write_json,
    write_lines,
    write_listing,
)
from nsqtools.cli.running.runtime import ExitStatus, Session, status_of_work
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import NS, counted, utc_text
from nsqtools.records.envelope import Envelope

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import Repaired, RepairedFile


LINES_A_WRITE = 1000
ARCHIVES = ("file", "messages", "topics", "first", "last", "bytes", "format", "state")


def verify(paths: ArchivePaths, json: Json = False, *, runtime: Session) -> int:
    """Read archives and report what is damaged.

    Every member is unpacked, every line of JSON is read, and each file is compared with its index.
    Prints a line for each problem; the exit status is 1 when there is one.

    Examples:
        nsq archive verify /var/nsq
        nsq archive verify /var/nsq --json | jq -r '.damaged[].file'
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.reader import verify as verify_archive

    damage = DamageReporter(
        runtime, say=lambda line: None if json else write_lines(runtime, [line])
    )
    archives = find_archives(paths)
    messages = sum(verify_archive(archive, damage) for archive in archives)
    damage.report(len(archives), messages, json=json)
    return ExitStatus.FAILED if damage.files else ExitStatus.DONE


def repair(
    paths: ArchivePaths, delimiter: Delimiter = None, json: Json = False, *, runtime: Session
) -> int:
    """Finish files that a crash left, and repair damaged archives.

    Files in progress without a writer are cut back to their last durable message and get their
    final name. A damaged file keeps what can be read; the original is kept as .NAME.damaged.

    Examples:
        nsq archive repair /var/nsq
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.part_file import Directories, recover
    from nsqtools.archive.place_url import OBJECT_SCHEMES, local_path, scheme_of
    from nsqtools.archive.reader import repair as repair_archive
    from nsqtools.archive.reader import verify as verify_archive

    archives = find_archives(paths)
    finished: list[str] = []
    repaired: list[RepairedFile] = []
    failed: list[NsqError] = []
    damage = DamageReporter(runtime, say=lambda line: None)
    for path in paths:
        if scheme_of(path) in OBJECT_SCHEMES:
            continue
        if (folder := local_path(path).absolute()).is_dir():
            finished += map(str, recover(Directories(folder, folder)))
    if not json:
        write_lines(runtime, [f"{path}: finished" for path in finished])
    for archive in archives:
        if not archive.is_in_progress:
            verify_archive(archive, damage)
        if archive.shown not in damage.files:
            continue
        try:
            count = repair_archive(archive, b"\n" if delimiter is None else delimiter)
        except NsqError as error:  # a FIFO, say: the others are repaired all the same
            runtime.report(error)
            failed.append(error)
            continue
        repaired.append({"file": str(archive.path), "messages": count})
        if not json:
            of = "" if archive.messages in (None, count) else f" of {archive.messages} in its index"
            write_lines(runtime, [f"{archive.path}: repaired, {counted(count, 'message')}{of}"])
    if json:
        document: Repaired = {"finished": finished, "repaired": repaired}
        write_json(runtime, document)
    is_anything_done = bool(finished or repaired)
    return status_of_work(
        next(iter(failed), None), is_whole=not failed, is_anything_done=is_anything_done
    )


def cat(
    paths: ArchivePaths,
    topic: ArchivedTopics = None,
    count: Count = None,
    bodies: bool = opt("", "Print only the bodies, each ended by --delimiter."),
    delimiter: Delimiter = None,
    since: Since = None,
    until: Until = None,
    json: Json = False,
    format: Template = None,
    pick: Pick = None,
    pretty: Pretty = False,
    *,
    keep: MessageFilter,
    runtime: Session,
) -> int:
    """Print the messages in archives of any format and compression.

    Messages are printed as lines of JSON, as nsq tail --json does, and bodies of raw files as they
    are. What is damaged is skipped and reported on stderr, as are messages to which --where or
    --pick cannot be applied. Of a file in progress, what is durable is printed.

    Examples:
        nsq archive cat /var/nsq/clicks.*.log.gz | jq .body
        nsq archive cat /var/nsq --since -2h --bodies
        nsq archive cat /var/nsq -t clicks -n 10 --where '.page == "/cart"' --pick .user
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.reader import read_messages

    if sum((bodies, json, format is not None)) > 1:
        raise ConfigurationError("--bodies, --json and --format exclude each other")
    ending = b"\n" if delimiter is None else delimiter
    unjudged = UnjudgedReporter(runtime, keep)
    keep = unjudged.keep
    printer = partial(message_printer, pick=pick, print_topic=False)
    plain = whole = printer(pretty=pretty, delimiter=ending)(runtime, unjudged)
    if format is not None:
        whole = printer(format=format, delimiter=None)(runtime, unjudged)
    elif not bodies:
        whole = printer(json=True, pretty=pretty, delimiter=None)(runtime, unjudged)
    within = time_range(since, until)
    chosen = TopicFilter(topic or ())
    damage = DamageReporter(runtime)
    timeless = 0

    def encode(message: Envelope) -> bytes:
        encoded = whole if message.topic or format else plain  # a body of a raw file stays alone
        return encoded(message.topic, message.nsqd, [message])

    def is_within(message: Envelope) -> bool:
        nonlocal timeless
        is_in = within.contains(message.timestamp_ns)
        timeless += not is_in  # the reader leaves out the others
        return is_in

    messages = (
        message
        for archive in find_archives(paths)
        for message in read_messages(archive, damage, delimiter=ending, within=within)
        if is_within(message) and chosen(message) and (keep is None or keep(message))
    )
    lines = map(encode, itertools.islice(messages, count))
    while some := list(itertools.islice(lines, LINES_A_WRITE)):
        runtime.write(b"".join(some))
    report_timeless(runtime, timeless)
    if count is None:
        chosen.check()
    return unjudged.sum_up() or damage.status


def convert(
    paths: ArchivePaths,
    output: Annotated[str, opt("--output -o PLACE", "The table: a directory or a URL.")],
    store: TableFormat = opt("", "Parquet by topic and date, or Delta.", None, TableFormat.parquet),
    topic: str | None = opt("--topic -t TOPIC", "The topic of bare bodies."),
    json: Json = False,
    *,
    bodies: BodyOptions,
    runtime: Session,
) -> int:
    """Bring archives into a table.

    The archives stay. What was brought there before is not brought again, so an interrupted run is
    continued by the same command. What is damaged is reported and left out: repair it first. So is
    a file without an index that has grown since. Bare bodies name no topic: with --topic, files are
    left out whose names lack it while others have it. The exit status is 6 when values did not fit
    their columns: the text of the body has them.

    Examples:
        nsq archive convert /var/nsq -o /srv/lake
        nsq archive convert /var/nsq -o s3://bucket/lake --store delta --body json
    """
    import socket

    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.place import translating_errors
    from nsqtools.archive.reader import files_without_topic
    from nsqtools.archive.table import convert as bring
    from nsqtools.files.scratch import scratch_directory

    host = socket.gethostname().partition(".")[0]
    plan = bodies.plan(output, host, {}, is_delta=store is TableFormat.delta)
    found = find_archives(paths)
    archives = [each for each in found if each.table is None]
    tables = len(found) - len(archives)
    if tables:
        runtime.info(f"nsq: {counted(tables, 'file')} of Parquet left out: see nsq archive compact")
    damage = DamageReporter(runtime)
    for archive in files_without_topic(archives, topic) if topic else ():
        archives.remove(archive)
        what = f"left out: its name lacks {topic}, which others have; convert it by itself"
        damage(archive.shown, what)
    done = files = messages = misfits = 0
    without_column: set[str] = set()
    with translating_errors("convert to", output), scratch_directory("nsq-convert-") as drafts:
        for archive, made, problem, unfit in bring(archives, plan, drafts, topic):
            if problem:
                damage(archive.shown, problem)
            done += bool(made)
            files += len(made)
            messages += sum(each.rows or 0 for each in made)
            misfits += unfit.bodies
            without_column |= {*unfit.fields}
            if not json:
                write_lines(runtime, [f"{archive.shown}: {each.path}" for each in made])
    if json:
        document = {"archives": done, "files": files, "messages": messages, "misfits": misfits}
        document["fields_without_column"] = len(without_column)
        write_json(runtime, document)
    words = f"{counted(done, 'archive')} of {len(found) - tables}, {counted(messages, 'message')}"
    runtime.info(f"nsq: {words}, {misfits} did not fit")
    partly = ExitStatus.PARTLY_DONE if misfits else ExitStatus.DONE
    return damage.status or report_unfit(runtime, 0, without_column) or partly


def schema(
    paths: ArchivePaths,
    count: int = opt("--count -n N", "Look at N messages.", None, 10_000, min=1),
    topic: ArchivedTopics = None,
    *,
    runtime: Session,
) -> int:
    """Print the columns of JSON bodies, as a JSON Schema.

    They are those of a sample, for --schema. Says on stderr how many bodies did not fit, and why.

    Examples:
        nsq archive schema /var/nsq -t clicks > clicks.json
    """
    from collections import Counter

    from nsqtools.archive.body_columns import BodyColumns, json_schema
    from nsqtools.archive.columns import batch_of_bodies
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.reader import read_messages

    chosen, damage = TopicFilter(topic or ()), DamageReporter(runtime)
    sample = (
        message.body
        for archive in find_archives(paths)
        for message in read_messages(archive, damage)
        if chosen(message)
    )
    columns, wrong, looked_at = BodyColumns(), Counter[str](), 0
    while some := list(itertools.islice(sample, min(LINES_A_WRITE, count - looked_at))):
        looked_at += len(some)
        found = columns.add(batch_of_bodies(some))["_error"]
        wrong.update(found.drop_null().to_pylist())
    write_json(runtime, json_schema(columns.fields))
    runtime.info(f"nsq: {looked_at} messages, {columns.misfits} did not fit")
    for reason, times in wrong.most_common(10):
        runtime.info(f"nsq: {times}: {reason}")
    return damage.status


def info(paths: ArchivePaths, *, form: ListingForm, runtime: Session) -> None:
    """List archives with their messages, topics and times.

    Of a file with an index only the index and two members are read; nsq archive verify reads all.

    Examples:
        nsq archive info /var/nsq
        nsq archive info clicks.log.gz --json
    """
    from nsqtools.archive.finding import find_archives, map_archives
    from nsqtools.archive.reader import scan_archive

    rows, found = [], find_archives(paths)
    for archive, scan in zip(found, map_archives(scan_archive, found), strict=True):
        times = [time for m in scan.members if m.max_ts for time in (m.min_ts, m.max_ts)]
        span = [utc_text(end(times) // NS, "seconds") if times else None for end in (min, max)]
        kind = "jsonl" if scan.topics else "raw"
        kind += f" {scan.codec.value}" if scan.codec.is_compressed else ""
        kind = "parquet" if archive.table is not None else kind
        state = "in progress" if archive.is_in_progress else scan.damage or "good"
        messages = sum(member.messages for member in scan.members)
        topics = ",".join(sorted(scan.topics))
        rows.append((archive.shown, messages, topics, *span, scan.size, kind, state))
    write_listing(runtime, ARCHIVES, rows, form, optional=("bytes", "format", "first", "topics"))
