"""Look at messages of a channel without taking them: receive, show, give back.

nsqd knows no other way to show a message than to deliver it, so the attempts of each grow by one,
and the channel's consumers do without it meanwhile. All are held until the connections are done
delivering: one that is given back earlier would come again at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions

LEAST_IN_FLIGHT = 8
"""With fewer in flight than there are nsqd, only some of them would deliver at a time."""
HOLD_SHARE = 0.5
"""Of msg_timeout: how long messages are held while others are looked at."""
GROWS_S = 1.5
"""The number in flight, which starts small, grows at least once a second: longer than silence."""


@dataclass(frozen=True, slots=True)
class Peeked:
    """How many messages were delivered and given back, and how many of them were shown.

    ``is_whole`` is False when there may be more to show than was looked at.
    """

    looked_at: int
    shown: int
    is_whole: bool = True


def peek(
    topic: str,
    channel: str,
    count: int,
    show: Callable[[Sequence[Message]], None],
    *,
    keep: Callable[[Message], bool] | None = None,
    look_at: int = 0,
    nsqd_tcp_addresses: Sequence[str],
    lookupd_http_addresses: Sequence[str] = (),
    options: ClientOptions,
    address_map: Mapping[str, str] | None = None,
    idle_s: float,
) -> Peeked:
    """Show the first ``count`` messages that ``keep`` accepts, of at most ``look_at``.

    Ends earlier when none came for ``idle_s``, and before nsqd would deliver the first one again,
    which would then be seen twice. Topic and channel must exist: subscribing creates them. Raises
    the connection error when no nsqd can be reached, and what ``keep`` and ``show`` raise; every
    message is given back in any case.
    """
    most = count if keep is None else max(count, look_at)
    spread = LEAST_IN_FLIGHT if lookupd_http_addresses else len(nsqd_tcp_addresses)
    consumer = Consumer(
        topic,
        channel,
        nsqd_tcp_addresses=nsqd_tcp_addresses,
        lookupd_http_addresses=lookupd_http_addresses,
        options=replace(options, max_in_flight=max(most, spread)),
        address_map=address_map,
    )
    held: list[Batch] = []
    kept: list[Message] = []

    def hold(batch: Batch) -> None:
        held.append(batch)
        kept.extend(each for each in batch if keep is None or keep(each))

    with consumer:
        consumer.start(fail_fast=True)
        try:
            ends_at = float("inf")
            is_whole = False
            while len(kept) < count and sum(map(len, held)) < most:
                wait_s = min(idle_s, ends_at - time.monotonic())
                batch = consumer.next_batch(wait_s) if wait_s > 0 else None
                if batch is None and wait_s == idle_s and consumer.is_starved:
                    batch = consumer.next_batch(min(GROWS_S, max(0.0, ends_at - time.monotonic())))
                if batch is None:
                    is_whole = wait_s == idle_s and not consumer.is_starved
                    break
                hold(batch)
                first = held[0][0]
                ends_at = first.received_at + HOLD_SHARE * (first.deadline - first.received_at)
            consumer.begin_stop(drain=True)
            for batch in iter(consumer.next_batch, None):
                hold(batch)
            shown = kept[:count]
            show(shown)
        finally:
            for batch in held:
                batch.requeue(0, backoff=False)
    return Peeked(sum(map(len, held)), len(shown), is_whole or len(shown) == count)
