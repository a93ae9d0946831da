"""Commands out of bytes, whole or in any pieces. Refusals are in tests/conformance."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.raw_client import sized

from nsqtools.errors import ProtocolError
from nsqtools.protocol import requests
from nsqtools.protocol.requests import PeerInfo

ID = b"0123456789abcdef"


def test_a_line_has_a_limit_and_asks_for_more_below_it() -> None:
    assert requests.read_request(b"x" * 16383 + b"\n", 0).position == 16384
    with pytest.raises(requests.LineTooLong):
        requests.read_request(b"x" * 16384, 0)
    with pytest.raises(requests.Incomplete) as more:
        requests.read_request(b"..NO", 2)
    assert (more.value.position, more.value.wanted, more.value.error) == (2, 3, None)


@pytest.mark.parametrize(
    ("command", "delays", "other"),
    [(b"FIN", [], b"TOUCH"), (b"TOUCH", [], b"FIN"), (b"REQ", [b"0", b"90000", b"007"], b"FIN")],
)
def test_answers_are_taken_in_one_run(command: bytes, delays: list[bytes], other: bytes) -> None:
    ends = [b" " + delay for delay in delays] or [b""] * 3
    run = b"".join(b"%b %b%b\n" % (command, ID, end) for end in ends)
    read = requests.read_answers(b".%b%b %b\n" % (run, other, ID), 1)
    assert read == (command, [ID] * 3, delays, 1 + len(run))
    many = requests.read_answers(run * 1000, 0)
    assert many is not None
    assert len(many.ids) == 500  # more hold up others


NOT_PLAIN = [b"FIN " + ID[1:] + end for end in (b"\n", b"\r\n", b"\t\n")]
NOT_PLAIN += [b"FIN " + ID + b"\r\n", b"FIN " + ID[2:] + b" a\n", b"FIN " + ID, b"TOUCH " + ID]
NOT_PLAIN += [b"fin " + ID + b"\n"]
DELAYS = [b"", b" ", b" -1", b" 1\r", b" 1000000000"]  # in the last the arithmetic may wrap
NOT_PLAIN += [b"REQ " + ID + delay + b"\n" for delay in DELAYS]


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_only_plain_answers_are(line: bytes) -> None:
    assert requests.read_answers(line, 0) is None


@given(
    st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8),
    st.binary(max_size=5),
    st.lists(st.integers(0, 60)),
)
def test_bodies_are_read_in_any_pieces(bodies: list[bytes], rest: bytes, cuts: list[int]) -> None:
    data = struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies)) + rest
    reader = requests.BodiesReader(100, 10_000)
    ends = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    buffer, needless = b"", []
    for start, end in pairwise(ends):
        buffer += data[start:end]
        try:
            position = reader.read(buffer, 0)
            break
        except requests.Incomplete as more:
            buffer = buffer[more.position :]
            needless += [more] * (len(buffer) >= more.wanted)  # what it waits for is there
    assert not needless
    assert reader.bodies == bodies
    assert (buffer[position:] + data[end:]) == rest


# -- what an nsqd says to nsqlookupd ---------------------------------------------------------------


INFO = PeerInfo(
    broadcast_address="nsqd.example", hostname="nsqd", http_port=1, tcp_port=2, version="1.3.0"
)
NOTHING = PeerInfo()


@pytest.mark.parametrize(
    ("data", "info"),
    [
        (INFO.encode(), INFO),
        (b"{}", NOTHING),
        (b"null", NOTHING),
        (b'{"version": null, "http_port": null, "new": [1]}', NOTHING),
        (b'{"http_port": 1, "hostname": "h"}', NOTHING._replace(http_port=1, hostname="h")),
        *((data, None) for data in (b"", b"[]", b"{", b'{"tcp_port": "1"}')),
        *((data, None) for data in (b'{"http_port": true}', b'{"version": 1}', b"\xff")),
    ],
)
def test_an_answer_to_identify_is_read_or_refused(data: bytes, info: PeerInfo | None) -> None:
    if info is not None:
        assert requests.decode_peer_info(data) == info
    else:
        with pytest.raises(ProtocolError):
            requests.decode_peer_info(data)
