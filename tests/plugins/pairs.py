"""The Go nsqd and the embedded one side by side, for tests that compare them.

nsqd_pair     ``go, embedded = nsqd_pair("-max-rdy-count=5")``, shared by a module's tests
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd

NsqdPair = Callable[..., tuple[Nsqd, Nsqd]]


@pytest.fixture(scope="module")
def nsqd_pair() -> Iterator[NsqdPair]:
    started: dict[tuple[str, ...], tuple[Nsqd, Nsqd]] = {}
    with ExitStack() as stack:

        def start(kind: type[GoNsqd] | type[EmbeddedServer], flags: tuple[str, ...]) -> Nsqd:
            directory = stack.enter_context(TemporaryDirectory(prefix="nsqd-"))
            server = kind(Path(directory), *flags)
            server.start()
            stack.callback(server.kill)
            return server

        def pair(*flags: str) -> tuple[Nsqd, Nsqd]:
            if flags not in started:
                started[flags] = start(GoNsqd, flags), start(EmbeddedServer, flags)
            return started[flags]

        yield pair
