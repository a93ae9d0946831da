"""What a crash of an earlier version left, for the tests beside this file (``left_by_...``).

Real commands of that version made each scene: they were killed, and the directory was kept that
they left. What made them is in the history, for the scenes of the next version: ``git show
c4661db3:tests/upgrade/make.py``. Messages carry numbers, so that what was lost and what was doubled
is known without a record beside it.

An archive's messages are identified by the address of their nsqd. Each scene has its own, far from
those that anybody uses, so that a test can serve at the same one and no two meet. For the same
reason a directory is kept with its path: checkpoints name it.

What an upload to S3 leaves is in the store, and is not kept: a store's own identifiers of its parts
cannot be restored. `tests/faults/test_archivers.py` has it for the present version.
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
FORMS = {  # of archives whose to-file was killed between the index and the FIN
    "archive-raw": ["--format", "raw"],
    "archive-raw-gzip": ["--format", "raw", "--gzip"],
    "archive-jsonl-gzip": ["--format", "jsonl", "--gzip"],
}
IN_FLIGHT = 50  # of a forwarder
SMALL = ["--max-msg-size=100"]
TOO_LARGE = [b"%d" % number * 101 for number in range(8)]  # for an nsqd that is SMALL
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
        return f"127.41.{net}.{1 + SCENES[self.version].index(self.name)}:4150"

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Its directory, always the same one. Another run waits until this one has done with it."""
        directory = Path("/tmp", f"nsqtools-left-by-{self}")
        lock = os.open(f"{directory}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
            directory.mkdir(mode=0o700)
            yield directory
            shutil.rmtree(directory)
        finally:
            os.close(lock)


def kept_of(version: str) -> Path:
    return Path(__file__).with_name(f"left_by_{version.replace('.', '_')}")


def body(number: int) -> bytes:
    return b"%08d some text that a message may have" % number
