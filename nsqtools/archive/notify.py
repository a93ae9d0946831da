"""What an archiver reports: a command for each finished file, and a Prometheus text file.

The command of ``--on-file`` is split as a shell would, ``{path}`` in its words becomes the file's
path, and no shell sees the result: a topic's name cannot become a command. The commands run one
after the other, beside the archiving.
"""

from __future__ import annotations

import logging
import queue
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from nsqtools.archive.archiver import TopicState
from nsqtools.errors import ConfigurationError
from nsqtools.records.prometheus import Metric

log = logging.getLogger("nsqtools")


class FileHook:
    """Runs ``command`` for each path given to `put`. Raises `ConfigurationError` for no command."""

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as exc:
            raise ConfigurationError(f"the command {command!r} cannot be read: {exc}") from None
        if not self._words:
            raise ConfigurationError("the command for finished files is empty")
        self.failures = 0
        self._paths: queue.SimpleQueue[Path | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nsq-on-file", daemon=True)
        self._thread.start()

    def put(self, path: Path | str) -> None:
        """Have the command run for a file, or the URL of one; returns at once."""
        self._paths.put(path)

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for the commands that are due; return whether all have ended."""
        self._paths.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        import subprocess

        while (path := self._paths.get()) is not None:
            words = [word.replace("{path}", str(path)) for word in self._words]
            try:
                done = subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    check=False,
                )
            except OSError as exc:
                self._failed(path, f"{words[0]}: {exc.strerror}")
                continue
            if done.returncode:
                last = done.stderr.decode("utf-8", "backslashreplace").strip().splitlines()[-1:]
                self._failed(path, " ".join([f"status {done.returncode}", *last]))

    def _failed(self, path: Path | str, reason: str) -> None:
        self.failures += 1
        log.error("the command for %s failed (%s)", path, reason)


log = logging.getLogger("nsqtools")

PREFIX = "nsq_to_file_"


# name, type, help, what
METRICS: tuple[tuple[str, str, str, Callable[[TopicState], int]], ...] = (
    ("messages_total", "counter", "Messages written.", lambda state: state.totals.messages),
    ("bytes_total", "counter", "Bytes of text written.", lambda state: state.totals.bytes),
    ("files_total", "counter", "Files finished.", lambda state: state.totals.files),
    (
        "already_written_total",
        "counter",
        "Messages delivered again, not written twice.",
        lambda state: state.totals.already_written,
    ),
    ("write_failures_total", "counter", "Failures to write.", lambda state: state.totals.failures),
    (
        "ambiguous_bodies_total",
        "counter",
        "Bodies that contain the delimiter.",
        lambda state: state.totals.ambiguous,
    ),
    ("held_messages", "gauge", "Messages not on disk yet.", lambda state: state.held),
    ("failing", "gauge", "1 while writing fails.", lambda state: int(state.is_failing)),
)


def topic_metrics(topics: Mapping[str, TopicState], now_s: float) -> list[Metric]:
    """Return the counts of all topics. ``now_s`` is the time since 1970."""
    metrics = [
        Metric(
            PREFIX + name,
            kind,
            help,
            [({"topic": topic}, read(state)) for topic, state in topics.items()],
        )
        for name, kind, help, read in METRICS
    ]
    seen = Metric(
        f"{PREFIX}last_seen_seconds", "gauge", "When this was written.", [({}, f"{now_s:.3f}")]
    )
    return [*metrics, seen]
