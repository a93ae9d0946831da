"""An nsqd as nsqlookupd sees it, with nothing of nsqtools in it: protocol V1 by hand.

with RawPeer(lookupd.tcp_address) as peer:
    peer.identify(broadcast_address="one.example")
    assert peer.ask(b"REGISTER clicks archive\\n") == b"OK"
"""

from __future__ import annotations

import json
import socket

from plugins.raw_client import RawClient, sized

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


class RawPeer(RawClient):
    """One connection; every read fails after `raw_client.TIMEOUT_S` without bytes."""

    def __init__(self, address: str, *, magic: bytes = b"  V1") -> None:
        super().__init__(address, magic=magic)

    def read_response(self) -> bytes:
        """The next response; EOFError when nsqlookupd has closed."""
        return self._take(int.from_bytes(self._take(4), "big"))

    def identify(self, **fields: object) -> bytes:  # type: ignore[override]
        return self.ask(identify(**fields))

    def leave(self) -> bytes:
        """End the connection and return the bytes that were still to come.

        nsqlookupd closes its side when it has forgotten the peer, so it has on return.
        """
        rest = self._buffer
        with self:
            try:
                self.socket.shutdown(socket.SHUT_WR)
                while chunk := self.socket.recv(1 << 16):
                    rest += chunk
            except TimeoutError:
                raise
            except OSError:
                pass  # a reset is an end, too: Go closes with input unread
        return rest
