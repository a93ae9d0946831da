"""``nsq nodes``, ``lookup``, ``ping``, ``info``, ``tombstone`` and ``config`` as processes."""

from __future__ import annotations

from plugins.cli import RunNsq
from plugins.clusters import RunningCluster, ValidJson


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
