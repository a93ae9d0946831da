"""The auth server on its sockets: /auth for nsqd, and the filter for users on another address.

/auth belongs to a trusted network, as nsqd's documentation has it, because its caller states the
address and the certificate of a client. Everyone may reach the filter.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nsqtools.authd.auth_api import AnswerSettings, AuthApi, make_api
from nsqtools.authd.authority import Audit, Authority
from nsqtools.authd.filter_api import FilterApi, Upstream
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError
from nsqtools.http.http_server import Handlers, HTTPServer, Limits
from nsqtools.http.listen import real_address, server_certificate
from nsqtools.http.service import serve_until

LIMITS = Limits(idle_s=60.0, most_idle=2048, most_idle_of_one=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthdSettings:
    """The settings. Raises `ConfigurationError`."""

    users: Path
    answer: AnswerSettings
    audit_log: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ConfigurationError("--listen-tls-cert and --listen-tls-key need each other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigurationError("--listen-tls-client-ca needs --listen-tls-cert")
        if self.answer.ttl_s < 1:
            raise ConfigurationError("--ttl must be at least 1s: nsqd takes whole seconds")


class AuthDaemon:
    """The auth server, and with a ``cluster`` its filter.

    `run` it on the main thread; `stop` it from any. Raises `ConfigurationError` and `OutputError`.
    """

    def __init__(
        self,
        settings: AuthdSettings,
        listener: socket.socket,
        filter_listener: socket.socket | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._certificate = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificate = server_certificate(
                settings.tls_cert, settings.tls_key, settings.tls_client_ca
            )
        scheme = "https" if self._certificate else "http"
        self.url = f"{scheme}://{real_address(listener)}"
        self.filter_url = f"{scheme}://{real_address(filter_listener)}" if filter_listener else ""
        self._settings = settings
        self._listener = listener
        self._filter_listener = filter_listener
        self._upstream = Upstream(cluster) if cluster else None
        self._audit = Audit(settings.audit_log)
        self._authority = Authority(settings.users)
        self._stopped = threading.Event()

    def run(self, on_turn: Callable[[], None]) -> None:
        """Serve until `stop`. ``on_turn`` is called every second, on the loop that serves."""
        asyncio.run(self._run(on_turn))

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stopped.set()

    async def _run(self, on_turn: Callable[[], None]) -> None:
        auth_api = AuthApi(self._authority, self._audit, self._settings.answer)
        servers = [self._server(auth_api.handlers(), self._listener)]
        if self._filter_listener is not None and self._upstream is not None:
            is_tls = self._certificate is not None
            filter_api = FilterApi(self._authority, self._audit, self._upstream, is_tls=is_tls)
            servers.append(self._server(filter_api.handlers(), self._filter_listener))
        refresh = self._authority.refresh
        await serve_until(self._stopped, servers, on_turn, refresh, self._certificate)
        if self._upstream is not None:
            self._upstream.close()

    def _server(self, handlers: Handlers, listener: socket.socket) -> HTTPServer:
        tls = self._certificate.get() if self._certificate else None
        return HTTPServer(make_api(handlers), listener, tls, LIMITS)
