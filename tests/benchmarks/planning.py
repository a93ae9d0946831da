"""Planning: the selection of files, and of members in them, that a job reads.

It is measured in its own process, whose memory the kernel reports. The files are indexes and a
first member, because planning reads nothing else.
"""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.logs import BEGIN_NS, HOUR_NS
from benchmarks.measure import Figures, Watched
from benchmarks.raw import Row

from nsqtools.archive.layout import Head, Member, TimeRange, encode_members, index_of, total_of
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings

PLAN_S = 600
WRITER = "5b1c2f0e8d9a4e6f9c3b7a1d2e4f6081"
MEMBERS = 3600  # per file


def make_indexes(directory: Path, topics: int, hours: int) -> None:
    """Write a file for each topic and hour, with only the parts that planning reads."""
    number = 0
    for topic in (f"topic{at:03d}" for at in range(topics)):
        for hour in range(hours):
            number += 1
            begin_ns = BEGIN_NS + hour * HOUR_NS
            first = [WireMessage(begin_ns, 1, b"%016x" % number, b"x")]
            path = directory / f"{topic}-{number:06d}.log.gz"
            with path.open("wb") as file:
                file.write(gzip.compress(encode_many(topic, "nsqd:4150", first)))
                file.truncate(25_000 * MEMBERS)
            index_of(path).write_bytes(Head(WRITER, number).encode() + lines(begin_ns))


@cache
def lines(begin_ns: int) -> bytes:
    """The lines of an index of an hour, with their total."""
    step_ns = HOUR_NS // MEMBERS
    members = [
        Member(25_000 * at, 25_000, 500, begin_ns + at * step_ns, begin_ns + (at + 1) * step_ns - 1)
        for at in range(MEMBERS)
    ]
    return encode_members(members) + total_of(members).encode()


def planning() -> Iterator[Row]:
    """Plan one hour of one topic over 400 files, and the same hour of all topics over 1,000."""
    with TemporaryDirectory(prefix="nsq-plan-") as place:
        few, many = Path(place, "few"), Path(place, "many")
        for directory, topics, hours in ((few, 20, 20), (many, 200, 5)):
            directory.mkdir()
            make_indexes(directory, topics, hours)
        for number in range(1, 4):
            of_a_topic = planned(few, "topic003")
            yield Row("an hour of a topic, 400 files of 3,600 members", number, of_a_topic)
            yield Row("an hour of 200 topics, 1,000 such files", number, planned(many))


def planned(*arguments: object) -> Figures:
    """The cost of planning, in its own process."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PLAN_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return dict(json.loads(done.stdout))


def main(place: str, *topics: str) -> None:
    """Plan an hour of some topics, or of all, and print the cost."""
    within = TimeRange(BEGIN_NS + 4 * HOUR_NS, BEGIN_NS + 5 * HOUR_NS)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    plan_batch(ReadSettings((place,), topics=frozenset(topics), within=within))
    took = {"s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    watched = Watched(os.getpid())
    watched.look()
    print(json.dumps({**took, "peak_mb": watched.peak_mb}))


if __name__ == "__main__":
    main(*sys.argv[1:])
