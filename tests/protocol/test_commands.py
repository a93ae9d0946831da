"""Every kind of answer to IDENTIFY.

What is asked by it is in client/test_options.py.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ProtocolError
from nsqtools.protocol.commands import IdentifyReply, decode_identify_reply


def test_a_plain_ok_means_an_old_nsqd_and_its_limits() -> None:
    reply = decode_identify_reply(b"OK")
    assert (reply.max_rdy_count, reply.msg_timeout, reply.version) == (2500, 60_000, "")
    assert not any([reply.tls_v1, reply.snappy, reply.deflate, reply.auth_required])


def test_a_reply_is_read_and_what_is_unknown_or_empty_passed_over() -> None:
    reply = IdentifyReply(max_rdy_count=3, version="1.3.0", tls_v1=True, deflate_level=2)
    assert decode_identify_reply(reply.encode()) == reply
    few = b'{"max_rdy_count":7,"new":[1],"version":null}'
    assert decode_identify_reply(few) == IdentifyReply(max_rdy_count=7)
    # which begins no line of its own in a log
    assert decode_identify_reply(rb'{"version":"1\nERROR"}').version == r"1\nERROR"


WRONG = [b"", b"ok", b"OK\n", b"[]", b"1", b"null", b'"OK"', b"{", b"\xff", b"_heartbeat_"]
WRONG += [pytest.param(b"[" * 100_000, id="nested")]  # type: ignore[list-item]
WRONG_FIELDS = """
    "max_rdy_count":"7" "max_rdy_count":7.5 "max_rdy_count":true "tls_v1":1 "version":1
    "max_rdy_count":0 "deflate":true,"deflate_level":0 "deflate":true,"deflate_level":10
    "msg_timeout":0 "msg_timeout":9223372036854775808
"""


@pytest.mark.parametrize("data", [*WRONG, *(b"{%b}" % f.encode() for f in WRONG_FIELDS.split())])
def test_any_other_answer_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_identify_reply(data)


@given(st.binary(max_size=60))
def test_random_answers_are_a_reply_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        decode_identify_reply(data)
