"""The console's own socket, when the process has no descriptor left."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

from plugins.console import Console
from plugins.waiting import wait_until

TOLD = "connections have to wait (too many open files)"


def test_without_descriptors_connections_wait_and_the_log_has_one_line(
    console: Callable[..., Console],
) -> None:
    running = console("--nsqd-http-address=127.0.0.1:1")
    wait_until(lambda: "nsq_up" in running.get("/metrics").text, what="everything is loaded")
    pid, address = running.process.pid, urlsplit(running.url)
    room = len(os.listdir(f"/proc/{pid}/fd")) + 5
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, room))

    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((address.hostname, address.port)))
        wait_until(lambda: TOLD in running.log, what="it says so")
    wait_until(lambda: running.get("/ping").status == 200, what="it serves again", timeout_s=20)

    assert running.log.count(TOLD) == 1
    assert "Traceback" not in running.log
    assert "asyncio" not in running.log
