"""Parsing commands from bytes in any pieces. Refusals are in tests/conformance."""

import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.raw_client import sized

from nsqtools.errors import ProtocolError
from nsqtools.protocol import requests
from nsqtools.protocol.commands import IdentifyReply, decode_identify_reply
from nsqtools.protocol.requests import PeerInfo

ID = b"0123456789abcdef"


def test_a_line_has_a_limit_and_an_incomplete_one_needs_more() -> None:
    assert requests.read_request(b"x" * 16383 + b"\n", 0).position == 16384
    with pytest.raises(requests.LineTooLong):
        requests.read_request(b"x" * 16384, 0)
    with pytest.raises(requests.Incomplete) as caught:
        requests.read_request(b"..NO", 2)
    assert (caught.value.position, caught.value.needed, caught.value.error) == (2, 3, None)


@pytest.mark.parametrize(
    ("command", "delays", "other"),
    [(b"FIN", [], b"TOUCH"), (b"TOUCH", [], b"FIN"), (b"REQ", [b"0", b"90000", b"007"], b"FIN")],
)
def test_consecutive_answers_are_parsed_in_one_run(
    command: bytes, delays: list[bytes], other: bytes
) -> None:
    ends = [b" " + delay for delay in delays] or [b""] * 3
    run = b"".join(b"%b %b%b\n" % (command, ID, end) for end in ends)
    read = requests.read_answers(b".%b%b %b\n" % (run, other, ID), 1)
    assert read == (command, [ID] * 3, delays, 1 + len(run))
    limited = requests.read_answers(run * 1000, 0)
    assert len(limited.ids) == 500  # More would delay other clients.


NOT_PLAIN = [b"FIN " + ID[1:] + end for end in (b"\n", b"\r\n", b"\t\n")]
NOT_PLAIN += [b"FIN " + ID + b"\r\n", b"FIN " + ID[2:] + b" a\n", b"FIN " + ID, b"TOUCH " + ID]
NOT_PLAIN += [b"fin " + ID + b"\n"]
DELAYS = [b"", b" ", b" -1", b" 1\r", b" 1000000000"]  # The arithmetic of the last may overflow.
NOT_PLAIN += [b"REQ " + ID + delay + b"\n" for delay in DELAYS]


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_only_plain_answers_are_parsed_in_runs(line: bytes) -> None:
    assert requests.read_answers(line, 0) is None


@given(
    st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8),
    st.binary(max_size=5),
    st.lists(st.integers(0, 60)),
)
def test_bodies_are_parsed_in_any_pieces(bodies: list[bytes], rest: bytes, cuts: list[int]) -> None:
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
            # It waits although the bytes have arrived.
            needless += [more] * (len(buffer) >= more.needed)
    assert not needless
    assert reader.bodies == bodies
    assert (buffer[position:] + data[end:]) == rest


@given(
    st.lists(st.sampled_from([b"", b"a", b"bb"]), max_size=3)
    | st.builds(lambda body, count: [body] * count, st.binary(max_size=3), st.integers(0, 40)),
    st.integers(-2, 2),
    st.integers(-2, 2),
    st.binary(max_size=3),
)
def test_an_mpub_is_accepted_in_one_step_only_if_all_its_messages_are(
    bodies: list[bytes], added_count: int, added_size: int, rest: bytes
) -> None:
    content = struct.pack(">i", len(bodies) + added_count) + b"".join(map(sized, bodies))
    data = b"??" + struct.pack(">i", max(0, len(content) + added_size)) + content + rest
    count, end = requests.check_multi_publish(data, 2, 1000, 2)
    is_valid = bool(bodies) and all(0 < len(body) <= 2 for body in bodies)
    if is_valid and not added_count and not added_size:
        assert (count, end) == (len(bodies), 6 + len(content))
        assert requests.sized_bodies(data[10:end], count) == bodies
    if count:
        reader = requests.BodiesReader(2, 1000)
        assert reader.read(data, 6) == end
        assert reader.count == count


INFO = PeerInfo("nsqd.example", hostname="nsqd", http_port=1, tcp_port=2, version="1.3.0")
INFOS = {INFO.encode(): INFO, b"{}": PeerInfo(), b"null": PeerInfo()}
INFOS |= {b'{"version": null, "http_port": null, "new": [1]}': PeerInfo()}
INFOS |= {b'{"http_port": 1, "hostname": "h"}': PeerInfo(http_port=1, hostname="h")}
NO_INFOS = [b"", b"[]", b"{", b"\xff", b'{"tcp_port": "1"}', b'{"http_port": true}']


@pytest.mark.parametrize("data", [*NO_INFOS, b'{"version": 1}'])
def test_peer_info_in_identify_is_parsed_or_refused(data: bytes) -> None:
    assert {info: requests.decode_peer_info(info) for info in INFOS} == INFOS
    with pytest.raises(ProtocolError):
        requests.decode_peer_info(data)


# -- responses to IDENTIFY; its requests are in client/test_options.py -----------------------------


def test_ok_means_an_old_nsqd_and_unknown_fields_are_ignored() -> None:
    reply = decode_identify_reply(b"OK")
    assert (reply.max_rdy_count, reply.msg_timeout, reply.version) == (2500, 60_000, "")
    assert not any([reply.tls_v1, reply.snappy, reply.deflate, reply.auth_required])
    reply = IdentifyReply(max_rdy_count=3, version="1.3.0", tls_v1=True, deflate_level=2)
    assert decode_identify_reply(reply.encode()) == reply
    partial = b'{"max_rdy_count":7,"new":[1],"version":null}'
    assert decode_identify_reply(partial) == IdentifyReply(max_rdy_count=7)
    # A newline would start another line of a log.
    assert decode_identify_reply(rb'{"version":"1\nERROR"}').version == r"1\nERROR"


WRONG = [b"", b"ok", b"OK\n", b"[]", b"1", b"null", b'"OK"', b"{", b"\xff", b"_heartbeat_"]
WRONG += [pytest.param(b"[" * 100_000, id="nested")]  # type: ignore[list-item]
WRONG_FIELDS = """
    "max_rdy_count":"7" "max_rdy_count":7.5 "max_rdy_count":true "tls_v1":1 "version":1
    "max_rdy_count":0 "deflate":true,"deflate_level":-1 "deflate":true,"deflate_level":10
    "msg_timeout":0 "msg_timeout":9223372036854775808
"""


@pytest.mark.parametrize("data", [*WRONG, *(b"{%b}" % f.encode() for f in WRONG_FIELDS.split())])
def test_any_other_response_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_identify_reply(data)


@given(st.binary(max_size=60))
def test_a_random_response_is_a_reply_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        decode_identify_reply(data)
