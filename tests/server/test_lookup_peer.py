"""The connection of an nsqd to an nsqlookupd."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from threading import Event

import httpx
import pytest
from plugins.waiting import patience_s, wait_until

from nsqtools.protocol.names import Address
from nsqtools.protocol.requests import PeerInfo, encode_register
from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.lookup_peers import LookupPeer

INFO = PeerInfo(broadcast_address="nsqd.example", http_port=4151, tcp_port=4150, version="1.3.0")
TIMEOUT_S = patience_s(10.0)
Answer = Callable[[StreamReader, StreamWriter], Coroutine[None, None, None]]


def test_a_topic_that_is_created_while_others_are_announced_is_announced_too() -> None:
    with EmbeddedNsqlookupd() as lookupd:
        asyncio.run(announce_while_more_come(lookupd))


async def announce_while_more_come(lookupd: EmbeddedNsqlookupd) -> None:
    topics = {"old": 1}
    log = io.StringIO()

    def create() -> None:
        topics["new"] = 1
        peer.send(encode_register("new"))

    def registrations() -> Iterator[bytes]:
        for topic in topics:
            # runs as soon as an answer is waited for
            asyncio.get_running_loop().call_soon(create)
            yield encode_register(topic)

    peer = LookupPeer(lookupd.tcp_address, INFO, registrations, DaemonLog(log, ""))
    peer.start()
    async with asyncio.timeout(TIMEOUT_S):
        while "'new'" not in await asyncio.to_thread(known_topics, lookupd):
            await asyncio.sleep(0.01)
    assert "'old'" in await asyncio.to_thread(known_topics, lookupd)
    assert "ERROR" not in log.getvalue()
    await peer.stop()


def known_topics(lookupd: EmbeddedNsqlookupd) -> str:
    answer = httpx.get(
        f"http://{lookupd.http_address}/topics", timeout=patience_s(5)
    ).raise_for_status()
    return str(answer.json()["topics"])


async def answer_tcp(
    http_port: int, identified: Event, reader: StreamReader, writer: StreamWriter
) -> None:
    """An nsqlookupd: OK to everything, and its HTTP port to IDENTIFY."""
    info = json.dumps({"broadcast_address": "127.0.0.1", "http_port": http_port, "tcp_port": 1})
    await reader.readexactly(4)
    with suppress(IncompleteReadError, ConnectionError):
        while line := await reader.readline():
            answer = b"OK"
            if line.startswith(b"IDENTIFY"):
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                await reader.readexactly(size)
                answer = info.encode()
            writer.write(struct.pack(">I", len(answer)) + answer)
            await writer.drain()
            if line.startswith(b"REGISTER"):  # so the answer to IDENTIFY was read
                identified.set()
    writer.close()


async def drip(reader: StreamReader, writer: StreamWriter) -> None:
    """An HTTP server whose answer never ends, and never pauses for long."""
    with suppress(ConnectionError):
        writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not reader.at_eof():
            writer.write(b"x")
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1000), 0.05)
    writer.close()


async def nest(reader: StreamReader, writer: StreamWriter) -> None:
    """An HTTP server whose answer is deeper than JSON is read."""
    body = b"[" * 100_000
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await reader.read()
    writer.close()


@pytest.mark.parametrize(("answer", "other_host"), [(drip, "127.0.0.1"), (nest, "::1")])
def test_a_new_topic_has_the_channels_of_the_other_nsqlookupd(
    answer: Answer, other_host: str
) -> None:
    """One answers byte by byte or too deeply, another is at no possible name."""
    asyncio.run(create_a_topic_beside_a_bad_nsqlookupd(answer, other_host))


async def create_a_topic_beside_a_bad_nsqlookupd(answer: Answer, other_host: str) -> None:
    http = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = http.sockets[0].getsockname()[1]
    identified = Event()
    tcp = await asyncio.start_server(partial(answer_tcp, port, identified), "127.0.0.1", 0)
    host, tcp_port = tcp.sockets[0].getsockname()
    place = f"{host}:{tcp_port}"

    log = io.StringIO()

    def publish() -> bytes:
        timeouts = {"http_client_connect_timeout": 0.2, "http_client_request_timeout": 0.3}
        address = str(Address(other_host, 0))
        with EmbeddedNsqlookupd(http_address=address, broadcast_address=other_host) as other:
            channel = "topic=clicks&channel=archive"
            httpx.post(
                f"http://{other.http_address}/channel/create?{channel}", timeout=patience_s(5)
            ).raise_for_status()
            places = [place, other.tcp_address, "a..b:4160"]
            with EmbeddedNsqd(lookupd_tcp_address=places, log=log, **timeouts) as nsqd:
                url = f"http://{nsqd.http_address}"
                httpx.post(f"{url}/pub?topic=early", content=b"one", timeout=TIMEOUT_S)
                assert identified.wait(TIMEOUT_S)
                wait_until(lambda: "'early'" in known_topics(other), what="it is registered")
                httpx.post(f"{url}/pub?topic=clicks", content=b"one", timeout=TIMEOUT_S)
                return httpx.get(f"{url}/stats?topic=clicks", timeout=patience_s(5)).content

    async with http, tcp, asyncio.timeout(TIMEOUT_S):
        assert b"[archive" in await asyncio.to_thread(publish)
    assert "ERROR: LOOKUPD(a..b:4160): " in log.getvalue()
