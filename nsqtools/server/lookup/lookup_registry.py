"""All nsqlookupd of an nsqd: announces topics and channels, and asks for those of a new topic.

A topic that is created here may have channels elsewhere in the cluster. They are created before the
first message may flow, so that no channel misses messages: the topic is not started until every
nsqlookupd that can be reached has been asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from nsqtools.protocol.lookup_v1 import PeerInfo, encode_register, encode_unregister
from nsqtools.protocol.names import is_ephemeral, is_valid_name
from nsqtools.server.lookup.peer import LookupPeer
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.topic import Topic


class LookupRegistry:
    """See `nsqd_queues.Registry`. Call `set_addresses` to begin, in the running loop."""

    def __init__(self, nsqd: NsqdQueues, own_info: PeerInfo) -> None:
        self._nsqd = nsqd
        self._own_info = own_info
        self._peers: dict[str, LookupPeer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        options = nsqd.options
        self._timeout = httpx.Timeout(
            options.http_client_request_timeout, connect=options.http_client_connect_timeout
        )

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Connect to these, and drop the others."""
        wanted = set(addresses)
        for address in self._peers.keys() - wanted:
            self._nsqd.log.info(f"LOOKUP({address}): removing peer")
            self._do(self._peers.pop(address).stop())
        for address in wanted - self._peers.keys():
            self._nsqd.log.info(f"LOOKUP({address}): adding peer")
            peer = LookupPeer(address, self._own_info, self._registrations, self._nsqd.log)
            self._peers[address] = peer
            peer.start()

    async def stop(self) -> None:
        """Drop all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(peer.stop() for peer in self._peers.values()))

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _registrations(self) -> Iterator[bytes]:
        for topic in self._nsqd.topics.values():
            if not topic.channels:
                yield encode_register(topic.name)
            for channel in topic.channels:
                yield encode_register(topic.name, channel)

    def _send(self, command: bytes) -> None:
        for peer in self._peers.values():
            peer.send(command)

    # nsqd_queues.Registry

    def topic_created(self, topic: Topic) -> None:
        """Announce it, and start it with the channels that it has elsewhere."""
        self._send(encode_register(topic.name))
        infos = [peer.info for peer in self._peers.values() if peer.info is not None]
        if infos:
            self._do(self._start_with_channels(topic, infos))
        else:
            topic.start()

    def topic_deleted(self, topic: Topic) -> None:
        """Take it back, and its channels after it."""
        self._send(encode_unregister(topic.name))
        for name in topic.channels:
            self._send(encode_unregister(topic.name, name))

    def channel_created(self, channel: Channel) -> None:
        """Announce it."""
        self._send(encode_register(channel.topic_name, channel.name))

    def channel_deleted(self, channel: Channel) -> None:
        """Take it back."""
        self._send(encode_unregister(channel.topic_name, channel.name))

    async def _start_with_channels(self, topic: Topic, infos: list[PeerInfo]) -> None:
        try:
            found = await asyncio.gather(*(self._channels_at(info, topic.name) for info in infos))
            if self._nsqd.topics.get(topic.name) is topic:
                for name in sorted(set().union(*found)):
                    if is_valid_name(name) and not is_ephemeral(name):
                        topic.get_channel(name)
        finally:
            topic.start()

    async def _channels_at(self, info: PeerInfo, topic_name: str) -> set[str]:
        url = f"http://{info.broadcast_address}:{info.http_port}/channels"
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        try:
            # plain HTTP, always: without verify=False every call would build a TLS context
            async with httpx.AsyncClient(
                timeout=self._timeout, verify=False, trust_env=False
            ) as client:
                response = await client.get(url, params={"topic": topic_name}, headers=headers)
                response.raise_for_status()
                return {str(name) for name in response.json()["channels"]}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as exc:
            self._nsqd.log.warn(f"failed to query nsqlookupd for channels - {url}: {exc}")
            return set()
