"""Commands as they go over the wire, and as nsqd's side of the protocol reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol import commands
from nsqtools.protocol.requests import (
    BodiesReader,
    read_answers,
    read_line,
    read_message,
    read_multi_publish_size,
)

ID = b"0123456789abcdef"
LIMIT = 1 << 20

bodies = st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20)


def test_a_command_is_one_line_with_its_words() -> None:
    assert commands.subscribe("t", "c#ephemeral") == b"SUB t c#ephemeral\n"
    assert commands.ready(2500) == b"RDY 2500\n"
    assert commands.finish(ID) == b"FIN 0123456789abcdef\n"
    assert commands.requeue(ID, 0) == b"REQ 0123456789abcdef 0\n"
    assert commands.touch(ID) == b"TOUCH 0123456789abcdef\n"
    assert commands.auth(b"s3cret") == b"AUTH\n\x00\x00\x00\x06s3cret"
    assert commands.deferred_publish("t", 0, b"b") == b"DPUB t 0\n\x00\x00\x00\x01b"


@given(st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=1))
def test_nsqd_reads_joined_finishes_back(ids: list[str]) -> None:
    wire = commands.encode_finishes([message_id.encode() for message_id in ids])
    encoded = [message_id.encode() for message_id in ids]
    assert read_answers(wire, 0) == (b"FIN", encoded, [], len(wire))


@given(st.binary(min_size=1, max_size=200))
def test_nsqd_reads_a_publish_back(body: bytes) -> None:
    wire = commands.publish("clicks", body)
    words, position = read_line(wire, 0)
    assert words == [b"PUB", b"clicks"]
    assert read_message(wire, position, 0, "PUB", LIMIT) == (body, len(wire))


@given(bodies)
def test_nsqd_reads_a_multi_publish_back(bodies: list[bytes]) -> None:
    wire = commands.multi_publish("clicks", bodies)
    words, position = read_line(wire, 0)
    assert words == [b"MPUB", b"clicks"]
    assert int.from_bytes(wire[position : position + 4], "big") == commands.mpub_size(
        list(map(len, bodies))
    )
    position = read_multi_publish_size(wire, position, 0, LIMIT)
    reader = BodiesReader(LIMIT, LIMIT)
    assert reader.read(wire, position) == len(wire)
    assert reader.bodies == bodies
