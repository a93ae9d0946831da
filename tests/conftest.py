"""Fixtures live in tests/plugins, one module per concern; this file only lists them.

The header of a run names the tested copy of the package: an installed one, or a checkout.
"""

import signal
import sys
from pathlib import Path

import pytest

import nsqtools

# Background jobs of a shell without job control ignore SIGINT, and their children inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Programs under nohup ignore SIGHUP. Children do not inherit a handler, so they end with the run.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / ".ci")]

pytest.register_assert_rewrite("plugins")
_PLUGINS = """browser certificates cli clients clusters console disks examples hostile_cluster
http_server java_classes network object_store schedule scripted_nsqd servers spark"""
pytest_plugins = ["pytester", *(f"plugins.{name}" for name in _PLUGINS.split())]


def pytest_report_header() -> str:
    return f"nsqtools {nsqtools.__version__}: {Path(nsqtools.__file__).parent}"
