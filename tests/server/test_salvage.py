"""Queue files with bytes changed, cut off or put in: what is whole is found, nothing invented."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import example, given, settings
from hypothesis import strategies as st
from plugins.damage import CHANGE, Change, damaged
from plugins.examples import examples

from nsqtools.server.queues.queue_files import NoRecord, QueueFile, Record

SENT_NS = 1_795_467_622_068_316_375
BODIES = st.lists(
    st.one_of(st.binary(max_size=60), st.just(b"0123456789abcdef" * 4), st.just(b"")),
    min_size=1,
    max_size=30,
)


def record(number: int, body: bytes) -> bytes:
    content = struct.pack(">qH", SENT_NS + number, number % 3) + b"%016x" % number + body
    return struct.pack(">i", len(content)) + content


def scanned(data: bytes) -> tuple[list[Record], list[NoRecord]]:
    """What a file of these bytes has; records and gaps cover it."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t.diskqueue.000000.dat"
        path.write_bytes(data)
        with QueueFile(path) as file:
            found = list(file.scan())
    records = [each for each in found if isinstance(each, Record)]
    gaps = [each for each in found if isinstance(each, NoRecord)]
    covered = sorted((each.at, each.end) for each in found)
    assert [0, *(end for _, end in covered)] == [*(at for at, _ in covered), len(data)]
    return records, gaps


@given(bodies=BODIES, what=st.lists(CHANGE, max_size=4))
@settings(max_examples=examples(300))
@example(bodies=[b"x", b"", b"0123456789abcdef" * 4], what=[])
@example(bodies=[b"body"] * 5, what=[("flip", 37.5 / 170, b"\x2c")])  # 20 more than its length
def test_records_that_no_change_touched_are_found(bodies: list[bytes], what: list[Change]) -> None:
    written = list(map(record, range(len(bodies)), bodies))
    data = damaged(b"".join(written), what)

    records, gaps = scanned(data)
    found = [data[each.at : each.end] for each in records]

    for each in written:
        # a changed length may end exactly where a record does: then one body has the others
        assert each not in data or any(each in one for one in found)
    if not what:
        assert [each.id for each in records] == [b"%016x" % n for n in range(len(bodies))]
        assert gaps == []
    if sum(kind == "flip" for kind, _, _ in what) == len(what):
        assert len(set(found) - set(written)) <= len(what)
