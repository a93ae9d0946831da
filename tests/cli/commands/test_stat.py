"""``nsq stat`` as a process: the forms of its output, its thresholds, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq, TerminalNsq
from plugins.clusters import RunningCluster, ValidJson
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer

HEAD = (
    "topic channel depth memory disk in_flight deferred ingress egress finish requeue requeued "
    "timed_out messages clients paused e2e_ms"
)


@pytest.fixture
def nsqd(any_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd with three messages in clicks/arch, and a paused topic views."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a", b"b", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    return nsqd


def at(nsqd: Nsqd, *arguments: str) -> list[str]:
    return ["stat", f"--nsqd-http-address={nsqd.http_address}", *arguments]


def test_a_pipe_gets_plain_columns(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    result = run_nsq(at(nsqd))

    assert (result.status, result.err) == (0, "")
    assert result.out.decode().replace("\t", " ").splitlines() == [
        HEAD,
        "clicks - 0 0 0 0 0 0.0 0.0 - 0.0 0 0 3 0 no -",
        "clicks arch 3 3 0 0 0 0.0 0.0 0.0 0.0 0 0 3 0 no -",
        "views - 0 0 0 0 0 0.0 0.0 - 0.0 0 0 0 0 yes -",
    ]


def test_a_terminal_gets_a_table_that_fits_it(nsq_on_a_terminal: TerminalNsq, nsqd: Nsqd) -> None:
    shown = nsq_on_a_terminal(at(nsqd), env={"NO_COLOR": "1"}).read()

    plain = re.sub(r"\x1b\[\d*m", "", shown).splitlines()
    assert [line.rstrip() for line in plain] == [
        "topic   channel  depth  in_flight  ingress  egress  finish  clients  paused",
        "clicks  -            0          0      0.0     0.0       -        0  no",
        "clicks  arch         3          0      0.0     0.0     0.0        0  no",
        "views   -            0          0      0.0     0.0       -        0  yes",
        "nsq: left out on this narrow terminal: memory, disk, deferred, requeue, requeued, "
        "timed_out, messages, e2e_ms; see -o wide",
    ]


@pytest.mark.parametrize("columns", [20, 44, 80])
def test_no_number_and_no_address_is_cut_however_narrow_the_terminal(
    columns: int, nsq_on_a_terminal: TerminalNsq, nsqd: Nsqd
) -> None:
    nsqd.publish("clicks", *(b"%d" % n for n in range(12_345)))

    def words(*arguments: str) -> list[str]:
        shown = nsq_on_a_terminal(list(arguments), env={"NO_COLOR": "1"}, columns=columns).read()
        assert "…" not in shown
        return shown.split()

    assert nsqd.http_address in words("nodes", "--nsqd-http-address", nsqd.http_address)
    assert "12348" in words(*at(nsqd, "--once"))
    assert nsqd.http_address in words(*at(nsqd, "--show", "nodes", "--once"))


def test_json_is_a_document_a_sample(run_nsq: RunNsq, nsqd: Nsqd, valid_json: ValidJson) -> None:
    once = run_nsq(at(nsqd, "--once", "--json"))
    twice = run_nsq(at(nsqd, "--interval", "50ms", "-n", "2", "--json", "-t", "clicks"))

    queues = valid_json("stat", once.out)["queues"]
    assert [(queue["topic"], queue["channel"]) for queue in queues] == [
        ("clicks", None),
        ("clicks", "arch"),
        ("views", None),
    ]
    assert queues[0]["ingress"] is None
    for line in twice.out.splitlines():
        assert valid_json("stat", line)["queues"][1]["ingress"] == 0
    assert twice.out.count(b"\n") == 2


def test_nodes_clients_and_memory_have_views(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: Nsqd, valid_json: ValidJson
) -> None:
    tail = spawn_nsq(
        ["tail", "-t", "clicks", "-c", "arch", f"--nsqd-tcp-address={nsqd.tcp_address}"]
    )
    assert tail.stdout is not None
    tail.stdout.readline()

    clients = valid_json("stat", run_nsq(at(nsqd, "--show", "clients", "--json")).out)["consumers"]
    memory = valid_json("stat", run_nsq(at(nsqd, "--show", "memory", "--json")).out)["nodes"]
    nodes = valid_json("stat", run_nsq(at(nsqd, "--show", "nodes", "--json")).out)["queues"]

    assert [client["user_agent"].partition("/")[0] for client in clients] == ["nsqtools"]
    assert memory[0]["memory"]["heap_in_use_bytes"] > 0
    assert {queue["node"] for queue in nodes} == {nsqd.http_address}
    table = run_nsq(at(nsqd, "--show", "clients", "--once")).out.decode().splitlines()
    assert table[1].split("\t")[:3] == ["clicks", "arch", nsqd.http_address]


def test_latency_is_shown_where_nsqd_measures_it(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], valid_json: ValidJson
) -> None:
    nsqd = any_nsqd("-e2e-processing-latency-percentile=1.0,0.99")
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a")
    with Consumer("clicks", "arch", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        next(iter(consumer.batches())).finish()

    def latency() -> dict[str, float]:
        queues = valid_json("stat", run_nsq(at(nsqd, "--once", "--json")).out)["queues"]
        found: dict[str, float] = queues[1]["e2e_latency_ms"]
        return found if found.get("1") else {}

    found = wait_until(latency, what="a latency")
    assert found.keys() == {"1", "0.99"}
    assert 0 < found["1"] < 30_000
    row = run_nsq(at(nsqd, "--once", "-c", "arch")).out.decode().splitlines()[1]
    assert float(row.split("\t")[-1]) == pytest.approx(found["1"], abs=0.06)


def test_csv_has_one_head_and_the_time_in_every_row(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    out = run_nsq(at(nsqd, "--csv", "--interval", "50ms", "-n", "2", "-c", "arch")).out.decode()

    head, *rows = csv.reader(out.splitlines())
    assert head == ["time", *HEAD.split()]
    assert [row[1:4] for row in rows] == [["clicks", "arch", "3"]] * 2
    assert rows[0][0] < rows[1][0]


def test_prometheus_has_the_counters_of_each_nsqd_and_says_who_is_up(
    run_nsq: RunNsq, nsqd: Nsqd
) -> None:
    dead = "127.0.0.1:1"
    result = run_nsq(at(nsqd, "--prometheus", f"--nsqd-http-address={dead}"))

    lines = result.out.decode().splitlines()
    labels = f'topic="clicks",channel="arch",node="{nsqd.http_address}"'
    assert f"nsq_channel_depth{{{labels}}} 3" in lines
    assert f'nsq_topic_paused{{topic="views",node="{nsqd.http_address}"}} 1' in lines
    assert f'nsq_up{{node="{nsqd.http_address}"}} 1' in lines
    assert f'nsq_up{{node="{dead}"}} 0' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert result.status == 6


def test_filters_and_sorting_choose_rows(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    def topics(*arguments: str) -> list[str]:
        out = run_nsq(at(nsqd, "--once", *arguments)).out.decode()
        return [line.split("\t")[0] for line in out.splitlines()[1:]]

    assert topics("--filter", "depth>0") == ["clicks"]
    assert topics("--filter", "paused=yes") == ["views"]
    assert topics("--sort", "messages") == ["clicks", "clicks", "views"]
    assert topics("-t", "v*") == ["views"]


def test_a_check_with_a_pattern_that_matches_nothing_does_not_pass(
    run_nsq: RunNsq, nsqd: Nsqd
) -> None:
    topic = run_nsq(at(nsqd, "--once", "-t", "nomatch*", "--max-depth", "1"))
    channel = run_nsq(at(nsqd, "--once", "-t", "clicks", "-c", "nomatch*"))

    assert [topic.status, channel.status] == [3, 3]
    assert "no topic matches nomatch*" in topic.err
    assert "no channel matches nomatch*" in channel.err


def test_a_threshold_that_is_passed_is_reported_and_fails(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    result = run_nsq(at(nsqd, "--once", "--quiet", "--max-depth", "2", "--min-clients", "1"))
    well = run_nsq(at(nsqd, "--max-depth", "3", "--max-requeue-rate", "0"))

    assert result.status == 1
    assert result.err.splitlines() == [
        "nsq: clicks/arch: depth 3 is above 2",
        "nsq: clicks/arch: 0 clients are fewer than 1",
    ]
    assert (well.status, well.err) == (0, "")


def test_a_dead_nsqd_is_left_out_and_named(run_nsq: RunNsq, cluster: RunningCluster) -> None:
    first, second = cluster.nsqds
    first.publish("clicks", b"a")
    second.kill()

    result = run_nsq(["stat", "--once", *cluster.nsqd_options])

    assert result.status == 6
    assert result.err.count("\n") == 1
    assert f"left out: cannot connect to http://{second.http_address}" in result.err
    assert result.out.decode().splitlines()[1].startswith("clicks\t-\t1\t")


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["-t", "click"], 3, "topic click does not exist"),
        (["--once", "--max-requeue-rate", "1"], 2, "--max-requeue-rate needs two samples"),
        (["--json", "--csv"], 2, "exclude each other"),
        (["--sort", "dept"], 2, "unknown column 'dept'; the columns are topic"),
        (["--filter", "depth"], 2, "'depth' is not a condition"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    run_nsq: RunNsq, nsqd: Nsqd, arguments: list[str], status: int, complaint: str
) -> None:
    result = run_nsq(at(nsqd, *arguments))

    assert (result.status, result.out) == (status, b"")
    assert complaint in result.err.splitlines()[0]


def test_no_server_is_status_4_and_one_that_wants_tls_is_status_5(
    run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], certificates: Certificates
) -> None:
    secured = any_nsqd(*certificates.server.nsqd_flags, "-tls-required=true")
    https = f"--nsqd-http-address=https://{secured.https_address}"

    nobody = run_nsq(["stat", "--nsqd-http-address=127.0.0.1:1"])
    plain = run_nsq(at(secured))
    trusted = run_nsq(["stat", "--once", https, f"--tls-ca-file={certificates.ca}"])
    strange = run_nsq(["stat", "--once", https, f"--tls-ca-file={certificates.other_ca}"])

    assert nobody.status == 4
    assert "cannot connect to http://127.0.0.1:1 (connection refused)" in nobody.err
    assert plain.status == 5
    assert "give an https:// address" in plain.err
    assert (trusted.status, trusted.err) == (0, "")
    assert strange.status == 5
    assert "certificate" in strange.err


def test_a_long_run_outlives_an_nsqd_that_restarts(spawn_nsq: SpawnNsq, nsqd: Nsqd) -> None:
    process = spawn_nsq(at(nsqd, "--interval", "50ms", "--json"))
    assert process.stdout is not None

    def next_sample() -> dict[str, list[object]]:
        sample: dict[str, list[object]] = json.loads(process.stdout.readline())
        return sample

    assert next_sample()["queues"]
    nsqd.stop()
    wait_until(lambda: next_sample()["failed"], what="a sample without the nsqd")
    nsqd.start()
    wait_until(lambda: next_sample()["queues"], what="a sample with it again")
    process.terminate()

    assert process.wait(patience_s(10)) == 143
    assert process.stderr is not None
    assert process.stderr.read().count(b'"code": "connect"') >= 1


def test_interrupting_ends_it_in_order(spawn_nsq: SpawnNsq, nsqd: Nsqd) -> None:
    process = spawn_nsq(at(nsqd, "--interval", "50ms", "--json"))
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["failed"] == []
    process.terminate()

    assert process.wait(patience_s(10)) == 143
