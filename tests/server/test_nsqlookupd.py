"""The embedded nsqlookupd as a library: where it listens, what it refuses, what it survives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.embedded import EmbeddedLookupServer
from plugins.examples import examples
from plugins.http_api import Nsqlookupd
from plugins.ports import ReservedPort
from plugins.raw_peer import RawPeer, identify
from plugins.waiting import wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqlookupd

CROWD = 500
MAX_CONNECTIONS_TIME_S = 20.0


@pytest.fixture
def lookupd(serve: Callable[[EmbeddedLookupServer], EmbeddedLookupServer]) -> EmbeddedLookupServer:
    return serve(EmbeddedLookupServer())


@pytest.fixture(scope="module")
def shared_lookupd() -> Iterator[EmbeddedNsqlookupd]:
    with EmbeddedNsqlookupd() as lookupd:
        yield lookupd


def assert_serves(lookupd: Nsqlookupd) -> None:
    """It takes a registration and tells of it."""
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify(broadcast_address="fresh.example", tcp_port=1)
        assert peer.ask(b"REGISTER fresh\n") == b"OK"
        assert "fresh.example:1" in lookupd.producers("fresh")


def test_logs_are_in_the_form_of_nsqlookupd() -> None:
    log = io.StringIO()
    with EmbeddedNsqlookupd(log=log) as lookupd, RawPeer(lookupd.tcp_address) as peer:
        peer.identify(broadcast_address="one.example", http_port=4151)
        peer.ask(b"REGISTER clicks archive\n")
        client = peer.address
        peer.leave()

    texts = [line.split(" ", 4)[4] for line in log.getvalue().splitlines()]
    for expected in (
        f"TCP: new client({client})",
        f"CLIENT({client}): IDENTIFY Address:one.example TCP:4150 HTTP:4151 Version:1.3.0",
        f"DB: client({client}) REGISTER category:client key: subkey:",
        f"DB: client({client}) REGISTER category:channel key:clicks subkey:archive",
        f"DB: client({client}) REGISTER category:topic key:clicks subkey:",
        f"DB: client({client}) UNREGISTER category:topic key:clicks subkey:",
        f"PROTOCOL(V1): [{client}] exiting ioloop",
    ):
        assert expected in texts
    assert log.getvalue().startswith("[nsqlookupd] 20")


def test_a_port_in_use_is_named_and_the_other_one_is_free_again() -> None:
    with EmbeddedNsqlookupd() as first:
        port = ReservedPort()
        free = f"127.0.0.1:{port.number}"
        second = EmbeddedNsqlookupd(tcp_address=free, http_address=first.http_address)
        with pytest.raises(ConfigurationError, match="address already in use"):
            second.start()
        with EmbeddedNsqlookupd(tcp_address=free) as third:
            assert third.tcp_address == free


def test_a_star_tombstones_all_topics(lookupd: EmbeddedLookupServer) -> None:
    """Go marks one of them, by chance."""
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify()
        assert peer.ask(b"REGISTER clicks archive\n") == peer.ask(b"REGISTER errors\n") == b"OK"
        lookupd.post("/topic/tombstone", topic="*", node="nsqd.example:4151")
        assert lookupd.producers("clicks") == lookupd.producers("errors") == []


def test_an_error_reaches_a_peer_that_goes_on_sending(lookupd: EmbeddedLookupServer) -> None:
    with RawPeer(lookupd.tcp_address) as peer:
        peer.send(b"BAD\n" + b"PING\n" * 10_000)
        assert peer.read_response() == b"E_INVALID invalid command BAD"


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),  # kills Go
        (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
        (b"R" * 16384, b""),
    ],
)
def test_a_hostile_size_or_line_is_cut_off(
    lookupd: EmbeddedLookupServer, data: bytes, answer: bytes
) -> None:
    with RawPeer(lookupd.tcp_address) as peer:
        peer.send(data)
        if answer:
            assert peer.read_response() == answer
        with pytest.raises((EOFError, ConnectionError)):
            peer.read_response()
    assert_serves(lookupd)


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from(
            [b"  V1", b"IDENTIFY\n", b"PING\n", b"REGISTER t c\n", b"\0\0\0\5", identify(), b"\n"]
        ),
        max_size=8,
    )
)
def test_any_bytes_are_answered_or_cut_off(
    shared_lookupd: EmbeddedNsqlookupd, parts: list[bytes]
) -> None:
    with RawPeer(shared_lookupd.tcp_address, magic=b"") as peer:
        try:
            peer.send(b"".join(parts))
        except ConnectionError:
            pass  # it has hung up already
        peer.leave()
    with RawPeer(shared_lookupd.tcp_address) as peer:
        assert peer.ask(b"PING\n") == b"OK"


def test_a_crowd_is_served_and_forgotten(lookupd: EmbeddedLookupServer) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(lookupd.tcp_address)) for _ in range(CROWD)]
        for index, peer in enumerate(peers):
            peer.send(identify(tcp_port=index + 1) + b"REGISTER clicks archive\n")
        for peer in peers:
            assert peer.read_response().startswith(b"{")
            assert peer.read_response() == b"OK"
        assert len(lookupd.producers("clicks")) == len(lookupd.json("/nodes")["producers"]) == CROWD

    wait_until(
        lambda: lookupd.json("/nodes") == {"producers": []},
        what="all to be forgotten",
        timeout_s=MAX_CONNECTIONS_TIME_S,
    )
    assert lookupd.json("/lookup", topic="clicks") == {"channels": ["archive"], "producers": []}
