"""Which worker runs which test, when pytest-xdist runs several (``-n 2 --dist loadgroup``).

- All tests that share the Spark session go to one worker: a second session costs a JVM.
- A test marked ``alone`` measures time or needs the whole machine: while it runs, no other worker
  runs anything. Two locked files see to that. Every test takes ``turn``, then ``machine`` (shared;
  an ``alone`` test exclusively), and gives ``turn`` back at once. An ``alone`` test that waits for
  the machine keeps the turn, so that others cannot start before it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

SPARK_SESSION = "spark"  # the fixture, and the name of the group
LOCKS = pytest.StashKey[TemporaryDirectory[str]]()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SPARK_SESSION in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(SPARK_SESSION))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker that this process starts the directory of the locks."""
    stash = node.config.stash
    if LOCKS not in stash:
        stash[LOCKS] = TemporaryDirectory(prefix="nsqtools-tests-")
    node.workerinput["locks"] = stash[LOCKS].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if directory := config.stash.get(LOCKS, None):
        directory.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    locks = Path(worker["locks"])
    with _locked(locks / "turn", fcntl.LOCK_EX) as turn, _locked(locks / "machine", how):
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
