"""The connection of an nsqd to one nsqlookupd: registered, kept alive, made again when it breaks.

Every peer has its own task and queue, so one that hangs delays nobody. A connection that ends is
noticed at once; after it is made again everything is registered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from nsqtools.errors import NsqError, ProtocolError
from nsqtools.protocol.addresses import LOOKUPD_TCP_PORT, parse_address
from nsqtools.protocol.lookup_v1 import (
    MAGIC_V1,
    PING,
    PeerInfo,
    decode_peer_info,
    encode_identify,
)
from nsqtools.server.daemon_log import DaemonLog

_TIMEOUT_S = 1.0  # to connect, and for each answer
_PING_INTERVAL_S = 15.0
_RETRY_S = 1.0
_MAX_ANSWER_SIZE = 1 << 20


class LookupPeer:
    """One nsqlookupd. ``registrations`` returns the commands that describe what there is now.

    ``info`` is its answer to IDENTIFY, None while there is no connection.
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
        self._commands: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect from now on, in a task."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Drop the connection; nothing is unregistered, as nsqd does it."""
        if self._task is not None:
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
            except (OSError, EOFError, NsqError, TimeoutError) as exc:
                self._log.error(f"LOOKUPD({self.address}): {exc or type(exc).__name__}")
            await asyncio.sleep(_RETRY_S)

    async def _converse(self) -> None:
        self._log.info(f"LOOKUP connecting to {self.address}")
        host, port = parse_address(self.address, LOOKUPD_TCP_PORT)
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(MAGIC_V1)
            self.info = await self._identify(reader, writer)
            self._commands = asyncio.Queue()
            # all at once: what is created while they are sent is queued
            for command in list(self._registrations()):
                await self._ask(reader, writer, command)
            await self._follow(reader, writer)
        finally:
            self.info = None
            writer.close()

    async def _identify(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> PeerInfo:
        answer = await self._ask(reader, writer, encode_identify(self._own_info))
        info = decode_peer_info(answer)
        self._log.info(f"LOOKUPD({self.address}): peer info {info}")
        return info

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the commands that come, until the connection ends."""
        while True:
            ended = asyncio.create_task(reader.read(1))
            command = asyncio.create_task(self._commands.get())
            try:
                await asyncio.wait(
                    (ended, command),
                    timeout=_PING_INTERVAL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if ended.done():
                    raise EOFError("the connection ended")
            finally:
                ended.cancel()
                command.cancel()
                await asyncio.wait((ended, command))
            sent = PING if command.cancelled() else command.result()
            await self._ask(reader, writer, sent)

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
