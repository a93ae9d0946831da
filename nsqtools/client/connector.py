"""Connecting without blocking the I/O thread: name look-up, TCP, TLS and negotiation all block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqtools.client.connection import Connection
from nsqtools.client.handshake import open_connection
from nsqtools.client.io_loop import IOLoop
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConnectionFailed, NsqError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.commands import Subscribe

if TYPE_CHECKING:
    import ssl


log = logging.getLogger("nsqtools")


def connect_in_background(
    loop: IOLoop,
    address: Address,
    options: ClientOptions,
    tls: ssl.SSLContext | None,
    subscribe: Subscribe | None,
    done: Callable[[Address, Connection | NsqError], None],
) -> None:
    """Open a connection on a thread of its own; ``done`` is called on the loop's thread."""

    def connect() -> None:
        result: Connection | NsqError
        try:
            result = open_connection(address, options, tls, subscribe)
        except NsqError as exc:
            result = exc
        except Exception as exc:  # a defect must not leave the address connecting for ever
            log.exception("connecting to %s failed", address)
            result = ConnectionFailed(f"cannot connect to {address} ({exc!r})")
        loop.call_soon(lambda: done(address, result))

    threading.Thread(target=connect, name=f"nsq-connect-{address}", daemon=True).start()
