"""Running a handler: what its outcome means for a message, and signals."""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Self

from nsqtools.client.message import Answered, Message
from nsqtools.client.options import check_times
from nsqtools.errors import ConfigurationError

log = logging.getLogger("nsqtools")

ONCE_S = 0.2  # timeout(1) sends a signal to the process, and at once to its process group as well

_SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class RequeueWithoutBackoff(Exception):
    """Raise it in a handler of `Consumer.run` to requeue the message without slowing down.

    ``delay_s`` as in `Message.requeue`. Raises `ConfigurationError` for a negative one.
    """

    def __init__(self, delay_s: float | None = None) -> None:
        super().__init__(delay_s)
        check_times(delay_s=delay_s or 0)
        self.delay_s = delay_s


OnHandled = Callable[[Message, float, BaseException | None], None]
"""Gets each message that a handler is done with, the seconds it took, and what it raised."""


def check_is_sync(handler: object) -> None:
    """Raise `ConfigurationError` for a handler whose call does nothing but make a coroutine, or a
    generator."""
    while isinstance(handler, partial):
        handler = handler.func
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - as it is called
        if any(kind(function) for kind in kinds):
            raise _refusal("is a coroutine or generator function")


def _refusal(what: str) -> ConfigurationError:
    hint = "use nsqtools.aio.Consumer for coroutines, or answer later, with auto_answer=False"
    return ConfigurationError(f"the handler {what}, which run does not wait for; {hint}")


class Handling:
    """Calls a handler in several threads or tasks.

    ``fatal_error`` is set when a handler cannot work: it returned what is not done yet, or nothing
    to await. And when what it raised is to end more than its thread.
    """

    def __init__(
        self, handler: Callable[[Message], object], *, answers: bool, on_handled: OnHandled | None
    ) -> None:
        if not callable(handler):
            raise ConfigurationError(f"the handler is {handler!r}, which cannot be called")
        self._handler = handler
        self._answers = answers
        self._on_handled = on_handled
        self.fatal_error: BaseException | None = None

    def handle(self, message: Message) -> None:
        """Handle one message, and answer it by the outcome."""
        began_at = time.monotonic() if self._on_handled is not None else 0.0
        error: BaseException | None = None
        try:
            result = self._handler(message)
            if result is None:  # as usual
                if self._answers:
                    message.finish()
            else:
                self._answer(message, result)
        except BaseException as exc:
            error = self._requeue(message, exc)
        if self._on_handled is not None:
            self._tell(self._on_handled, message, began_at, error)

    async def handle_in_task(self, message: Message) -> None:
        """`handle` with a handler whose result is awaited."""
        began_at = time.monotonic() if self._on_handled is not None else 0.0
        error: BaseException | None = None
        try:
            result = self._handler(message)
            if not inspect.isawaitable(result):
                complaint = "the handler returns nothing to await; use nsqtools.Consumer"
                self.fatal_error = ConfigurationError(complaint)
                raise self.fatal_error
            self._answer(message, await result)
        except BaseException as exc:
            import asyncio

            task, cause = asyncio.current_task(), exc
            if isinstance(exc, asyncio.CancelledError) and task and not task.cancelling():
                cause = RuntimeError("what the handler awaited was cancelled")  # the task was not
            error = self._requeue(message, cause)
        if self._on_handled is not None:
            self._tell(self._on_handled, message, began_at, error)

    def _answer(self, message: Message, outcome: object) -> None:
        is_undone = isinstance(outcome, (GeneratorType, AsyncGeneratorType))
        is_undone |= inspect.isawaitable(outcome)
        if hasattr(type(outcome), "add_done_callback"):  # a future; who answers later may have one
            is_undone = self._answers
        if is_undone and not isinstance(outcome, Answered):
            if isinstance(outcome, CoroutineType):
                outcome.close()
            self.fatal_error = _refusal(f"returns a {type(outcome).__name__}")
            raise self.fatal_error
        if outcome is False:
            message.requeue()
        elif self._answers:
            message.finish()

    def _requeue(self, message: Message, error: BaseException) -> BaseException:
        """Requeue what the handler raised for, and return it; raise what interrupted the handler,
        which will not answer any more."""
        if isinstance(error, RequeueWithoutBackoff):
            message.requeue(error.delay_s, backoff=False)
        elif error is self.fatal_error or not isinstance(error, Exception):
            message.requeue(0, backoff=False)
        else:
            log.error("the handler failed for %r", message, exc_info=error)
            message.requeue()
        if not isinstance(error, Exception):
            raise error
        return error

    def _tell(
        self, on_handled: OnHandled, message: Message, began_at: float, error: BaseException | None
    ) -> None:
        try:
            on_handled(message, time.monotonic() - began_at, error)
        except Exception:
            log.exception("on_handled failed for %r", message)


def check_count(name: str, count: int) -> None:
    """Raise `ConfigurationError` for a number of workers or messages that cannot be."""
    if not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"{name} must be a whole number >= 1, not {count!r}")


class StopSignals:
    """Within the block: ``stop`` on the first SIGTERM or SIGINT, ``end`` on the second.

    ``wanted`` None: those that the program does not handle itself, and none outside the main
    thread, which alone gets signals. Raises `ConfigurationError` there for True.
    """

    def __init__(
        self, wanted: bool | None, *, stop: Callable[[], object], end: Callable[[], object]
    ) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if wanted and not is_main:
            raise ConfigurationError("signals=True works on the main thread only")
        self._begin_stop, self._end = stop, end
        self._numbers = [
            number
            for number in (signal.SIGTERM, signal.SIGINT)
            if wanted or (wanted is None and is_main and _is_unhandled(number))
        ]
        self._before: dict[int, _SignalHandler] = {}
        self._first_at: float | None = None
        self.ends_now = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __bool__(self) -> bool:
        """Tell whether a signal is handled."""
        return bool(self._numbers)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
            self._begin_stop()
            return
        if time.monotonic() - self._first_at < ONCE_S:  # it is the same one
            return
        for each in self._numbers:  # a third one ends a program that catches even what is raised
            signal.signal(each, signal.SIG_DFL)
        self.ends_now = True
        self._end()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _is_unhandled(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # what asyncio.run installs for SIGINT, to cancel its main task
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return type(owner).__module__ == "asyncio.runners"
