"""What a Spark session is started with, and where its log goes.

Spark writes a great deal to stderr; all of it goes to one file of the session, which errors name.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from nsqtools.errors import ConfigurationError
from nsqtools.spark.location import Location

KEPT_LOGS = 20


@dataclass(frozen=True)
class SparkSettings:
    """Where Spark runs and with what.

    ``master`` is ``local[*,4]`` (all cores, a task is tried four times) or a cluster:
    ``spark://host:7077``, ``yarn``, ``k8s://...``. ``driver_memory`` is the heap of the JVM that is
    started beside this process, as Java has it: ``2g``, ``800m``. ``conf`` holds any of Spark's own
    settings and wins over ours. ``local_dir`` is where Spark puts its temporary files, in a
    directory of the session that is removed at the end (default: ``$SPARK_LOCAL_DIRS``, else the
    system's). ``places`` are what the session reads and writes, as far as it needs jars for it, and
    ``delta`` whether that is tables of Delta. ``python_places`` need only credentials: no JVM
    reads or writes them. ``inherited`` are descriptors, of locks, that the JVM keeps open while it
    lives: it may outlive this process for a moment.

    Raises `ConfigurationError`.
    """

    master: str = "local[*,4]"
    app_name: str = "nsqtools"
    driver_memory: str = "2g"
    conf: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    local_dir: Path | None = None
    places: tuple[Location, ...] = ()
    delta: bool = False
    python_places: tuple[Location, ...] = ()
    inherited: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*[kmgtKMGT]", self.driver_memory):
            raise ConfigurationError(
                f"driver memory {self.driver_memory!r} is not a size that Java reads",
                hint="Write 2g or 800m.",
            )
        if self.master.startswith("sc://"):
            raise ConfigurationError(
                f"{self.master} is a Spark Connect server, but nsq spark starts its own driver",
                hint="Give the cluster's own address: spark://HOST:7077, yarn or k8s://... In a "
                "Connect session of yours the formats work: nsqtools.spark.register(spark).",
            )

    @property
    def all_places(self) -> tuple[Location, ...]:
        """What needs credentials."""
        return self.places + self.python_places

    @property
    def is_local(self) -> bool:
        """Whether driver and executors are one JVM on this machine."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def local_slots(self) -> int:
        """How many tasks run at a time in local mode; 0 where the cluster decides."""
        if not self.is_local:
            return 0
        found = re.match(r"local\[(\d+|\*)", self.master)
        if found is None:
            return 1
        return (os.cpu_count() or 1) if found[1] == "*" else int(found[1])

    @property
    def log_path(self) -> Path:
        """The file that Spark's messages go to."""
        return self.log_file or default_log_file()


@cache
def default_log_file() -> Path:
    """The log of this process's sessions, in the user's state directory; old ones are removed."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    directory = state / "nsqtools" / "spark"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        logs = sorted(directory.glob("*.log*"), key=lambda path: path.stat().st_mtime)
        for old in logs[: -KEPT_LOGS + 1]:
            old.unlink(missing_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError
    except OSError:  # a service may have no home; in /tmp no name must be predictable
        directory = Path(tempfile.mkdtemp(prefix="nsq-spark-log-"))
    return directory / f"nsq-spark-{os.getpid()}.log"
