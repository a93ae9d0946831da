"""The minimum of a Python client, which shows the possible speed: no retries, no options.

As a program, ``bare_loop.py consume ADDRESS TOPIC CHANNEL`` finishes messages until it is killed,
and ``bare_loop.py publish ADDRESS TOPIC`` publishes the lines of its standard input.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator

READ_SIZE = 1 << 18
RDY = 2500
WINDOW = 4  # MPUBs without an answer
OK = b"\0\0\0\6\0\0\0\0OK"
HEARTBEAT = b"_heartbeat_"
MESSAGE = 2
FRAME = struct.Struct(">II10x16s200s")


def connect(address: str, identify: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"  V2IDENTIFY\n" + len(identify).to_bytes(4, "big") + identify)
    return sock


def subscribe(address: str, topic: str, channel: str) -> socket.socket:
    sock = connect(address, b'{"output_buffer_timeout": 25}')
    sock.sendall(f"SUB {topic} {channel}\n".encode())
    for _ in range(2):
        expect_ok(sock.recv(len(OK), socket.MSG_WAITALL))
    return sock


def consume(address: str, topic: str, channel: str) -> None:
    """Receive, split into frames, and send all FINs of a read in one write, until nsqd closes."""
    sock = subscribe(address, topic, channel)
    sock.sendall(b"RDY %d\n" % RDY)
    size_of = struct.Struct(">I").unpack_from
    data = b""
    while chunk := sock.recv(READ_SIZE):
        data += chunk
        position, ids = 0, []
        while len(data) - position >= 4:
            end = position + 4 + size_of(data, position)[0]
            if end > len(data):
                break
            if data[position + 7] == MESSAGE:
                ids.append(data[position + 18 : position + 34])
            elif data[position + 8 : end] == HEARTBEAT:
                sock.sendall(b"NOP\n")
            position = end
        data = data[position:]
        if ids:
            sock.sendall(b"FIN " + b"\nFIN ".join(ids) + b"\n")


def finish(sock: socket.socket, count: int) -> None:
    """Finish ``count`` messages of 200 bytes, without parsing, which keeps any nsqd busy."""
    sock.sendall(b"RDY %d\n" % RDY)
    data = b""
    while count > 0:
        data += sock.recv(READ_SIZE)
        if whole := len(data) // FRAME.size * FRAME.size:
            ids = [frame[2] for frame in FRAME.iter_unpack(data[:whole])]
            sock.sendall(b"FIN " + b"\nFIN ".join(ids) + b"\n")
            count -= len(ids)
            data = data[whole:]


def publish(address: str, topic: str, batches: Iterable[bytes], window: int = WINDOW) -> None:
    """Publish packed batches, at most ``window`` unconfirmed; return when all are confirmed."""
    with connect(address, b'{"heartbeat_interval": -1}') as sock, sock.makefile("rb") as answers:
        command = f"MPUB {topic}\n".encode()
        unconfirmed = 1  # IDENTIFY is answered with OK too
        for batch in batches:
            if unconfirmed == window:
                expect_ok(answers.read(len(OK)))
                unconfirmed -= 1
            sock.sendall(command + len(batch).to_bytes(4, "big") + batch)
            unconfirmed += 1
        for _ in range(unconfirmed):
            expect_ok(answers.read(len(OK)))


def expect_ok(answer: bytes) -> None:
    if answer != OK:
        raise RuntimeError(f"nsqd answered {answer!r}")


def packed(bodies: list[bytes]) -> bytes:
    """The body of an MPUB, without its length."""
    parts = [len(bodies).to_bytes(4, "big")]
    for body in bodies:
        parts += len(body).to_bytes(4, "big"), body
    return b"".join(parts)


def batches_of_lines(descriptor: int) -> Iterator[bytes]:
    """Yield one batch for each read, which is 64 KiB from a pipe."""
    incomplete = b""
    while chunk := os.read(descriptor, READ_SIZE):
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        if lines:
            yield packed(lines)
    if incomplete:
        yield packed([incomplete])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["consume", address, topic, channel]:
            consume(address, topic, channel)
        case ["publish", address, topic]:
            publish(address, topic, batches_of_lines(sys.stdin.fileno()))
        case _:
            sys.exit(__doc__)
