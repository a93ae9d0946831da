"""Call handlers, answer messages by the outcome, and stop on signals."""

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

from nsqtools.client.message import Answered, Batch, Message, source_of
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.arguments import NONE, check_argument, check_functions, check_times

log = logging.getLogger("nsqtools")

# timeout(1) signals the process and then its process group: two signals within this time are one.
SIGNAL_DEBOUNCE_S = 0.2

_SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class RequeueWithoutBackoff(Exception):
    """Raise this in a handler of `Consumer.run` to requeue the message without backoff.

    ``delay_s`` as in `Message.requeue`. Raises `ConfigurationError` for a negative one.
    """

    def __init__(self, delay_s: float | None = None) -> None:
        super().__init__(delay_s)
        if delay_s is not None:
            check_times(delay_s=delay_s)
        self.delay_s = delay_s


class GiveUp(Exception):
    """Raise this in a handler of `Consumer.run` for a message that no retry will help.

    The message is given up without waiting for max_attempts: it goes to ``on_giving_up`` or
    ``dead_letter``, or is finished with ``giving_up="finish"``. A consumer without any of these
    requeues it with backoff. The text of the exception is the reason in the log.
    """


OnHandled = Callable[[Message, float, BaseException | None], None]
"""Called with each handled message, the seconds it took, and the exception or None."""


def check_is_sync(handler: object) -> None:
    """Raise `ConfigurationError` for a coroutine or generator function."""
    while isinstance(handler, partial):
        handler = handler.func
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - as it is called
        if any(kind(function) for kind in kinds):
            raise _not_awaited("is a coroutine or generator function")


def _not_awaited(predicate: str) -> ConfigurationError:
    hint = "use nsqtools.aio.Consumer for coroutines, or answer later, with auto_answer=False"
    return ConfigurationError(f"the handler {predicate}, which run does not wait for; {hint}")


class Handling:
    """Calls a handler on several threads or tasks.

    ``fatal_error`` is set when the consumer must stop: the handler returned pending work, or
    nothing to await, or raised what ends the program, such as SystemExit.
    """

    def __init__(
        self,
        handler: Callable[[Message], object],
        *,
        answers: bool,
        on_handled: OnHandled | None,
        give_up: Callable[[Batch, str], None],
    ) -> None:
        if not callable(handler):
            raise ConfigurationError(f"the handler is {handler!r}, which cannot be called")
        check_functions(on_handled=on_handled)
        self._handler = handler
        self._answers = answers
        self._on_handled = on_handled
        self._give_up = give_up
        self.fatal_error: BaseException | None = None

    def handle(self, message: Message) -> None:
        """Call the handler, and answer the message by the outcome."""
        began_at = time.monotonic() if self._on_handled is not None else 0.0
        error: BaseException | None = None
        try:
            result = self._handler(message)
            if result is None:  # like `_answer`, without its call
                if self._answers:
                    message.finish()
            else:
                self._answer(message, result)
        except BaseException as exc:
            error = self._requeue(message, exc)
        if self._on_handled is not None:
            self._report(self._on_handled, message, began_at, error)

    async def handle_in_task(self, message: Message) -> None:
        """Do the same with a handler whose result is awaited."""
        began_at = time.monotonic() if self._on_handled is not None else 0.0
        error: BaseException | None = None
        try:
            result = self._handler(message)
            if type(result) is not CoroutineType and not inspect.isawaitable(result):
                text = "the handler returns nothing to await; use nsqtools.Consumer"
                self.fatal_error = ConfigurationError(text)
                raise self.fatal_error
            self._answer(message, await result)
        except BaseException as exc:
            import asyncio

            task, cause = asyncio.current_task(), exc
            # A handler that awaits a cancelled future has failed; only a cancelled task is to end.
            if isinstance(exc, asyncio.CancelledError) and task and not task.cancelling():
                cause = RuntimeError("the handler awaited something that was cancelled")
            error = self._requeue(message, cause)
        if self._on_handled is not None:
            self._report(self._on_handled, message, began_at, error)

    def _answer(self, message: Message, outcome: object) -> None:
        if outcome is None:  # the usual case, without a further call
            if self._answers:
                message.finish()
            return
        is_pending = isinstance(outcome, (GeneratorType, AsyncGeneratorType))
        is_pending |= inspect.isawaitable(outcome)
        # A handler that submits to a pool returns a future. That is right if it answers later.
        if hasattr(type(outcome), "add_done_callback"):
            is_pending = self._answers
        if is_pending and not isinstance(outcome, Answered):
            if isinstance(outcome, CoroutineType):
                outcome.close()  # or Python warns that it was never awaited
            self.fatal_error = _not_awaited(f"returns a {type(outcome).__name__}")
            raise self.fatal_error
        if outcome is False:
            message.requeue()
        elif self._answers:
            message.finish()

    def _requeue(self, message: Message, error: BaseException) -> BaseException:
        """Requeue the message of a failed handler, and return the error.

        Re-raises an error that is no ``Exception``, after an immediate requeue: the handler was
        interrupted and will not answer.
        """
        if isinstance(error, RequeueWithoutBackoff):
            message.requeue(error.delay_s, backoff=False)
        elif isinstance(error, GiveUp):
            if not message.is_answered:
                self._give_up(Batch(source_of(message), [message]), str(error))
        elif error is self.fatal_error or not isinstance(error, Exception):
            message.requeue(0, backoff=False)
        else:
            log.error("the handler failed for %r", message, exc_info=error)
            message.requeue()
        if not isinstance(error, Exception):
            raise error
        return error

    def _report(
        self, on_handled: OnHandled, message: Message, began_at: float, error: BaseException | None
    ) -> None:
        try:
            on_handled(message, time.monotonic() - began_at, error)
        except Exception:
            log.exception("on_handled failed for %r", message)


def check_count(name: str, count: int) -> None:
    """Raise `ConfigurationError` for a number of workers or messages below 1."""
    if not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"{name} must be a whole number >= 1, not {count!r}")


class StopSignals:
    """Within the block: ``stop`` on the first SIGTERM or SIGINT, ``end`` on the second.

    ``signals`` is the argument of `Consumer.run`. With None, signals are left alone that the
    program handles itself, and all of them outside the main thread, where Python allows no
    handlers. Raises `ConfigurationError` there for True.
    """

    def __init__(
        self, signals: bool | None, *, stop: Callable[[], object], end: Callable[[], object]
    ) -> None:
        check_argument("signals", signals, bool, NONE)
        is_main = threading.current_thread() is threading.main_thread()
        if signals and not is_main:
            raise ConfigurationError("signals=True works on the main thread only")
        self._begin_stop, self._end = stop, end
        self._numbers = [
            number
            for number in (signal.SIGTERM, signal.SIGINT)
            if signals or (signals is None and is_main and _has_default_handler(number))
        ]
        self._previous: dict[int, _SignalHandler] = {}
        self._first_at: float | None = None
        self.ends_now = False

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._stop) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __bool__(self) -> bool:
        """Return whether a signal is handled."""
        return bool(self._numbers)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
            self._begin_stop()
            return
        if time.monotonic() - self._first_at < SIGNAL_DEBOUNCE_S:
            return
        # A third signal ends even a program that catches the exception raised here.
        for handled_number in self._numbers:
            signal.signal(handled_number, signal.SIG_DFL)
        self.ends_now = True
        self._end()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _has_default_handler(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # asyncio.run installs a handler of its own for SIGINT, which cancels the main task.
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return type(owner).__module__ == "asyncio.runners"
