"""Archives under test: written on request, and read with tools other than ours."""

import base64
import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from plugins.daemons import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.finding import find_archives, table_files
from nsqtools.archive.journal import Journal, journals_below, stem_of
from nsqtools.archive.layout import Head
from nsqtools.archive.members import CompressorFactory, members_of, unpack_members
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import read_messages
from nsqtools.client.message import Batch, Message
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.records.naming import Codec

BEGIN_NS = 1_790_000_000 * 10**9  # 2026-09-21T14:13:20Z


def numbered(first: int, last: int, step_ns: int = 10**9) -> list[WireMessage]:
    """Messages, by default one a second, with their numbers in ids and bodies."""
    return [
        WireMessage(BEGIN_NS + n * step_ns, 1, b"%016x" % n, b"body %d" % n)
        for n in range(first, last)
    ]


def by_the_minute(first: int, last: int, attempts: int = 1) -> list[WireMessage]:
    """Messages of one a minute, with midnight before number 587; every other body is not UTF-8."""
    return [
        message._replace(attempts=attempts, body=b"%b\n%b" % (message.body, b"\xff" * (n % 2)))
        for n, message in enumerate(numbered(first, last, 60 * 10**9), first)
    ]


Row = tuple[str | None, str | None, str | None, int | None, bytes]


def content(output: Path | Place) -> list[Row]:
    """The partition, identity and body of each row, in order."""
    from pyarrow import parquet

    rows = []
    for root, names in table_files([parse_place(str(output))]).items():
        for name in names:
            values = dict(unquote(part).split("=", 1) for part in name.split("/")[:-1])
            with root.open(name) as file:
                table_rows = parquet.ParquetFile(file).read().to_pylist()
            for row in table_rows:
                body = row.get("body_bytes") or row["body"]
                body = body if isinstance(body, bytes) else body.encode()
                rows.append((values["topic"], values["date"], row["id"], row["ts_ns"], body))
    return sorted(rows, key=str)


def bodies_at(*places: Path | str) -> list[bytes]:
    """The bodies of all messages of archives and tables, in order; damage is an error."""
    return sorted(
        message.body
        for archive in find_archives(places)
        for message in read_messages(archive, lambda *problem: pytest.fail(str(problem)))
    )


def write_archive(
    path: Path,
    *members: Sequence[WireMessage],
    topic: str = "clicks",
    nsqd: str = "nsqd:4150",
    is_finished: bool = True,
    head: Head | None = None,
) -> Path:
    """Write messages with an index, and flush each member.

    The suffix of ``path`` selects zstd or Arrow instead of gzip.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = PartFile(path, 0o640, compressor_for(path), 0.0, head)
    flush(file, topic, nsqd, members)
    return finish_part(path, Directories(path.parent, path.parent)) if is_finished else path


def compressor_for(path: Path) -> CompressorFactory:
    codecs = {".zst": Codec.ZSTD, ".arrow": Codec.ARROW}
    return members_of(codecs[path.suffix]) if path.suffix in codecs else members_of(Codec.GZIP, 6)


def flush(file: PartFile, topic: str, nsqd: str, members: Iterable[Sequence[WireMessage]]) -> None:
    """Make members durable."""
    for messages in members:
        times = [message.timestamp_ns for message in messages]
        file.append(encode_many(topic, nsqd, messages))
        file.flush(file.end_member(len(messages), min(times), max(times)))


def dead_letters(folder: Path | Place) -> list[bytes]:
    """The lines of the messages that Spark's tasks could not publish."""
    storage = parse_place(str(folder))
    names = sorted(entry.name for entry in storage.list() if entry.name.startswith("dead-"))
    return [line for name in names for line in storage.read(name).splitlines()]


def dead_rows(folder: Path | Place) -> list[int]:
    """The row numbers of dead letters in their partitions."""
    return sorted(json.loads(line)["row"] for line in dead_letters(folder))


def values_of(plan: Iterable[Any], settings: Any, column: str) -> list[Any]:
    """The values of a column in all rows of some partitions, as Spark's executors read them."""
    from nsqtools.spark.archives.partition_reader import read_partition

    batches = (
        batch for partition in plan for batch in read_partition(partition, settings, [column])
    )
    return [value for batch in batches for value in batch[column].to_pylist()]


class Writer:
    """A writer of an archive: members become durable, and files are finished, one at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        output: Path | None = None,
        writer: str = "",
        topic: str = "clicks",
        suffix: str = "gz",
    ) -> None:
        self.directories = Directories(output or directory, directory)
        self.writer = writer or uuid.uuid4().hex
        self.number = 0
        self._topic, self._suffix = topic, suffix
        self._file: PartFile | None = None

    def write(self, *members: Sequence[WireMessage], name: str = "") -> Path:
        """Make members durable in the file in progress, or in a new one."""
        if self._file is None:
            self.number += 1
            name = name or f"{self._topic}-{self.number:06d}.log.{self._suffix}"
            path = self.directories.work / name
            head = Head(self.writer, self.number)
            self._file = PartFile(path, 0o640, compressor_for(path), 0.0, head)
        flush(self._file, self._topic, "nsqd:4150", members)
        return self._file.path

    def finish(self) -> Path:
        assert self._file is not None
        path = finish_part(self._file.path, self.directories)
        self._file = None
        return path


def journal_in(path: Path, topic: str = "clicks", channel: str = "archive", **more: Any) -> Journal:
    """The journal of a topic and channel, as a new run opens it."""
    settings = {"run": "1", "size": 100, "is_durable": lambda *member: True, "now_s": 0.0} | more
    earlier = journals_below(path).get(stem_of(topic, channel), ())
    return Journal(path, topic, channel, earlier=earlier, **settings)


NOW_S = 1_790_000_000.0


class FakeConnection:
    """A connection of a writer that delivers at ``NOW_S``, and records the answers."""

    msg_timeout_s = 60.0
    received_at = 0.0

    def __init__(self) -> None:
        self.topic, self.nsqd = "clicks", "127.0.0.1:4150"
        self.in_flight: dict[bytes, Message] = {}
        self.released: set[bytes] = set()
        self.finished, self.requeued, self.touched = list[bytes](), list[bytes](), list[bytes]()
        self.finish, self.finish_many = self.finished.append, self.finished.extend

    def requeue(self, message: Message, delay_s: float | None, backoff: bool) -> None:
        assert backoff
        self.requeued.append(message.id)

    def answer(self, message_id: bytes, kind: str, command: bytes) -> None:
        assert kind == "touch"
        self.touched.append(message_id)

    def deliver(self, *numbers: int, attempts: int = 1, days: int = 0) -> Batch:
        timestamp = (int(NOW_S) + days * 86_400) * 1_000_000_000
        batch = [Message(self, timestamp, attempts, b"%016d" % n, b"body %d" % n) for n in numbers]
        self.in_flight.update({message.id: message for message in batch})
        return Batch(self, batch)


def finished_files(directory: Path) -> list[Path]:
    """All files that are not hidden, in order."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.startswith("."))


def parts(directory: Path) -> list[Path]:
    """Files in progress."""
    return sorted(directory.rglob(".*.part"))


def text_of(path: Path) -> bytes:
    """The content of a file, which Python's gzip, or zstdcat if installed, must accept."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".arrow":
        with path.open("rb") as file:
            return b"".join(piece.text for piece in unpack_members(file, Codec.ARROW))
    if path.suffix != ".zst":
        return path.read_bytes()
    if not shutil.which("zstdcat"):
        with path.open("rb") as file:
            return b"".join(piece.text for piece in unpack_members(file, Codec.ZSTD))
    return subprocess.check_output(["zstdcat", path], timeout=patience_s(20))


def lines_of(directory: Path) -> list[bytes]:
    """The lines of all finished files; each file must end with a complete line."""
    lines: list[bytes] = []
    for path in finished_files(directory):
        *complete, incomplete = text_of(path).split(b"\n")
        assert incomplete == b"", f"{path} ends in {incomplete!r}"
        lines += complete
    return lines


def messages_of(directory: Path) -> list[dict[str, Any]]:
    """The messages of all finished jsonl files, each with its ``body`` as bytes."""
    messages = [json.loads(line) for line in lines_of(directory)]
    for message in messages:
        encoded = message.pop("body64", None)
        message["body"] = base64.b64decode(encoded) if encoded else message["body"].encode()
    return messages


ON_ITS_WAY_S = 0.05  # no count of nsqd has a message on its way from the queue to the client


def unfinished(nsqd: Nsqd, topic: str, channel: str) -> int:
    """The number of messages that nsqd still has; 0 only if two samples agree."""

    def counted() -> int:
        stats = nsqd.channel_stats(topic, channel)
        return int(stats["depth"] + stats["in_flight_count"] + stats["deferred_count"])

    if found := counted():
        return found
    time.sleep(ON_ITS_WAY_S)
    return counted()


# -- nsq to-file in its own process ---------------------------------------------------------------

TOPIC, CHANNEL = "clicks", "archive"


def filled(nsqd: Nsqd, bodies: Sequence[bytes]) -> list[bytes]:
    """Publish messages, and wait until the channel has them."""
    nsqd.create_channel(TOPIC, CHANNEL)
    for begin in range(0, len(bodies), 1000):
        nsqd.publish(TOPIC, *bodies[begin : begin + 1000])
    wait_until(
        lambda: nsqd.depth(TOPIC, CHANNEL) == len(bodies), what="a full channel", timeout_s=60
    )
    return list(bodies)


def to_file(address: str, directory: Path, *flags: str) -> list[str]:
    """The arguments of an archiver."""
    place = ["--nsqd-tcp-address", address, "--output-dir", str(directory)]
    return ["to-file", "-t", TOPIC, "-c", CHANNEL, *place, *flags]


def wait_until_archived(nsqd: Nsqd, topic: str = TOPIC) -> None:
    """Wait until the channel is empty, also of redeliveries."""
    wait_until(lambda: unfinished(nsqd, topic, CHANNEL) == 0, what="an empty channel", timeout_s=60)


def ended(process: subprocess.Popen[bytes]) -> str:
    """Stop an archiver, which finishes and stores its files; return its log."""
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=patience_s(90))
    assert process.returncode == 143, stderr.decode()
    return stderr.decode()


def killed_again_and_again(
    start: Callable[[], subprocess.Popen[bytes]], state: Callable[[], object], kills: int
) -> subprocess.Popen[bytes]:
    """Kill an archiver at random points after its ``state`` has changed; return its successor.

    A state of 0 means that no work is left.
    """
    chance = random.Random(kills)
    for _ in range(kills):
        before, process = state(), start()

        def has_moved() -> bool:
            assert process.poll() is None, "it ended by itself"  # noqa: B023
            return before == 0 or state() != before  # noqa: B023

        wait_until(has_moved, what="progress", timeout_s=90)
        time.sleep(chance.uniform(0, 0.3))  # the random point
        process.kill()
        process.wait(patience_s(90))
    return start()


def assert_each_once(found: Iterable[bytes], published: Iterable[bytes]) -> None:
    """Check that files or tables have every published message exactly once."""
    counts = Counter(found)
    assert set(published) - set(counts) == set(), "messages were lost"
    assert [body for body, times in counts.items() if times > 1] == [], "messages were doubled"
    assert set(counts) == set(published)


FORKING = """
import json, os, signal, sys, traceback

def step():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def around(owner, *names):
    for name in names:
        def stepped(*args, original=getattr(owner, name), **more):
            step()
            result = original(*args, **more)
            step()
            return result
        setattr(owner, name, stepped)

limit_s, steps, program = sys.argv[1:]
exec(steps)
for line in sys.stdin:
    if not (child := os.fork()):
        left, *words = json.loads(line)
        signal.alarm(int(limit_s))
        os.dup2(2, 1)
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

NSQ = """
from nsqtools.cli.main import main
sys.argv = ["nsq", *words]
main()
"""

KilledAt = Callable[..., bool]


@contextmanager
def killing(
    steps: str, program: str = NSQ, env: dict[str, str] | None = None
) -> Iterator[KilledAt]:
    """Yield ``killed_at(step, *words)``, which runs a program with words.

    It returns whether the program reached the step and was killed. Each run is a fork after
    ``steps`` has imported the program's modules, because imports take longer than the program. A
    step is before or after a function that is wrapped by ``around``.
    """
    limit_s = str(round(patience_s(90)))
    command = [sys.executable, "-c", FORKING, limit_s, steps, program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:

        def killed_at(step: int, *words: object) -> bool:
            process.stdin.write(json.dumps([step, *map(str, words)]) + "\n")
            process.stdin.flush()
            status = process.stdout.readline().strip()
            assert status in ("0", f"-{signal.SIGKILL:d}"), f"step {step} ended with {status!r}"
            return status != "0"

        yield killed_at
