"""The version that the daemons report, and the line of ``--version``."""

from __future__ import annotations

import platform

NSQ_VERSION = "1.3.0"  # the nsqd whose behaviour this is; nsqadmin compares it as semver


def version_line(program: str) -> str:
    """Return what ``--version``, the log and /stats say, in the form of nsqd's."""
    return f"{program} v{NSQ_VERSION} (built w/python{platform.python_version()})"
