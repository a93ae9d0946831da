"""Fixtures live in tests/plugins, one module per concern; this file only lists them.

The header of a run names the copy of the package that is on trial: an installed one, or a checkout.
"""

import signal
import sys
from pathlib import Path

import pytest

import nsqtools

# A shell without job control has background jobs ignore SIGINT, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup has all ignore SIGHUP; a handler is not inherited, so that what we start ends with it
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / ".ci")]

pytest.register_assert_rewrite("plugins")
_PLUGINS = """browser certificates cli clients clusters console disks examples hostile_cluster
http_server java_classes network object_store schedule scripted_nsqd servers spark"""
pytest_plugins = ["pytester", *(f"plugins.{name}" for name in _PLUGINS.split())]


def pytest_report_header() -> str:
    return f"nsqtools {nsqtools.__version__}: {Path(nsqtools.__file__).parent}"
