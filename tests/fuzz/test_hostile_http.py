"""Arbitrary responses of nsqd and nsqlookupd: no command fails with a bug or a usage error.

A response is a valid one with values replaced, removed or duplicated at random. Known cases are in
`FOUND`.
"""

import copy
import socket
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plugins.cli import RunNsq
from plugins.examples import examples
from plugins.hostile_cluster import HostileCluster


@pytest.fixture(autouse=True)
def only_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve only addresses, so that no result depends on a name server."""
    resolve = socket.getaddrinfo

    def of_address(*where: Any, flags: int = 0, **more: Any) -> Any:
        if len(where) > 5:
            *where, flags = where  # type: ignore[assignment]
        return resolve(*where, flags=flags | socket.AI_NUMERICHOST, **more)

    monkeypatch.setattr(socket, "getaddrinfo", of_address)


COMMANDS = """
    nodes; nodes --json; stat --once; stat --once --json --show clients; stat --once -o csv;
    stat --once --show memory; topic list; topic info clicks; channel list;
    channel info clicks archive --json; topic delete * --dry-run; lookup clicks; info; ping;
    config get log_level
"""

CONSTANTS = [None, True, False, [], {}, [[]], {"a": {}}, [None] * 3]
NUMBERS = [0, -1, 65536, 2**31, 2**63, 10**400, -(10**400), 1.5, 1e308, float("inf"), float("nan")]
TEXTS = ["", "x", "\ud800", "\x1b[2J", "a\nb", "[", "10.0.0.1:1", "::1", "é" * 300, "0", "9" * 5000]
ODD = st.sampled_from([*CONSTANTS, *NUMBERS, *TEXTS])
ODD_VALUES = st.one_of(ODD, st.integers(), st.floats(), st.text(max_size=5))
CHANGES = st.lists(
    st.tuples(st.sampled_from(["replace", "drop", "double"]), st.integers(0, 10**6), ODD_VALUES),
    min_size=1,
    max_size=4,
)

FOUND: list[tuple[str, str, Any]] = [
    ("/lookup", "broadcast_address", "["),
    ("/nodes", "broadcast_address", "["),
    ("/nodes", "broadcast_address", "[::1]"),
    ("/stats", "start_time", 10**400),
    ("/stats", "depth", 10**400),
    ("/stats", "topic_name", "\ud800"),
    ("/info", "tcp_port", "x"),
    ("/info", "broadcast_address", {}),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """All pairs of (container, key) in a document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    pairs = [(value, key) for key in keys]
    for container, key in list(pairs):
        if isinstance(container[key], dict | list):
            pairs += places(container[key])
    return pairs


def changed(document: Any, what: str, number: int, odd: Any) -> Any:
    pairs = places(document)
    if not pairs:
        return odd
    if number % (len(pairs) + 1) == len(pairs):
        return odd  # the whole response
    container, key = pairs[number % (len(pairs) + 1)]
    if what == "replace":
        container[key] = odd
    elif what == "drop":
        del container[key]
    elif isinstance(container, list):
        container.append(container[key])
    return document


def run(command: str, cluster: HostileCluster, run_nsq: RunNsq) -> None:
    daemon = "nsqd" if command.split()[0] in ("config", "info") else "lookupd"
    where = f"--{daemon}-http-address={cluster.http_address}"
    result = run_nsq([*command.split(), where, "--timeout", "2s"])
    assert "This is a bug" not in result.err
    assert "Traceback" not in result.err
    assert result.status in (0, 1, 3, 4, 5, 6), (result.status, result.err)  # 2 is a usage error.


def hostile(good: Any, changes: list[tuple[str, int, Any]]) -> Any:
    document = copy.deepcopy(good)
    for what, number, odd in changes:
        if isinstance(document, dict | list):
            document = changed(document, what, number, copy.deepcopy(odd))
    return document


@given(
    command=st.sampled_from(COMMANDS.split(";")),
    path=st.sampled_from(["/info", "/stats", "/nodes", "/topics", "/channels", "/lookup"]),
    changes=CHANGES,
)
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(command="stat --once", path="/stats", changes=[("replace", 0, 10**400)])
def test_no_response_causes_a_bug_or_a_usage_error(
    command: str,
    path: str,
    changes: list[tuple[str, int, Any]],
    polite_cluster: HostileCluster,
    run_nsq: RunNsq,
) -> None:
    with patch.dict(polite_cluster.answers, {path: hostile(polite_cluster.answers[path], changes)}):
        run(command, polite_cluster, run_nsq)


def test_known_hostile_responses_cause_no_bug(
    polite_cluster: HostileCluster, run_nsq: RunNsq
) -> None:
    for path, key, odd in FOUND:
        document = copy.deepcopy(polite_cluster.answers[path])
        for container, name in places(document):
            if name == key:
                container[name] = odd
        with patch.dict(polite_cluster.answers, {path: document}):
            for command in COMMANDS.split(";"):
                run(command, polite_cluster, run_nsq)
