"""HTTP/1.1 in the daemon's own loop, as Go's net/http serves it.

httptools parses. Requests of a connection are answered one after the other, most of them at once;
while one waits for something (the disk, a page that takes steps) no further ones are read.

A client has its time for each step: a head, a body, reading an answer. One that takes longer is
closed, as is the oldest of too many connections that wait.

`nsq web` is served by it too: an `Api` may answer with a `Stream`, which ends with its client.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable
from contextlib import aclosing
from email.utils import formatdate
from http import HTTPStatus
from ssl import SSLContext
from typing import NamedTuple, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

from nsqtools.server.http.foundation import BAD_ESCAPE, Call, ForeignCalls, Reply, Stream
from nsqtools.server.listen import IdleConnections, accept, read_in_pieces, real_address

_LINGER_S = 0.5  # a client that still sends can read the answer before the reset
_MAX_HEAD = (1 << 20) + 4096
_HEAD_S = 10.0  # from the first byte of a request to the end of its head
_BODY_S = 30.0
_SLOWEST_BODY = 16 << 10  # bytes a second, beside those seconds
_READ_S = 60.0  # for an answer that fills the buffers of the system
_MAX_DRAINED = 256 << 10  # bytes of a body that no handler reads, to keep the connection
_HOST = re.compile(r"[^\s/@\\]+")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {int(each): each.phrase.encode() for each in HTTPStatus}
_REASONS[413] = b"Request Entity Too Large"  # Python has other names for it
_WITHOUT_BODY = (204, 304)


class _Refused(Exception):
    """Read no more of this connection, and answer with this status."""

    def __init__(self, status: int, text: bytes = b"") -> None:
        super().__init__(status)
        reason = b"%d %b" % (status, _REASONS[status])
        self.answer = (
            b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Connection: close\r\n\r\n%b" % (reason, text or reason)
        )


class Api(Protocol):
    """What a server asks; its methods must not block, nor raise."""

    def find(self, call: Call) -> None:
        """Set how much is read of the body of a call whose head is known."""

    def answer(self, call: Call) -> Reply | Awaitable[Reply | Stream]:
        """Answer a call."""

    def report(self, call: Call, status: int) -> None:
        """Note how a call was answered."""


class Limits(NamedTuple):
    """What a server grants its clients beside the time for each step."""

    idle_s: float = 120.0  # between two requests
    most_idle: int = 8192
    most_idle_of_one: int = 1024
    finish_s: float = 1.0  # at the end, for requests that are being answered


class HTTPServer:
    """One listening socket of an HTTP API."""

    def __init__(
        self,
        api: Api,
        listener: socket.socket,
        tls_context: SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.api = api
        self.limits = limits = limits or Limits()
        self.connections: set[_Connection] = set()
        self.idle = IdleConnections[_Connection](
            most=limits.most_idle, most_of_one=limits.most_idle_of_one
        )
        self._listener = listener
        self._tls_context = tls_context
        self._server: asyncio.Server | None = None
        self._date = b""
        self._date_of = 0
        self._sweeps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve from now on."""
        self._server = await accept(self._listener, lambda: _Connection(self), self._tls_context)
        self._sweeps = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Let requests that are being answered finish, for a moment, and close everything."""
        if self._server is None:
            return
        self._server.close()
        if self._sweeps is not None:
            self._sweeps.cancel()
        tasks = [task for each in list(self.connections) if (task := each.stop())]
        if tasks:
            await asyncio.wait(tasks, timeout=self.limits.finish_s)
        for connection in list(self.connections):
            connection.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self.idle.close_late(loop.time())

    def date(self) -> bytes:
        """Return the time as answers have it."""
        now_s = int(time.time())
        if now_s != self._date_of:
            self._date_of, self._date = now_s, formatdate(now_s, usegmt=True).encode()
        return self._date


class _Connection(asyncio.Protocol):
    def __init__(self, server: HTTPServer) -> None:
        self._server = server
        self._api = server.api
        self._parser = httptools.HttpRequestParser(self)
        self._transport = cast(asyncio.Transport, None)  # until connection_made
        self._client = ""
        self._target = b""
        self._headers: dict[str, str] = {}
        self._call: Call | None = None  # whose body is being read
        self._chunks: list[bytes] = []
        self._body_size = 0
        self._head_size = 0  # bytes that came since the last of a body
        self._calls: deque[Call] = deque()  # to be answered
        self._task: asyncio.Task[None] | None = None  # answers one
        self._is_last = False  # no further bytes are read
        self._farewell: bytes | None = None  # sent after the answers, to a client that still sends
        self._stream_room: asyncio.Event | None = None  # of a stream: the client reads
        self._is_full = False  # the client reads too slowly
        self._waits_for_s = 0.0  # the time that the present step has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        read_in_pieces(transport)
        self._server.connections.add(self)
        peer = transport.get_extra_info("peername")
        self._client = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        self._wait_for(_HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._server.idle.works(self)
        self._calls.clear()
        if self._task is not None and self._stream_room is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        is_busy = bool(self._calls) or (self._task is not None and self._stream_room is None)
        self._is_last = True
        return is_busy and self._transport.get_extra_info("sslcontext") is None

    def stop(self) -> asyncio.Task[None] | None:
        """Close, at once or after what is being answered, which is returned."""
        self._is_last = True
        self._calls.clear()
        if self._task is None:
            self._transport.close()
        return self._task

    def abort(self) -> None:
        """Close at once: the client takes too long."""
        self._calls.clear()
        self._transport.abort()

    def close(self) -> None:
        """Close, whatever is being answered."""
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        self._head_size += len(data)
        try:
            self._parser.feed_data(data)
            if self._head_size > _MAX_HEAD:
                raise _Refused(431)
        except httptools.HttpParserUpgrade:
            self._is_last = True  # answered as if it had not asked for another protocol
        except (httptools.HttpParserError, _Refused) as exc:
            if not self._is_last:
                refused = exc if isinstance(exc, _Refused) else exc.__context__
                if not isinstance(refused, _Refused):
                    refused = _Refused(400)
                self._end(refused.answer)
        self._answer()

    def _end(self, farewell: bytes) -> None:
        self._is_last = True
        self._farewell = farewell

    # what the parser finds

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._call is None:  # else it follows the chunks of a body
            key = name.decode("latin-1").lower()
            if key == "host" and key in self._headers:
                raise _Refused(400)
            text = value.decode("latin-1")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        target = self._target.decode("latin-1")
        path, _, query_string = target.partition("?")
        if not path.startswith("/"):  # to a proxy
            parts = urlsplit(target)
            path = parts.path
            if parts.netloc:
                headers["host"] = parts.netloc
        if "%" in path:
            if BAD_ESCAPE.search(path):
                raise _Refused(400)
            path = unquote(path)
        call = Call(
            parser.get_method().decode(),
            target,
            path,
            query_string,
            headers,
            is_old=parser.get_http_version() == "1.0",
            closes=not parser.should_keep_alive() or parser.should_upgrade(),
            client=self._client,
        )
        if not call.is_old and not _HOST.fullmatch(headers.get("host", "")):
            raise _Refused(400)
        is_chunked = "transfer-encoding" in headers
        if is_chunked and headers["transfer-encoding"].lower() != "chunked":
            raise _Refused(501, b"Unsupported transfer encoding")
        self._call = call
        self._api.find(call)
        length = call.declared_length
        if length > max(call.limit, _MAX_DRAINED):
            self._do_not_read(call)
        if "expect" in headers:
            if headers["expect"].lower() != "100-continue":
                call.handler = lambda call: Reply(417, b"")
                self._do_not_read(call)
            if length > 0 or is_chunked:
                if not 0 < max(length, 1) <= call.limit:
                    self._do_not_read(call)
                if not self._calls and self._task is None:
                    self._transport.write(_CONTINUE)

    def _do_not_read(self, call: Call) -> None:
        """Answer without the body, and close: the parser is made to stop."""
        call.body, call.closes = None, True
        self._calls.append(call)
        self._end(b"")
        raise _Refused(413)

    def on_body(self, chunk: bytes) -> None:
        call = cast(Call, self._call)
        self._head_size = 0
        self._body_size += len(chunk)
        if self._body_size <= call.limit:
            self._chunks.append(chunk)
            return
        self._chunks.clear()
        call.body = None
        if self._body_size > max(call.limit, _MAX_DRAINED):
            self._do_not_read(call)

    def on_message_complete(self) -> None:
        call = cast(Call, self._call)
        if call.body is not None:
            call.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._calls.append(call)
        self._is_last = call.closes
        self._call = None
        self._target, self._headers, self._chunks = b"", {}, []
        self._body_size = self._head_size = 0
        self._waits_for_s = 0.0  # the next request has its own time

    # answers

    def _answer(self) -> None:
        answers: list[bytes] = []
        while self._calls and self._task is None and not self._is_full:
            call = self._calls.popleft()
            reply = self._api.answer(call)
            if isinstance(reply, Reply):
                answers.append(self._encoded(call, reply))
            else:
                self._task = asyncio.get_running_loop().create_task(self._wait(call, reply))
        if answers:
            self._transport.write(b"".join(answers))
        if self._calls:
            self._transport.pause_reading()
        self._note()
        if self._calls or self._task is not None:
            return  # and goes on here when it is done
        if self._farewell is not None:
            self._transport.write(self._farewell)
            self._farewell = None
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
        elif self._is_last:
            self._transport.close()
        elif not self._is_full:
            self._transport.resume_reading()

    def _note(self) -> None:
        """Give the client its time for what it has to do next."""
        if self._is_full:
            self._wait_for(_READ_S)
        elif self._calls or self._task is not None:
            self._waits_for_s = 0.0
            self._server.idle.works(self)
        elif (call := self._call) is not None:
            length = call.declared_length if call.declared_length >= 0 else call.limit
            self._wait_for(_BODY_S + length / _SLOWEST_BODY)
        elif self._head_size:
            self._wait_for(_HEAD_S)
        else:
            self._wait_for(self._server.limits.idle_s)

    def _wait_for(self, limit_s: float) -> None:
        if limit_s != self._waits_for_s and not self._transport.is_closing():
            self._waits_for_s = limit_s
            host = self._client.rpartition(":")[0]
            ends_s = asyncio.get_running_loop().time() + limit_s
            self._server.idle.waits(self, host, ends_s)

    async def _wait(self, call: Call, reply: Awaitable[Reply | Stream]) -> None:
        try:
            answer = await reply
            if isinstance(answer, Stream):
                await self._stream(call, answer)
        finally:
            self._task = self._stream_room = None
        if not self._transport.is_closing():
            if isinstance(answer, Reply):
                self._transport.write(self._encoded(call, answer))
            self._answer()

    async def _stream(self, call: Call, stream: Stream) -> None:
        """Write the pieces of an answer, as fast as the client reads them."""
        self._stream_room = room = asyncio.Event()
        self._is_last |= call.is_old
        framing = b"" if call.is_old else b"Transfer-Encoding: chunked\r\n"
        async with aclosing(stream.pieces):
            self._transport.write(self._head(call, stream.status, stream.fields, framing))
            async for piece in stream.pieces:
                if piece:
                    self._transport.write(
                        piece if call.is_old else b"%x\r\n%b\r\n" % (len(piece), piece)
                    )
                while self._is_full:
                    room.clear()
                    await room.wait()
        if not call.is_old:
            self._transport.write(b"0\r\n\r\n")

    def _encoded(self, call: Call, reply: Reply) -> bytes:
        status, fields, body = reply
        length = b"" if status in _WITHOUT_BODY else b"Content-Length: %d\r\n" % len(body)
        head = self._head(call, status, fields, length)
        return head + body if call.method != "HEAD" else head

    def _head(self, call: Call, status: int, fields: bytes, framing: bytes) -> bytes:
        self._api.report(call, status)
        connection = b""
        if call.closes != call.is_old:
            connection = b"Connection: close\r\n" if call.closes else b"Connection: keep-alive\r\n"
        return b"HTTP/1.%d %d %b\r\n%bDate: %b\r\n%b%b\r\n" % (
            not call.is_old,
            status,
            _REASONS[status],
            fields,
            self._server.date(),
            framing,
            connection,
        )

    def pause_writing(self) -> None:
        self._is_full = True
        self._transport.pause_reading()
        self._note()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._stream_room is not None:
            self._stream_room.set()
        self._answer()


def foreign_calls(listener: socket.socket, broadcast_address: str) -> ForeignCalls:
    """Return the rule for a listener: names are looked at when only this machine can connect."""
    host = real_address(listener).rpartition(":")[0]
    is_local = host.startswith("127.") or host == "[::1]"
    return ForeignCalls({broadcast_address, socket.gethostname()} if is_local else None)
