"""The data that crashed earlier versions left, for the tests in this folder (``left_by_...``).

Each scene is the directory that real commands of that version left when they were killed. The
script for scenes of the next version is in the history: ``git show
c4661db3:tests/upgrade/make.py``. Bodies are numbers, so that lost and duplicate messages are
recognized without any other record.

Archived messages are identified by the address of their nsqd. Each scene has its own unusual
address, so that a test can serve at it and no two tests collide. The path of the directory is the
same for a similar reason: checkpoints contain it.

No scene has a killed upload to S3, because the identifiers that a store gives to parts cannot be
restored. `tests/faults/test_archivers.py` tests it for the current version.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOPIC, CHANNEL = "clicks", "archive"
MESSAGES = 4_000
FORMS = {  # archives whose to-file was killed between the index and the FIN
    "archive-raw": ["--format", "raw"],
    "archive-raw-gzip": ["--format", "raw", "--gzip"],
    "archive-jsonl-gzip": ["--format", "jsonl", "--gzip"],
}
IN_FLIGHT = 50  # messages in flight of a forwarder
SMALL = ["--max-msg-size=100"]
TOO_LARGE = [b"%d" % number * 101 for number in range(8)]  # bodies above the limits of SMALL
FINISHED = 1_000  # messages of a durable nsqd, consumed before it was killed

_OF_EACH = (*FORMS, "nsqd", "replay", "spark-ingest", "spark-replay")
_SINCE_0_2 = ("upload", "nsqd-durable", "to-nsq", "to-http", "pub", "spark-topic", "spark-compact")
_SINCE_0_3 = ("landing", "table")
SCENES = {
    "0.1": _OF_EACH,
    "0.2": (*_OF_EACH, *_SINCE_0_2),
    "0.3": (*_OF_EACH, *_SINCE_0_2, *_SINCE_0_3),
}
"""The scenes of each version.

``landing`` is a to-file that was killed while it landed logs in a Delta table. ``table`` is a Delta
table with columns for the JSON bodies of two topics, with the archives that it was made from.
"""


@dataclass(frozen=True)
class Scene:
    """The data that one version left, and its address and path."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}-{self.name}"

    @property
    def kept(self) -> Path:
        return kept_of(self.version) / f"{self.name}.tar.xz"

    @property
    def address(self) -> str:
        """The TCP address of its nsqd."""
        net = 49 + int(self.version.partition(".")[2])
        return f"127.41.{net}.{1 + SCENES[self.version].index(self.name)}:4150"

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Its directory, always the same one. Other runs wait until this one has left it."""
        directory = Path("/tmp", f"nsqtools-left-by-{self}")
        lock = os.open(f"{directory}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(directory, ignore_errors=True)  # left by a killed run
            directory.mkdir(mode=0o700)
            yield directory
            shutil.rmtree(directory)
        finally:
            os.close(lock)


def kept_of(version: str) -> Path:
    return Path(__file__).with_name(f"left_by_{version.replace('.', '_')}")


def body(number: int) -> bytes:
    return b"%08d some text that a message may have" % number
