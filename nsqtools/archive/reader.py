"""Read archives back: any format, any compression, files in progress, damaged ones too.

Files in object stores are read as local ones are, by ranges. Damage is reported to ``on_damage``
and skipped, never raised: with an index reading continues at the next member, without one it ends
there, and what was readable before the tear is read. A file that changes or vanishes while it is
read is damage too. Of a file in progress only what its index names is read; the rest is not durable
yet.

Files are recognized by what is in them: their compression by their first bytes, messages (jsonl) by
their first text (`form_of`). Bare bodies have no topic, nsqd, id and time; those fields are empty
then. A message among bare bodies is damage, as a body among messages is.

`verify` says what is wrong with a file, and `repair` makes it whole again: it holds every member
that is good then, and from a member that is cut off the lines that can still be read; lines that
are no messages are left out, where the others are. It gets a new index. The damaged file stays
beside it as ``.NAME.damaged``, a later one under a name of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
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
    EVER,
    INDEX,
    MANIFEST,
    Index,
    Member,
    TimeRange,
    aside,
    decode_index,
    decode_total,
    end_of,
    index_of,
    total_of,
)
from nsqtools.archive.members import (
    LONGEST_LINE,
    CorruptError,
    DamagedError,
    Scan,
    Tally,
    Unpacker,
    codec_at,
    is_whole,
    members_of,
    scan_file,
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
from nsqtools.records.envelope import Envelope, Splitter, decode
from nsqtools.records.naming import Codec, with_rev

if TYPE_CHECKING:
    from nsqtools.archive.parquet import Contents

READ_SIZE = 1 << 18
LARGEST_TEXT = 1 << 26  # of a member at a time
BATCH_TEXT = 8 << 20
"""Bytes of text that become columns together: a batch has some ten thousand rows then."""
LEAST_ZEROS = 512
"""A disk loses at least so many; fewer may be empty bodies that end in zeros."""
ROW = ("topic", "nsqd", "id", "ts_ns", "attempts", "body", "body_bytes")
"""The columns of a table that are those of an `Envelope`."""

AMONG_BODIES = "a message among bare bodies, and left out"

OnDamage = Callable[[str, str], None]
"""Takes the path or URL of a file, and the problem."""
OnProblem = Callable[[str], object]


def read_text(
    archive: ArchiveFile, on_damage: OnDamage, within: TimeRange = EVER
) -> Iterator[bytes]:
    """Iterate over a file's text in pieces of any size; members outside of a range are left out.

    Raises as `failure_of` says when it cannot be read at all.
    """
    on_problem = partial(on_damage, archive.shown)
    with _noting(archive, on_problem), archive.open() as file:
        codec = codec_at(file)
        end, size = 0, file.seek(0, os.SEEK_END)
        for member in archive.members or ():
            end = member.end
            if within.may_have(member):
                yield from read_member(file, member, codec, on_problem)
        if not archive.is_in_progress:
            yield from _read_rest(file, min(end, size), codec, on_problem)


@contextmanager
def _noting(archive: ArchiveFile, on_problem: OnProblem) -> Iterator[None]:
    """Note what is damaged as a whole, gone or changed; raise as `failure_of` says for the rest."""
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
    """Iterate over the text of a member. Raises ``OSError``; damage is reported."""
    data = _read_all(file, member)
    if len(data) < member.length:
        on_problem(f"{member.length - len(data)} bytes are missing at its end")
    if not codec.is_compressed:
        yield data
        return
    member_text = Unpacker(codec)
    try:
        text = member_text.unpack(data, LARGEST_TEXT)
        while member_text.has_more:  # larger than any archiver makes it
            yield text
            text = member_text.unpack(b"", LARGEST_TEXT)
    except CorruptError as exc:
        on_problem(f"corrupt at byte {member.offset} ({exc})")
        return
    if member_text.is_over or len(data) < member.length:
        yield text
    else:  # its checksum was not reached: nothing of it can be trusted
        on_problem(f"corrupt at byte {member.offset} (it does not end where it should)")


def _read_all(file: BinaryIO, member: Member) -> bytes:
    """Read a member, or what there is of it: an index may claim lengths that no file has."""
    there = file.seek(0, os.SEEK_END) - member.offset
    if there <= 0:
        return b""
    file.seek(member.offset)
    return file.read(min(member.length, there))


def _read_rest(file: BinaryIO, offset: int, codec: Codec, on_problem: OnProblem) -> Iterator[bytes]:
    """What no index names."""
    if not codec.is_compressed:
        file.seek(offset)
        data = file.read(READ_SIZE)
        # a program that writes on after its file was cut to nothing leaves zeros before its lines
        if not offset and data.startswith(bytes(LEAST_ZEROS)):
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


def look_at(archive: ArchiveFile) -> Scan:
    """Return what a file holds, by its index, its first and its last member.

    Where these have several topics, or there is no index that fits or that knows their times, all
    of it is read. Raises `OutputError`; damage is in the result.
    """
    scan = Scan()
    with _noting(archive, scan.note):
        if archive.table is not None:
            scan.size = archive.table.bytes
            found = rows_of(archive)
            scan.topics.update(filter(None, found.topics))
            least, most = found.min_ts_ns or 0, found.max_ts_ns or 0
            scan.members = [Member(0, scan.size, found.rows, least, most)]
            return scan
        with archive.open() as file:
            members, scan.size = archive.members, file.seek(0, os.SEEK_END)
            is_whole = members and members[-1].end == scan.size
            if not (members and (is_whole or archive.is_in_progress)):
                scan_file(file, scan)
                return scan
            scan.members, scan.codec, tally = members, codec_at(file), Tally(scan.topics)
            for member in (members[0], *members[:0:-1]):
                for text in read_member(file, member, scan.codec, scan.note):
                    tally.count(text)
                if member is members[-1] and len(scan.topics) < 2:
                    break
            if scan.topics and is_whole and not all(m.max_ts for m in members):
                # its times are unknown, not those of 1970
                scan.members, scan.topics, scan.damage = [], set(), ""
                scan_file(file, scan)
    return scan


def rows_of(archive: ArchiveFile) -> Contents:
    """Return what a Parquet file holds, by its log or manifest, or else by its footer.

    Raises as `parquet.read`.
    """
    from nsqtools.archive import parquet

    table = archive.table
    assert table is not None
    topic, rows = table.partition.get("topic"), table.rows
    least, most = table.min_ts_ns, table.max_ts_ns
    if topic is not None and rows is not None and least is not None and most is not None:
        return parquet.Contents(list(ROW), rows, least, most, 0, [topic])
    with archive.open() as file:
        found = parquet.contents_of(file)
    return found if topic is None else found._replace(topics=[topic])


def form_of(archive: ArchiveFile, on_damage: OnDamage = lambda path, problem: None) -> FileForm:
    """Return the form of a file: of its first text that can be read.

    Raises as `read_text`.
    """
    beginning = head = b""
    has_index = archive.members is not None
    with _noting(archive, lambda problem: None), archive.open() as file:
        beginning = file.read(HEAD_SIZE)
    form = form_of_text(text_of(beginning), has_index=has_index)
    if form.kind is LineKind.messages or form.foreign:
        return form
    for text in read_text(archive, on_damage):  # its beginning may be damaged
        head = (head + text).lstrip(b"\0")
        if len(head) >= HEAD_SIZE and (b"\n" in head or len(head) > BATCH_TEXT):
            break
    return form_of_text(head, has_index=has_index)


def named_otherwise(archives: Sequence[ArchiveFile], topic: str) -> list[ArchiveFile]:
    """Return the files of bare bodies whose names lack a topic that other names have.

    Names as nsq_to_file makes them have the topic, so these are likely of another one.
    """
    word = re.compile(rf"(?<![0-9A-Za-z_]){re.escape(topic)}(?![0-9A-Za-z_])")
    bare = [each for each in archives if form_of(each).kind is LineKind.bodies]
    others = [archive for archive in bare if not word.search(archive.name)]
    return others if len(others) < len(bare) else []


def lines_end(text: bytes, delimiter: bytes) -> int:
    """Return the offset after the last line that has its delimiter, 0 without one."""
    if len(delimiter) > 1:  # of two that overlap, as in three newlines, the first one counts
        return len(text) - len(text.split(delimiter)[-1])
    return text.rfind(delimiter) + 1


def whole_lines(texts: Iterable[bytes], delimiter: bytes) -> Iterator[bytes]:
    """Join pieces of text to pieces of whole lines, of `BATCH_TEXT` or more."""
    held, size, enough = [], 0, BATCH_TEXT
    for text in texts:
        held.append(text)
        size += len(text)
        if size < enough:
            continue
        joined = b"".join(held)
        end = lines_end(joined, delimiter)
        if not end and size <= LONGEST_LINE:
            held, enough = [joined], min(2 * size, LONGEST_LINE + 1)  # each look costs all of it
            continue
        end = end or size
        yield joined[:end]
        held, size, enough = [joined[end:]], size - end, BATCH_TEXT
    if rest := b"".join(held):
        yield rest


def split_lines(text: bytes, delimiter: bytes) -> list[bytes]:
    """Return the lines of a text, whose last one may lack its delimiter."""
    lines = text.split(delimiter)
    if not lines[-1]:
        lines.pop()
    return lines


def read_lines(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[list[bytes]]:
    """Iterate over a file's lines, in lists, without their delimiters. Raises as `read_text`."""
    splitter = Splitter(delimiter, limit=LONGEST_LINE)
    try:
        for text in read_text(archive, on_damage, within):
            if lines := splitter.feed(text):
                yield lines
        if rest := splitter.end():
            yield rest
    except (OutputError, ConnectionFailed, RefusedError):
        raise
    except NsqError as exc:
        on_damage(archive.shown, str(exc))


def read_messages(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[Envelope]:
    """Iterate over a file's messages: those in a range of times, and without a time.

    Raises as `read_text`.
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
            if within.has(message.timestamp_ns) or not message.timestamp_ns:
                yield message


def _read_rows(archive: ArchiveFile, on_damage: OnDamage, within: TimeRange) -> Iterator[Envelope]:
    """Iterate over the messages of a Parquet file; columns that are its folders are theirs."""
    from nsqtools.archive import parquet

    assert archive.table is not None
    topic_of_all = archive.table.partition.get("topic") or ""
    with _noting(archive, partial(on_damage, archive.shown)), archive.open() as file:
        for batch in parquet.read(file, ROW, within):
            count, there = batch.num_rows, set(batch.schema.names)
            columns = [batch[name].to_pylist() if name in there else [None] * count for name in ROW]
            for topic, nsqd, id, ts_ns, attempts, body, raw in zip(*columns, strict=True):
                text = body.encode() if isinstance(body, str) else body
                yield Envelope(
                    topic or topic_of_all,
                    nsqd or "",
                    (id or "").encode(),
                    ts_ns or 0,
                    attempts or 0,
                    (raw or b"") if text is None else text,
                )


REMAKE = "Restore it, or remove it and make it again from its archive"
TABLE_REMEDY = f"{REMAKE}: nsq archive convert."


def verify(archive: ArchiveFile, on_damage: OnDamage) -> int:
    """Read a whole file, and compare it with its index; return how many messages it has.

    Raises the errors of a store that cannot be reached or refuses.
    """
    shown, messages = archive.shown, 0
    problems: list[str] = []

    def note(_: str, problem: str) -> None:
        problems.append(problem)
        on_damage(shown, problem)

    try:
        is_bare = False  # of which the delimiter is not known
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
    except OutputError as exc:  # of its disk, say: the others are looked at all the same
        note(shown, str(exc))
    return messages


def _differences_from_manifest(archive: ArchiveFile) -> Iterator[str]:
    """Say where a stored file is not what its manifest says; without a manifest, nothing.

    Raises ``OSError``, for an index that is not there too.
    """
    try:
        manifest = json.loads(archive.storage.read(aside(archive.name, MANIFEST)))
        size, digest = manifest["size"], manifest["sha256"]
        digest_of_index = manifest["index_sha256"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        yield "its manifest cannot be read"
        return
    if archive.size() != size:
        yield f"its manifest says that it has {size} bytes"
    else:
        with archive.open() as file:
            has_checksums = codec_at(file).is_compressed
        if not has_checksums and archive.storage.digest(archive.name, size) != digest:
            yield "its content is not what was uploaded"
    index = archive.storage.read(aside(archive.name, INDEX))
    if hashlib.sha256(index).hexdigest() != digest_of_index:
        yield "its index is not the one that was uploaded"


HAS_WRITER = "another program has it open for writing"
MAY_HAVE_WRITER = "no index or manifest says that it is finished, so a program may still write it"


def why_unfinished(archive: ArchiveFile) -> str:
    """Return why a file may still be written, "" for one that is known to be finished.

    What a program appends to a file that was deleted or replaced is lost, so the time of its last
    change proves nothing. A finished file ends where its index ends, with a total, or has the size
    that its manifest has; an index of early versions has no total. Objects in a store appear whole.
    Raises ``OSError``.
    """
    if archive.is_remote:
        return ""
    writer, size = has_writer(archive.path), archive.size()
    if writer:
        return HAS_WRITER
    with suppress(FileNotFoundError):
        index = archive.storage.read(aside(archive.name, INDEX))
        is_complete = decode_total(index) is not None or writer is False
        if is_complete and index and end_of(decode_index(index)) == size:
            return ""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        if json.loads(archive.storage.read(aside(archive.name, MANIFEST)))["size"] == size:
            return ""
    return MAY_HAVE_WRITER


def _refuse_written(archive: ArchiveFile) -> None:
    """Raise `OutputError` for a file that another program may write: it would not see the repair.

    Without a writer at this moment it is safe, as the next one opens the new file.
    """
    writer = has_writer(archive.path)
    is_own = archive.members is not None and archive.size() <= end_of(archive.members)
    if writer is False or (writer is None and is_own):
        return
    raise OutputError(
        f"cannot repair {archive.shown} ({HAS_WRITER if writer else MAY_HAVE_WRITER})",
        hint="Stop what writes it, or repair a copy of it on a local disk.",
    )


def repair(archive: ArchiveFile, delimiter: bytes = b"\n") -> int:
    """Make a finished file whole; return how many messages it has now. Raises `OutputError`."""
    if archive.table is not None:
        raise OutputError(
            f"cannot repair {archive.shown} (a table is not repaired)", hint=TABLE_REMEDY
        )
    path = archive.path
    with translating_errors("repair", path):
        _refuse_written(archive)
    if form_of(archive).kind is LineKind.messages:
        delimiter = b"\n"
    if archive.members is not None:  # the index of before, when a repair was killed: it misleads
        both = archive, replace(archive, members=None)
        archive = max(both, key=lambda each: sum(map(len, _readable(each, delimiter))))
    with translating_errors("repair", path), temporary_path(path) as beside:
        with archive.open() as file:
            begin_member, status = members_of(codec_at(file)), os.fstat(file.fileno())
        members: list[Member] = []
        remove_temporaries(path.parent, time.time() - ABANDONED_AFTER_S)
        with os.fdopen(os.open(beside, NEW | os.O_RDWR), "w+b") as copy:
            make_alike(copy.fileno(), status)
            for text in _readable(archive, delimiter):
                compressor = begin_member()
                copy.write(compressor.compress(text) + compressor.flush())
                tally = Tally(set())
                tally.count(text)
                member = tally.member(end_of(members), copy.tell())
                members.append(member._replace(messages=text.count(delimiter)))
            copy.flush()
            os.fsync(copy.fileno())
        archive.open().close()  # raises when another one is there now, as of a second repair
        _refuse_written(archive)
        _keep(path)
        beside.rename(path)
        sync_folder(path.parent)
        total = total_of(members).encode() if members else b""
        replace_file(index_of(path), Index(archive.head, members).encode() + total, status)
    return total_of(members).messages


def _keep(path: Path) -> None:
    """Give a damaged file a name beside it that no other has. Raises ``OSError``."""
    for number in itertools.count():
        name = f"{with_rev(f'.{path.name}', number)}.damaged"
        with suppress(FileExistsError):
            link_file(path, path.with_name(name))
            return


def _readable(archive: ArchiveFile, delimiter: bytes) -> Iterator[bytes]:
    """Iterate over the whole lines; of messages those that are.

    Raises `OutputError` for bare bodies of which none ends, as nothing of them would be left, and
    for bodies with messages among them.
    """
    has_messages = form_of(archive).kind is LineKind.messages
    splitter, has_lines = Splitter(delimiter, limit=LONGEST_LINE), False
    for text in read_text(archive, lambda path, problem: None):
        lines = splitter.feed(text)
        has_lines = has_lines or bool(lines)
        if has_messages:
            lines = [line for line in lines if is_whole(line)]
        elif any(map(BEGINNING.match, lines)):
            raise OutputError(
                f"cannot repair {archive.shown} (it has messages among bare bodies)",
                hint=f"Take them apart: grep -a '^{{\"topic\": ' {archive.shown} > messages.log",
            )
        if lines:
            yield delimiter.join([*lines, b""])
    rest = splitter.end()
    if rest and not has_lines and not has_messages:
        what = f"cannot repair {archive.shown} (it has no {delimiter!r})"
        raise OutputError(what, hint="Is --delimiter right?")
    if has_messages and any(map(is_whole, rest)):
        yield delimiter.join([*rest, b""])
