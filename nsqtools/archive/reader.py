"""Read, verify and repair archives in any format and compression, also in progress or damaged.

Files in object stores are read like local files, by ranges. Damage is reported to ``on_damage`` and
skipped, never raised. With an index, reading continues at the next member. Without one, the
readable lines before the damage are returned. A file that changes or vanishes while it is read is
damaged as well. Of a file in progress, only the members in its index are read, because later bytes
are not durable yet.

Files are recognized by their content: the compression by the first bytes, messages (jsonl) by the
first text (`form_of`). Bare bodies have empty fields for topic, nsqd, id and time. A message among
bare bodies is damage, and so is a body among messages.

`verify` reports damage. `repair` rewrites a file with all intact members, the readable lines of a
truncated member, and a new index. In a file of messages, other lines are dropped. The damaged file
is kept as ``.NAME.damaged``, or with a revision number if that name is used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.form import BEGINNING, HEAD_SIZE, FileForm, LineKind, form_of_text, text_of
from nsqtools.archive.layout import (
    ALL_TIMES,
    INDEX,
    MANIFEST,
    Index,
    Member,
    TimeRange,
    decode_index,
    decode_total,
    end_of,
    hidden_name,
    index_of,
    total_of,
)
from nsqtools.archive.members import (
    MAX_LINE_SIZE,
    CorruptError,
    DamagedError,
    Scan,
    Tally,
    Unpacker,
    codec_at,
    codec_of,
    is_decodable,
    members_of,
    scan_file,
    unpack_columns,
    unpack_members,
)
from nsqtools.archive.place import ABANDONED_AFTER_S, ChangedError, translating_errors
from nsqtools.errors import ConnectionFailed, NsqError, OutputError, RefusedError
from nsqtools.files.durable import (
    NEW,
    link_file,
    make_alike,
    remove_temporaries,
    replace_file,
    sync_folder,
    temporary_path,
)
from nsqtools.files.opening import NotRegularError, has_writer
from nsqtools.protocol.text import load_json
from nsqtools.records.envelope import Envelope, Splitter, decode
from nsqtools.records.naming import Codec, with_rev

if TYPE_CHECKING:
    import pyarrow

    from nsqtools.archive.parquet import Contents

READ_SIZE = 1 << 18
LARGEST_TEXT = 1 << 26
"""Text that is decompressed at a time. Archivers write smaller members."""
BATCH_TEXT = 8 << 20
"""Text that becomes one batch of columns, of about ten thousand rows."""
MIN_ZEROS = 512
"""Zero bytes that count as damage: a disk loses whole sectors, and fewer may be delimiters."""
ROW = ("topic", "nsqd", "id", "ts_ns", "attempts", "body", "body_bytes")
"""The columns of a table from which an `Envelope` is made."""

AMONG_BODIES = "a message among bare bodies, which is skipped"

OnDamage = Callable[[str, str], None]
"""Takes the path or URL of a file, and the problem."""
OnProblem = Callable[[str], object]


def read_text(
    archive: ArchiveFile, on_damage: OnDamage, within: TimeRange = ALL_TIMES
) -> Iterator[bytes]:
    """Iterate over the text of a file in pieces of any size; skip members outside of a range.

    Raises the errors of `failure_of` if it cannot be read at all.
    """
    on_problem = partial(on_damage, archive.shown)
    with _reporting_damage(archive, on_problem), archive.open() as file:
        codec = codec_at(file)
        end, size = 0, file.seek(0, os.SEEK_END)
        for member in archive.members or ():
            end = member.end
            if within.may_contain(member):
                yield from read_member(file, member, codec, on_problem)
        if not archive.is_in_progress:
            yield from _read_tail(file, min(end, size), codec, on_problem)


def has_columns(archive: ArchiveFile, form: FileForm, on_damage: OnDamage) -> bool:
    """Return whether `read_columns` reads a file: a log in Arrow whose index covers it.

    Raises the errors of `read_text`.
    """
    if form.codec is not Codec.ARROW or archive.members is None:
        return False
    size = 0
    with _reporting_damage(archive, partial(on_damage, archive.shown)), archive.open() as file:
        size = file.seek(0, os.SEEK_END)
    return archive.is_in_progress or size <= end_of(archive.members)


def read_columns(
    archive: ArchiveFile, on_damage: OnDamage, within: TimeRange = ALL_TIMES
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the columns of a log in Arrow, by its index; skip members outside of a range.

    Raises the errors of `read_text`.
    """
    on_problem = partial(on_damage, archive.shown)
    with _reporting_damage(archive, on_problem), archive.open() as file:
        for member in filter(within.may_contain, archive.members or ()):
            yield from read_member_columns(file, member, on_problem)


def read_member_columns(
    file: BinaryIO, member: Member, on_problem: OnProblem
) -> list[pyarrow.RecordBatch]:
    """Return the columns of a member; none, and a report, if it is damaged. Raises ``OSError``."""
    try:
        return unpack_columns(_read_available(file, member))
    except CorruptError as exc:
        on_problem(f"corrupt at byte {member.offset} ({exc})")
        return []


@contextmanager
def _reporting_damage(archive: ArchiveFile, on_problem: OnProblem) -> Iterator[None]:
    """Report a damaged, missing or changed file, and translate other errors with `failure_of`."""
    with translating_errors("read", archive.shown):
        try:
            yield
        except FileNotFoundError:
            on_problem("it was removed before it was read")
        except (ChangedError, NotRegularError) as exc:
            on_problem(str(exc.strerror))
        except CorruptError as exc:
            on_problem(str(exc))


def read_member(
    file: BinaryIO, member: Member, codec: Codec, on_problem: OnProblem
) -> Iterator[bytes]:
    """Iterate over the text of a member, and report damage. Raises ``OSError``."""
    data = _read_available(file, member)
    if len(data) < member.length:
        on_problem(f"{member.length - len(data)} bytes are missing at its end")
    if not codec.is_compressed:
        yield data
        return
    member_text = Unpacker(codec)
    try:
        # In a scan, zeros that pad a member are the beginning of the next one.
        text = member_text.unpack(data.lstrip(b"\0"), LARGEST_TEXT)
        while member_text.has_more:
            yield text
            text = member_text.unpack(b"", LARGEST_TEXT)
    except CorruptError as exc:
        on_problem(f"corrupt at byte {member.offset} ({exc})")
        return
    if member_text.is_over or len(data) < member.length:
        yield text
    else:
        # The checksum at the end of the member was not verified, so none of its text is returned.
        on_problem(f"corrupt at byte {member.offset} (it does not end where it should)")


def _read_available(file: BinaryIO, member: Member) -> bytes:
    """Read a member, or its existing part: a damaged index may have a length beyond the file."""
    available = file.seek(0, os.SEEK_END) - member.offset
    if available <= 0:
        return b""
    file.seek(member.offset)
    return file.read(min(member.length, available))


def _read_tail(file: BinaryIO, offset: int, codec: Codec, on_problem: OnProblem) -> Iterator[bytes]:
    """Iterate over the text after the last member of the index."""
    if not codec.is_compressed:
        file.seek(offset)
        data = file.read(READ_SIZE)
        # A file that was truncated to 0 bytes while a program wrote to it begins with a hole.
        if not offset and data.startswith(bytes(MIN_ZEROS)):
            while data and not (data := data.lstrip(b"\0")):
                data = file.read(READ_SIZE)
            on_problem(f"it begins with {file.tell() - len(data)} zero bytes")
        while data:
            yield data
            data = file.read(READ_SIZE)
        return
    try:
        for piece in unpack_members(file, codec, offset):
            yield piece.text
    except DamagedError as exc:
        on_problem(str(exc))


def scan_archive(archive: ArchiveFile) -> Scan:
    """Return the members and topics of a file, by its index and its first and last member.

    The whole file is read if these have several topics, or if the index is missing, does not match
    the file, or has no times. Damage is reported in the result. Raises `OutputError`.
    """
    scan = Scan()
    with _reporting_damage(archive, scan.note):
        if archive.table is not None:
            scan.size = archive.table.bytes
            contents = parquet_contents(archive)
            scan.topics.update(filter(None, contents.topics))
            min_ts, max_ts = contents.min_ts_ns or 0, contents.max_ts_ns or 0
            scan.members = [Member(0, scan.size, contents.rows, min_ts, max_ts)]
            return scan
        with archive.open() as file:
            members, scan.size = archive.members, file.seek(0, os.SEEK_END)
            is_complete = members and members[-1].end == scan.size
            if not (members and (is_complete or archive.is_in_progress)):
                scan_file(file, scan)
                return scan
            scan.members, scan.codec, tally = members, codec_at(file), Tally(scan.topics)
            # The first and the last member suffice for one topic. Otherwise all others follow.
            for member in (members[0], *members[:0:-1]):
                for text in read_member(file, member, scan.codec, scan.note):
                    tally.count(text)
                if member is members[-1] and len(scan.topics) < 2:
                    break
            # The index has no times, which must not count as times in 1970.
            if scan.topics and is_complete and not all(member.max_ts for member in members):
                scan.members, scan.topics, scan.damage = [], set(), ""
                scan_file(file, scan)
    return scan


def parquet_contents(archive: ArchiveFile) -> Contents:
    """Return the content of a Parquet file by its log or manifest, or else by its footer.

    Raises the errors of `parquet.read`.
    """
    from nsqtools.archive import parquet

    table = archive.table
    assert table is not None
    topic, rows = table.partition.get("topic"), table.rows
    min_ts, max_ts = table.min_ts_ns, table.max_ts_ns
    if topic is not None and rows is not None and min_ts is not None and max_ts is not None:
        return parquet.Contents(list(ROW), rows, min_ts, max_ts, 0, [topic])
    with archive.open() as file:
        contents = parquet.contents_of(file)
    return contents if topic is None else contents._replace(topics=[topic])


def form_of(archive: ArchiveFile, on_damage: OnDamage = lambda path, problem: None) -> FileForm:
    """Return the form of a file, which its first readable text decides.

    Raises the errors of `read_text`.
    """
    beginning = head = b""
    has_index = archive.members is not None
    with _reporting_damage(archive, lambda problem: None), archive.open() as file:
        beginning = file.read(HEAD_SIZE)
    codec = codec_of(beginning)
    form = form_of_text(text_of(beginning), has_index=has_index)
    if form.kind is LineKind.messages or form.foreign:
        return form._replace(codec=codec)
    # The beginning may be damaged, so more of the file is read.
    for text in read_text(archive, on_damage):
        head = (head + text).lstrip(b"\0")
        if len(head) >= HEAD_SIZE and (b"\n" in head or len(head) > BATCH_TEXT):
            break
    # A piece of text may be longer, and the file may begin within a long line.
    head = head[: head.find(b"\n") + 1 + HEAD_SIZE]
    return form_of_text(head, has_index=has_index)._replace(codec=codec)


def bare_files(archives: Iterable[ArchiveFile]) -> list[ArchiveFile]:
    """Return the files of bare bodies. Raises the errors of `read_text`."""
    return [
        archive
        for archive in archives
        if archive.table is None and form_of(archive).kind is LineKind.bodies
    ]


def files_without_topic(bare: Sequence[ArchiveFile], topic: str) -> list[ArchiveFile]:
    """Return `bare_files` without a topic in their names, if other names have the topic.

    The names of nsq_to_file contain the topic, so these files are probably of another topic.
    """
    word = re.compile(rf"(?<![0-9A-Za-z_]){re.escape(topic)}(?![0-9A-Za-z_])")
    without_topic = [archive for archive in bare if not word.search(archive.name)]
    return without_topic if len(without_topic) < len(bare) else []


def end_of_lines(text: bytes, delimiter: bytes) -> int:
    """Return the offset after the last delimiter, 0 without one."""
    # Occurrences of a longer delimiter may overlap. Only a search from the left finds the same
    # lines as the splitter.
    if len(delimiter) > 1:
        return len(text) - len(text.split(delimiter)[-1])
    return text.rfind(delimiter) + 1


def whole_lines(texts: Iterable[bytes], delimiter: bytes) -> Iterator[bytes]:
    """Join pieces of text to pieces of whole lines, each of at least `BATCH_TEXT`."""
    pending, size, target = [], 0, BATCH_TEXT
    for text in texts:
        pending.append(text)
        size += len(text)
        if size < target:
            continue
        joined = b"".join(pending)
        end = end_of_lines(joined, delimiter)
        if not end and size <= MAX_LINE_SIZE:
            # Each search reads the whole text, so the next one comes after twice the size.
            pending, target = [joined], min(2 * size, MAX_LINE_SIZE + 1)
            continue
        end = end or size
        yield joined[:end]
        pending, size, target = [joined[end:]], size - end, BATCH_TEXT
    if last := b"".join(pending):
        yield last


def split_lines(text: bytes, delimiter: bytes) -> list[bytes]:
    """Return the lines of a text. The last line may lack its delimiter."""
    lines = text.split(delimiter)
    if not lines[-1]:
        lines.pop()
    return lines


def read_lines(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = ALL_TIMES,
) -> Iterator[list[bytes]]:
    """Iterate over lists of lines without delimiters. Raises the errors of `read_text`."""
    splitter = Splitter(delimiter, limit=MAX_LINE_SIZE)
    try:
        for text in read_text(archive, on_damage, within):
            if lines := splitter.feed(text):
                yield lines
        if last := splitter.end():
            yield last
    except (OutputError, ConnectionFailed, RefusedError):
        raise
    except NsqError as exc:
        on_damage(archive.shown, str(exc))


def read_messages(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = ALL_TIMES,
) -> Iterator[Envelope]:
    """Iterate over the messages in a range of times, and those without a time.

    Raises the errors of `read_text`.
    """
    if archive.table is not None:
        yield from _read_rows(archive, on_damage, within)
        return
    number, form = 0, form_of(archive)
    if form.foreign:
        on_damage(archive.shown, form.foreign)
        return
    is_bare = form.kind is LineKind.bodies
    ending = delimiter if is_bare else b"\n"
    for lines in read_lines(archive, on_damage, delimiter=ending, within=within):
        for line in lines:
            number += 1
            if is_bare:
                if BEGINNING.match(line):
                    on_damage(archive.shown, f"line {number} is {AMONG_BODIES}")
                else:
                    yield Envelope("", "", b"", 0, 0, line)
                continue
            try:
                message = decode(line)
            except ValueError as exc:
                on_damage(archive.shown, f"line {number} is not a message: {exc}")
                continue
            if within.contains(message.timestamp_ns) or not message.timestamp_ns:
                yield message


def _read_rows(archive: ArchiveFile, on_damage: OnDamage, within: TimeRange) -> Iterator[Envelope]:
    """Iterate over the messages of a Parquet file, whose topic may be in the name of its folder."""
    from nsqtools.archive import parquet

    assert archive.table is not None
    default_topic = archive.table.partition.get("topic") or ""
    with _reporting_damage(archive, partial(on_damage, archive.shown)), archive.open() as file:
        for batch in parquet.read(file, ROW, within):
            names, nulls = batch.schema.names, [None] * batch.num_rows
            columns = [batch[name].to_pylist() if name in names else nulls for name in ROW]
            for topic, nsqd, id, ts_ns, attempts, body, raw in zip(*columns, strict=True):
                text = body.encode() if isinstance(body, str) else body
                yield Envelope(
                    topic or default_topic,
                    nsqd or "",
                    (id or "").encode(),
                    ts_ns or 0,
                    attempts or 0,
                    (raw or b"") if text is None else text,
                )


REMAKE = "Restore it, or remove it and convert its archive again"
TABLE_REMEDY = f"{REMAKE}: nsq archive convert."


def verify(archive: ArchiveFile, on_damage: OnDamage) -> int:
    """Read a whole file and compare it with its index; return the number of messages.

    Raises the errors of an unreachable or refusing store.
    """
    shown, messages = archive.shown, 0
    problems: list[str] = []

    def note(_: str, problem: str) -> None:
        problems.append(problem)
        on_damage(shown, problem)

    try:
        # The delimiter of bare bodies is unknown, so their count cannot be compared.
        is_bare = False
        for message in read_messages(archive, note):
            messages += 1
            is_bare = is_bare or not (message.topic or archive.table)
        if not problems and not archive.is_in_progress and archive.members is not None:
            size = archive.size()
            end = end_of(archive.members)
            if end != size:
                note(shown, f"its index ends at byte {end} of {size}")
        if not problems and not is_bare and archive.messages not in (None, messages):
            where = "index" if archive.table is None else "table"
            note(shown, f"it has {messages} messages, and {archive.messages} in its {where}")
        if archive.table is None and archive.is_remote:
            for problem in _differences_from_manifest(archive):
                note(shown, problem)
    except OSError as exc:
        note(shown, f"{exc.filename}: {exc.strerror}")
    # An error of one disk must not end the verification of other files.
    except OutputError as exc:
        note(shown, str(exc))
    return messages


def _differences_from_manifest(archive: ArchiveFile) -> Iterator[str]:
    """Iterate over differences between a stored file and its manifest, if it has one.

    Raises ``OSError``, also for a missing index.
    """
    try:
        manifest = load_json(archive.storage.read(hidden_name(archive.name, MANIFEST)))
        size, digest = manifest["size"], manifest["sha256"]
        digest_of_index = manifest["index_sha256"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        yield "its manifest cannot be read"
        return
    if archive.size() != size:
        yield f"its manifest has a size of {size} bytes"
    else:
        # Reading a compressed file has verified its checksums already.
        with archive.open() as file:
            has_checksums = codec_at(file).is_compressed
        if not has_checksums and archive.storage.digest(archive.name, size) != digest:
            yield "its content is not what was uploaded"
    index = archive.storage.read(hidden_name(archive.name, INDEX))
    if hashlib.sha256(index).hexdigest() != digest_of_index:
        yield "its index is not the one that was uploaded"


HAS_WRITER = "another program has it open for writing"
MAY_HAVE_WRITER = "no index or manifest shows that it is finished, so a program may still write it"


def why_unfinished(archive: ArchiveFile) -> str:
    """Return the reason why a program may still write to a file, "" for a finished file.

    The time of the last change proves nothing: lines that a program appends later to a deleted or
    replaced file would be lost. A file is finished if it has the size in its manifest, or ends
    where its index ends and the index has a total, which early versions did not write. Objects in a
    store are always finished. Raises ``OSError``.
    """
    if archive.is_remote:
        return ""
    writer, size = has_writer(archive.path), archive.size()
    if writer:
        return HAS_WRITER
    with suppress(FileNotFoundError):
        index = archive.storage.read(hidden_name(archive.name, INDEX))
        is_complete = decode_total(index) is not None or writer is False
        if is_complete and index and end_of(decode_index(index)) == size:
            return ""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        if load_json(archive.storage.read(hidden_name(archive.name, MANIFEST)))["size"] == size:
            return ""
    return MAY_HAVE_WRITER


def why_written(archive: ArchiveFile) -> str:
    """Return why a program may have the file open for writing, "" if none has.

    It would continue to write to a file that was replaced. A program that opens the file later gets
    the new one. Raises ``OSError``.
    """
    writer = None if archive.is_remote else has_writer(archive.path)
    is_indexed = archive.members is not None and archive.size() <= end_of(archive.members)
    if writer is False or (writer is None and (is_indexed or archive.is_remote)):
        return ""
    return HAS_WRITER if writer else MAY_HAVE_WRITER


def _refuse_written(archive: ArchiveFile) -> None:
    """Raise `OutputError` if a program may have the file open for writing."""
    if reason := why_written(archive):
        raise OutputError(
            f"cannot repair {archive.shown} ({reason})",
            hint="Stop what writes it, or repair a copy of it on a local disk.",
        )


def repair(archive: ArchiveFile, delimiter: bytes = b"\n") -> int:
    """Repair a finished file, and return its number of messages. Raises `OutputError`."""
    if archive.table is not None:
        raise OutputError(
            f"cannot repair {archive.shown} (a table is not repaired)", hint=TABLE_REMEDY
        )
    path = archive.path
    with translating_errors("repair", path):
        _refuse_written(archive)
    if form_of(archive).kind is LineKind.messages:
        delimiter = b"\n"
    # After a killed repair the index may belong to the damaged file. The file is read with and
    # without it, and the larger result is used.
    if archive.members is not None:
        variants = archive, replace(archive, members=None)
        archive = max(variants, key=lambda variant: sum(map(len, _readable(variant, delimiter))))
    with translating_errors("repair", path), temporary_path(path) as draft:
        with archive.open() as file:
            codec, status = codec_at(file), os.fstat(file.fileno())
        remove_temporaries(path.parent, time.time() - ABANDONED_AFTER_S)
        with os.fdopen(os.open(draft, NEW | os.O_RDWR), "w+b") as copy:
            make_alike(copy.fileno(), status)
            members = write_members(copy, codec, _readable(archive, delimiter), delimiter)
        # The open fails if the file has been replaced in the meantime, as by a second repair.
        archive.open().close()
        _refuse_written(archive)
        _keep_damaged(path)
        draft.rename(path)
        sync_folder(path.parent)
        total = total_of(members).encode() if members else b""
        replace_file(index_of(path), Index(archive.head, members).encode() + total, status)
    return total_of(members).messages


def write_members(
    copy: BinaryIO, codec: Codec, texts: Iterable[bytes], delimiter: bytes
) -> list[Member]:
    """Write each text as a member, durably, and return the members. Raises ``OSError``."""
    begin_member, members = members_of(codec), list[Member]()
    for text in texts:
        compressor = begin_member()
        copy.write(compressor.compress(text) + compressor.flush())
        tally = Tally(set())
        tally.count(text)
        member = tally.member(end_of(members), copy.tell())
        members.append(member._replace(messages=text.count(delimiter)))
    copy.flush()
    os.fsync(copy.fileno())
    return members


def _keep_damaged(path: Path) -> None:
    """Link a damaged file to an unused name in its folder. Raises ``OSError``."""
    for number in itertools.count():
        name = f"{with_rev(f'.{path.name}', number)}.damaged"
        with suppress(FileExistsError):
            link_file(path, path.with_name(name))
            return


_GREP = {
    Codec.GZIP: "zgrep",
    Codec.ZSTD: "zstdgrep",
    Codec.XZ: "xzgrep",
    Codec.BZIP2: "bzgrep",
}


def _readable(archive: ArchiveFile, delimiter: bytes) -> Iterator[bytes]:
    """Iterate over the intact lines of a file, in pieces of text.

    Raises `OutputError` for bare bodies without any delimiter, which would be lost, and for
    messages among bare bodies.
    """
    form = form_of(archive)
    has_messages = form.kind is LineKind.messages
    splitter, has_lines = Splitter(delimiter, limit=MAX_LINE_SIZE), False
    for text in read_text(archive, lambda path, problem: None):
        lines = splitter.feed(text)
        has_lines = has_lines or bool(lines)
        if has_messages:
            lines = [line for line in lines if is_decodable(line)]
        elif any(map(BEGINNING.match, lines)):
            grep = _GREP.get(form.codec, "grep")
            raise OutputError(
                f"cannot repair {archive.shown} (it has messages among bare bodies)",
                hint=f"Separate them: {grep} -a '^{{\"topic\": ' {archive.shown} > messages.log",
            )
        if lines:
            yield delimiter.join([*lines, b""])
    last = splitter.end()
    if last and not has_lines and not has_messages:
        problem = f"cannot repair {archive.shown} (it has no {delimiter!r})"
        raise OutputError(problem, hint="Is --delimiter right?")
    if has_messages and any(map(is_decodable, last)):
        yield delimiter.join([*last, b""])
