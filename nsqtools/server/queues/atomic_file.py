"""Replace a small file whole: written beside it, fsynced, renamed over it, mode 0600."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` whole or not at all. Raises ``OSError``."""
    beside = path.with_name(f"{path.name}.{secrets.randbits(63)}.tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
