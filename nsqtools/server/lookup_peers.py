"""The connection of an nsqd to one nsqlookupd: registered, kept alive, made again when it breaks.

Every peer has its own task and queue, so one that hangs delays no other. A connection that ends is
noticed at once; after it is made again everything is registered again.

`LookupRegistry` announces topics and channels to all nsqlookupd, and asks for those of a new
topic: one that is created here may have channels elsewhere in the cluster. They are created before
the first message may flow, so that no channel misses messages: the topic is not started until
every nsqlookupd that can be reached has been asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from nsqtools.errors import ProtocolError
from nsqtools.protocol.commands import identify
from nsqtools.protocol.names import (
    LOOKUPD_TCP_PORT,
    Address,
    is_ephemeral,
    is_valid_name,
    parse_address,
)
from nsqtools.protocol.requests import (
    MAGIC_V1,
    PING,
    PeerInfo,
    decode_peer_info,
    encode_register,
    encode_unregister,
)
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.http_get import http_get
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.topic import Topic


class LookupRegistry:
    """Tells all nsqlookupd. Call `set_addresses` to begin, in the running loop."""

    def __init__(
        self, topics: Mapping[str, Topic], options: NsqdOptions, log: DaemonLog, own_info: PeerInfo
    ) -> None:
        self._topics, self._log = topics, log
        self._own_info = own_info
        self._peers: dict[str, LookupPeer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._options = options

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Connect to these, and drop the others."""
        wanted = set(addresses)
        for address in self._peers.keys() - wanted:
            self._log.info(f"LOOKUP({address}): removing peer")
            self._do(self._peers.pop(address).stop())
        for address in wanted - self._peers.keys():
            self._log.info(f"LOOKUP({address}): adding peer")
            self._peers[address] = LookupPeer(
                address, self._own_info, self._registrations, self._log
            )

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
        for topic in self._topics.values():
            if not topic.channels:
                yield encode_register(topic.name)
            for channel in topic.channels:
                yield encode_register(topic.name, channel)

    def _send(self, command: bytes) -> None:
        for peer in self._peers.values():
            peer.send(command)

    # what changes

    def topic_created(self, topic: Topic) -> None:
        """Announce it, and start it with the channels that it has elsewhere."""
        self._send(encode_register(topic.name))
        infos = [peer.info for peer in self._peers.values() if peer.info is not None]
        if infos:
            self._do(self._start_with_channels(topic, infos))
        else:
            topic.start()

    def topic_deleted(self, topic: Topic) -> None:
        """Take it back; its channels come after it."""
        self._send(encode_unregister(topic.name))

    def channel_created(self, channel: Channel) -> None:
        """Announce it."""
        self._send(encode_register(channel.topic_name, channel.name))

    def channel_deleted(self, channel: Channel) -> None:
        """Take it back."""
        self._send(encode_unregister(channel.topic_name, channel.name))

    async def _start_with_channels(self, topic: Topic, infos: list[PeerInfo]) -> None:
        try:
            found = await asyncio.gather(*(self._channels_at(info, topic.name) for info in infos))
            if self._topics.get(topic.name) is topic:
                for name in sorted(set().union(*found)):
                    if is_valid_name(name) and not is_ephemeral(name):
                        topic.get_channel(name)
        finally:
            topic.start()

    async def _channels_at(self, info: PeerInfo, topic_name: str) -> set[str]:
        address = Address(info.broadcast_address, info.http_port)
        url = f"http://{address}/channels?topic={quote(topic_name)}"
        try:
            # plain HTTP, always: without verify=False every call would build a TLS context
            answer = json.loads(await http_get(url, self._options, verify=False))
            return {str(name) for name in answer["channels"]}
        except Exception as exc:  # JSON of any shape and depth
            reason = str(exc) or "no answer in time"
            self._log.warn(f"failed to query nsqlookupd for channels - {url}: {reason}")
            return set()


_TIMEOUT_S = 1.0  # to connect, and for each answer
_PING_INTERVAL_S = 15.0
_RETRY_S = 1.0
_MAX_ANSWER_SIZE = 1 << 20


class LookupPeer:
    """One nsqlookupd, from now to `stop`.

    ``registrations`` returns the commands that describe what there is now. ``info`` is its answer
    to IDENTIFY, None while there is no connection.
    """

    def __init__(
        self,
        address: str,
        own_info: PeerInfo,
        registrations: Callable[[], Iterable[bytes]],
        log: DaemonLog,
    ) -> None:
        self.address = address
        self.info: PeerInfo | None = None
        self._own_info = own_info
        self._registrations = registrations
        self._log = log
        self._said = ""  # the failure that was logged last: each is logged once
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Drop the connection; nothing is unregistered, as nsqd does it."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def send(self, command: bytes) -> None:
        """Send a command; registering again makes up for one that finds no connection."""
        if self.info is not None:
            self._commands.put_nowait(command)

    async def _run(self) -> None:
        while True:
            try:
                await self._converse()
            except Exception as exc:  # of any kind, such as no thread to look the name up
                reason, before = str(exc) or type(exc).__name__, self._said
                self._said = reason
                if reason != before:
                    self._log.error(f"LOOKUPD({self.address}): {reason}")
            await asyncio.sleep(_RETRY_S)

    async def _converse(self) -> None:
        if not self._said:
            self._log.info(f"LOOKUP connecting to {self.address}")
        host, port = parse_address(self.address, LOOKUPD_TCP_PORT)
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(MAGIC_V1)
            answer = await self._ask(reader, writer, identify(self._own_info.encode()))
            self.info = decode_peer_info(answer)
            self._log.info(f"LOOKUPD({self.address}): peer info {self.info}")
            self._said = ""
            self._commands: asyncio.Queue[bytes] = asyncio.Queue()
            # all at once: what is created while they are sent is queued
            for command in list(self._registrations()):
                await self._ask(reader, writer, command)
            await self._follow(reader, writer)
        finally:
            self.info = None
            writer.close()

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the commands that come, and pings, until the connection ends."""
        loop = asyncio.get_running_loop()
        ping_s = loop.time() + _PING_INTERVAL_S
        while True:
            ended = asyncio.create_task(reader.read(1))
            command = asyncio.create_task(self._commands.get())
            try:
                left_s = ping_s - loop.time()
                await asyncio.wait(
                    (ended, command), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if ended.done():
                    raise EOFError("the connection ended")
            finally:
                ended.cancel()
                command.cancel()
                await asyncio.wait((ended, command))
            if not command.cancelled():
                await self._ask(reader, writer, command.result())
            if loop.time() >= ping_s:  # a registration does not count as one
                await self._ask(reader, writer, PING)
                ping_s = loop.time() + _PING_INTERVAL_S

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, command: bytes
    ) -> bytes:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(command)
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > _MAX_ANSWER_SIZE:
                raise ProtocolError(f"an answer of {size} bytes")
            answer = await reader.readexactly(size)
        if answer.startswith(b"E_"):
            raise ProtocolError(f"{command.split()[0].decode()} was answered with {answer!r}")
        return answer
