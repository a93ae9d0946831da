"""``nsq spark doctor`` with a session, a directory and real nsqd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.cli import Result, RunNsq
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd
from plugins.spark import RunSpark

from nsqtools.spark import doctor


def findings(result: Result) -> dict[str, Any]:
    return {each["check"]: each for each in json.loads(result.out)}


def test_all_is_well_on_a_machine_that_has_what_it_takes(
    run_spark: RunSpark, nsqd: GoNsqd, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()

    result = run_spark(
        "doctor", "--json", "--shared-dir", shared, "--nsqd-http-address", nsqd.http_address
    )

    assert (result.status, result.err) == (0, "")
    found = findings(result)
    java = found["java"].pop("state")
    assert java in ("ok", "warning")  # which depends on its age
    assert {each["state"] for each in found.values() if "state" in each} == {"ok"}
    assert {"java", "pyspark", "pyarrow", "executors", "shared directory"} <= set(found)
    assert list(shared.iterdir()) == []


def test_a_table_on_a_pipe_and_hints_beside_it(
    run_spark: RunSpark, go_nsqd: Callable[..., GoNsqd]
) -> None:
    nodes = [go_nsqd("-node-id=7"), go_nsqd("-node-id=7")]
    addresses = [f"--nsqd-http-address={node.http_address}" for node in nodes]

    result = run_spark("doctor", "--shared-dir", "/proc", *addresses)

    assert result.status == 1
    lines = [line.split("\t") for line in result.out.decode().splitlines()]
    assert lines[0] == ["check", "state", "found"]
    states = {check: state for check, state, _ in lines[1:]}
    assert states["session"] == states["executors"] == "ok"
    assert states["shared directory"] == "failed"
    assert states["nsqd node ids"] == "warning"
    assert "have the node id 7" in result.out.decode()
    assert "hint: nsqtools does not rely on ids alone" in result.err


def test_an_nsqd_says_its_node_id_and_one_that_does_not_is_guessed(
    any_nsqd: Callable[..., Nsqd], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsqtools.http.nsqd_http import NsqdHTTPClient

    node = any_nsqd("-node-id=7", "-broadcast-address=here")
    announced = f"here:{node.tcp_address.rpartition(':')[2]}"
    with NsqdHTTPClient(f"http://{node.http_address}", connect_timeout_s=2, timeout_s=5) as client:
        assert doctor.identity(client) == (7, announced, False)

        monkeypatch.setattr(NsqdHTTPClient, "config", lambda *_: {"message": "no"})
        derived = doctor.derived_node_id(client.info()["hostname"])
        assert doctor.identity(client) == (derived, announced, True)


def test_what_is_missing_is_said_without_a_session(
    run_nsq: RunNsq, nsq_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('no', name='pyspark')\n")
    path = f"{tmp_path}:{nsq_env['PYTHONPATH']}"

    result = run_nsq(["spark", "doctor", "--json"], env={"PYTHONPATH": path})

    assert result.status == 1
    found = findings(result)
    assert found["pyspark"]["found"] == "Spark needs the package pyspark"
    assert "nsqtools[spark]" in found["pyspark"]["hint"]
    assert "session" not in found


def test_a_cluster_that_cannot_be_reached_is_a_finding(run_nsq: RunNsq) -> None:
    places = ["--master", "spark://127.0.0.1:1", "--nsqd-http-address", "127.0.0.1:1"]

    result = run_nsq(["spark", "doctor", "--json", *places])

    assert result.status == 1
    found = findings(result)
    assert "cannot connect to 127.0.0.1:1" in found["session"]["found"]
    assert "cannot connect to http://127.0.0.1:1" in found["nsqd"]["found"]
