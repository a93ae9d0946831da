"""A daemon in a thread of this process, with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from nsqtools.server.foreground import Daemon

D = TypeVar("D", bound=Daemon)


class DaemonThread(Generic[D]):
    """Runs what ``make`` returns, from `start` to `end`; may be started again after that."""

    def __init__(self, name: str, make: Callable[[], D]) -> None:
        self._name = name
        self._make = make
        self._daemon: D | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def daemon(self) -> D:
        """The daemon. Raises ``RuntimeError`` while none is running."""
        if self._daemon is None:
            raise RuntimeError(f"this {self._name} is not running")
        return self._daemon

    def start(self) -> None:
        """Return when the daemon serves. Raises what its making or starting raised."""
        started = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run, args=(started, failure), name=self._name, daemon=True
        )
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            raise failure[0]

    def _run(self, started: threading.Event, failure: list[BaseException]) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            try:
                daemon = self._make()
                runner.run(daemon.start())
            except BaseException as exc:
                failure.append(exc)
                return
            else:
                self._daemon = daemon
            finally:
                started.set()
            self._loop.run_forever()

    def end(self, how: Callable[[D], Coroutine[Any, Any, None]]) -> None:
        """Await ``how`` in the daemon's loop, and end the thread. Does nothing when none runs."""
        if self._daemon is None or self._loop is None or self._thread is None:
            return
        daemon, loop = self._daemon, self._loop
        try:
            asyncio.run_coroutine_threadsafe(how(daemon), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            self._daemon = None
