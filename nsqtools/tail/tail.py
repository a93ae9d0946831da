"""Tail: every message of some topics to one writer, and finished only once it is written.

One consumer has all topics, and one thread writes: lines of different topics cannot tear each
other. A batch is encoded and written whole, then finished in one
go. Messages that a filter leaves out are finished unwritten; messages beyond a count, and whatever
could not be written, are requeued at once and without backoff.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from nsqtools.client.consumer import Consumer, Stopped
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.tail.run_limits import End, LimitWatch, RunLimits

TICK_S = 0.25

Encode = Callable[[str, str, Iterable[Message]], bytes]
"""From topic, nsqd and messages to the bytes to write."""


class Tail:
    """One tail of one or more topics. `run` it on one thread; `stop` it from any.

    ``on_tick`` is called there a few times a second, to show progress.
    With ``not_waited_for`` silence ends it only while every topic has a connection, but for those
    that this returns of the ones without.
    """

    def __init__(
        self,
        topics: Sequence[str],
        channel: str,
        *,
        nsqd_tcp_addresses: Sequence[str],
        lookupd_http_addresses: Sequence[str] = (),
        options: ClientOptions,
        address_map: Mapping[str, str] | None = None,
        write: Callable[[bytes], None],
        encode: Encode,
        keep: Callable[[Message], bool] | None = None,
        limits: RunLimits | None = None,
        on_tick: Callable[[Tail], None] | None = None,
        not_waited_for: Callable[[Set[str]], Set[str]] | None = None,
    ) -> None:
        self._limits = limits or RunLimits()
        if self._limits.count is not None:
            # what is in flight beyond the count would only have its attempts raised
            wanted = min(options.max_in_flight, self._limits.count)
            options = replace(options, max_in_flight=max(len(topics), wanted))
        self._write = write
        self._encode = encode
        self._keep = keep
        self._on_tick = on_tick
        self._not_waited_for = not_waited_for
        self._next_tick = 0.0
        self._consumer = Consumer(
            topics,
            channel,
            nsqd_tcp_addresses=nsqd_tcp_addresses,
            lookupd_http_addresses=lookupd_http_addresses,
            options=options,
            address_map=address_map,
        )
        self._watch = LimitWatch(self._limits, 0.0)

    @property
    def count(self) -> int:
        """Messages written."""
        return self._watch.count

    @property
    def falls_short(self) -> bool:
        """Tell whether a count was asked for and not reached."""
        return self._watch.falls_short

    @property
    def connections(self) -> dict[str, list[str]]:
        """The nsqd that each topic is consumed from now."""
        return self._consumer.connections_by_topic()

    def look_up_soon(self) -> None:
        """Ask nsqlookupd in a second or a few, and not only when its interval has passed."""
        self._consumer.look_up_soon()

    def run(self) -> End:
        """Tail until a limit is reached or `stop` is called; return what ended it.

        Raises the connection error when no nsqd can be reached at the start, and what ``write``
        raises; the messages not written are requeued then.
        """
        self._watch = LimitWatch(self._limits, time.monotonic())
        try:
            wait_s = self._watch.left_s(time.monotonic())
            self._consumer.start(fail_fast=True, wait_s=wait_s)
            return self._pump()
        finally:
            self._consumer.stop()

    def stop(self) -> None:
        """Ask `run` to end: what is being written is finished, the rest requeued."""
        self._consumer.begin_stop()

    def end_after_delivered(self) -> None:
        """Ask `run` to end with what nsqd has sent already: that is still written."""
        self._consumer.begin_stop(drain=True)

    def _pump(self) -> End:
        while True:
            now = time.monotonic()
            end = self._watch.end(now)
            if end is End.IDLE and self._is_connecting():
                self._watch.saw_message(now)
            elif end is not None:
                return end
            entry = self._consumer.backlog.get(self._tick(now, self._watch.wait_s(now)))
            if isinstance(entry, Stopped):
                return End.STOPPED
            if isinstance(entry, Batch):
                self._watch.saw_message(time.monotonic())
                self._pass_on(entry)

    def _is_connecting(self) -> bool:
        if self._not_waited_for is None:
            return False
        cut_off = {topic for topic, addresses in self.connections.items() if not addresses}
        return not cut_off <= self._not_waited_for(cut_off)

    def _tick(self, now: float, wait_s: float | None) -> float | None:
        """Call ``on_tick`` when it is time to; return how long to wait for messages at most."""
        if self._on_tick is None:
            return wait_s
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._on_tick(self)
        return TICK_S if wait_s is None else min(wait_s, TICK_S)

    def _pass_on(self, batch: Batch) -> None:
        try:
            kept = batch if self._keep is None else [m for m in batch if self._keep(m)]
            room = self._watch.room_for(len(kept), batch.topic)
            if room < len(kept):
                beyond = kept[room]
                kept = kept[:room]
                for message in batch[batch.index(beyond) :]:
                    message.requeue(0, backoff=False)
            if kept:
                self._write(self._encode(batch.topic, batch.nsqd, kept))
        except BaseException:
            batch.requeue(0, backoff=False)
            raise
        batch.finish()
