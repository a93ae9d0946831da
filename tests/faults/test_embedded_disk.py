"""The embedded nsqd on a disk that takes nothing, or is full: it says so and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.embedded import EmbeddedServer
from plugins.raw_client import RawClient, sized
from plugins.servers import Serve


@pytest.fixture
def nsqd(data_path: Callable[[], Path], serve: Serve) -> EmbeddedServer:
    return serve(EmbeddedServer(data_path(), "-mem-queue-size=2"))


def obstruct(nsqd: EmbeddedServer, name: str) -> Path:
    obstacle = nsqd.data_path / f"{name}.diskqueue.000000.dat"
    obstacle.mkdir()
    return obstacle


def test_a_publisher_gets_the_error_and_the_health_shows_it(nsqd: EmbeddedServer) -> None:
    nsqd.create_topic("t")
    obstacle = obstruct(nsqd, "t")
    reason = f"open {obstacle}: is a directory"
    with RawClient(nsqd.tcp_address) as client:
        client.publish("t", b"1", b"2")
        client.send(b"PUB t\n" + sized(b"3"))
        assert client.read_error() == f"E_PUB_FAILED PUB failed {reason}".encode()

    assert nsqd.request("POST", "/pub?topic=t", b"4") == (503, b'{"message":"EXITING"}')
    assert nsqd.request("GET", "/ping") == (500, f"NOK - {reason}".encode())
    assert nsqd.stats()["health"] == f"NOK - {reason}"
    assert nsqd.depth("t") == 2

    obstacle.rmdir()
    nsqd.publish("t", b"5")
    assert nsqd.request("GET", "/ping") == (200, b"OK")
    assert nsqd.depth("t") == 3


def test_what_consumers_give_back_is_kept(nsqd: EmbeddedServer) -> None:
    with RawClient(nsqd.tcp_address) as client, RawClient(nsqd.tcp_address) as producer:
        client.subscribe("t", "ch", ready=8)
        client.settle()
        producer.publish("t", *[b"%d" % number for number in range(8)])
        held = client.read_messages(8)
        client.send(b"RDY 0\n")
        client.settle()
        obstruct(nsqd, "t:ch")
        client.send(b"".join(b"REQ %b 0\n" % message.id for message in held))
        client.settle()
        assert nsqd.depth("t", "ch") == 8
        producer.send(b"PUB t\n" + sized(b"refused"))
        assert producer.read_error().startswith(b"E_PUB_FAILED PUB failed open")

        client.send(b"RDY 100\n")
        bodies = [message.body for message in client.read_messages(8)]
        assert bodies == [message.body for message in held]
        client.settle()
        assert nsqd.depth("t", "ch") == 0


TOPICS = 200


def test_the_list_of_topics_stays_whole_on_a_disk_that_fills_up(
    small_disk: Path, serve: Serve
) -> None:
    nsqd = serve(EmbeddedServer(small_disk))
    for number in range(TOPICS):
        nsqd.create_topic(f"{number:040d}")
    nsqd.request("POST", f"/topic/pause?topic={0:040d}")  # writes nsqd.dat at once
    written = (small_disk / "nsqd.dat").read_bytes()
    assert len(json.loads(written)["topics"]) == TOPICS
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (8 << 10)))

    nsqd.request("POST", f"/topic/pause?topic={1:040d}")
    nsqd.kill()

    assert len(json.loads((small_disk / "nsqd.dat").read_bytes())["topics"]) == TOPICS
    nsqd.start()
    assert len(nsqd.stats()["topics"]) == TOPICS
