"""What an nsqd says to nsqlookupd: read back whole, in pieces, and when it is nonsense."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ProtocolError
from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.lookup_v1 import (
    MAX_IDENTIFY_SIZE,
    PeerInfo,
    decode_peer_info,
    encode_identify,
    encode_register,
    encode_unregister,
    read_identify,
    read_words,
    topic_and_channel,
)
from nsqtools.protocol.requests import Incomplete, LineTooLong

INFO = PeerInfo(
    broadcast_address="nsqd.example",
    hostname="nsqd",
    http_port=4151,
    tcp_port=4150,
    version="1.3.0",
)
HEAD = len(b"IDENTIFY\n")

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

    words, after = read_words(data, 0)
    read, end = read_identify(data, after, 0)

    assert (words, read, data[end:]) == ([b"IDENTIFY"], info, b"PING\n")


@given(names, st.one_of(st.just(""), names))
def test_registrations_come_back(topic: str, channel: str) -> None:
    for encoded in (encode_register(topic, channel), encode_unregister(topic, channel)):
        words, after = read_words(encoded, 0)

        assert topic_and_channel(words) == (topic, channel)
        assert after == len(encoded)


@pytest.mark.parametrize("length", range(1, len(encode_identify(INFO)) - HEAD))
def test_a_body_in_pieces_is_waited_for(length: int) -> None:
    data = encode_identify(INFO)

    with pytest.raises(Incomplete) as waiting:
        read_identify(data[: HEAD + length], HEAD, 0)

    assert waiting.value.position == 0
    assert HEAD + length < waiting.value.wanted <= len(data)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"PING\n", [b"PING"]),
        (b" \t PING \r\n", [b"PING"]),
        (b"REGISTER  t\n", [b"REGISTER", b"", b"t"]),
        (b"\n", [b""]),
    ],
)
def test_a_line_is_trimmed_and_split(line: bytes, words: list[bytes]) -> None:
    assert read_words(line, 0) == (words, len(line))


def test_a_line_without_end_is_given_up() -> None:
    with pytest.raises(LineTooLong):
        read_words(b"x" * 16384, 0)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (-1, b"E_BAD_BODY IDENTIFY invalid body size -1"),
        (-(1 << 31), b"E_BAD_BODY IDENTIFY invalid body size -2147483648"),
        (0, b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (MAX_IDENTIFY_SIZE + 1, b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"),
        ((1 << 31) - 1, b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
    ],
)
def test_a_lying_size_is_refused_at_once(size: int, text: bytes) -> None:
    data = b"IDENTIFY\n" + size.to_bytes(4, "big", signed=True)

    with pytest.raises(RequestError) as refused:
        read_identify(data, HEAD, 0)

    assert refused.value.data == text


@pytest.mark.parametrize(
    "missing", ["broadcast_address", "http_port", "tcp_port", "version", "hostname"]
)
def test_what_an_nsqd_says_of_itself_is_whole_but_for_its_hostname(missing: str) -> None:
    said = {**asdict(INFO), "remote_address": "10.0.0.9:5000"}
    del said[missing]
    body = json.dumps(said).encode()
    data = len(body).to_bytes(4, "big") + body

    if missing == "hostname":
        assert read_identify(data, 0, 0) == (replace(INFO, hostname=""), len(data))
    else:
        with pytest.raises(RequestError) as refused:
            read_identify(data, 0, 0)
        assert refused.value.data == b"E_BAD_BODY IDENTIFY missing fields"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([b"REGISTER"], b"E_INVALID REGISTER insufficient number of params"),
        ([b"REGISTER", b""], b"E_BAD_TOPIC REGISTER topic name '' is not valid"),
        ([b"UNREGISTER", b"t", b"*"], b"E_BAD_CHANNEL UNREGISTER channel name '*' is not valid"),
    ],
)
def test_names_that_cannot_be_are_refused(words: list[bytes], text: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        topic_and_channel(words)
    assert refused.value.data == text


NOTHING = PeerInfo(broadcast_address="", hostname="", http_port=0, tcp_port=0, version="")


@pytest.mark.parametrize(
    ("data", "info"),
    [
        (INFO.encode(), INFO),
        (b"{}", NOTHING),
        (b'{"version": null, "http_port": null, "new": [1]}', NOTHING),
        (b'{"http_port": 1, "hostname": "h"}', replace(NOTHING, http_port=1, hostname="h")),
        *((data, None) for data in (b"", b"[]", b"{", b"null", b'{"tcp_port": "1"}')),
        *((data, None) for data in (b'{"http_port": true}', b'{"version": 1}', b"\xff")),
    ],
)
def test_an_answer_to_identify_is_read_or_refused(data: bytes, info: PeerInfo | None) -> None:
    if info is not None:
        assert decode_peer_info(data) == info
    else:
        with pytest.raises(ProtocolError):
            decode_peer_info(data)


@given(
    st.binary(max_size=50)
    | st.dictionaries(
        st.sampled_from(["broadcast_address", "Hostname", "http_port", "tcp_port", "version", "x"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
    ).map(lambda document: json.dumps(document).encode())
)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    data = len(body).to_bytes(4, "big") + body

    try:
        info, end = read_identify(data, 0, 0)
    except RequestError as error:
        outcome = error.data
    else:
        outcome = b"read"
        assert end == len(data)
        assert all((info.broadcast_address, info.http_port, info.tcp_port, info.version))
    assert outcome in (
        b"read",
        b"E_BAD_BODY IDENTIFY failed to decode JSON body",
        b"E_BAD_BODY IDENTIFY missing fields",
    )
