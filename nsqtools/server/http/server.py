"""uvicorn's HTTP/1.1 in the daemon's own loop.

Only its protocol class is used: the daemon binds the sockets and handles the signals itself, and
uvicorn's own `Server` looks every 0.1 s whether it shall stop, and takes another 0.1 s to do it.

Trap: `H11Protocol` and `ServerState` are not public. What is used of them stands in this module
alone: the protocol's constructor, its ``shutdown``, and the state's ``connections`` and ``tasks``.
pyproject.toml has an upper bound for that, and a test names each of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from ssl import SSLContext

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from nsqtools.server.http.foreign_calls import ForeignCalls
from nsqtools.server.http.foundation import HTTPApi
from nsqtools.server.http.quick import QuickConnection, QuickPaths
from nsqtools.server.listen import accept, real_address

# uvicorn's messages about broken requests would go to stderr between nsqd's lines
logging.getLogger("uvicorn").addHandler(logging.NullHandler())

_KEEP_ALIVE_S = 24 * 3600  # Go closes no idle connection; a POST on one that just closed is lost
_FINISH_S = 1.0  # for requests that are being answered at the end


class HTTPServer:
    """One listening socket of the HTTP API."""

    def __init__(
        self,
        api: HTTPApi,
        listener: socket.socket,
        tls_context: SSLContext | None = None,
        quick: QuickPaths | None = None,
    ) -> None:
        self._config = uvicorn.Config(
            api,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._listener = listener
        self._tls_context = tls_context
        self._quick = quick
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Serve from now on."""
        self._config.load()
        self._server = await accept(self._listener, self._make_protocol, self._tls_context)

    def _make_protocol(self) -> asyncio.Protocol:
        if self._quick is not None:
            return QuickConnection(self._quick, self._make_framework)
        return self._make_framework()

    def _make_framework(self) -> asyncio.Protocol:
        return H11Protocol(self._config, self._state, app_state={})

    async def stop(self) -> None:
        """Let requests that are being answered finish, for a moment, and close everything."""
        if self._server is None:
            return
        self._server.close()
        if self._quick is not None:
            for quick in list(self._quick.connections):
                quick.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_FINISH_S)
        for task in self._state.tasks:
            task.cancel()


def foreign_calls(listener: socket.socket, broadcast_address: str) -> ForeignCalls:
    """Return the rule for a listener: names are looked at when only this machine can connect."""
    host = real_address(listener).rpartition(":")[0]
    is_local = host.startswith("127.") or host == "[::1]"
    return ForeignCalls({broadcast_address, socket.gethostname()} if is_local else None)
