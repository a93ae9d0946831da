"""Fixtures live in tests/plugins, one module per concern; this file only lists them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = [
    "plugins.auth_server",
    "plugins.certificates",
    "plugins.network",
    "plugins.scripted_nsqd",
    "plugins.servers",
]
