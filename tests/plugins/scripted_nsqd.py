"""An nsqd that is scripted byte for byte by the test, and does nothing by itself.

    conn = scripted_nsqd.accept()
    conn.subscribe("clicks", "archive", max_rdy_count=10)
    conn.expect("RDY 1")
    message_id = conn.message(b"bad")
    assert conn.expect("RDY 0").read == conn.expect(f"REQ {message_id} 90000").read

It is for behavior that no real nsqd shows on request; even heartbeats are sent on demand only.

A thread for each connection reads all the time, so that a client never blocks on it, and records
each command with the number of the ``recv`` that completed it. Equal numbers mean one write, or two
writes that the kernel has joined: a test cannot distinguish them.
"""

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import pytest
from plugins.raw_client import ERROR, MAGIC, RESPONSE, Command, frame, message_frame, split_commands
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(5.0)
READ_SIZE = 1 << 20

# The response of nsqd 1.3.0 to IDENTIFY with only feature negotiation.
IDENTIFY_REPLY = {
    "max_rdy_count": 2500,
    "version": "1.3.0",
    "max_msg_timeout": 900_000,
    "msg_timeout": 60_000,
    **dict.fromkeys(("tls_v1", "deflate", "snappy", "auth_required"), False),
    **dict.fromkeys(("deflate_level", "max_deflate_level"), 6),
    "sample_rate": 0,
    "output_buffer_size": 16_384,
    "output_buffer_timeout": 250,
}


class Connection:
    """One accepted connection: the received commands, and methods to send, close and reset."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._ids = itertools.count(1)
        self._received = threading.Condition()  # guards the four below
        self._commands: list[Command] = []
        self._taken = 0
        self._unparsed = b""
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def commands(self) -> list[Command]:
        with self._received:
            return list(self._commands)

    @property
    def not_yet_expected(self) -> list[str]:
        """The received lines that no `expect` has taken."""
        with self._received:
            return [command.line for command in self._commands[self._taken :]]

    def expect(self, line: str) -> Command:
        """Wait for the next command and fail unless its line is `line`."""
        command = self.take(line)
        assert command.line == line, f"expected {line!r}, received {self._history()}"
        return command

    def skip_to(self, line: str) -> Command:
        """Wait for `line`, and ignore the lines before it."""
        deadline = time.monotonic() + TIMEOUT_S
        while (command := self.take(line, deadline - time.monotonic())).line != line:
            pass
        return command

    def expect_closed(self) -> None:
        """Wait until the client has closed the connection; fail if it has sent another command."""
        with self._received:
            ended = self._received.wait_for(lambda: self._ended, TIMEOUT_S)
            assert ended, f"not closed within {TIMEOUT_S:g} s, received {self._history()}"
            untaken = self._commands[self._taken :]
            assert not untaken, f"expected nothing more, received {self._history()}"

    def reply_identify(self, *, glued: bytes = b"", **fields: object) -> None:
        """Answer with `IDENTIFY_REPLY` and `fields`; `glued` is sent in the same write."""
        reply = json.dumps(IDENTIFY_REPLY | fields, separators=(",", ":"))
        self.send(frame(RESPONSE, reply.encode()) + glued)

    def subscribe(self, topic: str, channel: str, **identify_fields: Any) -> None:
        """Answer the usual first commands of a consumer: IDENTIFY and SUB."""
        self.expect("IDENTIFY")
        self.reply_identify(**identify_fields)
        self.expect(f"SUB {topic} {channel}")
        self.ok()

    def ok(self) -> None:
        self.send(frame(RESPONSE, b"OK"))

    def close_wait(self) -> None:
        self.send(frame(RESPONSE, b"CLOSE_WAIT"))

    def heartbeat(self) -> None:
        self.send(frame(RESPONSE, b"_heartbeat_"))

    def error(self, text: str) -> None:
        """Send an error frame, such as ``E_BAD_TOPIC SUB topic name "a b" is not valid``."""
        self.send(frame(ERROR, text.encode()))

    def message(self, body: bytes, *, message_id: str = "", attempts: int = 1) -> str:
        """Deliver one message and return its id."""
        message_id = message_id or self.new_id()
        self.send(message_frame(body, message_id, attempts=attempts, timestamp_ns=17 * 10**17))
        return message_id

    def new_id(self) -> str:
        return f"{next(self._ids):016x}"

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def half_close(self) -> None:
        """Send FIN and continue to read, like an nsqd that closes after an error frame."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close cleanly: the client reads all sent bytes, then end of file."""
        self._stop_reader(socket.SHUT_RDWR)
        self._socket.close()

    def reset(self) -> None:
        """Send RST: the client's next read or write fails."""
        # The reader must be out of recv() first, as the kernel keeps the socket open for it.
        self._stop_reader(socket.SHUT_RD)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _stop_reader(self, how: int) -> None:
        # closed, or the client has disconnected: the reader has ended anyway
        with suppress(OSError):
            self._socket.shutdown(how)
        self._reader.join()

    def _read(self) -> None:
        magic_seen = False
        for read in itertools.count():
            try:
                data = self._socket.recv(READ_SIZE)
            except OSError:
                data = b""
            with self._received:
                self._unparsed += data
                if not magic_seen and self._unparsed.startswith(MAGIC):
                    magic_seen = True
                    self._unparsed = self._unparsed[len(MAGIC) :]
                if magic_seen:
                    commands, self._unparsed = split_commands(self._unparsed, read)
                    self._commands += commands
                self._ended = not data
                self._received.notify_all()
            if not data:
                return

    def take(self, wanted: str = "a command", timeout_s: float = TIMEOUT_S) -> Command:
        """Wait for the next command."""
        with self._received:
            self._received.wait_for(
                lambda: len(self._commands) > self._taken or self._ended, timeout_s
            )
            if len(self._commands) == self._taken:
                reason = "the client closed" if self._ended else f"nothing for {timeout_s:g} s"
                raise AssertionError(f"expected {wanted!r}: {reason}, received {self._history()}")
            command = self._commands[self._taken]
            self._taken += 1
            return command

    def _history(self) -> str:
        lines = [command.line for command in self._commands]
        unparsed = f" and {self._unparsed[:100]!r}" if self._unparsed else ""
        return f"{lines}{unparsed}"


class ScriptedNsqd:
    """A listener on a free port; `accept` gives the connections in the order they were made."""

    def __init__(self) -> None:
        self._holder = socket.socket()  # reserves the port after the listener is closed
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self._listener = socket.create_server(self._holder.getsockname())
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.connections: list[Connection] = []

    def accept(self, *, timeout_s: float = TIMEOUT_S) -> Connection:
        self._listener.settimeout(timeout_s)
        try:
            self.connections.append(Connection(self._listener.accept()[0]))
        except TimeoutError:
            raise AssertionError(f"no connection within {timeout_s:g} s") from None
        return self.connections[-1]

    def identified(self, then: str = "", **identify_fields: Any) -> Connection:
        """Accept, answer IDENTIFY, and expect a line if one is given."""
        connection = self.accept()
        connection.expect("IDENTIFY")
        connection.reply_identify(**identify_fields)
        if then:
            connection.expect(then)
        return connection

    def subscribed(self, ready: str = "") -> Connection:
        """Accept, subscribe, and skip to a line with RDY if one is given."""
        connection = self.accept()
        connection.subscribe("clicks", "archive")
        if ready:
            connection.skip_to(ready)
        return connection

    def stop_listening(self) -> None:
        """Refuse new connections; existing ones stay open."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        self._holder.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def scripted_nsqd() -> Iterator[ScriptedNsqd]:
    with ScriptedNsqd() as peer:
        yield peer
