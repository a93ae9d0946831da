"""Landing: a finished log into Parquet and into a Delta table, with and without columns of bodies.

The log is plain, its bodies are JSON of about 180 bytes. Rate and CPU are of the process that
lands alone, so CPU is what a message costs beyond the log; the first round, which imports, is left
out. Targets: 150,000 messages/s, 2.5 us a message, 26 bytes a row; 1.5 us more for columns.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.raw import Row
from benchmarks.spark_compact import body

from nsqtools.archive.columns import BodyKind
from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import Head, index_of
from nsqtools.archive.members import Plain
from nsqtools.archive.part_file import Directories, PartFile, finish
from nsqtools.archive.table import TablePlan
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many

BEGIN_NS = 1_790_000_000_000_000_000
EACH_NS = 6_000  # at 167,000 messages a second
MEMBER = 10_000
KINDS = [("parquet", "string"), ("delta", "string"), ("delta", "json")]


def landing(messages: int, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory(prefix="nsq-landing-") as place:
        log = make_log(Path(place, "clicks.log"), range(messages), BEGIN_NS, EACH_NS)
        for number in range(rounds + 1):
            for store, kind in KINDS:
                figures = land(log, store == "delta", BodyKind(kind), messages)
                if number:
                    yield Row(f"{store}, {kind}", number, figures)


def make_log(path: Path, numbers: range, begin_ns: int, each_ns: int) -> Path:
    """Write messages, each ``each_ns`` after the one before, as an archiver does."""
    file = PartFile(path, 0o640, Plain, 0.0, Head(uuid.uuid4().hex, 1))
    for first in range(0, len(numbers), MEMBER):
        some = [
            WireMessage(begin_ns + at * each_ns, 1, b"%016x" % at, body(at))
            for at in numbers[first : first + MEMBER]
        ]
        file.append(encode_many("clicks", "nsqd:4150", some))
        times = some[0].timestamp_ns, some[-1].timestamp_ns
        file.flush(file.end_member(len(some), *times))
    return finish(path, Directories(path.parent, path.parent))


def land(log: Path, is_delta: bool, kind: BodyKind, messages: int) -> dict[str, float]:
    with TemporaryDirectory(dir=log.parent) as place:
        logs = Path(place, "logs")
        logs.mkdir()
        copy = Path(shutil.copy(log, logs))
        shutil.copy(index_of(log), index_of(copy))
        lander = Lander(TablePlan(str(Path(place, "table")), is_delta, "web1", kind), logs)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        drafts, refused, _ = lander.land([copy])
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        assert not refused, refused
        row_bytes = sum(each.bytes for each in drafts) / messages
        return {
            "rate": messages / took_s,
            "cpu_us": cpu_s / messages * 1e6,
            "row_bytes": row_bytes,
        }
