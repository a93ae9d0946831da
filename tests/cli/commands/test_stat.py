"""``nsq stat`` as a process: the formats of its output, and refusals."""

import json
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq
from plugins.clusters import ValidJson
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.cluster.queue_rows import NodeReport, consumers_of, rows_of_topic, totals
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.cluster.stats_documents import client_documents
from nsqtools.protocol.stats import read_stats


@pytest.fixture
def nsqd(any_nsqd: AnyNsqd) -> Nsqd:
    """An nsqd with three messages in clicks/arch, and a paused topic views."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a", b"b", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    return nsqd


def at(nsqd: Nsqd, *arguments: str) -> list[str]:
    return ["stat", f"--nsqd-http-address={nsqd.http_address}", *arguments]


def test_clients_and_memory_have_views(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: Nsqd, valid_json: ValidJson
) -> None:
    tail = spawn_nsq(["tail", "-t", "clicks", "-c", "arch", *nsqd.options])
    tail.stdout.readline()

    clients, memory = (
        valid_json("stat", run_nsq(at(nsqd, "--show", view, "--json")).out)
        for view in ("clients", "memory")
    )
    assert [client["user_agent"].partition("/")[0] for client in clients["consumers"]] == [
        "nsqtools"
    ]
    assert memory["nodes"][0]["memory"]["heap_in_use_bytes"] > 0
    table = run_nsq(at(nsqd, "--show", "clients", "--once")).out.decode().splitlines()
    assert table[1].split("\t")[:3] == ["clicks", "arch", nsqd.http_address]


def test_consumers_are_in_the_order_of_their_queues() -> None:
    channels = [{"channel_name": "c", "clients": [{}]}]
    topics = [{"topic_name": name, "channels": channels} for name in "ab"]
    report = NodeReport("nsqd:4151", 0.0, read_stats({"topics": topics}))
    node = NodeState(report.address, [], list(consumers_of(report)))
    rows = totals(row for topic in report.stats.topics or () for row in rows_of_topic("", topic))

    documents = client_documents(Sample(0.0, [], rows, (), (), (node,)), reversed(rows))

    assert [document["topic"] for document in documents] == ["b", "a"]


def test_latency_is_shown_where_nsqd_measures_it(
    run_nsq: RunNsq, any_nsqd: AnyNsqd, valid_json: ValidJson
) -> None:
    nsqd = any_nsqd("-e2e-processing-latency-percentile=1.0,0.99")
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a")
    with Consumer("clicks", "arch", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        next(iter(consumer.batches())).finish()

    def latency() -> dict[str, float]:
        queues = valid_json("stat", run_nsq(at(nsqd, "--once", "--json")).out)["queues"]
        latencies: dict[str, float] = queues[1]["e2e_latency_ms"]
        return latencies if latencies.get("1") else {}

    latencies = wait_until(latency, what="a latency")
    assert latencies.keys() == {"1", "0.99"}
    assert 0 < latencies["1"] < 30_000
    row = run_nsq(at(nsqd, "--once", "-c", "arch")).out.decode().splitlines()[1]
    assert float(row.split("\t")[-1]) == pytest.approx(latencies["1"], abs=0.06)


def test_an_nsqd_that_requires_tls_or_is_not_trusted_is_status_5(
    run_nsq: RunNsq, any_nsqd: AnyNsqd, certificates: Certificates
) -> None:
    secured = any_nsqd(*certificates.server.nsqd_flags, "-tls-required=true")
    https = f"--nsqd-http-address=https://{secured.https_address}"

    plain = run_nsq(at(secured))
    trusted = run_nsq(["stat", "--once", https, f"--tls-ca-file={certificates.ca}"])
    strange = run_nsq(["stat", "--once", https, f"--tls-ca-file={certificates.other_ca}"])

    assert (plain.status, "give an https:// address" in plain.err) == (5, True)
    assert (trusted.status, trusted.err) == (0, "")
    assert (strange.status, "certificate" in strange.err) == (5, True)


def test_a_long_run_outlives_an_nsqd_that_restarts(spawn_nsq: SpawnNsq, nsqd: Nsqd) -> None:
    process = spawn_nsq(at(nsqd, "--interval", "50ms", "--json"))

    def next_sample() -> Any:
        return json.loads(process.stdout.readline())

    assert next_sample()["queues"]
    nsqd.stop()
    wait_until(lambda: next_sample()["failed"], what="a sample without the nsqd")
    nsqd.start()
    wait_until(lambda: next_sample()["queues"], what="a sample with it again")
    process.terminate()

    assert process.wait(patience_s(10)) == 143
    assert process.stderr.read().count(b'"code": "connect"') >= 1
