"""IDENTIFY: the request's JSON, and every kind of answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ProtocolError
from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.identify import (
    IdentifyLimits,
    IdentifyReply,
    IdentifyRequest,
    ReceivedIdentify,
    check_identify,
    decode_identify,
    decode_identify_reply,
)


def test_what_was_not_decided_is_not_sent() -> None:
    assert json.loads(IdentifyRequest().encode()) == {
        "feature_negotiation": True,
        "tls_v1": False,
        "snappy": False,
        "deflate": False,
    }


def test_zero_is_sent_where_it_was_decided() -> None:
    request = IdentifyRequest(output_buffer_timeout_ms=0, heartbeat_interval_ms=-1)
    sent = json.loads(request.encode())
    assert sent["output_buffer_timeout"] == 0
    assert sent["heartbeat_interval"] == -1


def test_names_go_out_under_the_old_keys_too() -> None:
    sent = json.loads(IdentifyRequest(client_id="me", hostname="me.example.org").encode())
    assert sent["client_id"] == sent["short_id"] == "me"
    assert sent["hostname"] == sent["long_id"] == "me.example.org"


def test_a_deflate_level_is_sent_with_deflate_only() -> None:
    assert "deflate_level" not in json.loads(IdentifyRequest(deflate_level=3).encode())
    sent = json.loads(IdentifyRequest(deflate=True, deflate_level=3).encode())
    assert sent["deflate_level"] == 3


def test_a_plain_ok_means_an_old_nsqd_and_its_limits() -> None:
    reply = decode_identify_reply(b"OK")
    assert reply.max_rdy_count == 2500
    assert reply.msg_timeout == 60_000
    assert reply.version == ""
    assert not any([reply.tls_v1, reply.snappy, reply.deflate, reply.auth_required])


def test_a_reply_reads_back() -> None:
    reply = IdentifyReply(
        max_rdy_count=3, version="1.3.0", tls_v1=True, deflate=True, deflate_level=2
    )
    assert decode_identify_reply(reply.encode()) == reply


def test_unknown_and_empty_fields_are_passed_over() -> None:
    assert decode_identify_reply(b'{"max_rdy_count":7,"new":[1],"version":null}') == IdentifyReply(
        max_rdy_count=7
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"ok",
        b"OK\n",
        b"[]",
        b"1",
        b"null",
        b'"OK"',
        b"{",
        b"\xff",
        b"_heartbeat_",
        b'{"max_rdy_count":"7"}',
        b'{"max_rdy_count":7.5}',
        b'{"max_rdy_count":true}',
        b'{"tls_v1":1}',
        b'{"version":1}',
        b'{"max_rdy_count":0}',
        b'{"deflate":true,"deflate_level":0}',
        b'{"deflate":true,"deflate_level":10}',
    ],
)
def test_any_other_answer_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_identify_reply(data)


@given(st.binary(max_size=60))
def test_random_answers_are_a_reply_or_a_protocol_error(data: bytes) -> None:
    try:
        decode_identify_reply(data)
    except ProtocolError:
        pass


# -- the receiving side ---------------------------------------------------------------------------

LIMITS = IdentifyLimits(
    max_heartbeat_interval=60_000,
    min_output_buffer_timeout=25,
    max_output_buffer_timeout=30_000,
    max_output_buffer_size=65_536,
    max_msg_timeout=900_000,
)


@pytest.mark.parametrize(
    ("field", "accepted", "refused", "what"),
    [
        ("heartbeat_interval", (-1, 0, 1000, 60_000), (-2, 1, 999, 60_001), "heartbeat interval"),
        ("output_buffer_timeout", (-1, 0, 25, 30_000), (-2, 24, 30_001), "output buffer timeout"),
        ("output_buffer_size", (-1, 0, 64, 65_536), (-2, 1, 63, 65_537), "output buffer size"),
        ("sample_rate", (0, 99), (-1, 100), "sample rate"),
        ("msg_timeout", (0, 1000, 900_000), (-1, 1, 999, 900_001), "msg timeout"),
    ],
)
def test_values_within_the_limits_are_accepted(
    field: str, accepted: tuple[int, ...], refused: tuple[int, ...], what: str
) -> None:
    for value in accepted:
        check_identify(ReceivedIdentify()._replace(**{field: value}), LIMITS)
    for value in refused:
        with pytest.raises(RequestError) as error:
            check_identify(ReceivedIdentify()._replace(**{field: value}), LIMITS)
        assert error.value.data == b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (
            what.encode(),
            value,
        )


def test_what_a_client_does_not_say_has_gos_zero_value() -> None:
    assert decode_identify(b"{}") == ReceivedIdentify()
    received = decode_identify(b'{"client_id": "me", "msg_timeout": 7, "tls_v1": true}')
    assert received == ReceivedIdentify(client_id="me", msg_timeout=7, tls_v1=True)
    assert decode_identify(b'{"Client_ID": "me", "MSG_TIMEOUT": 7, "tls_v1": true}') == received
    assert decode_identify(b'{"client_id": "\xff"}').client_id == "\ufffd"
    unreadable = (
        b"",
        b"[]",
        b'{"msg_timeout": "7"}',
        b'{"sample_rate": 2147483648}',
        b'{"x": NaN}',
    )
    for body in unreadable:
        with pytest.raises(RequestError) as error:
            decode_identify(body)
        assert error.value.data == b"E_BAD_BODY IDENTIFY failed to decode JSON body"
