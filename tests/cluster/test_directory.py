"""The directory of a cluster: which daemons are asked, at which address, and the cost of a hang."""

import json
import socket
import ssl
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.http_server import MakeScripted, MakeServer
from plugins.network import ProxyTo
from plugins.raw_client import RawPeer
from plugins.servers import AnyNsqd, GoNsqd, GoNsqlookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cluster.admin import apply, plan_tombstone
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.inventory import list_nodes
from nsqtools.errors import ConnectionFailed, DeadlineExceeded, ProtocolError
from nsqtools.http.http_api import HTTPAccess, NsqdHTTPClient


def test_a_configured_nsqd_is_asked_at_its_configured_address_only(cluster: RunningCluster) -> None:
    first = cluster.nsqds[0]
    port = first.http_address.rpartition(":")[2]
    first.publish("clicks", b"a")
    address = f"localhost:{port}"  # nsqd announces itself as 127.0.0.1
    places = ClusterAddresses([address], [lookupd.http_address for lookupd in cluster.lookupds])

    with Cluster(places) as client:
        addresses = set(client.ask_nsqds(NsqdHTTPClient.stats)[0])

    assert addresses == {address, cluster.nsqds[1].http_address}


def test_a_configured_nsqd_with_another_announced_port_counts_once(
    embedded_nsqd: AnyNsqd, lookupd: GoNsqlookupd, proxy_to: ProxyTo
) -> None:
    nsqd = embedded_nsqd()
    announced = proxy_to(nsqd.http_address).address
    places = ClusterAddresses([nsqd.http_address], [lookupd.http_address])
    with RawPeer(lookupd.tcp_address) as peer, Cluster(places) as client:
        peer.identify(broadcast_address="127.0.0.1", http_port=int(announced.rpartition(":")[2]))
        assert [*client.ask_nsqds(NsqdHTTPClient.stats)[0]] == [nsqd.http_address]
        assert client.names == {nsqd.http_address: announced}


def test_a_hanging_nsqd_is_asked_once_and_then_skipped(
    embedded_nsqd: AnyNsqd,
) -> None:
    nsqd = embedded_nsqd()
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = ClusterAddresses([f"127.0.0.1:{silent.getsockname()[1]}", nsqd.http_address])

    with silent, Cluster(addresses, HTTPAccess(timeout_s=patience_s(0.5))) as client:
        surveys = [client.ask_nsqds(NsqdHTTPClient.stats) for _ in range(2)]
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # no other request was sent
            silent.accept()

    for answers, failures in surveys:
        assert [*answers] == [nsqd.http_address]
        assert "no answer in time" in str(failures[0].error)


def test_a_timeout_is_forgotten_when_the_daemon_may_be_asked_again(dead_address: str) -> None:
    # like a connection, which has a shorter timeout
    wait = Mock(side_effect=DeadlineExceeded("no answer in time"))
    with Cluster(ClusterAddresses([dead_address]), HTTPAccess(timeout_s=0.01)) as client:
        with pytest.raises(DeadlineExceeded):
            client.ask_one("left:4151", wait, time.monotonic())
        time.sleep(0.02)
        client.keep_only({})
        assert not client._silent


def test_a_web_server_that_is_no_nsqd_is_reported(
    cluster: RunningCluster, http_server: MakeServer
) -> None:
    for address in (http_server(404).url, cluster.lookupds[0].http_address):
        with (
            Cluster(ClusterAddresses([address])) as client,
            pytest.raises(ProtocolError, match="does not answer like nsqd"),
        ):
            client.ask_nsqds(NsqdHTTPClient.stats)


def test_a_url_without_a_port_has_the_default_port_of_its_scheme() -> None:
    with Cluster(ClusterAddresses(["http://user:secret@nsqd.example"])) as cluster:
        [address] = cluster.given_addresses
        assert address == cluster.nsqd(address).url == "http://nsqd.example"
    with pytest.raises(ConnectionFailed, match="no daemon can be asked"):
        cluster.ask_nsqds(NsqdHTTPClient.stats)


# -- all commands connect in the same way: over https, with a bearer token, by the address map
# (nsqlookupd has no TLS, so a proxy adds it)

ANNOUNCED = "nsqd.internal"
BODIES = tuple(b"m%d" % number for number in range(5))


def registered(go_nsqd: MakeNsqd, lookupd: GoNsqlookupd, broadcast: str = "127.0.0.1") -> GoNsqd:
    """An nsqd with five messages in the topic payments, which has no channel."""
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", f"-broadcast-address={broadcast}")
    nsqd.publish("payments", *BODIES)
    wait_until(lambda: len(lookupd.producers("payments")) == 1, what="payments is registered")
    return nsqd


@pytest.mark.parametrize("broadcast", ["127.0.0.1", ANNOUNCED], ids=["https", "address map"])
def test_every_command_reaches_the_daemons_over_https_and_by_the_address_map(
    run_nsq: RunNsq,
    certificates: Certificates,
    proxy_to: ProxyTo,
    lookupd: GoNsqlookupd,
    go_nsqd: MakeNsqd,
    tmp_path: Path,
    broadcast: str,
) -> None:
    nsqd = registered(go_nsqd, lookupd, broadcast)
    if broadcast == ANNOUNCED:
        tcp_port = nsqd.tcp_address.rpartition(":")[2]
        pairs = [f"{ANNOUNCED}:{tcp_port}={nsqd.tcp_address}", f"{ANNOUNCED}=127.0.0.1"]
        where = [f"--lookupd-http-address={lookupd.http_address}"]
        where += [f"--address-map={pair}" for pair in pairs]
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server.cert, certificates.server.key)
        address = proxy_to(lookupd.http_address, context).address
        where = [f"--lookupd-http-address=https://{address}", f"--tls-ca-file={certificates.ca}"]

    refused = run_nsq(["tail", "-t", "payments", "-n", "1", "--no-tls", *where])
    assert (refused.status, refused.out) == (2, b"")
    assert "no channel and 5 messages waiting" in refused.err
    assert nsqd.depth("payments") == 5

    misspelt = run_nsq(["tail", "-t", "payment", "-c", "c", "--no-tls", *where])
    assert misspelt.status == 3
    assert "Did you mean payments?" in misspelt.err

    stat = run_nsq(["stat", "--once", "--json", *where])
    assert (stat.status, stat.err) == (0, "")
    assert nsqd.http_address.encode() in stat.out

    flags = ["--output-dir", str(tmp_path / "out"), "--format", "raw", "--until-empty"]
    to_file = ["to-file", "--topic-pattern", ".", "-c", "archive", "--no-tls"]
    archived = run_nsq([*to_file, *where, *flags])
    assert archived.status == 0, archived.err
    [file] = (tmp_path / "out").glob("*.log")
    assert sorted(file.read_bytes().split()) == sorted(BODIES)

    nsqd.publish("payments", b"more")
    peek = ["peek", "-t", "payments", "-c", "archive", "-n", "1", "--no-tls"]
    peeked = run_nsq([*peek, *where])
    assert (peeked.status, peeked.out) == (0, b"more\n"), peeked.err


@pytest.mark.parametrize(
    "command",
    [
        "tail -t t -c c --for 500ms",
        "peek -t t -c c",
        "to-file -t t --output-dir DIRECTORY --for 500ms",
        "to-file --topic-pattern t --output-dir DIRECTORY --for 500ms",
        "topic list",
        "stat --once",
        "lookup t",
        "nodes",
    ],
)
def test_the_secret_is_a_bearer_token_for_nsqlookupd_only_on_request(
    command: str, run_nsq: RunNsq, scripted_lookupd: MakeScripted, tmp_path: Path
) -> None:
    for flags, bearer in (["--lookupd-authorization"], "Bearer s3cret"), ([], None):
        lookupd = scripted_lookupd()
        lookupd.answer = {"topics": [], "channels": [], "producers": []}
        words = command.replace("DIRECTORY", str(tmp_path)).split()
        args = [*words, f"--lookupd-http-address={lookupd.address}", *flags]
        log = run_nsq(args, env={"NSQ_AUTH_SECRET": "s3cret"}).err

        assert {request.headers.get("Authorization") for request in lookupd.requests} == {bearer}
        assert ("the auth secret goes to http://" in log) == bool(flags)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_nsqd_with_an_ipv6_address_counts_once_and_is_tombstoned(
    host: str, lookupd: GoNsqlookupd, go_nsqd: MakeNsqd
) -> None:
    nsqd = registered(go_nsqd, lookupd, host)
    with Cluster(ClusterAddresses([nsqd.http_address])) as client:
        [node] = list_nodes(client)[0]
    assert node.tcp_address == f"[::1]:{nsqd.tcp_address.rpartition(':')[2]}"

    with Cluster(ClusterAddresses([nsqd.http_address], [lookupd.http_address])) as client:
        answers, failures = client.ask_nsqds(NsqdHTTPClient.stats)
        assert ([*answers], failures) == ([nsqd.http_address], [])
        plan = plan_tombstone(client, "payments", nsqd.http_address)
        apply(client, plan._replace(steps=plan.steps[:1]))
    assert [producer["tombstones"] for producer in lookupd.json("/nodes")["producers"]] == [[True]]


def test_an_nsqd_with_two_names_counts_once(
    run_nsq: RunNsq, lookupd: GoNsqlookupd, go_nsqd: MakeNsqd
) -> None:
    """nsqlookupd keeps the old name of an nsqd that was restarted with another one."""
    nsqd = registered(go_nsqd, lookupd, "127.0.0.1")
    tcp_port, http_port = (
        int(address.rpartition(":")[2]) for address in (nsqd.tcp_address, nsqd.http_address)
    )
    old, place = f"localhost:{http_port}", ["--lookupd-http-address", lookupd.http_address]
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify(broadcast_address="localhost", tcp_port=tcp_port, http_port=http_port)
        peer.ask(b"REGISTER payments\n")
        columns = ["-t", "payments", "--columns", "depth", "-o", "tsv"]
        stat = run_nsq(["stat", "--once", *place, *columns])
        listed = run_nsq(["nodes", *place, "--json"])
        both = run_nsq(
            ["stat", "--once", f"--nsqd-http-address={old},{nsqd.http_address}", *columns]
        )
        check = run_nsq(["check", *place, "--window", "100ms"])
        hidden = run_nsq(["tombstone", "payments", old, *place, "--yes"])

    assert (stat.out, both.out) == (b"depth\n5\n", b"depth\n5\n")
    [node] = json.loads(listed.out)
    assert (node["node"], node["aliases"]) == (nsqd.http_address, [old])
    assert node["lookupds"] == [lookupd.http_address]
    assert f"nsq: {nsqd.http_address} is one nsqd that is also at {old}\n" in listed.err
    assert b"not registered" not in check.out
    assert hidden.status == 0
    assert lookupd.json("/lookup", topic="payments")["producers"] == []


def test_an_old_name_of_an_nsqd_is_an_alias_until_it_unregisters(
    lookupd: GoNsqlookupd, go_nsqd: MakeNsqd
) -> None:
    nsqd = registered(go_nsqd, lookupd, "127.0.0.1")
    port = int(nsqd.http_address.rpartition(":")[2])
    old = f"localhost:{port}"
    with Cluster(ClusterAddresses([], [lookupd.http_address])) as client:
        samples: dict[str, NsqdHTTPClient] = {}
        client.remember(samples)
        for _ in range(2):
            peer = RawPeer(lookupd.tcp_address)
            peer.identify(broadcast_address="localhost", http_port=port)
            assert [*client.nsqds()[0]] == [nsqd.http_address]
            assert client.aliases == {old: nsqd.http_address}
            peer.leave()
            assert ([*client.nsqds()[0]], client.aliases) == ([nsqd.http_address], {})
        samples[old] = client.nsqd(old)  # samples used this address before nsqd had another name
        assert [node.address for node in list_nodes(client)[0]] == [nsqd.http_address]


def test_an_unreachable_configured_nsqd_is_listed_and_reported_once(
    lookupd: GoNsqlookupd, dead_address: str
) -> None:
    places = ClusterAddresses([dead_address], [lookupd.http_address])
    with Cluster(places) as client, RawPeer(lookupd.tcp_address) as nsqd:
        for is_announced in (False, True):
            if is_announced:
                port = int(dead_address.rpartition(":")[2])
                nsqd.identify(broadcast_address="127.0.0.1", http_port=port)
            nodes, failures = list_nodes(client)
            _, failed = client.ask_nsqds(NsqdHTTPClient.stats, required=False)
            assert [node.address for node in nodes if node.error] == [dead_address]
            assert failures == []
            assert [failure.address for failure in failed] == [dead_address]


def test_clients_connect_to_a_configured_nsqd_unless_the_address_map_has_it(
    go_nsqd: MakeNsqd,
) -> None:
    nsqd = go_nsqd("-broadcast-address=nsqd.invalid")
    place = ClusterAddresses([nsqd.http_address])
    mapped = HTTPAccess(address_map={"nsqd.invalid": "10.0.0.1:1"})
    for access, address in ((HTTPAccess(), nsqd.tcp_address), (mapped, "10.0.0.1:1")):
        with Cluster(place, access) as client:
            info = client.nsqd(nsqd.http_address).info()
            assert client.tcp_address(nsqd.http_address, info) == address


def test_timeout_limits_requests_to_daemons_in_every_command(
    run_nsq: RunNsq, lookupd: GoNsqlookupd, proxy_to: ProxyTo, tmp_path: Path
) -> None:
    slow = proxy_to(lookupd.http_address)
    slow.delay_s = 0.25
    to_file = ["to-file", "--topic-pattern", ".", "--output-dir", str(tmp_path), "--for", "500ms"]
    for command in (["topic", "list"], to_file):
        args = [*command, f"--lookupd-http-address={slow.address}", "--timeout"]
        assert run_nsq([*args, "100ms"]).status == 4
        assert run_nsq([*args, "20s"]).status == 0
