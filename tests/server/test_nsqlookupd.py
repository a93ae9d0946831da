"""The embedded nsqlookupd as a library: where it listens, what it refuses, what it survives."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.embedded import EmbeddedLookupServer
from plugins.examples import examples
from plugins.ports import ReservedPort
from plugins.raw_client import RawPeer, identify
from plugins.servers import Serve
from plugins.waiting import wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqlookupd

CROWD = 500


@pytest.fixture
def lookupd(serve: Serve) -> EmbeddedLookupServer:
    return serve(EmbeddedLookupServer())


def test_a_port_in_use_is_named_and_the_other_one_is_free_again(
    lookupd: EmbeddedLookupServer,
) -> None:
    port = ReservedPort()
    free = f"127.0.0.1:{port.number}"
    with pytest.raises(ConfigurationError, match="address already in use"):
        EmbeddedNsqlookupd(tcp_address=free, http_address=lookupd.http_address).start()
    with EmbeddedNsqlookupd(tcp_address=free) as other:
        assert other.tcp_address == free


def test_a_star_tombstones_all_topics(lookupd: EmbeddedLookupServer) -> None:
    """Go marks one of them, by chance."""
    with RawPeer(lookupd.tcp_address) as peer:
        peer.identify()
        assert peer.ask(b"REGISTER clicks archive\n") == peer.ask(b"REGISTER errors\n") == b"OK"
        lookupd.post("/topic/tombstone", topic="*", node="nsqd.example:4151")
        assert lookupd.producers("clicks") == lookupd.producers("errors") == []


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),  # kills Go
        (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
        (b"R" * 16384, b""),
        (b"BAD\n" + b"PING\n" * 10_000, b"E_INVALID invalid command BAD"),
    ],
)
def test_what_is_hostile_is_answered_and_cut_off(
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
def test_any_bytes_are_answered_or_cut_off(parts: list[bytes]) -> None:
    with EmbeddedNsqlookupd() as lookupd:
        with RawPeer(lookupd.tcp_address, magic=b"") as peer:
            with suppress(ConnectionError):  # it has hung up already
                peer.send(b"".join(parts))
            peer.leave()
        with RawPeer(lookupd.tcp_address) as peer:
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
        timeout_s=20,
    )
    assert lookupd.json("/lookup", topic="clicks") == {"channels": ["archive"], "producers": []}
