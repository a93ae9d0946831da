"""Protocol V1, nsqlookupd's side: one nsqd that says what it has.

As in `protocol_v2`, a handler gets the words of the line, the buffer, the position after the line
and the one where the command began, and returns the position after its body.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.lookup_v1 import (
    PeerInfo,
    encode_response,
    read_identify,
    read_words,
    topic_and_channel,
)
from nsqtools.protocol.text import go_duration
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.registrations import (
    RegisteredNsqd,
    Registration,
    Registrations,
    steady_ns,
)
from nsqtools.server.tcp.client_connection import ClientConnection

_OK = encode_response(b"OK")

Handler = Callable[[list[bytes], bytes, int, int], int]


class LookupProtocolV1:
    """The conversation with one nsqd; see `client_connection.ConnectionProtocol`.

    ``own_info`` is what nsqlookupd says of itself.
    """

    def __init__(
        self,
        connection: ClientConnection,
        registrations: Registrations,
        own_info: PeerInfo,
        log: DaemonLog,
    ) -> None:
        self._connection = connection
        self._registrations = registrations
        self._own_info = own_info
        self._log = log
        self._peer: RegisteredNsqd | None = None
        self._handlers: dict[bytes, Handler] = {
            b"PING": self._ping,
            b"IDENTIFY": self._identify,
            b"REGISTER": self._register,
            b"UNREGISTER": self._unregister,
        }

    # client_connection.ConnectionProtocol

    def execute(self, data: bytes, position: int) -> int:
        """Run the command at the position."""
        words, after = read_words(data, position)
        handler = self._handlers.get(words[0])
        if handler is None:
            raise RequestError("E_INVALID", b"invalid command " + words[0])
        return handler(words, data, after, position)

    def quick(self, data: bytes) -> bytes | None:
        """Nothing here is so frequent that it would need a way of its own."""
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether a command is not answered yet: all are at once."""
        return False

    def encode_error(self, error: RequestError) -> bytes:
        """Return the error as a response."""
        return encode_response(error.data)

    def commands_done(self) -> None:
        """Nothing to do: nsqlookupd has no deadlines."""

    def output_stuck(self) -> None:
        """Nothing to do: the connection stops reading until the nsqd takes its answers."""

    def output_flows(self) -> None:
        """Go on."""

    def closed(self) -> None:
        """Forget the nsqd; the names that it announced stay."""
        address = self._connection.remote_address
        self._log.info(f"PROTOCOL(V1): [{address}] exiting ioloop")
        if self._peer is not None:
            self._log_changes("UNREGISTER", self._registrations.disconnect(self._peer))

    # commands

    def _ping(self, words: list[bytes], data: bytes, position: int, start: int) -> int:
        if self._peer is not None:
            now_ns = steady_ns()
            since = go_duration(now_ns - self._peer.last_update_ns)
            self._log.info(f"CLIENT({self._peer.remote_address}): pinged (last ping {since})")
            self._peer.last_update_ns = now_ns
        self._connection.send(_OK)
        return position

    def _identify(self, words: list[bytes], data: bytes, position: int, start: int) -> int:
        if self._peer is not None:
            raise RequestError("E_INVALID", "cannot IDENTIFY again")
        info, position = read_identify(data, position, start)
        address = self._connection.remote_address
        self._log.info(
            f"CLIENT({address}): IDENTIFY Address:{info.broadcast_address} TCP:{info.tcp_port} "
            f"HTTP:{info.http_port} Version:{info.version}"
        )
        self._peer = RegisteredNsqd(address, info, steady_ns())
        self._log_changes("REGISTER", self._registrations.identify(self._peer))
        self._connection.send(encode_response(self._own_info.encode()))
        return position

    def _register(self, words: list[bytes], data: bytes, position: int, start: int) -> int:
        peer = self._identified()
        topic, channel = topic_and_channel(words)
        self._log_changes("REGISTER", self._registrations.register(peer, topic, channel))
        self._connection.send(_OK)
        return position

    def _unregister(self, words: list[bytes], data: bytes, position: int, start: int) -> int:
        peer = self._identified()
        topic, channel = topic_and_channel(words)
        self._log_changes("UNREGISTER", self._registrations.unregister(peer, topic, channel))
        self._connection.send(_OK)
        return position

    def _identified(self) -> RegisteredNsqd:
        if self._peer is None:
            raise RequestError("E_INVALID", "client must IDENTIFY")
        return self._peer

    def _log_changes(self, command: str, changes: list[Registration]) -> None:
        for category, key, subkey in changes:
            self._log.info(
                f"DB: client({self._connection.remote_address}) {command} "
                f"category:{category} key:{key} subkey:{subkey}"
            )
