"""The embedded nsqlookupd as a library, and the connection of an nsqd to one."""

import asyncio
import gc
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from threading import Event
from unittest.mock import Mock

import pytest
from plugins.daemons import MAX_TURN_S, EmbeddedLookupServer
from plugins.http_server import Serves, http
from plugins.ports import ReservedPort
from plugins.raw_client import RawPeer, sized
from plugins.servers import AnyNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.http.loop_meter import meter_of
from nsqtools.protocol.names import Address
from nsqtools.protocol.requests import PeerInfo, encode_register
from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd, lookup_peers
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.lookup_peers import LookupPeer
from nsqtools.server.registrations import RegisteredNsqd

INFO = PeerInfo(broadcast_address="nsqd.example", http_port=4151, tcp_port=4150, version="1.3.0")
TIMEOUT_S = patience_s(10.0)


@pytest.fixture
def lookupd(serve: Serve) -> EmbeddedLookupServer:
    return serve(EmbeddedLookupServer())


async def test_topics_created_during_registration_are_registered_and_delay_no_ping(
    lookupd: EmbeddedLookupServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_peers, "_PING_INTERVAL_S", 0.02)
    topics, log = {"old": 1}, io.StringIO()

    def create() -> None:
        topics["new"] = 1
        peer.send(encode_register("new"))

    def registrations() -> Iterator[bytes]:
        for topic in topics:
            # It runs as soon as the connection waits for an answer.
            asyncio.get_running_loop().call_soon(create)
            yield encode_register(topic)

    peer = LookupPeer(lookupd.tcp_address, INFO, registrations, DaemonLog(log, ""))
    async with asyncio.timeout(TIMEOUT_S):
        while len((await asyncio.to_thread(lookupd.json, "/topics"))["topics"]) < 2:
            await asyncio.sleep(0.01)
        while "pinged" not in lookupd.log:
            peer.send(encode_register("new"))
            await asyncio.sleep(0)
    assert "ERROR" not in log.getvalue()
    await peer.stop()


def test_failures_of_a_peer_are_logged_once_and_retried(
    serves: Serves, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = serves(lambda accepted: accepted.makefile().read())
    log = io.StringIO()
    with EmbeddedNsqd(lookupd_tcp_address=(silent,), log=log):
        wait_until(lambda: f"LOOKUPD({silent}): TimeoutError\n" in log.getvalue(), what="silence")
        fault = Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr(asyncio, "open_connection", fault)
        wait_until(lambda: fault.call_count > 2, what="it goes on")
    assert log.getvalue().count(f"LOOKUPD({silent}): can't start new thread\n") == 1
    assert log.getvalue().count("LOOKUP connecting") == 1


def test_a_silent_name_server_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    called, answers = Event(), Event()
    ended: list[object] = []
    real_look_up = socket.getaddrinfo

    def look_up(host: str, *args: object, **hints: object) -> object:
        if host != "slow.example":
            return real_look_up(host, *args, **hints)  # type: ignore[arg-type]
        called.set()
        ended.append(answers.wait(TIMEOUT_S))
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with EmbeddedNsqd(lookupd_tcp_address=("slow.example:4160",)):
        assert called.wait(TIMEOUT_S)
    assert not ended
    answers.set()


def a_nsqlookupd(http_port: int, identified: Event) -> Callable[[socket.socket], None]:
    """Answer OK to everything, and its HTTP port to IDENTIFY."""
    info = json.dumps({"broadcast_address": "127.0.0.1", "http_port": http_port, "tcp_port": 1})

    def talk(accepted: socket.socket) -> None:
        with accepted.makefile("rb") as stream:
            stream.read(4)
            while line := stream.readline():
                answer = b"OK"
                if line.startswith(b"IDENTIFY"):
                    stream.read(int.from_bytes(stream.read(4), "big"))
                    answer = info.encode()
                accepted.sendall(sized(answer))
                if line.startswith(b"REGISTER"):  # The answer to IDENTIFY has been read.
                    identified.set()

    return talk


def dripping() -> Iterator[bytes]:
    """An answer that never ends, and never pauses for long."""
    yield b"HTTP/1.1 200 OK\r\nX-Long: "
    while True:
        time.sleep(0.05)
        yield b"x"


def nested() -> Iterator[bytes]:
    """An answer that is nested too deeply for the JSON parser."""
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000


@pytest.mark.parametrize(("answer", "other_host"), [(dripping, "127.0.0.1"), (nested, "::1")])
def test_a_new_topic_has_the_channels_of_the_other_nsqlookupd(
    answer: Callable[[], Iterator[bytes]],
    other_host: str,
    serves: Serves,
    serve: Serve,
    embedded_nsqd: AnyNsqd,
) -> None:
    """One nsqlookupd answers byte by byte or too deeply, another has an impossible name."""
    identified = Event()
    port = int(serves(lambda accepted: http(answer())(accepted)).rpartition(":")[2])
    address = f"-http-address={Address(other_host, 0)}"
    other = serve(EmbeddedLookupServer(address, f"-broadcast-address={other_host}"))
    for channel in ("archive", "tail#ephemeral"):
        other.post("/channel/create", topic="clicks", channel=channel)
    places = [serves(a_nsqlookupd(port, identified)), other.tcp_address, "a..b:4160"]
    flags = [f"-lookupd-tcp-address={address}" for address in places]
    # The dripping one takes all of this time, in which the other has to answer.
    patience = f"{patience_s(300):.0f}ms"
    flags += [f"-http-client-{kind}-timeout={patience}" for kind in ("connect", "request")]
    nsqd = embedded_nsqd(*flags)
    nsqd.create_topic("early")
    assert identified.wait(TIMEOUT_S)
    wait_until(lambda: other.json("/topics")["topics"] == ["clicks", "early"], what="both")
    nsqd.publish("clicks", b"one")
    [channel] = nsqd.topic_stats("clicks")["channels"]
    assert (channel["channel_name"], channel["depth"]) == ("archive", 1)
    nsqd.stop()
    assert "ERROR: LOOKUPD(a..b:4160): " in nsqd.log


def test_a_port_in_use_is_named_and_the_other_port_released(lookupd: EmbeddedLookupServer) -> None:
    port = ReservedPort()
    free = f"127.0.0.1:{port.number}"
    with pytest.raises(ConfigurationError, match="address already in use"):
        EmbeddedNsqlookupd(tcp_address=free, http_address=lookupd.http_address).start()
    with EmbeddedNsqlookupd(tcp_address=free) as second:
        assert second.tcp_address == free


def test_a_star_tombstones_all_topics(lookupd: EmbeddedLookupServer) -> None:
    """Go marks a random one."""
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify()
        assert peer.ask(b"REGISTER clicks archive\n") == peer.ask(b"REGISTER errors\n") == b"OK"
        lookupd.post("/topic/tombstone", topic="*", node="nsqd.example:4151")
        assert lookupd.producers("clicks") == lookupd.producers("errors") == []


def test_nodes_of_a_large_cluster_do_not_block_the_loop(
    request: pytest.FixtureRequest, lookupd: EmbeddedLookupServer
) -> None:
    gc.disable()
    request.addfinalizer(gc.enable)
    for number in range(10):
        peer = RegisteredNsqd(f"127.0.0.1:{number}", INFO)
        lookupd._daemon.daemon.registrations.identify(peer)
        for topic in range(10_000):
            lookupd._daemon.daemon.registrations.register(peer, f"t{topic}", "")
    meter = meter_of(lookupd._daemon._loop)
    meter.forget()
    nodes = [node for _ in range(2) for node in lookupd.json("/nodes")["producers"]]
    assert [len(node["topics"]) for node in nodes] == [10_000] * 20
    assert meter.longest_cpu_s < MAX_TURN_S


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),  # crashes Go
        (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
        (b"R" * 16384, b""),
        (b"BAD\n" + b"PING\n" * 10_000, b"E_INVALID invalid command BAD"),
    ],
)
def test_a_hostile_client_is_disconnected(
    lookupd: EmbeddedLookupServer, data: bytes, answer: bytes
) -> None:
    with RawPeer(lookupd.tcp_address) as peer:
        peer.send(data)
        if answer:
            assert peer.read_response() == answer
        with pytest.raises((EOFError, ConnectionError)):
            peer.read_response()
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify(broadcast_address="fresh.example", tcp_port=1)
        assert peer.ask(b"REGISTER fresh\n") == b"OK"
        assert "fresh.example:1" in lookupd.producers("fresh")
