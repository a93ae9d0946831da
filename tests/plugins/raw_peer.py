"""An nsqd as nsqlookupd sees it, with nothing of nsqtools in it: protocol V1 by hand.

with RawPeer(lookupd.tcp_address) as peer:
    peer.identify(broadcast_address="one.example")
    assert peer.ask(b"REGISTER clicks archive\\n") == b"OK"
"""

from __future__ import annotations

import json
import socket
from typing import Self

from plugins.raw_client import TIMEOUT_S, sized

MAGIC = b"  V1"

DESCRIPTION = {
    "broadcast_address": "nsqd.example",
    "hostname": "nsqd",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
}


def identify(**fields: object) -> bytes:
    """The command; a field that is None is left out."""
    given = {k: v for k, v in (DESCRIPTION | fields).items() if v is not None}
    return b"IDENTIFY\n" + sized(json.dumps(given).encode())


class RawPeer:
    """One connection; every read fails after `TIMEOUT_S` without bytes."""

    def __init__(self, address: str, *, magic: bytes = MAGIC) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._stream = self.socket.makefile("rb")
        self.send(magic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address under which nsqlookupd knows this peer."""
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_response(self) -> bytes:
        """The next response; EOFError when nsqlookupd has closed."""
        head = self._stream.read(4)
        if not head:
            raise EOFError("nsqlookupd has closed the connection")
        return self._stream.read(int.from_bytes(head, "big"))

    def ask(self, command: bytes) -> bytes:
        """Send a command and return its response."""
        self.send(command)
        return self.read_response()

    def identify(self, **fields: object) -> bytes:
        return self.ask(identify(**fields))

    def leave(self) -> bytes:
        """End the connection and return the bytes that were still to come.

        nsqlookupd closes its side when it has forgotten the peer, so it has on return.
        """
        try:
            self.socket.shutdown(socket.SHUT_WR)
            return self._stream.read()
        except TimeoutError:
            raise
        except OSError:
            return b""  # a reset is an end, too: Go closes with input unread
        finally:
            self.close()

    def close(self) -> None:
        self._stream.close()
        self.socket.close()
