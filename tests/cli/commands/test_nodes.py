"""``nsq nodes``, ``lookup``, ``ping``, ``info``, ``tombstone`` and ``config`` as processes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster, ValidJson
from plugins.http_api import Nsqd


def test_nodes_are_those_of_every_nsqlookupd_with_their_tombstones(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson
) -> None:
    first, second = cluster.nsqds
    first.create_topic("clicks")
    cluster.wait_for_topic("clicks", 1)
    for lookupd in cluster.lookupds:
        lookupd.post("/topic/tombstone", topic="clicks", node=first.http_address)

    listed = run_nsq(["nodes", *cluster.lookupd_options])
    nodes = valid_json("nodes", run_nsq(["nodes", "--json", *cluster.lookupd_options]).out)

    assert (listed.status, listed.err) == (0, "")
    rows = sorted(line.split("\t") for line in listed.out.decode().splitlines()[1:])
    assert rows == sorted(
        [nsqd.http_address, nsqd.tcp_address, rows[0][2], rows[0][3], topics, topics, "2", "ok"]
        for nsqd, topics in ((first, "1"), (second, "0"))
    )
    [hidden] = [node for node in nodes if node["tombstoned"]]
    assert (hidden["node"], hidden["tombstoned"]) == (first.http_address, ["clicks"])


def test_a_dead_nsqd_and_a_dead_nsqlookupd_are_named(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson
) -> None:
    first, second = cluster.nsqds
    cluster.lookupds[0].kill()
    second.kill()

    nodes = run_nsq(["nodes", "--json", *cluster.nsqd_options])
    seen = run_nsq(["nodes", *cluster.lookupd_options])
    pongs = run_nsq(["ping", "--json", *cluster.nsqd_options, *cluster.lookupd_options])

    errors = {node["node"]: node["error"] for node in valid_json("nodes", nodes.out)}
    assert errors[first.http_address] is None
    assert "connection refused" in errors[second.http_address]
    assert nodes.status == seen.status == pongs.status == 6
    assert f"left out: cannot connect to http://{cluster.lookupds[0].http_address}" in seen.err
    state = {pong["address"]: pong["error"] for pong in valid_json("ping", pongs.out)}
    assert {address for address, error in state.items() if error} == {
        second.http_address,
        cluster.lookupds[0].http_address,
    }


def test_lookup_names_the_nsqd_and_suggests_for_a_typo(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson
) -> None:
    first = cluster.nsqds[0]
    first.create_channel("clicks", "arch")
    cluster.wait_for_topic("clicks", 1)

    found = run_nsq(["lookup", "clicks", *cluster.lookupd_options])
    where = valid_json(
        "lookup", run_nsq(["lookup", "clicks", "--json", *cluster.lookupd_options]).out
    )
    typo = run_nsq(["lookup", "click", *cluster.lookupd_options])
    nobody = run_nsq(["lookup", "clicks", *cluster.nsqd_options])

    row = f"{first.tcp_address}\t{first.http_address}\t2"
    assert found.out.decode().splitlines() == ["nsqd\tnode\tlookupds", row]
    assert where["channels"] == ["arch"]
    assert typo.status == 3
    assert "Did you mean clicks?" in typo.err
    assert nobody.status == 2
    assert "--lookupd-http-address" in nobody.err


def test_ping_and_info_of_one_nsqd(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], valid_json: ValidJson
) -> None:
    nsqd = any_nsqd()
    here = f"--nsqd-http-address={nsqd.http_address}"

    ping = run_nsq(["ping", here])
    info = run_nsq(["info", here])

    assert ping.status == 0
    head, row = (line.split("\t") for line in ping.out.decode().splitlines())
    assert head == ["daemon", "address", "latency_ms", "state"]
    assert (row[0], row[1], row[3]) == ("nsqd", nsqd.http_address, "ok")
    assert float(row[2]) < 2000
    assert info.out.decode().splitlines()[1].startswith(f"{nsqd.http_address}\t1.3.0\t")
    assert re.search(r"\t20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ\n$", info.out.decode())
    [document] = valid_json("info", run_nsq(["info", "--json", here]).out)
    assert document["tcp_port"] == int(nsqd.tcp_address.rpartition(":")[2])
    nsqd.kill()
    assert run_nsq(["ping", here]).status == 4
    assert run_nsq(["info", here]).status == 4


def test_tombstone_takes_a_topic_from_one_nsqd(run_nsq: RunNsq, cluster: RunningCluster) -> None:
    first, second = cluster.nsqds
    for nsqd in cluster.nsqds:
        nsqd.create_topic("clicks")
    cluster.wait_for_topic("clicks", 2)
    command = ["tombstone", "clicks", first.http_address, *cluster.lookupd_options]

    refused = run_nsq(command)
    done = run_nsq([*command, "--yes"])

    assert refused.status == 2
    assert done.status == 0
    for lookupd in cluster.lookupds:
        assert lookupd.producers("clicks") == [second.tcp_address]


def test_options_of_nsqd_are_read_and_two_are_changed(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], valid_json: ValidJson
) -> None:
    nsqd = any_nsqd("-max-rdy-count=123")
    here = f"--nsqd-http-address={nsqd.http_address}"

    got = run_nsq(["config", "get", "max-rdy-count", here])
    changed = run_nsq(["config", "set", "log_level", "error", here])
    addresses = run_nsq(["config", "set", "nsqlookupd_tcp_addresses", "", "--json", here])

    assert got.out.decode() == (f"node\toption\tvalue\n{nsqd.http_address}\tmax-rdy-count\t123\n")
    assert changed.status == 0
    assert nsqd.get("/config/log_level") == b"4"
    assert valid_json("node-options", addresses.out)[0]["value"] == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["get", "max_rdy"], "has no option max_rdy"),
        (["get", "../ping"], "is not the name of an option"),
        (["set", "max_rdy_count", "1"], "cannot be changed while nsqd runs"),
        (["set", "log_level", "loud"], "does not take 'loud' for log_level"),
    ],
)
def test_what_nsqd_would_refuse_is_explained(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], arguments: list[str], complaint: str
) -> None:
    nsqd = any_nsqd()

    result = run_nsq(["config", *arguments, f"--nsqd-http-address={nsqd.http_address}"])

    assert result.status == 2
    assert complaint in result.err.splitlines()[0]


def test_where_no_daemon_answers_the_status_is_that_of_no_connection(
    run_nsq: RunNsq, dead_address: str
) -> None:
    tcp, http = (f"--nsqd-{kind}-address={dead_address}" for kind in ("tcp", "http"))
    runs = [
        run_nsq(["nodes", http]),
        run_nsq(["stat", "--once", tcp]),
        run_nsq(["peek", "-t", "t", "-c", "c", tcp]),
        run_nsq(["peek", "-t", "t", "-c", "c", http]),
    ]

    assert [run.status for run in runs] == [4] * 4
    assert f"{dead_address}: no answer at its usual HTTP port" in runs[1].err
    assert f"cannot connect to {dead_address}" in runs[2].err
    assert "--nsqd-http-address" in runs[1].err
