"""Planning: which files a job reads, of many on disk or in a bucket, and which members of them.

Each is measured in a process of its own, whose memory is what the kernel saw. The files are
indexes, and a first member: no more is looked at. The targets are in the tables of `pages`.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.logs import BEGIN_NS, HOUR_NS
from benchmarks.measure import Figures
from benchmarks.raw import Row

from nsqtools.archive import location
from nsqtools.archive.catalog import table_files
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.layout import Head, Member, TimeRange, encode_members, index_of, total_of
from nsqtools.archive.location import parse_place
from nsqtools.archive.storage import Entry
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.spark.archives.archive_files import CATALOG
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings

PLAN_S = 600
WRITER = "5b1c2f0e8d9a4e6f9c3b7a1d2e4f6081"
DELTA = "a Delta table of 10,000 files in a bucket"


def make_indexes(directory: Path, topics: int, hours: int, members: int) -> None:
    """Write a file for each topic and hour, with an index of as many members."""
    number = 0
    for topic in (f"topic{at:03d}" for at in range(topics)):
        for hour in range(hours):
            number += 1
            name, data, index = small_file(topic, hour, number, members)
            path = directory / name
            with path.open("wb") as file:
                file.write(data)
                file.truncate(25_000 * members)
            index_of(path).write_bytes(index)


def small_file(topic: str, hour: int, number: int, members: int) -> tuple[str, bytes, bytes]:
    """Return name, first bytes and index of a file of an hour."""
    begin, step = BEGIN_NS + hour * HOUR_NS, HOUR_NS // members
    first = encode_many(topic, "nsqd:4150", [WireMessage(begin, 1, b"%016x" % number, b"x")])
    head = Head(WRITER, number).encode()
    return f"{topic}-{number:06d}.log.gz", gzip.compress(first), head + lines(begin, step, members)


@cache
def lines(begin_ns: int, step_ns: int, members: int) -> bytes:
    """The lines of an index, with their total."""
    some = [
        Member(25_000 * at, 25_000, 500, begin_ns + at * step_ns, begin_ns + (at + 1) * step_ns - 1)
        for at in range(members)
    ]
    return encode_members(some) + total_of(some).encode()


def indexes() -> Iterator[Row]:
    """Plan one hour of one topic over 400 files, and the same hour of all topics."""
    hour = {"since": BEGIN_NS + 4 * HOUR_NS, "until": BEGIN_NS + 5 * HOUR_NS}
    with TemporaryDirectory(prefix="nsq-plan-") as place:
        few, many = Path(place, "few"), Path(place, "many")
        few.mkdir()
        many.mkdir()
        make_indexes(few, 20, 20, 3600)
        make_indexes(many, 200, 5, 3600)
        for number in range(1, 4):
            of_a_topic = planned(few, {**hour, "topic": "topic003"})
            yield Row("an hour of a topic, 400 files of 3,600 members", number, of_a_topic)
            yield Row("an hour of 200 topics, 1,000 such files", number, planned(many, hour))


def small_files() -> Iterator[Row]:
    """Plan many small files, as an archiver leaves them that is restarted again and again.

    Target: 10,000 planned in 3 s, at least as many tasks as cores.
    """
    for files in (1_000, 10_000):
        with TemporaryDirectory(prefix="plan-") as place:
            make_indexes(Path(place), 1, files, 1)
            yield Row(f"{files:,} files", 0, planned(place, {}))


def planned(place: Path | str, asked: Mapping[str, object], **environ: str) -> Figures:
    """What it took to plan, in a process of its own."""
    command = [sys.executable, __file__, str(place), json.dumps(asked)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=PLAN_S,
        env={**os.environ, **environ},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return dict(json.loads(done.stdout))


def main() -> None:
    """Plan what the arguments say, and print what it took."""
    place, asked = sys.argv[1], json.loads(sys.argv[2])
    if asked.get("is_synthetic"):
        location._bucket = SyntheticBucket  # type: ignore[assignment]
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    if asked.get("is_table"):
        files = table_files([parse_place(place)], lambda at: at["topic"] == asked["topic"])
        found = {"files": sum(map(len, files.values()))}
    else:
        settings = ReadSettings(
            paths=(place,), within=TimeRange(asked.get("since"), asked.get("until"))
        )
        if topic := asked.get("topic"):
            settings = replace(settings, topics=frozenset([topic]))
        parts = plan_batch(settings)
        paths = {each.path for part in parts for each in part.ranges}
        found = {"files": len(paths), "tasks": len(parts)}
    took = {"s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(json.dumps({**took, **found, "peak_mb": peak / 1000}))


# -- a bucket -----------------------------------------------------------------------------------

SERVER = """
import logging, sys
logging.disable()
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
count = [0]
WSGIRequestHandler.log_request = lambda *a, **k: count.__setitem__(0, count[0] + 1)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
for line in sys.stdin:
    if line.startswith("count"):
        print(count[0], flush=True)
        continue
    key, size, data = line.rstrip("\\n").split("\\t")
    backend = s3_backends["123456789012"]["aws"]
    if not backend.buckets:
        backend.create_bucket("bucket", "us-east-1")
    backend.put_object("bucket", key, bytes.fromhex(data).ljust(int(size), b"\\0"))
"""


@contextmanager
def bucket() -> Iterator[subprocess.Popen[str]]:
    """A server of moto's that counts requests and takes objects by its standard input."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield server
    finally:
        server.kill()
        server.wait()


def buckets(files: int = 10_000) -> Iterator[Row]:
    """Plan an hour of one topic in a bucket: of logs, before and after a catalog, and of Delta."""
    with bucket() as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = next(line for line in server.stdout if line.strip().isdigit()).strip()
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret"}
        keys |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}

        def count() -> int:
            server.stdin.write("count\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        for number in range(files):
            for key, size, data in stored_file("topic003", number):
                server.stdin.write(f"{key}\t{size}\t{data.hex()}\n")
        before = count()
        hour = {"topic": "topic003", "since": BEGIN_NS, "until": BEGIN_NS + HOUR_NS}
        for name in ("10,000 logs in a bucket, the first time", "the same, with a catalog"):
            figures = planned("s3://bucket/logs", hour, **keys)
            after = count()
            yield Row(name, 1, {**figures, "requests": after - before})
            before = after
        os.environ.update(keys)
        table = DeltaCatalog("s3://bucket/table")
        make_table(table, files)
        before = count()
        figures = planned("s3://bucket/table", {"is_table": True, "topic": "topic003"})
        yield Row(DELTA, 1, {**figures, "requests": count() - before})


def stored_file(topic: str, number: int) -> Iterator[tuple[str, int, bytes]]:
    """Iterate over the objects of a file: key, size and first bytes."""
    hour = number // 10
    name, data, index = small_file(topic, hour, number, 2)
    size = 50_000
    manifest = {
        "version": 1,
        "size": size,
        "writer": WRITER,
        "number": number,
        "messages": 1000,
        "min_ts": BEGIN_NS + hour * HOUR_NS,
        "max_ts": BEGIN_NS + (hour + 1) * HOUR_NS - 1,
    }
    day = f"{21 + hour // 24 % 10:02d}"
    folder = f"logs/topic={topic}/date=2026-09-{day}"
    yield f"{folder}/.{name}.index", len(index), index
    document = json.dumps(manifest).encode()
    yield f"{folder}/.{name}.manifest", len(document), document
    yield f"{folder}/{name}", size, data


def make_table(table: DeltaCatalog, files: int) -> None:
    """Commit files that are not there: a plan reads none."""
    import pyarrow

    from nsqtools.archive.columns import message_schema

    table.create(
        message_schema().append(pyarrow.field("date", pyarrow.date32())), ["topic", "date"]
    )
    adds = [
        TableFile(
            f"topic=topic{at % 200:03d}/date=2026-09-21/{at}.parquet",
            1 << 20,
            1000,
            BEGIN_NS + at,
            BEGIN_NS + at + HOUR_NS,
            {"topic": f"topic{at % 200:03d}", "date": "2026-09-21"},
        )
        for at in range(files)
    ]
    for number, first in enumerate(range(0, files, 100_000), 1):
        table.commit(adds[first : first + 100_000], app_id="benchmark", number=number)
    table._table().create_checkpoint()  # as writers do every so often


# -- a million files ----------------------------------------------------------------------------

TOPICS = 200
OF_TOPIC = 5_000


class SyntheticBucket:
    """What a listing needs of a bucket of 1,000,000 logs, with a catalog for each topic."""

    def __init__(self, url: str) -> None:
        self._head = "5b1c2f0e8d9a4e6f9c3b7a1d2e4f%04x"

    def children(self, prefix: str) -> tuple[list[Entry], list[str]]:
        return [], [f"{prefix}/topic=topic{at:03d}" for at in range(TOPICS)]

    def list(self, prefix: str) -> Iterator[Entry]:
        yield Entry(f"{prefix}/{CATALOG}", 1, 0, "v")
        folder = f"{prefix}/date=2026-09-21"
        for number in range(OF_TOPIC):
            name, version = f"clicks-{number:06d}.log.gz", f'"{number:032x}"'
            yield Entry(f"{folder}/.{name}.index", 100, 0, version)
            yield Entry(f"{folder}/.{name}.manifest", 300, 0, version)
            yield Entry(f"{folder}/{name}", 50_000, 0, version)

    def read(self, key: str) -> bytes:
        head = self._head % int(key.partition("=topic")[2].partition("/")[0])
        lines = []
        for number in range(OF_TOPIC):
            times = (BEGIN_NS + number * HOUR_NS, BEGIN_NS + (number + 1) * HOUR_NS - 1)
            total = (0, 1000, 50_000, *times)
            name = f"date=2026-09-21/clicks-{number:06d}.log.gz"
            lines.append(json.dumps([name, f'"{number:032x}"', (head, number), total]))
        return "\n".join(lines).encode()

    def read_range(self, key: str, *_: object) -> bytes:
        return gzip.compress(b'{"topic": "x", "nsqd": "')


def a_million() -> Iterator[Row]:
    """Plan an hour over as many logs and over a Delta table, without reading any: memory."""
    hour = {"since": BEGIN_NS, "until": BEGIN_NS + HOUR_NS, "topic": "topic003"}
    logs = planned("s3://bucket/logs", {"is_synthetic": True, **hour, "topic": ""})
    yield Row("archives in a bucket, 1,000,000 files", 1, logs)
    with TemporaryDirectory(prefix="nsq-lake-") as place:
        make_table(DeltaCatalog(place), TOPICS * OF_TOPIC)
        found = planned(place, {"is_table": True, **hour})
        yield Row("a Delta table of 1,000,000 files", 1, found)


if __name__ == "__main__":
    main()
