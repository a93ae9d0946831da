"""Fixtures for real servers, and skips and reports of missing programs.

    nsqd          the Go nsqd, started
    go_nsqd       a factory of them: ``go_nsqd("-msg-timeout=2s")``
    any_nsqd      the same for conformance tests, which run once for each of `NSQD_KINDS`
    embedded_nsqd the same for the embedded one
    nsqlookupd    a factory of Go nsqlookupd; `lookupd` is one
    go_program    the path of a Go program: ``go_program("nsq_tail")``
    serve         starts any daemon object, such as ``serve(GoNsqd(directory))``

This module also exports the classes of these servers.

Servers are killed when the test ends, and the report of a failure has their logs. A test that uses
a Go program is marked ``real_nsqd`` and needs the programs of ``tests/go/build``: without them it
is skipped, and with ``CI=true`` it fails.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from plugins.daemons import GO_PROGRAMS, EmbeddedServer, GoNsqd, GoNsqlookupd, Nsqd, Running

# The classes with which `any_nsqd` runs a test; arguments are a data directory and flags of nsqd.
# Only classes that need the Go programs have the mark.
NSQD_KINDS = [
    pytest.param(GoNsqd, id="real", marks=pytest.mark.real_nsqd),
    pytest.param(EmbeddedServer, id="embedded"),
]

GO_FIXTURES = {"nsqd", "go_nsqd", "nsqlookupd", "go_program"}


Serve = Callable[..., Any]
MakeNsqd = Callable[..., GoNsqd]
AnyNsqd = Callable[..., Nsqd]
DataPath = Callable[[], Path]
GoProgram = Callable[[str], Path]
MakeLookupd = Callable[..., GoNsqlookupd]
D = TypeVar("D", bound=Running)

SERVED = pytest.StashKey[list[Running]]()


@pytest.fixture
def data_path() -> Iterator[DataPath]:
    """A factory of empty directories, which are removed after the test's daemons have ended."""
    with ExitStack() as directories:
        yield lambda: Path(directories.enter_context(TemporaryDirectory(prefix="nsqd-")))


@pytest.fixture
def serve(
    request: pytest.FixtureRequest,
    data_path: DataPath,  # unused, but must outlive the daemons that write there
) -> Iterator[Serve]:
    served = request.node.stash.setdefault(SERVED, [])

    def start(daemon: D) -> D:
        served.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in reversed(served):
        daemon.kill()
        daemon.release_ports()


@pytest.fixture
def go_nsqd(data_path: DataPath, serve: Serve) -> MakeNsqd:
    return lambda *flags: serve(GoNsqd(data_path(), *flags))


@pytest.fixture
def embedded_nsqd(data_path: DataPath, serve: Serve) -> AnyNsqd:
    return lambda *flags: serve(EmbeddedServer(data_path(), *flags))


@pytest.fixture
def quick_nsqd(embedded_nsqd: AnyNsqd) -> EmbeddedServer:
    """An nsqd that times messages out after a second; the Go nsqd first scans after five."""
    return embedded_nsqd("--msg-timeout=1s")


@pytest.fixture
def nsqd(go_nsqd: MakeNsqd) -> GoNsqd:
    return go_nsqd()


@pytest.fixture(params=NSQD_KINDS)
def any_nsqd(request: pytest.FixtureRequest, data_path: DataPath, serve: Serve) -> AnyNsqd:
    return lambda *flags: serve(request.param(data_path(), *flags))


@pytest.fixture
def nsqlookupd(serve: Serve) -> MakeLookupd:
    return lambda *flags: serve(GoNsqlookupd(*flags))


@pytest.fixture
def lookupd(nsqlookupd: MakeLookupd) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def go_program() -> GoProgram:
    return lambda name: GO_PROGRAMS / name


def missing_programs() -> str:
    """The reason why tests marked ``real_nsqd`` cannot run, or ``""``."""
    if (GO_PROGRAMS / ".built-from").exists():
        return ""
    return "the Go programs of NSQ are missing: run tests/go/build"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GO_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real_nsqd)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("real_nsqd"):
        need(missing_programs())


def need(missing: str) -> None:
    """Skip a test if something is missing; with ``CI=true`` it fails."""
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    elif missing:
        pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for daemon in item.stash.get(SERVED, []):
            report.sections.append((f"log of {daemon.name}", daemon.log))
    return report


def pytest_report_header() -> str:
    return f"real servers: {missing_programs() or GO_PROGRAMS}"
