"""The bytes of NSQ, and a client of protocol V2, without code of nsqtools except codecs.

with subscribed(nsqd.tcp_address, "topic", "channel", ready=1) as client:
    message = client.read_message()
    client.send(b"FIN " + message.id + b"\\n")

with RawPeer(lookupd.tcp_address) as peer:
    peer.identify(broadcast_address="one.example")
    assert peer.ask(b"REGISTER clicks archive\\n") == b"OK"
"""

import json
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from plugins.waiting import patience_s

from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec

CODECS: dict[str, Callable[[], StreamCodec]] = {"snappy": SnappyCodec, "deflate": DeflateCodec}
TIMEOUT_S = patience_s(10.0)
HEARTBEAT = b"_heartbeat_"
MAGIC = b"  V2"
RESPONSE, ERROR, MESSAGE = 0, 1, 2
COMMANDS_WITH_BODY = {"IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB"}


def frame(frame_type: int, data: bytes) -> bytes:
    return struct.pack(">Ii", len(data) + 4, frame_type) + data


def message_frame(body: bytes, message_id: str, *, attempts: int, timestamp_ns: int) -> bytes:
    header = struct.pack(">qH", timestamp_ns, attempts)
    return frame(MESSAGE, header + message_id.encode() + body)


@dataclass(frozen=True, slots=True)
class Command:
    """One command as the client sent it; `body` follows the line, without its length."""

    line: str
    body: bytes
    read: int

    @property
    def json(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.body)
        return document


def split_commands(data: bytes, read: int) -> tuple[list[Command], bytes]:
    """The complete commands at the beginning of `data`, and the remaining bytes."""
    commands = []
    start = 0
    while (line_end := data.find(b"\n", start)) >= 0:
        line, end, body = data[start:line_end].decode("latin-1"), line_end + 1, b""
        if line.split(" ")[0] in COMMANDS_WITH_BODY:
            body_start = end + 4
            end = body_start + int.from_bytes(data[end:body_start], "big")
            if len(data) < max(end, body_start):
                break
            body = data[body_start:end]
        commands.append(Command(line, body, read))
        start = end
    return commands, data[start:]


@dataclass(frozen=True, slots=True)
class Received:
    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes


def sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def mpub(topic: str, bodies: Sequence[bytes]) -> bytes:
    packed = struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies))
    return f"MPUB {topic}\n".encode() + sized(packed)


def received(data: bytes) -> Received:
    timestamp_ns, attempts, message_id = struct.unpack_from(">qH16s", data)
    return Received(timestamp_ns, attempts, message_id, data[26:])


class RawClient:
    """One connection; every read fails after `TIMEOUT_S` without bytes."""

    def __init__(self, address: str, *, magic: bytes = MAGIC, receive_buffer: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self._buffer = b""
        self._codec: StreamCodec | None = None
        try:
            self.socket.connect((host, int(port)))
            self.send(magic)
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def start_tls(self, context: ssl.SSLContext) -> None:
        self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def negotiate(self, codec: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Send IDENTIFY, and start TLS, and compression by ``snappy`` or ``deflate``."""
        layers = [name for name in ("tls_v1" if tls else "", codec) if name]
        reply = self.identify(**dict.fromkeys(layers, True))
        assert [reply[name] for name in layers] == [True] * len(layers)
        if tls:
            self.start_tls(tls)
            assert self.read_response() == b"OK"
        if codec:
            self._codec = CODECS[codec]()
            self._buffer = self._codec.decompress(self._buffer)  # the OK may have arrived already
            assert self.read_response() == b"OK"

    def send(self, data: bytes) -> None:
        self.socket.sendall(data if self._codec is None else self._codec.compress(data))

    def read_frame(self) -> tuple[int, bytes]:
        """The next frame of any type; EOFError if the server has closed."""
        size = int.from_bytes(self._take(4), "big")
        data = self._take(size)
        return int.from_bytes(data[:4], "big"), data[4:]

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise EOFError(f"closed after {self._buffer!r}")
            self._buffer += chunk if self._codec is None else self._codec.decompress(chunk)
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def read(self) -> tuple[int, bytes]:
        """The next frame that is not a heartbeat; heartbeats are answered."""
        while (found := self.read_frame()) == (RESPONSE, HEARTBEAT):
            self.send(b"NOP\n")
        return found

    def _read_kind(self, wanted: int) -> bytes:
        kind, data = self.read()
        assert kind == wanted, (kind, data)
        return data

    def read_response(self) -> bytes:
        return self._read_kind(RESPONSE)

    def read_error(self) -> bytes:
        return self._read_kind(ERROR)

    def read_message(self) -> Received:
        return received(self._read_kind(MESSAGE))

    def read_messages(self, count: int) -> list[Received]:
        return [self.read_message() for _ in range(count)]

    def ask(self, command: bytes) -> bytes:
        self.send(command)
        return self.read_response()

    def identify(self, **fields: object) -> dict[str, object]:
        body = json.dumps({"feature_negotiation": True, **fields}).encode()
        reply: dict[str, object] = json.loads(self.ask(b"IDENTIFY\n" + sized(body)))
        return reply

    def subscribe(self, topic: str, channel: str, *, ready: int = 0) -> None:
        assert self.ask(f"SUB {topic} {channel}\n".encode()) == b"OK"
        if ready:
            self.send(b"RDY %d\n" % ready)

    def publish(self, topic: str, *bodies: bytes) -> None:
        for body in bodies:
            self.send(f"PUB {topic}\n".encode() + sized(body))
        for _ in bodies:
            assert self.read_response() == b"OK"

    def publish_deferred(self, topic: str, delay_ms: int, body: bytes) -> None:
        assert self.ask(f"DPUB {topic} {delay_ms}\n".encode() + sized(body)) == b"OK"

    def finish(self, messages: Iterable[Received]) -> None:
        self.send(b"".join(b"FIN %b\n" % message.id for message in messages))

    def settle(self) -> None:
        """Wait until the server has processed all commands."""
        assert self.ask(b"PUB settled#ephemeral\n" + sized(b"x")) == b"OK"


def subscribed(address: str, topic: str, channel: str, *, ready: int = 0) -> RawClient:
    client = RawClient(address)
    client.subscribe(topic, channel, ready=ready)
    return client


DESCRIPTION = {
    "broadcast_address": "nsqd.example",
    "hostname": "nsqd",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
}


def identify(**fields: object) -> bytes:
    """The command IDENTIFY, without the fields that are None."""
    given = {k: v for k, v in (DESCRIPTION | fields).items() if v is not None}
    return b"IDENTIFY\n" + sized(json.dumps(given).encode())


class RawPeer(RawClient):
    """An nsqd as nsqlookupd sees it, with protocol V1."""

    def __init__(self, address: str, *, magic: bytes = b"  V1") -> None:
        super().__init__(address, magic=magic)

    def read_response(self) -> bytes:
        """The next response; EOFError if nsqlookupd has closed."""
        return self._take(int.from_bytes(self._take(4), "big"))

    def identify(self, **fields: object) -> bytes:  # type: ignore[override]
        return self.ask(identify(**fields))

    def leave(self) -> bytes:
        """End the connection and return the remaining bytes.

        nsqlookupd closes its side after it has forgotten the peer, so on return it has.
        """
        remaining = self._buffer
        with self:
            try:
                self.socket.shutdown(socket.SHUT_WR)
                while chunk := self.socket.recv(1 << 16):
                    remaining += chunk
            except TimeoutError:
                raise
            except OSError:
                pass  # a reset also ends it, because Go closes with unread input
        return remaining
