"""Archives with bytes changed, removed or inserted at random: reading ends without an exception.

All damage that checksums can detect is detected: from a truncated file, or a changed one with an
index, only archived messages are read. (A member that is both truncated and changed has no checksum
to detect it.) ``nsq-archive`` of Spark reads and reports the same as the archive's own reader.
"""

import gzip
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plugins.archives import journal_in, write_archive
from plugins.clients import run_program
from plugins.disks import CHANGE, Change, damaged
from plugins.examples import examples

from nsqtools.archive.finding import PARQUET_MAGIC, find_archives
from nsqtools.archive.journal import stem_of
from nsqtools.archive.layout import decode_index, encode_members, index_of
from nsqtools.archive.members import scan_members
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.reader import read_messages
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import BYTES, ReadSettings

MESSAGES = [
    WireMessage(1000 * (1 + n // 30) + n % 30, 1, b"%016x" % (n % 30), b"body %d \xff" % n)
    for n in range(60)
]
BODIES = {message.body for message in MESSAGES}


@given(
    what=st.lists(CHANGE, max_size=4),
    has_index=st.booleans(),
    is_compressed=st.booleans(),
    partition_bytes=st.integers(1, 5000),
)
@example(
    what=[("cut", 0.0, b"\0"), ("insert", 0.0, b"\0")],
    has_index=False,
    is_compressed=False,
    partition_bytes=1,
)
@settings(max_examples=examples(100))
def test_both_readers_read_the_same_real_messages_of_a_damaged_archive(
    what: list[Change], has_index: bool, is_compressed: bool, partition_bytes: int
) -> None:
    with TemporaryDirectory() as directory:
        folder, reports = Path(directory, "archive"), Path(directory, "reports")
        folder.mkdir()
        path = write_archive(folder / "a.gz", MESSAGES[:20], MESSAGES[20:40], MESSAGES[40:])
        data = path.read_bytes()
        if not is_compressed:
            data = gzip.decompress(data)
        changed = damaged(data, what)
        assume(not changed.startswith(PARQUET_MAGIC))  # It is refused as a file of another program.
        path.write_bytes(changed)
        if not (has_index and is_compressed):
            index_of(path).unlink()
        problems: list[str] = []
        (archive,) = find_archives([path])
        messages = list(read_messages(archive, lambda path, problem: problems.append(problem)))
        scan_members(path)
        reading = ReadSettings(
            (str(folder),), damage_path=LocalPlace(reports), partition_bytes=partition_bytes
        )
        rows = [
            (row["topic"], row["nsqd"], row["id"], row["ts_ns"], row["attempts"], row["body"])
            for partition in plan_batch(reading)
            for batch in read_partition(partition, reading, BYTES.message_schema().names)
            for row in batch.to_pylist()
        ]
        if all(message.topic for message in messages):
            assert rows == [
                (m.topic, m.nsqd, m.id.decode("latin-1"), m.timestamp_ns, m.attempts, m.body)
                for m in messages
            ]
            assert bool(read_damage(LocalPlace(reports))) >= bool(problems)
        if changed[:2] != data[:2] or not is_compressed:
            return  # Its bytes are read as bare bodies.
        cuts = [kind for kind, _, _ in what if kind == "cut"]
        if len(cuts) == len(what) or (has_index and not cuts):
            assert {message.body for message in messages if message.topic} <= BODIES
            assert problems or len(messages) in (0, 20, 40, 60)


# -- damaged journals and indexes are read as far as they are valid -------------------------------


IDS = [b"%016x" % number for number in range(40)]
LINES = b"".join(
    b"%d 100 nsqd-1:4150 %s a.log\n" % (number * 100, b"".join(IDS[number::4]).hex().encode())
    for number in range(4)
)
END = b" h " + b"0" * 32 + b" x\n"
INDEX = b"".join(b"%d 100 10 1 2\n" % (number * 100) for number in range(20))


@given(
    what=st.lists(CHANGE, max_size=4),
    more=st.binary(max_size=60),
    is_proved=st.booleans(),
    durable=st.sets(st.sampled_from([0, 100, 200, 300])),
)
@settings(max_examples=examples(75))
@example(what=[], more=b"9" * 5000 + b" 1" + END, is_proved=False, durable=set())
@example(what=[], more=b"1 " + b"9" * 5000 + END, is_proved=True, durable=set())
def test_a_damaged_journal_has_only_recorded_messages(
    what: list[Change], more: bytes, is_proved: bool, durable: set[int]
) -> None:
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        path = folder / f"{stem_of('clicks', 'archive')}abc-000001.journal"
        path.write_bytes(damaged(LINES, what) + more + (b"proved\n" if is_proved else b""))
        at: Any = {"is_durable": lambda name, head, offset, length: offset in durable}
        journal = journal_in(folder, run="def", now_s=time.time(), **at)
        assert journal.has_message("nsqd-1:4150", IDS[0]) in (True, False)
        if not what and not more:
            assert journal.has_message("nsqd-1:4150", IDS[0])
        assert not journal.has_message("nsqd-1:4150", b"f" * 16)
        journal.close()


@given(st.lists(CHANGE, max_size=4), st.binary(max_size=60))
@settings(max_examples=examples(150))
@example([], b"0 " + b"9" * 5000 + b" 1 1 1\n")
@example([], b"writer " + b"0" * 32 + b" " + b"9" * 5000 + b"\n")
@example([], b"1" * 30 + b" 1 1 1 1\n" * 3)
def test_a_damaged_index_has_only_consecutive_members(what: list[Change], more: bytes) -> None:
    decode_index(more)
    members = decode_index(damaged(INDEX, what) + more)
    end = 0
    for member in members:
        assert member.offset == end
        end = member.end
    assert decode_index(encode_members(members)) == members


@pytest.mark.alone
def test_an_index_needs_memory_for_its_lines_and_little_for_an_endless_line() -> None:
    """The index is read in a separate process to measure its peak memory."""
    program = """
        import gzip, io, resource, time
        from nsqtools.archive import members
        from nsqtools.archive.layout import decode_index
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        assert decode_index(b"x" * 50_000_000) == []
        assert decode_index(b"\\n" * 5_000_000) == []
        assert time.process_time() - began < 2
        members.MAX_LINE_SIZE = 1 << 20
        members.scan_file(io.BytesIO(gzip.compress(bytes(500_000_000), 1)), members.Scan())
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
        """
    assert run_program(program) == ""
