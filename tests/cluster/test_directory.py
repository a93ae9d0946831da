"""The cluster as one thing: who is asked, at which address, and what a silent one costs.

Samples are taken of dead ones (test_sampling), and addresses mapped (test_ways_to_ask).
"""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from plugins.clusters import RunningCluster
from plugins.embedded import EmbeddedServer
from plugins.servers import Serve
from plugins.waiting import patience_s

from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.errors import DeadlineExceeded, ProtocolError
from nsqtools.http.http_api import HTTPAccess


def test_a_given_nsqd_is_asked_as_given_and_counts_once(cluster: RunningCluster) -> None:
    first = cluster.nsqds[0]
    port = first.http_address.rpartition(":")[2]
    first.publish("clicks", b"a")
    given = f"localhost:{port}"  # it announces itself as 127.0.0.1
    places = ClusterAddresses([given], [lookupd.http_address for lookupd in cluster.lookupds])

    with Cluster(places) as asked:
        survey = asked.stats()

    addresses = [node.address for node in survey.nodes]
    assert sorted(addresses) == sorted([given, cluster.nsqds[1].http_address])


def test_a_silent_nsqd_is_asked_once_and_left_out_of_what_is_asked_then(
    serve: Serve, tmp_path: Path
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path))
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = ClusterAddresses([f"127.0.0.1:{silent.getsockname()[1]}", nsqd.http_address])

    with silent, Cluster(addresses, HTTPAccess(timeout_s=patience_s(0.5))) as asked:
        surveys = [asked.stats(), asked.stats()]
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # there was no other question
            silent.accept()

    for survey in surveys:
        assert [node.address for node in survey.nodes] == [nsqd.http_address]
        assert "no answer in time" in str(survey.failures[0].error)


def test_who_was_silent_is_forgotten_when_it_may_be_asked_again(dead_address: str) -> None:
    def wait() -> None:
        time.sleep(0.01)
        raise DeadlineExceeded("no answer in time")

    with Cluster(ClusterAddresses([dead_address]), HTTPAccess(timeout_s=0.01)) as asked:
        with pytest.raises(DeadlineExceeded):
            asked.ask_one("left:4151", wait, time.monotonic())
        time.sleep(0.02)
        asked.keep_only({})
        assert not asked._silent


def test_a_web_server_that_is_no_nsqd_is_said_to_be_none(cluster: RunningCluster) -> None:
    class Shop(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Shop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shop = "{}:{}".format(*server.server_address)
        try:
            for address in (shop, cluster.lookupds[0].http_address):
                with (
                    Cluster(ClusterAddresses([address])) as asked,
                    pytest.raises(ProtocolError, match="does not answer like nsqd"),
                ):
                    asked.stats()
        finally:
            server.shutdown()


def test_a_url_without_a_port_is_asked_at_that_of_its_scheme() -> None:
    with Cluster(ClusterAddresses(["http://user:secret@nsqd.example"])) as cluster:
        [address] = cluster.given
        assert address == cluster.nsqd(address).url == "http://nsqd.example"
