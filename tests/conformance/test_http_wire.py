"""HTTP below the endpoints, on both nsqd: versions, keep-alive, pipelining, broken requests."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conformance.http_exchanges import CLOSE, talk
from plugins.http_api import Nsqd

AnyNsqd = Callable[..., Nsqd]


def test_http_1_0_is_answered_and_closed(any_nsqd: AnyNsqd) -> None:
    answer = talk(any_nsqd(), b"GET /ping HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.")
    assert answer.endswith(b"\r\n\r\nOK")


def test_requests_may_be_pipelined(any_nsqd: AnyNsqd) -> None:
    request = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = talk(any_nsqd(), request * 2 + b"GET /ping HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert answer.count(b"\r\n\r\nOK") == 3


def test_a_body_may_come_in_chunks(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    head = b"POST /pub?topic=t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE
    assert b" 200 " in talk(nsqd, head + b"\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert nsqd.topic_stats("t")["message_bytes"] == 5


def test_too_large_a_body_in_chunks_is_refused(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-max-msg-size=10")
    head = b"POST /pub?topic=t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE
    answer = talk(nsqd, head + b"\r\n" + b"6\r\nabcdef\r\n" * 3 + b"0\r\n\r\n")
    assert b" 413 " in answer
    assert b"MSG_TOO_BIG" in answer


def test_a_client_may_wait_for_the_go_ahead(any_nsqd: AnyNsqd) -> None:
    head = b"POST /pub?topic=t HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n" + CLOSE
    answer = talk(any_nsqd(), head + b"\r\nx")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.endswith(b"OK")


@pytest.mark.parametrize(
    "data",
    [
        b"  V2IDENTIFY\n\0\0\0\x02{}",
        b"GET /ping\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_a_broken_request_is_answered_in_http(any_nsqd: AnyNsqd, data: bytes) -> None:
    nsqd = any_nsqd()
    assert talk(nsqd, data).startswith(b"HTTP/1.1 400 ")
    assert nsqd.get("/ping") == b"OK"


def test_a_body_that_nobody_reads_leaves_the_connection(any_nsqd: AnyNsqd) -> None:
    refused = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\nxxxxxxxxxxx"
    ping = b"GET /ping HTTP/1.1\r\n" + CLOSE + b"\r\n"
    answer = talk(any_nsqd("-max-msg-size=10"), refused + ping)
    assert b" 413 " in answer
    assert answer.endswith(b"\r\n\r\nOK")


def test_who_reads_late_gets_all_answers_in_order(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    for number in range(100):
        nsqd.create_topic(f"t{number}")
    page = b"GET /stats?format=json HTTP/1.1\r\nHost: x\r\n\r\n"
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = talk(nsqd, (page + ping) * 100 + b"GET /ping HTTP/1.1\r\n" + CLOSE + b"\r\n")
    kinds = re.findall(rb"Content-Type: (text|application)", answer)
    assert kinds == [b"application", b"text"] * 100 + [b"text"]
