"""``--on-file``: a command for each finished file, one after the other, beside the archiving.

The command is split as a shell would, ``{path}`` in its words becomes the file's path, and no shell
sees the result: a topic's name cannot become a command.
"""

from __future__ import annotations

import logging
import queue
import shlex
import threading
from pathlib import Path

from nsqtools.errors import ConfigurationError

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
        self._paths: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nsq-on-file", daemon=True)
        self._thread.start()

    def put(self, path: Path) -> None:
        """Have the command run for a file; returns at once."""
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

    def _failed(self, path: Path, reason: str) -> None:
        self.failures += 1
        log.error("the command for %s failed (%s)", path, reason)
