"""The embedded nsqlookupd as a library: where it listens, what it refuses, what it survives."""

from __future__ import annotations

import pytest
from plugins.embedded import EmbeddedLookupServer
from plugins.ports import ReservedPort
from plugins.raw_client import RawPeer
from plugins.servers import Serve

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqlookupd


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
