"""Any bytes at the embedded daemons are answered or cut off, and others are served.

What is answered is that of the Go daemons: tests/conformance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.embedded import EmbeddedLookupServer, EmbeddedServer
from plugins.examples import examples
from plugins.raw_client import RawClient, RawPeer, identify, mpub, sized

LINES = [b"\n", b"IDENTIFY\n", b"\0\0\0\5", b"\xff\xff\xff\xff", b"0123456789abcdef"]
OF_NSQLOOKUPD = [*LINES, b"  V1", b"PING\n", b"REGISTER t c\n", identify()]
OF_NSQD = [*LINES, b"  V2", sized(b"{}"), b"SUB t c\n", b"RDY 1\n", b"NOP\n", b"CLS\n", b"AUTH\n"]
OF_NSQD += [b"PUB t\n", b"DPUB t 1\n", b"MPUB t\n", mpub("t", [b"x", b"y"])]
OF_NSQD += [each + b"0123456789abcdef\n" for each in (b"FIN ", b"TOUCH ", b"REQ ")]


def bytes_of(words: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.binary(max_size=30) | st.sampled_from(words), max_size=8).map(b"".join)


@pytest.fixture(scope="module")
def nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("nsqd")) as nsqd:
        yield nsqd


@pytest.fixture(scope="module")
def lookupd() -> Iterator[EmbeddedLookupServer]:
    with EmbeddedLookupServer() as lookupd:
        yield lookupd


def send(address: str, data: bytes) -> None:
    with RawPeer(address, magic=b"") as peer:
        with suppress(ConnectionError):  # it has hung up already
            peer.send(data)
        peer.leave()


@settings(max_examples=examples(75))
@given(data=bytes_of(OF_NSQD) | bytes_of(OF_NSQD).map(b"  V2".__add__))
def test_at_nsqd(nsqd: EmbeddedServer, data: bytes) -> None:
    send(nsqd.tcp_address, data)
    with RawClient(nsqd.tcp_address) as client:
        client.settle()
    assert "Traceback" not in nsqd.log


@settings(max_examples=examples(75))
@given(data=bytes_of(OF_NSQLOOKUPD) | bytes_of(OF_NSQLOOKUPD).map(b"  V1".__add__))
def test_at_nsqlookupd(lookupd: EmbeddedLookupServer, data: bytes) -> None:
    send(lookupd.tcp_address, data)
    with RawPeer(lookupd.tcp_address) as peer:
        assert peer.ask(b"PING\n") == b"OK"
    assert "Traceback" not in lookupd.log
