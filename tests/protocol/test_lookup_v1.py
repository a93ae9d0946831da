"""What an nsqd says to nsqlookupd: read back whole, in pieces, and when it is nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ProtocolError
from nsqtools.protocol.requests import (
    PeerInfo,
    decode_peer_info,
    encode_identify,
    encode_register,
    encode_unregister,
    read_identify,
    read_trimmed_request,
    topic_and_channel,
)

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
