"""Archives for the benchmarks of tables and of Spark, as an archiver writes them.

Bodies are JSON of about 180 bytes.
"""

import json
import random
import uuid
from pathlib import Path

from nsqtools.archive.layout import Head
from nsqtools.archive.members import members_of
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.records.naming import Codec

HOUR_NS = 3_600 * 10**9
BEGIN_NS = 1_789_948_800_000_000_000  # 2026-09-21
MEMBER = 2_500
JSON_DDL = (
    "topic string, nsqd string, id string, ts bigint, attempts int, body string, body64 string"
)


def body(number: int) -> bytes:
    fields = {
        "user": random.randrange(1 << 40),
        "url": f"https://example.com/{random.randrange(1000)}/{number}",
        "agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36",
        "seconds": random.random(),
    }
    return json.dumps(fields).encode()


def make_logs(
    directory: Path,
    messages: int,
    files: int,
    *,
    hours: float = 24,
    topic: str = "clicks",
    doubled: float = 0,
    suffix: str = ".log.gz",
) -> int:
    """Write messages of some hours, a share of them twice; return the number of messages."""
    each_ns = int(hours * HOUR_NS / messages)
    written = 0
    for number in range(files):
        path = directory / f"{topic}-{number:06d}{suffix}"
        codec = members_of(Codec.ARROW) if suffix.endswith(".arrow") else members_of(Codec.GZIP, 6)
        file = PartFile(path, 0o640, codec, 0.0, Head(uuid.uuid4().hex, 1))
        begin, end = number * messages // files, (number + 1) * messages // files
        for first in range(begin, end, MEMBER):
            batch = [
                WireMessage(BEGIN_NS + at * each_ns, 1, b"%016x" % at, body(at))
                for at in range(first, min(first + MEMBER, end))
            ]
            times = batch[0].timestamp_ns, batch[-1].timestamp_ns
            batch += random.sample(batch, int(len(batch) * doubled))
            file.append(encode_many(topic, "nsqd:4150", batch))
            file.flush(file.end_member(len(batch), *times))
            written += len(batch)
        finish_part(path, Directories(directory, directory))
    return written
