"""Make what a crash of an earlier version leaves, for the tests beside this file.

    git worktree add ../nsqtools-0.2 0d05edd (0.1: ebd8538), install it with its extra spark, and
    PYTHONPATH=tests python -m upgrade.make ../nsqtools-0.2/.venv/bin/nsq [NAME...]

Each scene runs real commands of that version, kills them, and keeps the directory it leaves as
``left_by_0_2/NAME.tar.xz``. The tests copy it, go on with the present version, and count. Messages
carry numbers, so that what was lost and what was doubled is known without a record beside it.

An archive's messages are identified by the address of their nsqd. Each scene has its own, far from
those that anybody uses, so that a test can serve at the same one and no two meet. For the same
reason a directory is kept with its path: checkpoints name it.

What an upload to S3 leaves is in the store, and is not kept: a store's own identifiers of its parts
cannot be restored. `tests/faults/test_upload_killed.py` has it for the present version.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plugins.processes import descendants, kill

TOPIC, CHANNEL = "clicks", "archive"
MESSAGES = 4_000
FORMS = {
    "archive-raw": ["--format", "raw"],
    "archive-raw-gzip": ["--format", "raw", "--gzip"],
    "archive-jsonl-gzip": ["--format", "jsonl", "--gzip"],
}


DURABLE = ["--durable", "--mem-queue-size=500", "--max-bytes-per-file=40000"]
FINISHED = 1_000  # of those that are published to the durable nsqd
IN_FLIGHT = 50  # of a forwarder
SMALL = ["--max-msg-size=100"]
TOO_LARGE = [b"%d" % number * 101 for number in range(8)]  # for an nsqd that is SMALL


@dataclass(frozen=True)
class Scene:
    """What one version leaves, and where."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}-{self.name}"

    @property
    def kept(self) -> Path:
        return kept_of(self.version) / f"{self.name}.tar.xz"

    @property
    def address(self) -> str:
        """Where its nsqd serves TCP."""
        net = 49 + int(self.version.partition(".")[2])
        return f"127.41.{net}.{1 + list(SCENES[self.version]).index(self.name)}:4150"

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Its directory, always the same one, and nobody else's."""
        directory = Path("/tmp", f"nsqtools-left-by-{self}")
        directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


def kept_of(version: str) -> Path:
    return Path(__file__).with_name(f"left_by_{version.replace('.', '_')}")


def version_of(nsq: str) -> str:
    """Return the version as the scenes have it: 0.2 of "nsq 0.2.0"."""
    told = subprocess.run([nsq, "--version"], capture_output=True, text=True, check=True).stdout
    return told.split()[1].rpartition(".")[0]


def main(nsq: str, names: list[str]) -> None:
    version = version_of(nsq)
    kept_of(version).mkdir(exist_ok=True)
    for name, make in SCENES[version].items():
        if not names or name in names:
            scene = Scene(version, name)
            with scene.scratch() as scratch:
                make(nsq, scene, scratch)
                keep(scene, scratch)


def keep(scene: Scene, directory: Path) -> None:
    path = scene.kept
    with tarfile.open(path, "w:xz") as archive:
        for entry in sorted(directory.iterdir()):
            archive.add(entry, entry.name, filter=without_owner)
    print(f"{path.name}: {path.stat().st_size} bytes")


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def body(number: int) -> bytes:
    return b"%08d some text that a message may have" % number


class Nsqd:
    """An nsqd of that version."""

    def __init__(self, nsq: str, address: str, data: Path, *flags: str) -> None:
        data.mkdir(exist_ok=True)
        self.tcp, self.http = address, f"127.0.0.1:{free_port()}"
        addresses = [f"--tcp-address={self.tcp}", f"--http-address={self.http}"]
        self._process = start([nsq, "nsqd", *addresses, f"--data-path={data}", *flags])
        wait_until(self._serves)

    def _serves(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://{self.http}/ping").read()
            return True
        return False

    def post(self, path: str, data: bytes = b"") -> None:
        url = f"http://{self.http}{path}"
        urllib.request.urlopen(urllib.request.Request(url, data, method="POST")).read()

    def publish(self, numbers: range) -> None:
        for begin in range(numbers.start, numbers.stop, 1000):
            some = range(begin, min(begin + 1000, numbers.stop))
            self.post(f"/mpub?topic={TOPIC}", b"\n".join(map(body, some)))

    def depth(self) -> int:
        """All that the channel still has: waiting, in flight and deferred."""
        with urllib.request.urlopen(f"http://{self.http}/stats?format=json") as answer:
            stats = json.load(answer)
        [channel] = [c for t in stats["topics"] if t["topic_name"] == TOPIC for c in t["channels"]]
        keys = ("depth", "in_flight_count", "deferred_count")
        return sum(int(channel[key]) for key in keys)

    def stop(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(30)


@contextlib.contextmanager
def serving(
    nsq: str, address: str, data: Path, *flags: str, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[Nsqd]:
    """Serve a topic with a channel."""
    nsqd = Nsqd(nsq, address, data, *flags)
    try:
        nsqd.post(f"/topic/create?topic={TOPIC}")
        nsqd.post(f"/channel/create?topic={TOPIC}&channel={CHANNEL}")
        yield nsqd
    finally:
        nsqd.stop(ended_by)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def killed(command: list[str], directory: Path | None = None) -> Iterator[None]:
    """Run a command and kill it, with the JVM of one that has it, at once."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=directory, **streams)
    try:
        yield
    finally:
        for each in (*(java.pid for java in descendants(process.pid, "java")), process.pid):
            kill(each)
        process.wait(30)
        if "spark" in command:
            time.sleep(3)  # until its workers have noticed


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, pause_s: float = 0.02
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(pause_s)


def indexed(directory: Path) -> int:
    """How many messages the indexes below a directory have."""
    lines = [
        line.split()
        for path in directory.rglob(".*.index")
        for line in path.read_text().splitlines()
        if not line.startswith("writer")
    ]
    return sum(int(line[2]) for line in lines)


def archive_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill to-file between the index and the FIN: some messages are in the archive and in nsqd."""
    archive, both = scratch / "archive", 0

    def has_begun() -> bool:
        return archive.exists() and indexed(archive) >= MESSAGES // 3

    while not both:
        both = kill_archiver(nsq, scene, scratch, has_begun, *FORMS[scene.name])
    print(f"{both} messages are both in the archive and in nsqd")


def upload_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill to-file while it stores files: some are stored, some are not, and one is half done."""
    archive, store = scratch / "archive", scratch / "store"

    def half_done() -> int:
        under_way = {path.stem for path in archive.rglob(".*.uploading")}
        stored = {path.stem for path in archive.rglob(".*.uploaded")}
        return bool(stored) and len(under_way - stored)

    while not half_done():
        shutil.rmtree(store, ignore_errors=True)
        flags = ["--gzip", "--rotate-size", "2KB", "--upload", str(store)]
        kill_archiver(nsq, scene, scratch, half_done, *flags)
    print(f"{half_done()} uploads are half done")


def kill_archiver(
    nsq: str, scene: Scene, scratch: Path, condition: Callable[[], object], *flags: str
) -> int:
    """Kill to-file when it has come so far and writes on; return how many are in both places."""
    for name in ("nsqd", "archive"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    archive = scratch / "archive"
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        nsqd.publish(range(MESSAGES))
        flush = ["--sync-count", "400", "--rotate-size", "20KB", "--max-in-flight", "800"]
        with killed([*to_file(nsq, nsqd.tcp, archive), *flush, *flags]):
            wait_until(condition, pause_s=0)
            seen = indexed(archive)
            if scene.name in FORMS:
                wait_until(lambda: indexed(archive) > seen, pause_s=0)
        time.sleep(0.5)
        return indexed(archive) + nsqd.depth() - MESSAGES


def to_file(nsq: str, address: str, archive: Path) -> list[str]:
    topic = [nsq, "to-file", "-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", address]
    return [*topic, "--output-dir", str(archive), "--host-identifier", "host"]


def nsqd_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """All is on disk, as with --mem-queue-size 0 --sync-every 1, when nsqd is killed."""
    flags = ["--mem-queue-size=0", "--sync-every=1", "--max-bytes-per-file=40000"]
    with serving(nsq, scene.address, scratch / "nsqd", *flags, ended_by=signal.SIGKILL) as nsqd:
        nsqd.post("/topic/create?topic=paused")
        nsqd.post("/topic/pause?topic=paused")
        nsqd.publish(range(MESSAGES))
        wait_until(lambda: nsqd.depth() == MESSAGES)
        time.sleep(0.5)


def durable_nsqd_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Messages are in memory, in files and deferred, and some are finished, when it is killed."""
    data = scratch / "nsqd"
    with serving(nsq, scene.address, data, *DURABLE, ended_by=signal.SIGKILL) as nsqd:
        nsqd.publish(range(MESSAGES))
        nsqd.post("/topic/create?topic=later")
        nsqd.post("/channel/create?topic=later&channel=later")
        nsqd.post("/pub?topic=later&defer=3600000", b"in an hour")
        where = ["--nsqd-tcp-address", nsqd.tcp]
        tail = [nsq, "tail", "-t", TOPIC, "-c", CHANNEL, *where, "-n", str(FINISHED)]
        with (scratch / "finished").open("wb") as finished:
            subprocess.run(tail, stdout=finished, check=True)
        wait_until(lambda: nsqd.depth() == MESSAGES - FINISHED)
        time.sleep(0.5)


def to_http_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill a forwarder whose endpoint refuses everything: some are dead letters, some not."""
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        nsqd.publish(range(MESSAGES))
        to = ["to-http", "--post", f"http://{nsqd.http}/pub"]  # without a topic: 400
        kill_forwarder([nsq, *to], nsqd, scratch, MESSAGES // 3)


def to_nsq_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill a forwarder whose destination has refused half of what it does not take."""
    destination = scratch / "destination"
    with (
        serving(nsq, scene.address, scratch / "nsqd") as nsqd,
        serving(nsq, f"127.0.0.1:{free_port()}", destination, *SMALL) as there,
    ):
        for number, too_large in enumerate(TOO_LARGE):
            nsqd.publish(range(number * 500, (number + 1) * 500))
            nsqd.post(f"/pub?topic={TOPIC}", too_large)
        to = ["to-nsq", "--destination-nsqd-tcp-address", there.tcp]
        kill_forwarder([nsq, *to], nsqd, scratch, len(TOO_LARGE) // 2)


def kill_forwarder(command: list[str], nsqd: Nsqd, scratch: Path, dead_letters: int) -> None:
    dead = scratch / "dead.jsonl"
    pace = ["--max-in-flight", str(IN_FLIGHT), "--dead-letter-file", str(dead)]
    where = ["-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", nsqd.tcp]
    with killed([*command, *where, *pace]):
        wait_until(
            lambda: dead.exists() and dead.read_bytes().count(b"\n") >= dead_letters, pause_s=0
        )
    time.sleep(0.5)
    print(f"{dead.read_bytes().count(10)} dead letters, {nsqd.depth()} to come")


def pub_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill pub in the middle of a file; its checkpoint is of a moment before."""
    text = scratch / "input.txt"
    text.write_bytes(b"".join(body(number) + b"\n" for number in range(MESSAGES)))
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        pace = ["--checkpoint", str(scratch / "checkpoint.json"), "--rate", "1000"]
        where = ["--nsqd-tcp-address", nsqd.tcp]
        with killed([nsq, "pub", "-t", TOPIC, "-f", str(text), *pace, *where]):
            wait_until(lambda: nsqd.depth() > MESSAGES // 2)
        time.sleep(0.5)


def archive_drained(nsq: str, scene: Scene, scratch: Path) -> None:
    with serving(nsq, scene.address, scratch / "source") as nsqd:
        nsqd.publish(range(MESSAGES))
        command = to_file(nsq, nsqd.tcp, scratch / "archive")
        rotated = ["--gzip", "--rotate-size", "5KB", "--sync-count", "400", "--until-empty"]
        subprocess.run([*command, *rotated], check=True)
    shutil.rmtree(scratch / "source")


def replay_interrupted(nsq: str, scene: Scene, scratch: Path) -> None:
    """Interrupt a replay that has a checkpoint; what it published is in the data of its nsqd."""
    archive_drained(nsq, scene, scratch)
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        pace = ["--checkpoint", "checkpoint.json", "--rate", "1500"]
        command = [nsq, "replay", "archive", *pace, "--nsqd-tcp-address", nsqd.tcp]
        replay = subprocess.Popen(command, cwd=scratch, stderr=subprocess.DEVNULL)
        wait_until(lambda: nsqd.depth() > MESSAGES // 4)
        replay.send_signal(signal.SIGINT)
        replay.wait(30)
        time.sleep(0.5)


def ingest_once(nsq: str, scene: Scene, scratch: Path) -> None:
    """Ingest two files of an archive; the others come after that."""
    archive_drained(nsq, scene, scratch)
    set_apart(scratch)
    to = ["--output", str(scratch / "lake"), "--checkpoint", str(scratch / "checkpoint")]
    command = [nsq, "spark", "ingest", str(scratch / "archive"), *to, "--once"]
    subprocess.run(command, cwd=scratch, check=True)  # Python finds no other nsqtools there


def set_apart(scratch: Path) -> None:
    """Leave two files in the archive; the others come later."""
    finished = sorted((scratch / "archive").glob("clicks*"))
    (scratch / "later").mkdir()
    for path in finished[2:]:
        for each in (path, path.with_name(f".{path.name}.index")):
            each.rename(scratch / "later" / each.name)


def bring_back(scratch: Path) -> None:
    """Move what was set apart to the archive."""
    for path in (scratch / "later").iterdir():
        path.rename(scratch / "archive" / path.name)


def topic_stream_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill a stream of a topic: half of it is in the spool, a part of that in the output."""
    lake = scratch / "lake"
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        nsqd.publish(range(MESSAGES // 2))
        to = ["--output", str(lake), "--checkpoint", str(scratch / "checkpoint")]
        pace = ["--trigger", "1s", "--max-rows-per-trigger", "500"]
        where = ["-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", nsqd.tcp]
        command = [nsq, "spark", "ingest", *where, *to, *pace]
        with killed(command, scratch):
            wait_until((lake / "_spark_metadata" / "1").exists, timeout_s=240, pause_s=0)
        nsqd.publish(range(MESSAGES // 2, MESSAGES))


def compaction_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill the second compaction of a day while it has the first one's messages in the making."""
    archive_drained(nsq, scene, scratch)
    set_apart(scratch)
    to = ["--output", str(scratch / "lake"), "--open-days", "--yes"]
    command = [nsq, "spark", "compact", str(scratch / "archive"), *to]
    subprocess.run(command, cwd=scratch, check=True)
    bring_back(scratch)
    staging = scratch / "lake" / "_staging"
    with killed(command, scratch):
        wait_until(lambda: any(staging.rglob("*.parquet")), timeout_s=240, pause_s=0)
    assert any(staging.rglob("*.parquet")), "it was done: run this again"


def spark_replay_killed(nsq: str, scene: Scene, scratch: Path) -> None:
    """Kill a replay on Spark that has a ledger."""
    archive_drained(nsq, scene, scratch)
    with serving(nsq, scene.address, scratch / "nsqd") as nsqd:
        pace = ["--ledger", str(scratch / "ledger"), "--rate", "600"]
        where = ["--nsqd-tcp-address", nsqd.tcp]
        command = [nsq, "spark", "replay", str(scratch / "archive"), *pace, *where]
        with killed(command, scratch):
            wait_until(lambda: nsqd.depth() > MESSAGES // 4, timeout_s=240)


Make = Callable[[str, Scene, Path], None]

_OF_EACH: dict[str, Make] = {
    **dict.fromkeys(FORMS, archive_killed),
    "nsqd": nsqd_killed,
    "replay": replay_interrupted,
    "spark-ingest": ingest_once,
    "spark-replay": spark_replay_killed,
}
SCENES: dict[str, dict[str, Make]] = {
    "0.1": _OF_EACH,
    "0.2": {
        **_OF_EACH,
        "upload": upload_killed,
        "nsqd-durable": durable_nsqd_killed,
        "to-nsq": to_nsq_killed,
        "to-http": to_http_killed,
        "pub": pub_killed,
        "spark-topic": topic_stream_killed,
        "spark-compact": compaction_killed,
    },
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
