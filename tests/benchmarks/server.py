"""The barest client that keeps an nsqd busy, with messages of 200 bytes: MPUB of 100, RDY 2500.

It cuts frames of a known size out of what it reads and answers with FINs in one write.
"""

from __future__ import annotations

import socket
import struct

BODY = b"x" * 200
BATCH = 100
WINDOW = 50  # MPUBs under way
FRAME = struct.Struct(">II10x16s200s")
OK_FRAME_SIZE = 10


def connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"  V2")
    return connection


def publish(address: tuple[str, int], count: int) -> None:
    payload = struct.pack(">I", BATCH) + (struct.pack(">I", len(BODY)) + BODY) * BATCH
    command = b"MPUB bench\n" + struct.pack(">I", len(payload)) + payload
    with connect(address) as connection:
        missing = 0
        for _ in range(count // BATCH):
            connection.sendall(command)
            missing += OK_FRAME_SIZE
            while missing > WINDOW * OK_FRAME_SIZE:
                missing -= len(connection.recv(65536))
        while missing:
            missing -= len(connection.recv(65536))


def subscribe(address: tuple[str, int]) -> socket.socket:
    connection = connect(address)
    connection.sendall(b"SUB bench ch\n")
    connection.recv(OK_FRAME_SIZE, socket.MSG_WAITALL)
    return connection


def consume(connection: socket.socket, count: int) -> None:
    connection.sendall(b"RDY 2500\n")
    buffered = b""
    while count > 0:
        buffered += connection.recv(1 << 18)
        whole = len(buffered) // FRAME.size * FRAME.size
        if whole:
            ids = [frame[2] for frame in FRAME.iter_unpack(buffered[:whole])]
            connection.sendall(b"FIN " + b"\nFIN ".join(ids) + b"\n")
            count -= len(ids)
            buffered = buffered[whole:]
