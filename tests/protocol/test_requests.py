"""Commands out of bytes, whole or in any pieces. Refusals are in tests/conformance."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.raw_client import sized

from nsqtools.errors import ProtocolError
from nsqtools.protocol.requests import (
    BodiesReader,
    Incomplete,
    LineTooLong,
    PeerInfo,
    decode_peer_info,
    encode_identify,
    encode_register,
    encode_unregister,
    read_answers,
    read_identify,
    read_line,
    read_trimmed_request,
    topic_and_channel,
)

ID = b"0123456789abcdef"


def test_a_line_has_a_limit_and_asks_for_more_below_it() -> None:
    assert read_line(b"x" * 16383 + b"\n", 0)[1] == 16384
    with pytest.raises(LineTooLong):
        read_line(b"x" * 16384, 0)
    with pytest.raises(Incomplete) as more:
        read_line(b"..NO", 2)
    assert (more.value.position, more.value.wanted, more.value.error) == (2, 3, None)


@pytest.mark.parametrize(
    ("command", "delays", "other"),
    [(b"FIN", [], b"TOUCH"), (b"TOUCH", [], b"FIN"), (b"REQ", [b"0", b"90000", b"007"], b"FIN")],
)
def test_answers_are_taken_in_one_run(command: bytes, delays: list[bytes], other: bytes) -> None:
    ends = [b" " + delay for delay in delays] or [b""] * 3
    run = b"".join(b"%b %b%b\n" % (command, ID, end) for end in ends)
    read = read_answers(b".%b%b %b\n" % (run, other, ID), 1)
    assert read == (command, [ID] * 3, delays, 1 + len(run))
    many = read_answers(run * 1000, 0)
    assert many is not None
    assert len(many.ids) == 500  # more hold up others


@pytest.mark.parametrize(
    "line",
    [
        b"FIN " + ID[1:] + b"\n",
        b"FIN " + ID[1:] + b"\r\n",
        b"FIN " + ID + b"\r\n",
        b"FIN " + ID[2:] + b" a\n",
        b"FIN " + ID,
        b"fin " + ID + b"\n",
        b"FIN " + ID[1:] + b"\t\n",
        b"TOUCH " + ID,
        b"REQ " + ID + b"\n",
        b"REQ " + ID + b" \n",
        b"REQ " + ID + b" -1\n",
        b"REQ " + ID + b" 1\r\n",
        b"REQ " + ID + b" 1000000000\n",  # the arithmetic may wrap
    ],
)
def test_only_plain_answers_are(line: bytes) -> None:
    assert read_answers(line, 0) is None


@given(
    st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8),
    st.binary(max_size=5),
    st.lists(st.integers(0, 60)),
)
def test_bodies_are_read_in_any_pieces(bodies: list[bytes], rest: bytes, cuts: list[int]) -> None:
    data = struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies)) + rest
    reader = BodiesReader(100, 10_000)
    ends = sorted({*(cut for cut in cuts if cut < len(data)), len(data)})
    buffer = b""
    start = 0
    waits_for_what_is_there = False
    for end in ends:
        buffer += data[start:end]
        start = end
        try:
            position = reader.read(buffer, 0)
            break
        except Incomplete as more:
            waits_for_what_is_there = len(buffer) - more.position >= more.wanted
            buffer = buffer[more.position :]

    assert not waits_for_what_is_there
    assert reader.bodies == bodies
    assert (buffer[position:] + data[start:]) == rest


# -- what an nsqd says to nsqlookupd ---------------------------------------------------------------


INFO = PeerInfo(
    broadcast_address="nsqd.example",
    hostname="nsqd",
    http_port=4151,
    tcp_port=4150,
    version="1.3.0",
)

names = st.from_regex(r"[.a-zA-Z0-9_-]{1,54}(#ephemeral)?", fullmatch=True)
infos = st.builds(
    PeerInfo,
    broadcast_address=st.text(min_size=1),
    hostname=st.text(),
    http_port=st.integers(1, 65535),
    tcp_port=st.integers(1, 65535),
    version=st.text(min_size=1),
)


@given(infos)
def test_what_one_side_encodes_the_other_reads(info: PeerInfo) -> None:
    data = encode_identify(info) + b"PING\n"

    request = read_trimmed_request(data, 0)
    read, end = read_identify(request)

    assert (request.words, read, data[end:]) == ([b"IDENTIFY"], info, b"PING\n")


@given(names, st.one_of(st.just(""), names))
def test_registrations_come_back(topic: str, channel: str) -> None:
    for encoded in (encode_register(topic, channel), encode_unregister(topic, channel)):
        request = read_trimmed_request(encoded, 0)

        assert topic_and_channel(request) == (topic, channel)
        assert request.position == len(encoded)


NOTHING = PeerInfo(broadcast_address="", hostname="", http_port=0, tcp_port=0, version="")


@pytest.mark.parametrize(
    ("data", "info"),
    [
        (INFO.encode(), INFO),
        (b"{}", NOTHING),
        (b"null", NOTHING),
        (b'{"version": null, "http_port": null, "new": [1]}', NOTHING),
        (b'{"http_port": 1, "hostname": "h"}', replace(NOTHING, http_port=1, hostname="h")),
        *((data, None) for data in (b"", b"[]", b"{", b'{"tcp_port": "1"}')),
        *((data, None) for data in (b'{"http_port": true}', b'{"version": 1}', b"\xff")),
    ],
)
def test_an_answer_to_identify_is_read_or_refused(data: bytes, info: PeerInfo | None) -> None:
    if info is not None:
        assert decode_peer_info(data) == info
    else:
        with pytest.raises(ProtocolError):
            decode_peer_info(data)
