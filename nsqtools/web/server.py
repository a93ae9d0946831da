"""Serve the console until it is stopped: uvicorn, in the ordinary way, on a socket of our own.

Traps: an answer that goes on (server-sent events) would keep the server from ending. Stopping the
watcher ends those, and what is left is cut off after a moment. And without a descriptor for a new
connection asyncio waits a second, but first logs a traceback for each connection it has room for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nsqtools.errors import ConfigurationError, TLSError
from nsqtools.protocol.names import Address
from nsqtools.web.access import WebSettings
from nsqtools.web.watcher import Watcher

log = logging.getLogger("nsqtools")

BACKLOG = 128
FINISH_S = 3.0
TURN_S = 1.0
MAX_CONNECTIONS = 512
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY_S = 0.5  # less than asyncio's own
REPEAT_S = 60.0


class Listener(socket.socket):
    """A listening socket that is tried no more for a moment after the system had no room."""

    _retry_s = 0.0
    _told_s = -REPEAT_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ``OSError``."""
        now_s = time.monotonic()
        if now_s < self._retry_s:
            raise BlockingIOError(errno.EAGAIN, "tried again in a moment")
        try:
            return super().accept()
        except OSError as exc:
            if exc.errno in EXHAUSTED:
                self._retry_s = now_s + ACCEPT_RETRY_S
                if now_s - self._told_s >= REPEAT_S:
                    self._told_s = now_s
                    reason = os.strerror(exc.errno).lower()
                    log.warning("connections have to wait (%s): raise the limit, ulimit -n", reason)
            raise


def listen(settings: WebSettings) -> Listener:
    """Bind and listen. Raises `ConfigurationError`."""
    host = settings.host
    everywhere = host in ("", "0.0.0.0", "::")
    try:
        if everywhere and socket.has_dualstack_ipv6():
            made = socket.create_server(
                ("::", settings.port),
                family=socket.AF_INET6,
                dualstack_ipv6=True,
                backlog=BACKLOG,
            )
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.create_server((host, settings.port), family=family, backlog=BACKLOG)
    except OSError as exc:
        is_of_system = (exc.errno or 0) > 0  # not of getaddrinfo
        reason = os.strerror(exc.errno or 0) if is_of_system else exc.strerror
        raise ConfigurationError(
            f"cannot listen on {settings.listen} ({reason})",
            hint="Give --listen another port; 0 takes any free one.",
        ) from exc
    return Listener(made.family, made.type, made.proto, made.detach())


def url_of(listener: socket.socket, settings: WebSettings) -> str:
    """Return the address to open in a browser."""
    scheme = "https" if settings.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):
        host = socket.gethostname()
    return f"{scheme}://{Address(host, port)}{settings.base_path}/"


class WebServer:
    """One server. `run` it on the main thread; `stop` it from any. Raises `TLSError`."""

    def __init__(
        self, app: ASGIApp, settings: WebSettings, watcher: Watcher, listener: socket.socket
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=int(FINISH_S),
            ssl_certfile=_text(settings.tls_cert),
            ssl_keyfile=_text(settings.tls_key),
        )
        try:
            config.load()
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise TLSError(
                f"cannot use {settings.tls_cert} with {settings.tls_key} ({reason})",
                hint="Check --listen-tls-cert and --listen-tls-key.",
            ) from exc
        self._server = uvicorn.Server(config)
        self._watcher = watcher
        self._listener = listener

    def run(self, on_turn: Callable[[], None]) -> None:
        """Serve until `stop`. ``on_turn`` is called every second, on the loop that serves."""
        asyncio.run(self._run(on_turn))

    def stop(self) -> None:
        """Ask `run` to end."""
        self._server.should_exit = True
        self._watcher.stop()

    async def _run(self, on_turn: Callable[[], None]) -> None:
        asyncio.get_running_loop().set_exception_handler(_handle)
        turns = asyncio.create_task(self._turn(on_turn))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            turns.cancel()
            with suppress(asyncio.CancelledError):
                await turns

    async def _turn(self, on_turn: Callable[[], None]) -> None:
        while True:
            if self._server.started:
                on_turn()
            await asyncio.sleep(TURN_S)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context):
        loop.default_exception_handler(context)  # the listener has told of the others


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
