"""Running a handler: what its outcome means for a message, signals, and automatic TOUCH.

The I/O thread touches what is being handled: a handler that computes need not care.
nsqd bounds the sum at its max_msg_timeout, 15 minutes unless set.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CoroutineType, FrameType
from typing import Protocol

from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError

log = logging.getLogger("nsqtools")

TOUCH_SHARE = 0.5  # of msg_timeout


class RequeueWithoutBackoff(Exception):
    """Raise it in a handler of `Consumer.run` to requeue the message without slowing down.

    ``delay_s`` as in `Message.requeue`.
    """

    def __init__(self, delay_s: float | None = None) -> None:
        super().__init__(delay_s)
        self.delay_s = delay_s


OnHandled = Callable[[Message, float, BaseException | None], None]
"""Gets each message that a handler is done with, the seconds it took, and what it raised."""


def check_is_sync(handler: object) -> None:
    """Raise `ConfigurationError` for a handler whose call does nothing but make a coroutine."""
    while isinstance(handler, partial):
        handler = handler.func
    for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - as it is called
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise _refusal("a coroutine function")


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the handler is {what}, which run does not await; use nsqtools.aio.Consumer"
    )


class Handling:
    """Calls a handler on several threads, and notes the message that each of them handles.

    ``misuse`` is set when a handler cannot work: it returned an awaitable.
    """

    def __init__(
        self,
        handler: Callable[[Message], object],
        *,
        answers: bool,
        on_handled: OnHandled | None = None,
    ) -> None:
        self._handler = handler
        self._answers = answers
        self._on_handled = on_handled
        self._at_work: dict[int, Message] = {}  # by thread
        self.misuse: ConfigurationError | None = None

    def handle(self, message: Message) -> None:
        """Handle one message, and answer it by the outcome."""
        thread = threading.get_ident()
        self._at_work[thread] = message
        began_at = time.monotonic() if self._on_handled is not None else 0.0
        error: BaseException | None = None
        try:
            result = self._handler(message)
        except RequeueWithoutBackoff as exc:
            error = exc
            message.requeue(exc.delay_s, backoff=False)
        except Exception as exc:
            error = exc
            log.exception("the handler failed for %r", message)
            message.requeue()
        except BaseException:  # an interrupt: the message will not be answered any more
            message.requeue(0, backoff=False)
            raise
        else:
            if result is not None and inspect.isawaitable(result):
                error = self.misuse = _refusal("one that returns an awaitable")
                message.requeue(0, backoff=False)
                if isinstance(result, CoroutineType):
                    result.close()
            elif result is False:
                message.requeue()
            elif self._answers:
                message.finish()
        finally:
            del self._at_work[thread]
        if self._on_handled is not None:
            try:
                self._on_handled(message, time.monotonic() - began_at, error)
            except Exception:
                log.exception("on_handled failed for %r", message)

    def touch(self, now: float) -> None:
        """Touch what has been handled for a while (on the I/O thread)."""
        for message in list(self._at_work.values()):
            left_s = message.deadline - now
            if left_s < (1 - TOUCH_SHARE) * (message.deadline - message.received_at):
                message.touch()


class Stoppable(Protocol):
    def begin_stop(self, *, drain: bool = False) -> None: ...
    def abort(self) -> None: ...


@contextmanager
def stopping_on_signals(consumer: Stoppable) -> Iterator[None]:
    """Drain on the first SIGTERM or SIGINT, abort on the second.

    Raises `ConfigurationError` outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("signals=True works on the main thread only")
    seen = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            consumer.abort()
        else:
            seen = True
            consumer.begin_stop(drain=True)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
