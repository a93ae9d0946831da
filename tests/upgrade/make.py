"""Make what a crash of version 0.1 leaves, for the tests beside this file.

    git worktree add ../nsqtools-0.1 ebd8538, install it with its extra spark, and then
    python tests/upgrade/make.py ../nsqtools-0.1/.venv/bin/nsq [NAME...]

Each scene runs real commands of that version, kills them, and keeps the directory it leaves as
``left_by_0_1/NAME.tar.xz``. The tests copy it, go on with the present version, and count. Messages
carry numbers, so that what was lost and what was doubled is known without a record beside it.

An archive's messages are identified by the address of their nsqd. Each scene has its own
(`address_of`), far from those that anybody uses, so that a test can serve at the same one and no
two meet. For the same reason a directory is kept with its path: checkpoints name it.
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
from pathlib import Path

KEPT = Path(__file__).with_name("left_by_0_1")
TOPIC, CHANNEL = "clicks", "archive"
MESSAGES = 4_000
FORMS = {
    "archive-raw": ["--format", "raw"],
    "archive-raw-gzip": ["--format", "raw", "--gzip"],
    "archive-jsonl-gzip": ["--format", "jsonl", "--gzip"],
}


def main(nsq: str, names: list[str]) -> None:
    KEPT.mkdir(exist_ok=True)
    for name, make in SCENES.items():
        if not names or name in names:
            with scratch_of(name) as scratch:
                make(nsq, name, scratch)
                keep(name, scratch)


@contextlib.contextmanager
def scratch_of(scene: str) -> Iterator[Path]:
    """The directory of a scene, always the same one, and nobody else's."""
    directory = Path("/tmp", f"nsqtools-left-by-0.1-{scene}")
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def keep(name: str, directory: Path) -> None:
    path = KEPT / f"{name}.tar.xz"
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

    def __init__(self, nsq: str, scene: str, data: Path, *flags: str) -> None:
        data.mkdir(exist_ok=True)
        self.tcp, self._http = address_of(scene), f"127.0.0.1:{free_port()}"
        addresses = [f"--tcp-address={self.tcp}", f"--http-address={self._http}"]
        self._process = start([nsq, "nsqd", *addresses, f"--data-path={data}", *flags])
        wait_until(self._serves)

    def _serves(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://{self._http}/ping").read()
            return True
        return False

    def post(self, path: str, data: bytes = b"") -> None:
        url = f"http://{self._http}{path}"
        urllib.request.urlopen(urllib.request.Request(url, data, method="POST")).read()

    def publish(self, numbers: range) -> None:
        for begin in range(numbers.start, numbers.stop, 1000):
            some = range(begin, min(begin + 1000, numbers.stop))
            self.post(f"/mpub?topic={TOPIC}", b"\n".join(map(body, some)))

    def depth(self) -> int:
        """All that the channel still has: waiting, in flight and deferred."""
        with urllib.request.urlopen(f"http://{self._http}/stats?format=json") as answer:
            stats = json.load(answer)
        [channel] = [c for t in stats["topics"] for c in t["channels"]]
        keys = ("depth", "in_flight_count", "deferred_count")
        return sum(int(channel[key]) for key in keys)

    def stop(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(30)


@contextlib.contextmanager
def serving(
    nsq: str, scene: str, data: Path, *flags: str, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[Nsqd]:
    """Serve a topic with a channel."""
    nsqd = Nsqd(nsq, scene, data, *flags)
    try:
        nsqd.post(f"/topic/create?topic={TOPIC}")
        nsqd.post(f"/channel/create?topic={TOPIC}&channel={CHANNEL}")
        yield nsqd
    finally:
        nsqd.stop(ended_by)


def address_of(scene: str) -> str:
    """Where the nsqd of a scene serves TCP."""
    return f"127.41.50.{1 + list(SCENES).index(scene)}:4150"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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


def archive_killed(nsq: str, scene: str, scratch: Path) -> None:
    """Kill to-file between the index and the FIN: some messages are in the archive and in nsqd."""
    both = 0
    while not both:
        both = kill_archiver(nsq, scene, scratch)
    print(f"{both} messages are both in the archive and in nsqd")


def kill_archiver(nsq: str, scene: str, scratch: Path) -> int:
    for name in ("nsqd", "archive"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    archive = scratch / "archive"
    with serving(nsq, scene, scratch / "nsqd") as nsqd:
        nsqd.publish(range(MESSAGES))
        flush = ["--sync-count", "400", "--rotate-size", "20KB", "--max-in-flight", "800"]
        archiver = start([*to_file(nsq, nsqd.tcp, archive), *flush, *FORMS[scene]])
        wait_until(lambda: archive.exists() and indexed(archive) >= MESSAGES // 3, pause_s=0)
        seen = indexed(archive)
        wait_until(lambda: indexed(archive) > seen, pause_s=0)
        archiver.kill()
        archiver.wait(30)
        time.sleep(0.5)
        return indexed(archive) + nsqd.depth() - MESSAGES


def to_file(nsq: str, address: str, archive: Path) -> list[str]:
    topic = [nsq, "to-file", "-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", address]
    return [*topic, "--output-dir", str(archive), "--host-identifier", "host"]


def nsqd_killed(nsq: str, scene: str, scratch: Path) -> None:
    """All is on disk, as with --mem-queue-size 0 --sync-every 1, when nsqd is killed."""
    flags = ["--mem-queue-size=0", "--sync-every=1", "--max-bytes-per-file=40000"]
    with serving(nsq, scene, scratch / "nsqd", *flags, ended_by=signal.SIGKILL) as nsqd:
        nsqd.post("/topic/create?topic=paused")
        nsqd.post("/topic/pause?topic=paused")
        nsqd.publish(range(MESSAGES))
        wait_until(lambda: nsqd.depth() == MESSAGES)
        time.sleep(0.5)


def archive_drained(nsq: str, scene: str, scratch: Path) -> None:
    with serving(nsq, scene, scratch / "source") as nsqd:
        nsqd.publish(range(MESSAGES))
        command = to_file(nsq, nsqd.tcp, scratch / "archive")
        rotated = ["--gzip", "--rotate-size", "5KB", "--sync-count", "400", "--until-empty"]
        subprocess.run([*command, *rotated], check=True)
    shutil.rmtree(scratch / "source")


def replay_interrupted(nsq: str, scene: str, scratch: Path) -> None:
    """Interrupt a replay that has a checkpoint; what it published is in the data of its nsqd."""
    archive_drained(nsq, scene, scratch)
    with serving(nsq, scene, scratch / "nsqd") as nsqd:
        pace = ["--checkpoint", "checkpoint.json", "--rate", "1500"]
        command = [nsq, "replay", "archive", *pace, "--nsqd-tcp-address", nsqd.tcp]
        replay = subprocess.Popen(command, cwd=scratch, stderr=subprocess.DEVNULL)
        wait_until(lambda: nsqd.depth() > MESSAGES // 4)
        replay.send_signal(signal.SIGINT)
        replay.wait(30)
        time.sleep(0.5)


def ingest_once(nsq: str, scene: str, scratch: Path) -> None:
    """Ingest two files of an archive; the others come after that."""
    archive_drained(nsq, scene, scratch)
    finished = sorted((scratch / "archive").glob("clicks*"))
    later = [*finished[2:], *((path.with_name(f".{path.name}.index")) for path in finished[2:])]
    (scratch / "later").mkdir()
    for path in later:
        path.rename(scratch / "later" / path.name)
    to = ["--output", str(scratch / "lake"), "--checkpoint", str(scratch / "checkpoint")]
    command = [nsq, "spark", "ingest", str(scratch / "archive"), *to, "--once"]
    subprocess.run(command, cwd=scratch, check=True)  # Python finds no other nsqtools there


def spark_replay_killed(nsq: str, scene: str, scratch: Path) -> None:
    """Kill a replay on Spark that has a ledger."""
    archive_drained(nsq, scene, scratch)
    with serving(nsq, scene, scratch / "nsqd") as nsqd:
        pace = ["--ledger", str(scratch / "ledger"), "--rate", "600"]
        where = ["--nsqd-tcp-address", nsqd.tcp]
        command = [nsq, "spark", "replay", str(scratch / "archive"), *pace, *where]
        replay = subprocess.Popen(command, cwd=scratch, stderr=subprocess.DEVNULL)
        wait_until(lambda: nsqd.depth() > MESSAGES // 4, timeout_s=240)
        replay.kill()
        replay.wait(30)
        time.sleep(3)  # until its JVM has noticed


SCENES: dict[str, Callable[[str, str, Path], None]] = {
    **dict.fromkeys(FORMS, archive_killed),
    "nsqd": nsqd_killed,
    "replay": replay_interrupted,
    "spark-ingest": ingest_once,
    "spark-replay": spark_replay_killed,
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
