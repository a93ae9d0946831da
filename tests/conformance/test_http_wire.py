"""HTTP below the endpoints, on both nsqd: versions, keep-alive, pipelining, broken requests."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

from plugins.http_api import Nsqd
from plugins.waiting import patience_s

AnyNsqd = Callable[..., Nsqd]
CLOSE = b"Host: x\r\nConnection: close\r\n"


def talk(nsqd: Nsqd, data: bytes) -> bytes:
    """Send bytes, stop sending, and return all that comes back."""
    host, _, port = nsqd.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience_s(10.0)) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def test_who_reads_late_gets_all_answers_in_order(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    for number in range(100):
        nsqd.create_topic(f"t{number}")
    page = b"GET /stats?format=json HTTP/1.1\r\nHost: x\r\n\r\n"
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = talk(nsqd, (page + ping) * 100 + b"GET /ping HTTP/1.1\r\n" + CLOSE + b"\r\n")
    kinds = re.findall(rb"Content-Type: (text|application)", answer)
    assert kinds == [b"application", b"text"] * 100 + [b"text"]
