"""AUTH on one connection: the secret it gave, and what the auth servers allow with it."""

from __future__ import annotations

from functools import partial

from nsqtools.protocol.frames import RESPONSE, encode_frame
from nsqtools.protocol.go_text import go_json, quote
from nsqtools.protocol.requests import Request, RequestError, read_body
from nsqtools.server.queues.nsqd import Nsqd
from nsqtools.server.tcp.auth import AuthFailed, AuthRequest, AuthServers, AuthState
from nsqtools.server.tcp.connection import Connection, Pause


class Authorization:
    """``servers`` is None when this nsqd does not ask for secrets; then everything is allowed."""

    def __init__(self, connection: Connection, nsqd: Nsqd, servers: AuthServers | None) -> None:
        self.state: AuthState | None = None
        self._connection = connection
        self._log = nsqd.log
        self._max_body_size = nsqd.options.max_body_size
        self._servers = servers
        self._request: AuthRequest | None = None

    def authenticate(self, request: Request) -> int:
        """Run AUTH. Raises `RequestError` or `Pause`."""
        if len(request.words) != 1:
            raise RequestError("E_INVALID", "AUTH invalid number of parameters")
        _, data, position, start = request
        secret, position = read_body(data, position, start, "AUTH", self._max_body_size)
        if self.state is not None and self.state.authorizations:
            raise RequestError("E_INVALID", "AUTH already set")
        if self._servers is None:
            raise RequestError("E_AUTH_DISABLED", "AUTH disabled")
        tls = self._connection.tls
        self._request = AuthRequest(
            secret.decode("utf-8", "surrogateescape"),
            self._connection.remote_ip,
            is_tls=tls is not None,
            common_name=tls.common_name if tls is not None else "",
        )
        raise Pause(position, partial(self._introduce, self._request, self._servers))

    async def _introduce(self, request: AuthRequest, servers: AuthServers) -> None:
        state = await self._ask(request, servers)
        if not state.authorizations:
            raise RequestError("E_UNAUTHORIZED", "AUTH no authorizations found")
        reply = {
            "identity": state.identity,
            "identity_url": state.identity_url,
            "permission_count": len(state.authorizations),
        }
        self._connection.send(encode_frame(RESPONSE, go_json(reply)))

    async def _ask(self, request: AuthRequest, servers: AuthServers) -> AuthState:
        try:
            self.state = await servers.ask(request)
        except AuthFailed as exc:
            # why is for the log only: an untrusted client must not learn of the auth server
            client = self._connection.remote_address
            self._log.warn(f"PROTOCOL(V2): [{client}] AUTH failed {exc}")
            raise RequestError("E_AUTH_FAILED", "AUTH failed") from exc
        return self.state

    def check(self, command: str, topic: str, channel: str, start: int) -> None:
        """Refuse what is not allowed; an empty channel means publishing.

        Raises `RequestError`, or `Pause` when the answer has to be asked for anew: then the command
        that began at ``start`` is run again.
        """
        if self._servers is None:
            return
        if self.state is None or self._request is None or not self.state.authorizations:
            raise RequestError("E_AUTH_FIRST", f"AUTH required before {command}")
        if self.state.has_expired:
            raise Pause(start, partial(self._ask, self._request, self._servers))
        if not self.state.allows(topic, channel):
            names = quote(topic.encode()) + b" " + quote(channel.encode())
            raise RequestError("E_UNAUTHORIZED", f"AUTH failed for {command} on ".encode() + names)
