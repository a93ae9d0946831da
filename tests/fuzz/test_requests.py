"""Any bytes at the embedded daemons are answered or end the connection, and others are served.

tests/conformance compares the responses with those of the Go daemons.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.daemons import EmbeddedLookupServer, EmbeddedServer
from plugins.examples import examples
from plugins.raw_client import RawClient, RawPeer, identify, mpub, sized

UNFORESEEN = re.compile(r"Traceback|ERROR: client\(\S+\) - (?!line too long|\[Errno).*")

LINES = [b"\n", b"IDENTIFY\n", b"\0\0\0\5", b"\xff\xff\xff\xff", b"0123456789abcdef"]
OF_NSQLOOKUPD = [*LINES, b"  V1", b"PING\n", b"REGISTER t c\n", identify()]
OF_NSQD = [*LINES, b"  V2", sized(b"{}"), b"SUB t c\n", b"RDY 1\n", b"NOP\n", b"CLS\n", b"AUTH\n"]
OF_NSQD += [b"PUB t\n", b"DPUB t 1\n", b"MPUB t\n", mpub("t", [b"x", b"y"])]
OF_NSQD += [command + b"0123456789abcdef\n" for command in (b"FIN ", b"TOUCH ", b"REQ ")]


def bytes_of(words: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.binary(max_size=30) | st.sampled_from(words), max_size=8).map(b"".join)


@pytest.fixture(scope="module")
def daemons(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EmbeddedServer, EmbeddedLookupServer]]:
    with EmbeddedServer(tmp_path_factory.mktemp("nsqd")) as nsqd, EmbeddedLookupServer() as lookupd:
        yield nsqd, lookupd


def send(address: str, data: bytes) -> None:
    with RawPeer(address, magic=b"") as peer:
        with suppress(ConnectionError):  # The daemon has already closed.
            peer.send(data)
        peer.leave()


@settings(max_examples=examples(100))
@given(
    of_nsqd=bytes_of(OF_NSQD) | bytes_of(OF_NSQD).map(b"  V2".__add__),
    of_nsqlookupd=bytes_of(OF_NSQLOOKUPD) | bytes_of(OF_NSQLOOKUPD).map(b"  V1".__add__),
)
def test_any_bytes_are_answered_or_end_the_connection(
    daemons: tuple[EmbeddedServer, EmbeddedLookupServer], of_nsqd: bytes, of_nsqlookupd: bytes
) -> None:
    nsqd, lookupd = daemons
    send(nsqd.tcp_address, of_nsqd)
    send(lookupd.tcp_address, of_nsqlookupd)
    with RawClient(nsqd.tcp_address) as client, RawPeer(lookupd.tcp_address) as peer:
        client.settle()
        assert peer.ask(b"PING\n") == b"OK"
    assert not UNFORESEEN.findall(nsqd.log + lookupd.log)
