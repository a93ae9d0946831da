"""The limit of open files of this process."""

from __future__ import annotations

import resource


def allow_many() -> None:
    """Raise the soft limit of open files to the hard one, as Go does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system may refuse what it says that it allows
            pass
