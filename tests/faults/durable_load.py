"""Clients of an nsqd that checkpoints often: they note what it confirmed, until it is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from plugins.daemons import EmbeddedNsqdProcess
from plugins.raw_client import RawClient
from plugins.waiting import patience_s

OFTEN = """
import sys
from nsqtools.server import durable_database as database
database._WAL_BYTES = 50_000
from nsqtools.cli.commands.daemons import nsqd
sys.exit(nsqd(sys.argv[1:]))
"""


class Load:
    """Works on ``t:ch``, each on a thread with a connection of its own. One that returns begins
    again on another connection."""

    def __init__(self, nsqd: EmbeddedNsqdProcess) -> None:
        self.confirmed: set[bytes] = set()
        self.finished: set[bytes] = set()
        self._nsqd = nsqd
        self._threads: list[threading.Thread] = []

    def start(self, *works: Callable[[RawClient], None]) -> None:
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(patience_s(20))
            assert not thread.is_alive()

    def _run(self, work: Callable[[RawClient], None]) -> None:
        while True:
            try:
                with RawClient(self._nsqd.tcp_address) as client:
                    work(client)
            except (OSError, EOFError):
                return  # it was killed
