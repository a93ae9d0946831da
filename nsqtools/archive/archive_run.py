"""A run of ``nsq to-file``: the archiver, the uploads of its files, and the command for each file.

`FileHook` runs the command of ``--on-file``. The command is split into words as a shell does, and
``{path}`` in a word is replaced by the path of the file. No shell is run, so the name of a topic
cannot become a command. The commands run one after the other, on a thread of their own.
"""

from __future__ import annotations

import logging
import queue
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsqtools.archive.archiver import Archiver
from nsqtools.archive.topic_writer import ArchiveSettings, ArchiveTotals
from nsqtools.archive.upload import Uploads, UploadTotals
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import ConfigurationError
from nsqtools.records.prometheus import Metric
from nsqtools.tail import RunLimits

log = logging.getLogger("nsqtools")

# Time after which waiting for the commands of --on-file is logged at the end.
SLOW_HOOK_S = 5.0
# Bytes of the error output of a command that are kept for the log.
STDERR_TAIL = 4096


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """The counts at the end of a run. The next run uploads the ``not_uploaded`` files."""

    totals: ArchiveTotals
    uploads: UploadTotals
    not_uploaded: int
    hook_failures: int


class ArchiveRun:
    """Archives topics, uploads or lands the finished files, and calls the hook for each.

    Without ``uploads`` the finished files stay where they are. `Landings` call the ``hook`` for the
    new files of a table, so the run does not call it for their logs. Call `run`, and then `finish`
    even if `run` has raised.
    """

    def __init__(
        self,
        topics: ConsumedTopics,
        channel: str,
        options: ClientOptions,
        settings: ArchiveSettings,
        *,
        limits: RunLimits,
        uploads: Uploads | None = None,
        hook: FileHook | None = None,
    ) -> None:
        self.uploads = uploads
        self._hook = hook
        self.archiver = Archiver(
            topics, channel, options, settings, limits=limits, on_finished=self._on_finished
        )

    def _on_finished(self, path: Path) -> None:
        is_replaced = self.uploads is not None and self.uploads.REPLACES_FILES
        if self._hook is not None and not is_replaced:
            self._hook.put(path)
        if self.uploads is not None:
            self.uploads.put(path)

    def run(self, on_tick: Callable[[], None]) -> None:
        """Archive until a limit is reached or the archiver is stopped. Raises as `Archiver.run`."""

        def tick() -> None:
            if self.uploads is not None:
                self.uploads.start()
                self.uploads.regulate(self.archiver.set_paused)
            on_tick()

        self.archiver.run(tick)

    def finish(
        self, *, is_signaled: Callable[[], bool], on_wait: Callable[[], None]
    ) -> ArchiveResult:
        """Wait for the last uploads, as `Uploads.close`, and for the hook."""
        remaining = 0
        if self.uploads is not None:
            remaining = self.uploads.close(is_signaled=is_signaled, on_wait=on_wait)
        if self._hook is not None:
            self._hook.close()
        return ArchiveResult(
            self.archiver.totals,
            self.uploads.totals if self.uploads is not None else UploadTotals(),
            remaining,
            self._hook.failures if self._hook is not None else 0,
        )

    def taken_count(self) -> int:
        """Return the number of messages that are written or held."""
        return sum(state.totals.messages + state.held for state in self.archiver.states.values())

    @property
    def health(self) -> tuple[bool, str]:
        """Whether archiving and uploading work, and a line that names the problems."""
        is_healthy, text = self.archiver.health
        if self.uploads is None or not is_healthy:
            return is_healthy, text
        is_uploading, problem = self.uploads.health
        return is_uploading, "; ".join(filter(None, (text, problem)))

    def metrics(self) -> list[Metric]:
        """Return the counts of the topics and of the uploads, for Prometheus."""
        return [
            *self.archiver.metrics(),
            *(self.uploads.metrics() if self.uploads is not None else ()),
        ]


class FileHook:
    """Runs ``command`` for each path given to `put`.

    Raises `ConfigurationError` for a command that is empty or cannot be split into words.
    """

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
        """Queue the path or URL of a file."""
        self._paths.put(path)

    def close(self) -> None:
        """Wait until the commands of all queued files have ended."""
        self._paths.put(None)
        self._thread.join(SLOW_HOOK_S)
        if self._thread.is_alive():
            log.warning("waiting for the commands for finished files")
        self._thread.join()

    def _run(self) -> None:
        while (path := self._paths.get()) is not None:
            if reason := self._failure([word.replace("{path}", str(path)) for word in self._words]):
                self.failures += 1
                log.error("the command for %s failed (%s)", path, reason)

    @staticmethod
    def _failure(words: Sequence[str]) -> str:
        from subprocess import DEVNULL, PIPE, Popen

        output = b""
        try:
            # In a session of its own, so that Ctrl-C does not interrupt the command.
            with Popen(
                words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
            ) as process:
                while data := process.stderr.read1(STDERR_TAIL):  # type: ignore[union-attr]
                    output = (output + data)[-STDERR_TAIL:]
        except OSError as exc:
            return f"{words[0]}: {exc.strerror}"
        last = output.decode("utf-8", "backslashreplace").strip().splitlines()[-1:]
        return " ".join([f"status {process.returncode}", *last]) if process.returncode else ""
