"""A network that misbehaves on request: a TCP proxy, and addresses that never answer.

    def test_...(proxy_to, nsqd):
        proxy = proxy_to(nsqd.tcp_address)
        ...                         # the client connects to proxy.address
        proxy.pause(TO_CLIENT)      # half-open: bytes from nsqd do not arrive any more
        proxy.resume(TO_CLIENT)     # now they do
        proxy.pause_after(TO_SERVER, 1000)  # half-open after about 1,000 more bytes
        proxy.cut(reset=True)       # all connections end with RST; new ones are accepted

The proxy is an asyncio loop in its own thread, and its methods return when they have taken effect.
The end of one side of a connection (end of file, reset) is passed on to the other side.
"""

import asyncio
import math
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, Literal, Self, TypeVar

import pytest
from plugins.waiting import patience_s

Direction = Literal["to client", "to server"]
TO_CLIENT: Direction = "to client"
TO_SERVER: Direction = "to server"

READ_SIZE = 1 << 16
CALL_TIMEOUT_S = patience_s(5.0)
NO_LINGER = struct.pack("ii", 1, 0)  # makes close() send RST

T = TypeVar("T")


class Proxy:
    """Forwards connections to `target`. Use it as a context manager.

    ``delay_s`` passes before each piece is passed on, and a piece is at most ``piece_size`` bytes.
    Both hold for both directions and may be set at any time. With ``tls`` it is the TLS end of a
    server that speaks plain text.
    """

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self.address = ""
        self._tls = tls
        self.delay_s = 0.0
        self.piece_size = READ_SIZE
        self._target_host, _, self._target_port = target.rpartition(":")
        self._flowing = {TO_CLIENT: asyncio.Event(), TO_SERVER: asyncio.Event()}
        self._left: dict[Direction, float] = {}  # bytes until a direction pauses by itself
        self._connections: set[asyncio.Task[None]] = set()
        # a cut waits, because an incomplete connection cannot be ended cleanly
        self._connecting = asyncio.Lock()
        self._cut_with_reset = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def pause(self, direction: Direction) -> None:
        """Hold back all bytes of a direction, and the end of file."""
        self._call(self._set_flow(direction, 0))

    def pause_after(self, direction: Direction, size: int) -> None:
        """Deliver the held bytes, and ``size`` bytes more of all connections, then hold back.

        The piece that exceeds the size is delivered whole.
        """
        self._call(self._set_flow(direction, size))

    def is_paused(self, direction: Direction) -> bool:
        return not self._flowing[direction].is_set()

    def resume(self, direction: Direction) -> None:
        """Deliver the held bytes, and continue."""
        self._call(self._set_flow(direction, math.inf))

    def cut(self, *, reset: bool) -> None:
        """End every connection on both sides, with RST or with FIN."""
        self._call(self._cut(reset))

    def __enter__(self) -> Self:
        self._thread.start()
        self.resume(TO_CLIENT)
        self.resume(TO_SERVER)
        self._server = self._call(
            asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=self._tls)
        )
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    def __exit__(self, *exception: object) -> None:
        self._call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    async def _set_flow(self, direction: Direction, size: float) -> None:
        self._left[direction] = size
        if size:
            self._flowing[direction].set()
        else:
            self._flowing[direction].clear()

    async def _cut(self, reset: bool) -> None:
        async with self._connecting:
            self._cut_with_reset = reset
            connections = list(self._connections)
            for connection in connections:
                connection.cancel()
        await asyncio.gather(*connections)

    async def _finish(self) -> None:
        """Cut, and cancel incomplete connections, whose sockets would be collected unclosed."""
        self._server.close()
        await self._cut(reset=True)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        """Copy both ways until both have ended, one fails, or the connection is cut."""
        connection = asyncio.current_task()
        writers = [client_writer]
        reset = False
        try:
            async with self._connecting:
                server_reader, server_writer = await asyncio.open_connection(
                    self._target_host, self._target_port
                )
                writers.append(server_writer)
                self._connections.add(connection)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(server_reader, client_writer, TO_CLIENT))
                both.create_task(self._copy(client_reader, server_writer, TO_SERVER))
        except* OSError:
            reset = True
        except* asyncio.CancelledError:
            reset = self._cut_with_reset
        for writer in writers:
            if reset and not writer.transport.is_closing():
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                writer.transport.abort()
            else:
                writer.close()
        self._connections.discard(connection)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        flowing = self._flowing[direction]
        while data := await reader.read(READ_SIZE):
            while data:
                await flowing.wait()
                await asyncio.sleep(self.delay_s)
                piece, data = data[: self.piece_size], data[self.piece_size :]
                self._left[direction] -= len(piece)
                if self._left[direction] <= 0:
                    flowing.clear()
                writer.write(piece)
                await writer.drain()
        await flowing.wait()
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS closes both directions together
            writer.close()


ProxyTo = Callable[..., Proxy]


@pytest.fixture
def proxy_to() -> Iterator[ProxyTo]:
    """A factory: ``proxy_to("127.0.0.1:4150").address``."""
    with ExitStack() as proxies:
        yield lambda target, tls=None: proxies.enter_context(Proxy(target, tls))


@pytest.fixture
def dead_address() -> Iterator[str]:
    """An address that refuses connections; its port stays reserved."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*held.getsockname())


@pytest.fixture
def deaf_address() -> Iterator[str]:
    """An address that accepts connections, but never reads or answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "{}:{}".format(*listener.getsockname())


@pytest.fixture
def unreachable_address() -> Iterator[str]:
    """An address that never answers a connect, as behind a firewall that drops packets.

    Linux drops the first packet of a connection while the listener's backlog is full.
    """
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield "{}:{}".format(*listener.getsockname())


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every lookup of a name wait for an answer, as without a network."""
    ends, look_up = threading.Event(), socket.getaddrinfo

    def wait(host: str, *more: Any, flags: int = 0, **kwargs: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            ends.wait(patience_s(30))
        return look_up(host, *more, flags=flags | socket.AI_NUMERICHOST, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield
    ends.set()
