"""The connections of an nsqd to nsqlookupd: registration, pings and reconnects.

Every `LookupPeer` has its own task and queue, so a peer that hangs delays no other. The end of a
connection is detected immediately, and after a reconnect everything is registered again.

`LookupRegistry` registers topics and channels with all nsqlookupd. A new topic may have channels on
other nsqd of the cluster. It is started when every nsqlookupd with a connection has been asked for
these, and they have been created here, so that no channel misses a message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
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
    """Registers topics and channels with all nsqlookupd, after `set_addresses` in the loop."""

    def __init__(
        self, topics: Mapping[str, Topic], options: NsqdOptions, log: DaemonLog, own_info: PeerInfo
    ) -> None:
        self._topics, self._log = topics, log
        self._own_info = own_info
        self._peers: dict[str, LookupPeer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._options = options

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Connect to new addresses, and disconnect from all that are not in ``addresses``."""
        new_addresses = set(addresses)
        for address in self._peers.keys() - new_addresses:
            self._log.info(f"LOOKUP({address}): removing peer")
            self._create_task(self._peers.pop(address).stop())
        for address in new_addresses - self._peers.keys():
            self._log.info(f"LOOKUP({address}): adding peer")
            self._peers[address] = LookupPeer(
                address, self._own_info, self._registrations, self._log
            )

    async def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(peer.stop() for peer in self._peers.values()))

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
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

    # changes

    def topic_created(self, topic: Topic) -> None:
        """Register the topic, and start it with the channels that it has on other nsqd."""
        self._send(encode_register(topic.name))
        infos = [peer.info for peer in self._peers.values() if peer.info is not None]
        if infos:
            self._create_task(self._start_with_channels(topic, infos))
        else:
            topic.start()

    def topic_deleted(self, topic: Topic) -> None:
        """Unregister the topic. Its channels are unregistered by `channel_deleted`."""
        self._send(encode_unregister(topic.name))

    def channel_created(self, channel: Channel) -> None:
        """Register the channel."""
        self._send(encode_register(channel.topic_name, channel.name))

    def channel_deleted(self, channel: Channel) -> None:
        """Unregister the channel."""
        self._send(encode_unregister(channel.topic_name, channel.name))

    async def _start_with_channels(self, topic: Topic, infos: list[PeerInfo]) -> None:
        try:
            # All nsqlookupd are asked at the same time, so a slow one costs its timeout only once.
            requests = (self._fetch_channels(info, topic.name) for info in infos)
            channels = set().union(*await asyncio.gather(*requests))
            if self._topics.get(topic.name) is topic:  # otherwise deleted meanwhile
                for name in sorted(channels):
                    if is_valid_name(name) and not is_ephemeral(name):
                        topic.get_channel(name)
        finally:
            topic.start()

    async def _fetch_channels(self, info: PeerInfo, topic_name: str) -> set[str]:
        address = Address(info.broadcast_address, info.http_port)
        url = f"http://{address}/channels?topic={quote(topic_name)}"
        try:
            # The URL is always plain HTTP. Without verify=False each call creates a TLS context.
            answer = json.loads(await http_get(url, self._options, verify=False))
            return {str(name) for name in answer["channels"]}
        except Exception as exc:  # any kind: the JSON may have any shape and depth
            reason = str(exc) or "no answer in time"
            self._log.warn(f"failed to query nsqlookupd for channels - {url}: {reason}")
            return set()


_TIMEOUT_S = 1.0  # of a connect, and of each answer
_PING_INTERVAL_S = 15.0  # as nsqd; nsqlookupd hides a peer that is silent for 300 s
_RETRY_S = 1.0
_MAX_ANSWER_SIZE = 1 << 20  # an answer has at most some hundred bytes


class LookupPeer:
    """The connection to one nsqlookupd, from construction to `stop`.

    ``registrations`` returns the commands that register all current topics and channels. ``info``
    is the answer to IDENTIFY, None while there is no connection.
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
        self._failure = ""  # the last one in the log: the same failure is logged once
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Close the connection without unregistering anything, as nsqd does."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def send(self, command: bytes) -> None:
        """Send a command. Without a connection it is dropped: a reconnect registers everything."""
        if self.info is not None:
            self._commands.put_nowait(command)

    async def _run(self) -> None:
        while True:
            try:
                await self._connect_and_serve()
            except Exception as exc:  # any kind, for example no thread for the DNS query
                reason = str(exc) or type(exc).__name__
                if reason != self._failure:
                    self._log.error(f"LOOKUPD({self.address}): {reason}")
                self._failure = reason
            await asyncio.sleep(_RETRY_S)

    async def _connect_and_serve(self) -> None:
        if not self._failure:
            self._log.info(f"LOOKUP connecting to {self.address}")
        host, port = parse_address(self.address, LOOKUPD_TCP_PORT)
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(MAGIC_V1)
            answer = await self._ask(reader, writer, identify(self._own_info.encode()))
            self.info = decode_peer_info(answer)
            self._log.info(f"LOOKUPD({self.address}): peer info {self.info}")
            self._failure = ""
            self._commands: asyncio.Queue[bytes] = asyncio.Queue()
            # A list of this moment: topics that are created during the registration are queued.
            for command in list(self._registrations()):
                await self._ask(reader, writer, command)
            await self._send_commands(reader, writer)
        finally:
            self.info = None
            writer.close()

    async def _send_commands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send queued commands and pings until the connection ends."""
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
            if loop.time() >= ping_s:  # nsqlookupd counts a PING only, not a REGISTER
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
