"""The selection of tests, and their distribution to workers.

``pytest --quick`` runs the tests that are in `QUICK` and not in `NOT_QUICK`, without tests that
need the Go programs or Spark. It is a first check of a change, and the check with other Pythons and
other versions of packages.

With several workers of pytest-xdist (``-n 2``):

- Tests run on the first free worker, but all tests of a group run on the same one: `group_of`. A
  second Spark session costs a JVM, a second image a build.
- A test marked ``alone`` measures time or needs the whole machine. Two locked files ensure this:
  every test locks ``turn``, then ``machine`` (shared; an ``alone`` test exclusively), and releases
  ``turn`` immediately. These tests run last, because each makes the other workers wait.
"""

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plugins.servers import GO_FIXTURES
from plugins.spark import SPARK_FIXTURES

TESTS = Path(__file__).parents[1]
QUICK = """archive client cluster files forward http protocol publish records replay tail transport
    cli/commands/test_to_http.py cli/options cli/parsing cli/render cli/top web/test_api.py
    conformance/test_exchanges.py server/test_durable_path.py test_public_api.py test_startup.py"""

# The results of these tests do not depend on the Python or on versions of packages; together they
# take as long as all others. The last one needs pyspark.
NOT_QUICK = """archive/test_power_cut.py client/test_backlog.py client/test_giving_up.py
    client/test_hung_handlers.py client/test_in_flight_limit.py client/test_rotation.py
    cluster/test_problems.py
    archive/test_compaction.py::test_a_compaction_killed_at_any_step
    archive/test_compaction.py::test_each_message_is_compacted_once
    archive/test_tables.py::test_columns_belong_to_the_rows_of_their_bodies
    cli/commands/test_to_http.py::test_a_body_without_an_end
    cli/commands/test_to_http.py::test_a_redirect_never_leads_into_a_private_network
    cli/options/test_spark_session.py::test_the_damage_reports"""

# the tests of a file share a build or a server
BUILDERS = ("tests/docker/", "tests/packaging/", "tests/web/browser/")
# Tests that start Spark in its own process need not wait for the tests with the session.
OWN_JVM = """fuzz/ cli/test_own_processes.py spark/test_cluster.py
    spark/test_registration.py::test_a_plain_pyspark spark/test_session.py::test_a_signal_ends
    spark/test_session.py::test_a_failed_query
    spark/test_session.py::test_a_missing_requirement"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the tests that take a minute in all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (config.getoption("--quick") and collection_path.is_relative_to(TESTS)):
        return None
    path = collection_path.relative_to(TESTS)
    quick_paths = (Path(name) for name in QUICK.split())
    is_quick = any(
        path.is_relative_to(quick_path) or quick_path.is_relative_to(path)
        for quick_path in quick_paths
    )
    return None if is_quick and path.as_posix() not in NOT_QUICK.split() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = filter(is_quick, items)
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def is_quick(item: pytest.Item) -> bool:
    """Whether a test is short and needs neither the Go programs, Spark nor an idle machine."""
    if item.nodeid.removeprefix("tests/").startswith(tuple(NOT_QUICK.split())):
        return False
    fixtures = set(getattr(item, "fixturenames", ()))
    needs = fixtures & (GO_FIXTURES | SPARK_FIXTURES)
    return not needs and not any(map(item.get_closest_marker, ("real_nsqd", "alone")))


def group_of(node_id: str) -> str:
    """The group of a test: its tests run on the same worker; most groups have a single test."""
    if node_id.startswith(BUILDERS):
        return node_id.partition("::")[0]
    own_jvm = tuple(OWN_JVM.split())
    if "spark" in node_id and not node_id.removeprefix("tests/").startswith(own_jvm):
        return "spark"
    return node_id


def pytest_itemcollected(item: pytest.Item) -> None:
    if "spark" in getattr(item, "fixturenames", ()) and group_of(item.nodeid) != "spark":
        raise pytest.UsageError(f"{item.nodeid} uses the Spark session: name it test_spark_...")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of ``--dist loadscope``, with our groups in place of modules."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not hasattr(item.config, "workerinput"):  # there is no other worker
        return (yield)
    mode = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    locks = Path(item.config.getoption("basetemp")).parent  # the directory of the run
    with _locked(locks / "turn", fcntl.LOCK_EX) as turn, _locked(locks / "machine", mode):
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
