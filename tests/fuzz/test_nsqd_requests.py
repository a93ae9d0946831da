"""Random requests to both nsqd: whatever is sent, the embedded one answers as the Go one does.

Commands are made of valid and invalid parts, cut off anywhere and sent in any pieces. Publishing
and subscribing use different topics, so that no message is delivered: when it would come between
the answers is up to chance in both.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.examples import examples
from plugins.http_api import Nsqd
from plugins.raw_client import sized
from plugins.waiting import patience_s

pytestmark = pytest.mark.real_nsqd

TIMEOUT_S = patience_s(10.0)
FLAGS = ("-max-msg-size=50", "-max-body-size=200", "-max-rdy-count=20")

IDS = st.sampled_from([b"0123456789abcdef", b"fedcba9876543210", b"short", b"0123456789abcdef0"])
NAMES = st.sampled_from([b"one", b"two#ephemeral", b"bad*", b"", b"x" * 64, b"x" * 65, b'q"\xff'])
NUMBERS = st.sampled_from([b"0", b"1", b"20", b"21", b"", b"-1", b"007", b"x", b"9" * 25, b"\xb2"])
SIZES = st.sampled_from([-1, 0, 1, 3, 50, 51, 200, 201, 1 << 30])
BODIES = st.binary(max_size=60)


def line(*words: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b" \n", b" more\n"])
    return st.builds(lambda parts, end: b" ".join(parts) + end, st.tuples(*words), ends)


def word(*choices: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from(choices)


def inner(bodies: list[bytes], count: int | None, size: int | None) -> bytes:
    data = struct.pack(">i", len(bodies) if count is None else count) + b"".join(map(sized, bodies))
    return struct.pack(">i", len(data) if size is None else size) + data


with_body = st.one_of(BODIES.map(sized), st.builds(lambda n: struct.pack(">i", n), SIZES))
multi_body = st.builds(
    inner,
    st.lists(BODIES, max_size=4),
    st.one_of(st.none(), st.none(), SIZES),
    st.one_of(st.none(), st.none(), SIZES),
)
PUBLISHED = NAMES.map(lambda name: b"pub" + name)
COMMANDS = st.one_of(
    line(word(b"NOP", b"CLS", b"RDY", b"FIN", b"nop", b"", b"BAH")),
    line(word(b"RDY"), NUMBERS),
    line(word(b"FIN", b"TOUCH"), IDS),
    line(word(b"REQ"), IDS, NUMBERS),
    line(word(b"SUB"), NAMES, NAMES),
    st.tuples(line(word(b"PUB"), PUBLISHED), with_body).map(b"".join),
    st.tuples(line(word(b"DPUB"), PUBLISHED, NUMBERS), with_body).map(b"".join),
    st.tuples(line(word(b"MPUB"), PUBLISHED), multi_body).map(b"".join),
    st.tuples(line(word(b"AUTH")), with_body).map(b"".join),
    st.tuples(
        word(b"IDENTIFY\n"),
        word(
            sized(b"{}"),
            sized(b'{"feature_negotiation":true,"msg_timeout":2000}'),
            sized(b'{"heartbeat_interval":-1}'),
            sized(b'{"sample_rate":100}'),
            sized(b'{"client_id":"\xff","hostname":null}'),
            sized(b"nonsense"),
        ),
    ).map(b"".join),
    st.binary(max_size=30),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nsqd, Nsqd]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("go", "embedded")]
    with GoNsqd(folders[0], *FLAGS) as go, EmbeddedServer(folders[1], *FLAGS) as embedded:
        yield go, embedded


@settings(
    max_examples=examples(60),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.tuples(word(b"", b"SUB one ch\n"), st.lists(COMMANDS, min_size=1, max_size=8).map(b"".join)),
    st.integers(0, 40),
    st.lists(st.integers(1, 200), max_size=4),
)
def test_any_requests_are_answered_alike(
    pair: tuple[Nsqd, Nsqd], parts: tuple[bytes, bytes], cut_off: int, cuts: list[int]
) -> None:
    go, embedded = pair
    data = b"  V2" + b"".join(parts)
    if 0 < cut_off < 10:
        data = data[:-cut_off]
    assert answers(embedded, data, cuts) == answers(go, data, [])


def answers(server: Nsqd, data: bytes, cuts: list[int]) -> bytes:
    """All that comes back until the server closes; what was cut apart is sent in pieces."""
    host, _, port = server.tcp_address.rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for cut in cuts:
                connection.sendall(data[:cut])
                data = data[cut:]
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has closed already
        try:
            while chunk := connection.recv(1 << 16):
                received += chunk
        except ConnectionError:
            # The Go nsqd resets a connection with input unread, and the reset can overtake the
            # error frame: ask again until it does not. The embedded one never resets.
            if not received:
                return answers(server, data, [])
    return received
