"""The connection of an nsqd to an nsqlookupd."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import httpx
from plugins.waiting import patience_s

from nsqtools.protocol.lookup_v1 import PeerInfo, encode_register
from nsqtools.server import EmbeddedNsqlookupd
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.lookup_peers import LookupPeer

INFO = PeerInfo(broadcast_address="nsqd.example", http_port=4151, tcp_port=4150, version="1.3.0")
TIMEOUT_S = patience_s(10.0)


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
    answer = httpx.get(f"http://{lookupd.http_address}/topics").raise_for_status()
    return str(answer.json()["topics"])
