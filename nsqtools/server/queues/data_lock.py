"""The lock on a data path: only one nsqd, of either kind, works in a directory at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nsqtools.errors import ConfigurationError


class DataLock:
    """An exclusive flock on the directory itself, held until `release`.

    Raises `ConfigurationError` when the directory is missing or in use.
    """

    def __init__(self, data_path: Path) -> None:
        try:
            self._descriptor = os.open(data_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            reason = (exc.strerror or "").lower()
            raise ConfigurationError(
                f"failed to lock data-path: open {data_path}: {reason}",
                hint="--data-path must be a directory that exists.",
            ) from exc
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._descriptor)
            raise ConfigurationError(
                f"failed to lock data-path: cannot flock directory {data_path} - "
                f"{(exc.strerror or '').lower()} (possibly in use by another instance of nsqd)",
                hint="Stop the other nsqd, or give this one its own --data-path.",
            ) from exc

    def release(self) -> None:
        """Give the directory free."""
        os.close(self._descriptor)
