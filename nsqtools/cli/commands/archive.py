"""``nsq archive``: inspect files of ``nsq to-file`` or nsq_to_file, and convert them to tables.

Each damaged place is reported in a line on stderr, and the exit status is 6. ``verify`` prints the
lines on stdout, and its status is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.params import (
    ArchivePaths,
    Count,
    Delimiter,
    Json,
    MessageJson,
    Since,
    Until,
    time_range,
)
from nsqtools.cli.options.printing import (
    ArchivedTopics,
    MessageFilter,
    PickOption,
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
from nsqtools.records.envelope import Envelope, bounded_batches

if TYPE_CHECKING:
    from nsqtools.archive.finding import ArchiveFile
    from nsqtools.archive.place import Place
    from nsqtools.cli.render.documents import Repaired, RepairedFile


BODIES_PER_BATCH = 1000
ARCHIVES = ("file", "messages", "topics", "first", "last", "bytes", "format", "state")


def verify(paths: ArchivePaths, json: Json = False, *, runtime: Session) -> int:
    """Read archives and report damage.

    Every member is decompressed, every line of JSON is read, and each file is compared with its
    index. Prints a line for each problem; the exit status is 1 if there is any.

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

    Files in progress without a writer are truncated after their last durable message and get their
    final name. A damaged file keeps its readable messages; the original is kept as .NAME.damaged.

    Examples:
        nsq archive repair /var/nsq
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.part_file import Directories, recover_parts
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
            finished += map(str, recover_parts(Directories(folder, folder)))
    if not json:
        write_lines(runtime, [f"{path}: finished" for path in finished])
    for archive in archives:
        if not archive.is_in_progress:
            verify_archive(archive, damage)
        if archive.shown not in damage.files:
            continue
        try:
            count = repair_archive(archive, b"\n" if delimiter is None else delimiter)
        # An error of one file, such as a FIFO, must not keep the others from being repaired.
        except NsqError as error:
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
    json: MessageJson = False,
    format: Template = None,
    pick: PickOption = None,
    pretty: Pretty = False,
    *,
    keep: MessageFilter,
    runtime: Session,
) -> int:
    """Print the messages in archives of any format and compression.

    Messages are printed as lines of JSON, as nsq tail --json does, and bodies of raw files
    unchanged. Damage is skipped and reported on stderr, as are messages to which --where or --pick
    cannot be applied. Of a file in progress, the durable messages are printed.

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
    print_body = print_message = printer(pretty=pretty, delimiter=ending)(runtime, unjudged)
    if format is not None:
        print_message = printer(format=format, delimiter=None)(runtime, unjudged)
    elif not bodies:
        print_message = printer(json=True, pretty=pretty, delimiter=None)(runtime, unjudged)
    within = time_range(since, until)
    topics = TopicFilter(topic or ())
    damage = DamageReporter(runtime)
    timeless = 0

    def encode(message: Envelope) -> bytes:
        # A raw file has no fields besides the body.
        encoder = print_message if message.topic or format else print_body
        return encoder(message.topic, message.nsqd, [message])

    def is_within(message: Envelope) -> bool:
        nonlocal timeless
        is_match = within.contains(message.timestamp_ns)
        # The reader skips messages outside of the range, but yields those without a time.
        timeless += not is_match
        return is_match

    messages = (
        message
        for archive in find_archives(paths)
        for message in read_messages(archive, damage, delimiter=ending, within=within)
        if is_within(message) and topics(message) and (keep is None or keep(message))
    )
    encoded = map(encode, itertools.islice(messages, count))
    for lines in bounded_batches(encoded, len):
        runtime.write(b"".join(lines))
    report_timeless(runtime, timeless)
    if count is None:
        topics.check()
    return unjudged.sum_up() or damage.status


def convert(
    paths: ArchivePaths,
    output: Annotated[str, opt("--output -o PLACE", "The table: a directory or a URL.")],
    store: TableFormat = opt("", "Parquet by topic and date, or Delta.", None, TableFormat.parquet),
    topic: str | None = opt("--topic -t TOPIC", "The topic of bare bodies."),
    topic_from: str | None = opt(
        "FORMAT", "Format of file names, or its beginning, with the topic: '<TOPIC>.'."
    ),
    json: Json = False,
    *,
    bodies: BodyOptions,
    runtime: Session,
) -> int:
    """Convert archives to a table.

    A table is converted as well, for example to tables of its topics. The inputs are kept. A file
    is converted once, so the same command continues an interrupted run. A damaged file is reported
    and skipped: repair it first. So is a file without an index that has grown since its conversion.
    Bare bodies have no topic: with --topic, files without the topic in their names are skipped if
    other names have it; --topic-from takes the topic from each name. Values that do not fit their
    columns remain in the text of the body.

    Examples:
        nsq archive convert /var/nsq -o /srv/lake
        nsq archive convert /var/nsq -o 's3://bucket/lake/{topic}' --store delta --body json
        nsq archive convert s3://bucket/old -o 's3://bucket/new/{topic}' --store delta --body json
    """
    import socket

    from nsqtools.archive.place import refuse_nested, translating_errors
    from nsqtools.archive.place_url import parse_place
    from nsqtools.archive.reader import bare_files, files_without_topic
    from nsqtools.archive.table import convert as convert_archives
    from nsqtools.archive.table import have_many_topics
    from nsqtools.files.scratch import scratch_directory
    from nsqtools.records.naming import topic_in, topic_pattern

    if topic is not None and topic_from is not None:
        raise ConfigurationError("--topic and --topic-from exclude each other")
    pattern = None if topic_from is None else topic_pattern(topic_from)

    def topic_of(archive: ArchiveFile) -> str | None:
        return topic if pattern is None else topic_in(pattern, archive.name)

    host = socket.gethostname().partition(".")[0]
    archives, tables = find_convertible(runtime, paths)
    total = len(archives)
    plan = bodies.plan(
        output,
        host,
        {},
        is_delta=store is TableFormat.delta,
        has_many_topics=lambda: topic is None and have_many_topics(archives, topic_of),
        info=runtime.info,
    )
    for place in tables:
        refuse_nested("--output", parse_place(plan.base), place)
    damage = DamageReporter(runtime)
    bare = bare_files(archives) if topic else []
    if topic and archives and not bare:
        reason = "it is for bare bodies, and there are none"
        runtime.info(f"nsq: --topic {topic} has no effect: {reason}")
    for archive in files_without_topic(bare, topic) if topic else ():
        archives.remove(archive)
        problem = f"skipped: its name lacks {topic}, which other names have; convert it separately"
        damage(archive.shown, problem)
    nameless = [archive for archive in archives if pattern is not None and not topic_of(archive)]
    for archive in bare_files(nameless):
        archives.remove(archive)
        damage(archive.shown, f"skipped: its name has no topic by {topic_from}")
    converted = files = messages = misfits = 0
    without_column: set[str] = set()
    with translating_errors("convert to", output), scratch_directory("nsq-convert-") as drafts:
        for archive, new_files, problem, unfit in convert_archives(
            archives, plan, drafts, topic_of
        ):
            if problem:
                damage(archive.shown, problem)
            converted += bool(new_files)
            files += len(new_files)
            messages += sum(file.rows or 0 for file in new_files)
            misfits += unfit.bodies
            without_column |= {*unfit.fields}
            if not json:
                write_lines(runtime, [f"{archive.shown}: {file.path}" for file in new_files])
    if json:
        document = {"archives": converted, "files": files, "messages": messages}
        document |= {"misfits": misfits, "fields_without_column": len(without_column)}
        write_json(runtime, document)
    summary = f"{counted(converted, 'archive')} of {total}, {counted(messages, 'message')}"
    runtime.info(f"nsq: {summary}, {misfits} did not fit")
    fails = bodies.fail_on_misfit
    status = report_unfit(runtime, 0, without_column, fails=fails)
    if misfits and fails:
        status = ExitStatus.PARTLY_DONE
    return damage.status or status


def find_convertible(
    runtime: Session, paths: Sequence[str]
) -> tuple[list[ArchiveFile], list[Place]]:
    """Return the files of archives and of tables, and the tables.

    Parquet next to archives is skipped, because it may have been made of them.
    """
    from nsqtools.archive.finding import find_archives, find_inputs
    from nsqtools.archive.place_url import parse_place

    inputs = {path: find_inputs([parse_place(path)]) for path in paths}
    tables = [place for kinds in inputs.values() for place in (*kinds.delta, *kinds.parquet)]
    in_tables = find_archives(list(map(str, tables)))
    in_archives = find_archives([path for path in paths if inputs[path].archives])
    archives = [archive for archive in in_archives if archive.table is None]
    if skipped := len(in_archives) - len(archives):
        runtime.info(f"nsq: {counted(skipped, 'file')} of Parquet skipped: convert the table alone")
    return archives + in_tables, tables


def schema(
    paths: ArchivePaths,
    count: int = opt("--count -n N", "Look at N messages.", None, 10_000, min=1),
    topic: ArchivedTopics = None,
    *,
    runtime: Session,
) -> int:
    """Print the columns of JSON bodies as a JSON Schema.

    The columns are those of a sample; use the output with --schema. Reports on stderr how many
    bodies did not fit, and why.

    Examples:
        nsq archive schema /var/nsq -t clicks > clicks.json
    """
    from collections import Counter

    from nsqtools.archive.body_columns import BodyColumns
    from nsqtools.archive.body_schema import TimeFields, json_schema
    from nsqtools.archive.columns import batch_of_bodies
    from nsqtools.archive.finding import find_archives
    from nsqtools.archive.reader import read_messages

    topics, damage = TopicFilter(topic or ()), DamageReporter(runtime)
    sample = (
        message.body
        for archive in find_archives(paths)
        for message in read_messages(archive, damage)
        if topics(message)
    )
    columns, time_fields, reasons, sampled = BodyColumns(), TimeFields(), Counter[str](), 0
    while bodies := list(itertools.islice(sample, min(BODIES_PER_BATCH, count - sampled))):
        sampled += len(bodies)
        rows = columns.add(batch_of_bodies(bodies))
        time_fields.add(rows, columns.schema())
        reasons.update(rows["_error"].drop_null().to_pylist())
    if sampled < count:
        topics.check()
    write_json(runtime, json_schema(time_fields.apply(columns.fields)))
    runtime.info(f"nsq: {sampled} messages, {columns.misfits} did not fit")
    for reason, times in reasons.most_common(10):
        runtime.info(f"nsq: {times}: {reason}")
    return damage.status


def info(paths: ArchivePaths, *, form: ListingForm, runtime: Session) -> None:
    """List archives with their messages, topics and times.

    Of a file with an index, only the index and two members are read; nsq archive verify reads all.

    Examples:
        nsq archive info /var/nsq
        nsq archive info clicks.log.gz --json
    """
    from nsqtools.archive.finding import find_archives, map_archives
    from nsqtools.archive.reader import scan_archive
    from nsqtools.records.naming import Codec

    rows, archives = [], find_archives(paths)
    for archive, scan in zip(archives, map_archives(scan_archive, archives), strict=True):
        times = [time for m in scan.members if m.max_ts for time in (m.min_ts, m.max_ts)]
        first, last = (
            utc_text(function(times) // NS, "seconds") if times else None for function in (min, max)
        )
        kind = "jsonl" if scan.topics else "raw"
        kind += f" {scan.codec.value}" if scan.codec.is_compressed else ""
        kind = "arrow" if scan.codec is Codec.ARROW else kind
        kind = "parquet" if archive.table is not None else kind
        state = "in progress" if archive.is_in_progress else scan.damage or "good"
        messages = sum(member.messages for member in scan.members)
        topics = ",".join(sorted(scan.topics))
        rows.append((archive.shown, messages, topics, first, last, scan.size, kind, state))
    write_listing(runtime, ARCHIVES, rows, form, optional=("bytes", "format", "first", "topics"))
