"""Consume a channel with a handler function, until a stop.

The main thread supervises: signals, probes and reloads. Handlers run on other threads, or on the
event loop of one, so that a stop works even while every handler hangs.

A handler may take as long as it needs. Its message is touched until nsqd's --max-msg-timeout (15
minutes by default). nsqd delivers it again after that, but no other worker of this process gets it.
While every worker has such a message, the service is not alive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import signal
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nsqtools import aio
from nsqtools.client.consumer import ABORT_S, Consumer
from nsqtools.client.handling import GiveUp, RequeueWithoutBackoff, StopSignals, check_count
from nsqtools.client.message import Batch, Message, source_of
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError
from nsqtools.forward.dispatcher import DeadLetterFile
from nsqtools.forward.parcel import Parcel
from nsqtools.http.service import service
from nsqtools.protocol.names import one_or_several
from nsqtools.protocol.text import counted
from nsqtools.records.prometheus import Metric, MetricSample, metric_of
from nsqtools.work import Decoding
from nsqtools.work.handler import Function, Handler, NamedHandler, make_handler
from nsqtools.work.tracing import process_spans

log = logging.getLogger("nsqtools")

# How often the main thread looks after the service.
TICK_S = 0.5
# How long handlers may take to return after their consumer has ended.
RETURN_S = 1.0
# Failed messages whose last error is kept for a file of dead letters, at about 300 bytes each.
MAX_ERRORS = 10_000


@dataclass(frozen=True, kw_only=True)
class WorkSettings:
    """What to consume, and what happens to messages that cannot be handled.

    The names are those of `serve`. Raises `ConfigurationError`.
    """

    topics: Sequence[str]
    channel: str
    workers: int = 1
    decoding: Decoding | None = None
    nsqd_tcp_addresses: Sequence[str] = ()
    lookupd_http_addresses: Sequence[str] = ()
    nsqd_http_addresses: Sequence[str] = ()
    address_map: Mapping[str, str] | None = None
    options: ClientOptions = field(default_factory=ClientOptions)
    max_attempts: int = 0
    dead_letter_topic: str = ""
    dead_letter_file: Path | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        if self.dead_letter_topic and self.dead_letter_file:
            raise ConfigurationError("give either dead_letter_topic or dead_letter_file")
        for name, is_set in {"decode": self.decoding, "max_attempts": self.max_attempts}.items():
            if is_set and not (self.dead_letter_topic or self.dead_letter_file):
                raise ConfigurationError(f"{name} needs dead_letter_topic or dead_letter_file")


class WorkService:
    """A service that calls a handler with each message.

    Call `run` on the main thread, and `stop` on any.
    """

    def __init__(
        self,
        handler: str | Function,
        settings: WorkSettings,
        *,
        report: Callable[[str], object] = log.info,
    ) -> None:
        """Import and check the handler. Lines about the run go to ``report``.

        Raises `ConfigurationError`, and `OutputError` for a dead-letter file.
        """
        self._named = None
        if isinstance(handler, str):
            self._named = NamedHandler(handler, settings.decoding)
            self._handler = self._named.load()
        else:
            name = getattr(handler, "__qualname__", None) or repr(handler)
            self._handler = make_handler(handler, name, settings.decoding)
        self._settings = settings
        self._report = report
        self._file = settings.dead_letter_file and DeadLetterFile(settings.dead_letter_file)
        self._errors: dict[tuple[str, str, bytes], str] = {}  # by message, the reason to give it up
        self._times = HandlingTimes()
        self._span = process_spans(settings.channel)
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._wants_reload = False
        self.consumer = self._make_consumer()

    def _make_consumer(self) -> Consumer | aio.Consumer:
        settings = self._settings
        return (aio.Consumer if self._handler.is_async else Consumer)(
            settings.topics,
            settings.channel,
            nsqd_tcp_addresses=settings.nsqd_tcp_addresses,
            lookupd_http_addresses=settings.lookupd_http_addresses,
            address_map=settings.address_map,
            options=replace(settings.options, max_attempts=settings.max_attempts),
            dead_letter=settings.dead_letter_topic,
            on_giving_up=self._write_dead_letter if self._file else None,
            _nsqd_http_addresses=settings.nsqd_http_addresses,
        )

    # -- supervision ----------------------------------------------------------------------------

    def run(
        self,
        *,
        listen_http: str | None = None,
        metrics_file: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        dev: bool = False,
    ) -> None:
        """Work until `stop`. With ``dev``, reload when a source file changes.

        Raises `ConfigurationError` for an address that cannot be listened on, and for a handler
        that returns pending work.
        """
        thread = threading.Thread(target=self._consume, name="nsq-work", daemon=True)
        reports = service(
            listen_http,
            environ,
            metrics=self.metrics,
            health=self.health,
            metrics_file=metrics_file,
        )
        with reports as supervised, self._reload_on_hangup():
            if dev and self._named is not None:
                self._named.watch()  # before a handler may show its code
            thread.start()
            supervised.ready()
            while thread.is_alive() and not self._is_stopping:
                if self._has_free_worker():
                    supervised.alive()
                self._reload_if_due(dev)
                thread.join(TICK_S)
            supervised.stopping()
            while not self.consumer.wait_for_end(TICK_S) and thread.is_alive():
                supervised.write_metrics()
            thread.join(RETURN_S)
        if thread.is_alive():
            log.warning("a handler has not returned; its message was requeued")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop after the delivered messages are handled, at most drain_timeout. Does not wait."""
        self._is_stopping = True
        self.consumer.begin_stop(drain=True)

    def abort(self) -> None:
        """Requeue the messages of running handlers, and wait until nsqd has them."""
        self.consumer.abort()
        self.consumer.wait_for_end(ABORT_S)

    def health(self) -> tuple[bool, str]:
        """Return whether an nsqd is connected and a worker free, and a line of text."""
        connections = self.consumer.connections
        if not self._has_free_worker():
            return False, "every worker has a message that has timed out"
        return bool(connections), f"connected to {', '.join(connections) or 'no nsqd'}"

    def _has_free_worker(self) -> bool:
        return len(self.consumer.health().overdue) < self._settings.workers

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        health, stats = self.consumer.health(), self.consumer.stats
        yield self._times.metric()
        for name, help, value in (
            ("received_messages_total", "Deliveries.", stats.received),
            ("finished_messages_total", "Messages finished.", stats.finished),
            ("requeued_messages_total", "Messages requeued.", stats.requeued),
            ("given_up_messages_total", "Messages given up: dead letters.", stats.given_up),
            ("in_flight_messages", "Messages without an answer.", health.in_flight),
            ("overdue_messages", "Messages that timed out in a handler.", len(health.overdue)),
            ("workers", "Messages that may be handled at a time.", self._settings.workers),
            ("connections", "Connected nsqd.", len(health.connections)),
            ("backoff_level", "0 unless handlers failed recently.", health.backoff_level),
        ):
            yield metric_of(f"nsq_work_{name}", help, [({}, value)])

    def summary(self) -> str:
        """Return the counts in a line."""
        line = f"{counted(self._times.total('ok'), 'message')} handled"
        if failed := self._times.total("error"):
            line += f", {failed} failed"
        if given_up := self.consumer.stats.given_up:
            line += f", {counted(given_up, 'dead letter')}"
        return line

    @property
    def handled_count(self) -> int:
        """The number of messages that handlers have received so far."""
        return self._times.total("ok") + self._times.total("error")

    # -- reloading ------------------------------------------------------------------------------

    @contextmanager
    def _reload_on_hangup(self) -> Iterator[None]:
        """Inside, SIGHUP reloads a named handler, unless nohup or the program has set it."""
        is_main = threading.current_thread() is threading.main_thread()
        is_free = is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        if self._named is None or not is_free:
            yield
            return

        def request_reload(*_: object) -> None:
            self._wants_reload = True

        signal.signal(signal.SIGHUP, request_reload)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def _reload_if_due(self, dev: bool) -> None:
        if self._named is None:
            return
        has_changed = dev and self._named.has_changed()
        if self._wants_reload or has_changed:
            self._wants_reload = False
            self._reload(self._named)

    def _reload(self, named: NamedHandler) -> None:
        try:
            handler = named.reload()
            if handler.is_async is not self._handler.is_async:
                raise ConfigurationError("a change between def and async def needs a restart")
        except ConfigurationError as exc:
            log.error("%s is not reloaded, the previous code continues: %s", named.name, exc)
        else:
            self._handler = handler
            self._report(f"reloaded {named.name}")

    # -- handling -------------------------------------------------------------------------------

    def _consume(self) -> None:
        consumer, workers = self.consumer, self._settings.workers
        try:
            if isinstance(consumer, Consumer):
                consumer.run(
                    self._handle,
                    workers=workers,
                    signals=False,
                    auto_touch=True,
                    on_handled=self._on_handled,
                )
            else:
                asyncio.run(
                    consumer.run(
                        self._handle_async,
                        concurrency=workers,
                        signals=False,
                        auto_touch=True,
                        on_handled=self._on_handled,
                    )
                )
        except BaseException as exc:
            self._failure = exc

    def _handle(self, message: Message) -> object:
        handler = self._handler  # a reload may replace it meanwhile
        try:
            with self._span(message):
                result = handler.function(_argument(handler, message))
        except (Exception, SystemExit) as exc:
            self._note_failure(message, exc)
            raise
        if self._errors:
            self._errors.pop(_key(message), None)
        return result

    async def _handle_async(self, message: Message) -> object:
        handler = self._handler
        try:
            with self._span(message):
                result = await handler.function(_argument(handler, message))
        except (Exception, SystemExit) as exc:
            self._note_failure(message, exc)
            raise
        if self._errors:
            self._errors.pop(_key(message), None)
        return result

    def _note_failure(self, message: Message, error: BaseException) -> None:
        """Note why a message failed, for its dead letter. sys.exit fails the message only."""
        if isinstance(error, RequeueWithoutBackoff):
            return
        if isinstance(error, BrokenPipeError) and _has_stdout_lost_its_reader():
            # Each further message that the handler prints would fail as well.
            self._failure, self._is_stopping = error, True
            self.consumer.begin_stop(drain=False)
        text = str(error) if isinstance(error, GiveUp) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            text = f"the handler called sys.exit({error.code!r})"
        if self._file is not None:
            self._errors[_key(message)] = text
            if len(self._errors) > MAX_ERRORS:
                self._errors.pop(next(iter(self._errors)), None)
        if isinstance(error, SystemExit):
            raise RuntimeError(text) from error

    def _on_handled(self, message: Message, seconds: float, error: BaseException | None) -> None:
        self._times.record(message.topic, "ok" if error is None else "error", seconds)

    def _write_dead_letter(self, message: Message) -> bool:
        """Write a message to the file; return whether it is on disk."""
        assert self._file
        key = _key(message)
        reason = self._errors.get(key, f"given up after {message.attempts} attempts")
        batch, results = Batch(source_of(message), [message]), list[bool]()
        parcel = Parcel(batch, [message.body], message.topic, time.monotonic())
        self._file.put(parcel, reason, lambda _, is_kept: results.append(is_kept))
        is_written = results == [True]
        if is_written:  # otherwise it is given up again, without a call of the handler
            self._errors.pop(key, None)
        return is_written


def _has_stdout_lost_its_reader() -> bool:
    poll = select.poll()
    poll.register(1, 0)  # the system reports errors without being asked for any event
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _argument(handler: Handler, message: Message) -> Any:
    if handler.decode is None:
        return message
    try:
        return handler.decode(message.body)
    except ValueError as exc:
        raise GiveUp(f"the body does not fit: {exc}") from None


def _key(message: Message) -> tuple[str, str, bytes]:
    return message.topic, message.nsqd, message.id


def _parse_decode(decode: str | None) -> Decoding | None:
    try:
        return None if decode is None else Decoding(decode)
    except ValueError:
        raise ConfigurationError(f"decode must be json, text or bytes, not {decode!r}") from None


def serve(
    handler: str | Function,
    topic: str | Sequence[str],
    channel: str,
    *,
    workers: int = 1,
    decode: Literal["json", "text", "bytes"] | None = None,
    nsqd_tcp_addresses: str | Sequence[str] = (),
    lookupd_http_addresses: str | Sequence[str] = (),
    options: ClientOptions | None = None,
    max_attempts: int = 0,
    dead_letter_topic: str = "",
    dead_letter_file: str | Path | None = None,
    listen_http: str | None = None,
    signals: bool | None = None,
) -> None:
    """Call a function with each message until SIGTERM or SIGINT, as `nsq work` does.

    Messages are answered by the outcome as `Consumer.run` does it, and touched while the function
    runs.

    Args:
        handler: a function, or ``MODULE:FUNCTION``, which SIGHUP reloads. An ``async def`` function
            runs on an event loop, others run on threads.
        workers: messages that are handled at the same time.
        decode: what the function gets instead of the message. ``json`` converts to the annotation
            of its parameter. A body that does not fit becomes a dead letter.
        max_attempts: attempts before a message becomes a dead letter; 0 is without limit.
        dead_letter_topic: where dead letters are published, on the same nsqd.
        dead_letter_file: where they are appended instead, for `nsq redrive`.
        listen_http: ``[HOST:]PORT`` of /metrics, /ready and /live, by default on loopback.
        signals: as in `Consumer.run`.

    Raises `ConfigurationError`, and `OutputError` for a dead-letter file that cannot be written.
    """
    settings = WorkSettings(
        topics=one_or_several(topic),
        channel=channel,
        workers=workers,
        decoding=_parse_decode(decode),
        nsqd_tcp_addresses=one_or_several(nsqd_tcp_addresses),
        lookupd_http_addresses=one_or_several(lookupd_http_addresses),
        options=options or ClientOptions(),
        max_attempts=max_attempts,
        dead_letter_topic=dead_letter_topic,
        dead_letter_file=Path(dead_letter_file) if dead_letter_file else None,
    )
    worker = WorkService(handler, settings)
    with StopSignals(signals, stop=worker.stop, end=worker.abort):
        worker.run(listen_http=listen_http)


# -- handling times -------------------------------------------------------------------------------

# Seconds. The steps of Prometheus clients up to 10 s, then as long as messages may be in flight:
# 15 minutes is nsqd's default of -max-msg-timeout.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)


class HandlingTimes:
    """A histogram of handling times by topic and outcome. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def record(self, topic: str, outcome: str, seconds: float) -> None:
        """Count a message."""
        index, key = bisect_left(BOUNDS, seconds), (topic, outcome)
        with self._lock:
            if key not in self._counts:
                self._counts[key], self._sums[key] = [0] * (len(BOUNDS) + 1), 0.0
            self._counts[key][index] += 1
            self._sums[key] += seconds

    def total(self, outcome: str) -> int:
        """Return the number of messages with this outcome."""
        with self._lock:
            return sum(sum(counts) for (_, o), counts in self._counts.items() if o == outcome)

    def metric(self) -> Metric:
        """Return the histogram."""
        help = "How long the handler took; outcome error: it raised an exception."
        return Metric("nsq_work_handling_seconds", "histogram", help, list(self._samples()))

    def _samples(self) -> Iterator[MetricSample]:
        with self._lock:
            counts = {key: (counts.copy(), self._sums[key]) for key, counts in self._counts.items()}
        for (topic, outcome), (by_bound, seconds) in counts.items():
            labels, count = {"topic": topic, "outcome": outcome}, 0
            for bound, number in zip((*BOUNDS, math.inf), by_bound, strict=True):
                count += number
                yield {**labels, "le": f"{bound:g}".replace("inf", "+Inf")}, count, "_bucket"
            yield labels, seconds, "_sum"
            yield labels, count, "_count"
