"""The lock on a topic and channel in a directory: only one archiver of them works there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nsqtools.errors import ConfigurationError


class TopicLock:
    """Held until `release`. Raises `ConfigurationError` when it is taken, and ``OSError``."""

    def __init__(self, folder: Path, topic: str, channel: str) -> None:
        path = folder / f".{topic}@{channel}.lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 20).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise ConfigurationError(
                f"process {holder or 'unknown'} archives channel {channel} of topic {topic} "
                f"in {folder} already",
                hint="One archiver does for a channel; give another one its own --work-dir.",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)
