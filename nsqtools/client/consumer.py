"""Consumer: subscribe to a channel of a topic and handle its messages.

    with Consumer("clicks", "archive", nsqd_tcp_addresses=["127.0.0.1:4150"]) as consumer:
        for message in consumer:
            store(message.body)
            message.finish()

A thread of the consumer's own does all network traffic: heartbeats are answered however long a
handler takes. Messages come to the handler's thread in batches, one for each read of the socket,
through a queue without bound: it holds no more than max_in_flight messages plus what nsqd delivers
again, and a bounded one would stop the reader, and with it the heartbeats.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from nsqtools.client.consumer_io import ConsumerIO, ConsumerStats, GivenUp
from nsqtools.client.discovery import Discovery
from nsqtools.client.handshake import tls_context
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.addresses import Address, parse_address
from nsqtools.protocol.names import check_channel, check_topic

log = logging.getLogger("nsqtools")


class Stopped:
    """Put in the queue when a consumer will deliver no more."""

    __slots__ = ("consumer",)

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer


Delivery = Batch | GivenUp | Stopped
DeliveryQueue = queue.SimpleQueue[Delivery]


class RequeueWithoutBackoff(Exception):
    """Raise it in a handler of `Consumer.run` to requeue the message without slowing down.

    ``delay_s`` as in `Message.requeue`.
    """

    def __init__(self, delay_s: float | None = None) -> None:
        super().__init__(delay_s)
        self.delay_s = delay_s


class Consumer:
    """One channel of one topic, on all nsqd that have it.

    Give addresses of nsqd, of nsqlookupd, or both: a sequence of them, or just one.

    ``on_error`` is told of every connection that fails or is lost (on the I/O thread; it must not
    block); ``on_giving_up`` of each message that was delivered more than max_attempts times and is
    finished unseen, on a handler's thread.
    Several consumers may share one ``deliveries`` queue, whose reader then tells their batches
    apart by `Batch.topic`.

    Raises `ConfigurationError` for bad names, addresses or options.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] = (),
        lookupd_http_addresses: str | Sequence[str] = (),
        options: ClientOptions | None = None,
        address_map: Mapping[str, str] | None = None,
        on_error: Callable[[NsqError], None] | None = None,
        on_giving_up: Callable[[Message], None] | None = None,
        deliveries: DeliveryQueue | None = None,
    ) -> None:
        self.topic = check_topic(topic)
        self.channel = check_channel(channel)
        self.options = options or ClientOptions()
        nsqd_tcp_addresses = _sequence(nsqd_tcp_addresses)
        lookupd_http_addresses = _sequence(lookupd_http_addresses)
        if not nsqd_tcp_addresses and not lookupd_http_addresses:
            raise ConfigurationError(
                "a consumer needs an address", hint="Give one of an nsqd or an nsqlookupd."
            )
        if self.options.heartbeat_interval_s < 0:
            raise ConfigurationError("nsqd refuses consumers without heartbeats")
        self.deliveries: DeliveryQueue = (
            deliveries if deliveries is not None else queue.SimpleQueue()
        )
        self._on_giving_up = on_giving_up
        self._discovery = (
            Discovery(lookupd_http_addresses, topic, self.options, self._on_round, address_map)
            if lookupd_http_addresses
            else None
        )
        self._io = ConsumerIO(
            topic,
            channel,
            [parse_address(address) for address in nsqd_tcp_addresses],
            self.options,
            tls_context(self.options),
            expects_lookup=self._discovery is not None,
            deliver=self.deliveries.put,
            on_stopped=self._end_deliveries,
            on_error=on_error or (lambda error: None),
            on_lost_discovered=self._ask_soon,
        )
        # re-entrant: a signal handler may stop what its thread is starting
        self._life = threading.RLock()
        self._is_started = False
        self._is_stopping = False
        self._drains = True  # until a stop says otherwise
        self._handled: dict[int, Batch] = {}  # by the threads that iterate or run handlers

    # -- life -----------------------------------------------------------------------------------

    def start(self, *, fail_fast: bool = False) -> None:
        """Connect. With ``fail_fast`` wait for the first tries, and raise the first error if none
        of them led to a connection; otherwise failures are logged and tried again.

        A consumer is started once: after a stop this does nothing.
        """
        with self._life:
            if self._is_started or self._is_stopping:
                return
            self._is_started = True
            self._io.start(quietly=fail_fast)
            if self._discovery is not None:
                self._discovery.start()
        if fail_fast:
            self._io.settled.wait()
            if self._io.first_errors and not self._io.subscriptions:
                self.stop()
                raise self._io.first_errors[0]
            for error in self._io.first_errors:
                log.warning("%s; trying again", error)

    def begin_stop(self, *, drain: bool = False) -> None:
        """Start to stop and return at once; safe in a signal handler and in a message handler.

        Without ``drain`` messages that no handler has started on are requeued at once; with it
        they are still delivered. Messages being handled may be answered for drain_timeout.
        """
        with self._life:
            self._drains = drain and (self._drains or not self._is_stopping)
            if not self._is_started and not self._is_stopping:
                self.deliveries.put(Stopped(self))
            self._is_stopping = True
            if self._discovery is not None:
                self._discovery.stop()
            if self._is_started:
                self._io.loop.call_soon(lambda: self._io.begin_stop(drain))

    def stop(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Stop and wait for it: until everything delivered is answered, and the answers sent.

        Returns whether the consumer has stopped. It has not yet when ``timeout_s`` passed, nor
        when called inside a handler or a loop over messages, which is what would be waited for.
        Messages that nobody answers are requeued after drain_timeout. May be called again.
        """
        self.begin_stop(drain=drain)
        handled = self._handled.get(threading.get_ident(), ())
        if any(not message.is_answered for message in handled):
            return False
        return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None = None) -> bool:
        return self._io.loop.join(timeout_s) if self._is_started else True

    def abort(self) -> None:
        """Stop without waiting for running handlers: what they hold is requeued."""
        self.begin_stop()
        if self._is_started:
            self._io.loop.call_soon(self._io.abort)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.begin_stop()
        else:
            self.abort()
        self._wait()

    def _end_deliveries(self) -> None:
        """The last batch has been put in the queue (the I/O thread, which alone can know that)."""
        if not self._drains:
            self._requeue_undelivered()
        self.deliveries.put(Stopped(self))

    def _requeue_undelivered(self) -> None:
        """Requeue our batches that nobody has taken from the queue, and keep the rest in it."""
        kept: list[Delivery] = []
        try:
            while True:
                delivery = self.deliveries.get_nowait()
                batch = delivery.batch if isinstance(delivery, GivenUp) else delivery
                if isinstance(batch, Batch) and self._io.owns(batch):
                    batch.requeue(0, backoff=False)
                else:
                    kept.append(delivery)
        except queue.Empty:
            for delivery in kept:
                self.deliveries.put(delivery)

    # -- messages -------------------------------------------------------------------------------

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Wait for the next batch. None when ``timeout_s`` passed or the consumer has stopped.

        Every message must be answered, on any thread: `Batch.finish` finishes what is left.
        """
        self._io.loop.wake()  # whoever asks for more has answered: send it
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            try:
                delivery = self.deliveries.get(timeout=left_s)
            except queue.Empty:
                return None
            if isinstance(delivery, Stopped):
                self.deliveries.put(delivery)  # for whoever asks next, on any thread
                if self._io.loop.failure is not None:
                    raise RuntimeError("the I/O thread failed") from self._io.loop.failure
                return None
            if isinstance(delivery, GivenUp):
                self.give_up(delivery)
            elif self._drains:
                return delivery
            else:
                delivery.requeue(0, backoff=False)

    def batches(self, timeout_s: float | None = None) -> Iterator[Batch]:
        """Iterate over batches until the consumer stops, or for ``timeout_s`` none came.

        Every message must be answered: `Batch.finish` finishes what is left of a batch.
        """
        self.start()
        thread = threading.get_ident()
        try:
            while (batch := self.next_batch(timeout_s)) is not None:
                self._handled[thread] = batch
                yield batch
        finally:
            self._handled.pop(thread, None)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the consumer stops. Each must be answered.

        Leaving the loop requeues the messages of the batch that were not reached. A message that
        timed out in the queue and was delivered anew is passed over the first time.
        """
        for batch in self.batches():
            reached = 0
            in_flight = batch.source.in_flight
            try:
                for message in batch:
                    if not self._drains:
                        break
                    reached += 1
                    if in_flight.get(message.id) is message:
                        yield message
            finally:
                for message in batch[reached:]:
                    message.requeue(0, backoff=False)

    def run(self, handler: Callable[[Message], object], *, workers: int = 1) -> None:
        """Call ``handler`` with each message until the consumer stops, on ``workers`` threads.

        A message that the handler has not answered itself is finished when it returns, requeued
        with backoff when it returns False or raises (the exception is logged), and requeued without
        backoff when it raises `RequeueWithoutBackoff`.
        """
        self.start()
        threads = [
            threading.Thread(target=self._work, args=(handler,), name=f"nsq-worker-{n}")
            for n in range(workers - 1)
        ]
        for thread in threads:
            thread.start()
        try:
            self._work(handler)
        except BaseException:
            self.begin_stop()  # or the other threads would go on
            raise
        finally:
            for thread in threads:
                thread.join()

    def _work(self, handler: Callable[[Message], object]) -> None:
        for message in self:
            _handle(handler, message)

    def give_up(self, given_up: GivenUp) -> None:
        """Tell of messages that were delivered too often, and finish them."""
        for message in given_up.batch:
            log.warning("giving up %r", message)
            if self._on_giving_up is not None:
                try:
                    self._on_giving_up(message)
                except Exception:
                    log.exception("on_giving_up failed for %r", message)
            message.give_up()

    # -- state ----------------------------------------------------------------------------------

    def set_max_in_flight(self, count: int) -> None:
        """Change max_in_flight while running; 0 pauses."""
        if count < 0:
            raise ConfigurationError("max_in_flight must not be negative")
        self._io.loop.call_soon(lambda: self._io.set_max_in_flight(count))

    @property
    def is_starved(self) -> bool:
        """Tell whether some connection has 85 % of its RDY in flight: who holds messages back to
        answer them together should answer now."""
        return self._io.rdy.is_starved

    @property
    def connections(self) -> list[str]:
        """The addresses of the nsqd connected to now."""
        return [subscription.nsqd for subscription in list(self._io.subscriptions)]

    @property
    def stats(self) -> ConsumerStats:
        """Counts since the start."""
        return self._io.stats

    # -- discovery ------------------------------------------------------------------------------

    def _on_round(self, found: set[Address], errors: list[NsqError]) -> None:
        self._io.loop.call_soon(lambda: self._io.listed(found, errors))

    def _ask_soon(self) -> None:
        if self._discovery is not None:
            self._discovery.ask_soon()


def _sequence(addresses: str | Sequence[str]) -> Sequence[str]:
    return [addresses] if isinstance(addresses, str) else addresses


def _handle(handler: Callable[[Message], object], message: Message) -> None:
    try:
        result = handler(message)
    except RequeueWithoutBackoff as exc:
        message.requeue(exc.delay_s, backoff=False)
    except Exception:
        log.exception("the handler failed for %r", message)
        message.requeue()
    except BaseException:  # an interrupt: nobody will answer the message any more
        message.requeue(0, backoff=False)
        raise
    else:
        if result is False:
            message.requeue()
        else:
            message.finish()
