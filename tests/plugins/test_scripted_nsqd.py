"""The scripted nsqd is a peer that real clients accept, and its checks can fail."""

from __future__ import annotations

import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.wire import ERROR, MESSAGE, RESPONSE, frame

IDENTIFY = b"  V2IDENTIFY\n\x00\x00\x00\x02{}"


@pytest.fixture
def client(scripted_nsqd: ScriptedNsqd) -> Iterator[socket.socket]:
    host, port = scripted_nsqd.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        yield sock


@pytest.fixture
def conn(scripted_nsqd: ScriptedNsqd, client: socket.socket) -> Connection:
    return scripted_nsqd.accept()


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


def test_commands_of_one_write_have_the_same_read(client: socket.socket, conn: Connection) -> None:
    client.sendall(IDENTIFY)
    identify = conn.expect("IDENTIFY")
    client.sendall(b"RDY 0\nFIN 1\nPUB t\n\x00\x00\x00\x03a\nb")
    rdy, fin, pub = conn.next_command(), conn.next_command(), conn.next_command()

    assert [c.line for c in (rdy, fin, pub)] == ["RDY 0", "FIN 1", "PUB t"]
    assert identify.read < rdy.read == fin.read == pub.read
    assert (identify.json, pub.body) == ({}, b"a\nb")


def test_a_command_is_recorded_when_its_last_byte_has_come(
    client: socket.socket, conn: Connection
) -> None:
    client.sendall(IDENTIFY[:-1])
    with pytest.raises(AssertionError, match=r"expected 'IDENTIFY': nothing for 0\.05 s"):
        conn.expect("IDENTIFY", timeout_s=0.05)
    client.sendall(IDENTIFY[-1:])
    conn.expect("IDENTIFY")


def test_an_unexpected_command_fails_with_what_came(
    client: socket.socket, conn: Connection
) -> None:
    client.sendall(b"  V2NOP\nCLS\n")
    with pytest.raises(AssertionError, match=r"expected 'RDY 1', received \['NOP', 'CLS'\]"):
        conn.expect("RDY 1")


def test_a_peer_that_speaks_something_else_is_shown(
    client: socket.socket, conn: Connection
) -> None:
    client.sendall(b"GET / HTTP/1.1\r\n")
    client.shutdown(socket.SHUT_WR)
    with pytest.raises(AssertionError, match="GET / HTTP"):
        conn.expect("IDENTIFY")


def test_skip_to_passes_over_other_commands(client: socket.socket, conn: Connection) -> None:
    client.sendall(b"  V2NOP\nRDY 3\nCLS\n")
    conn.skip_to("CLS")
    assert conn.not_yet_expected == []


def test_frames_are_those_of_the_protocol(client: socket.socket, conn: Connection) -> None:
    conn.ok()
    conn.error("E_INVALID no")
    message_id = conn.message(b"body", attempts=40_000, timestamp_ns=7)

    message = struct.pack(">qH", 7, 40_000) + message_id.encode() + b"body"
    expected = frame(RESPONSE, b"OK") + frame(ERROR, b"E_INVALID no") + frame(MESSAGE, message)
    assert expected.startswith(
        b"\x00\x00\x00\x06\x00\x00\x00\x00OK\x00\x00\x00\x10\x00\x00\x00\x01"
    )
    assert receive(client, len(expected)) == expected


def test_pieces_arrive_whole(client: socket.socket, conn: Connection) -> None:
    conn.send(frame(RESPONSE, b"OK"), piece_size=1)
    assert receive(client, 10) == frame(RESPONSE, b"OK")


def test_close_is_end_of_file_and_reset_is_an_error(scripted_nsqd: ScriptedNsqd) -> None:
    host, port = scripted_nsqd.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        scripted_nsqd.accept().close()
        assert client.recv(1) == b""
    with socket.create_connection((host, int(port)), timeout=5) as client:
        scripted_nsqd.accept().reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_half_closed_still_hears_the_client(client: socket.socket, conn: Connection) -> None:
    conn.half_close()
    assert client.recv(1) == b""
    client.sendall(b"  V2CLS\n")
    conn.expect("CLS")
    client.close()
    conn.expect_closed()


def test_a_closed_connection_with_untaken_commands_fails(
    client: socket.socket, conn: Connection
) -> None:
    client.sendall(b"  V2CLS\n")
    client.close()
    with pytest.raises(AssertionError, match=r"expected nothing more, received \['CLS'\]"):
        conn.expect_closed()


def test_nobody_connects(scripted_nsqd: ScriptedNsqd) -> None:
    with pytest.raises(AssertionError, match="no connection"):
        scripted_nsqd.accept(timeout_s=0.05)


def test_nsq_tail_takes_it_for_an_nsqd(
    scripted_nsqd: ScriptedNsqd, go_program: Callable[[str], Path]
) -> None:
    address = f"-nsqd-tcp-address={scripted_nsqd.address}"
    arguments = ["-topic=clicks", "-channel=archive", "-max-in-flight=7", address]
    tail = subprocess.Popen(
        [go_program("nsq_tail"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with tail:
        conn = scripted_nsqd.accept()
        conn.subscribe("clicks", "archive")
        conn.expect("RDY 7")
        message_id = conn.message(b"hello")
        conn.expect(f"FIN {message_id}")
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"hello\n"
        conn.heartbeat()
        conn.expect("NOP")

        tail.terminate()
        conn.expect("CLS")
        conn.close_wait()
        conn.expect_closed()
