"""Look at messages of a channel without taking them: receive, show, give back.

nsqd knows no other way to show a message than to deliver it, so the attempts of each grow by one,
and the channel's consumers do without it meanwhile. All are held until the connections are done
delivering: one that is given back earlier would come again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions

LEAST_IN_FLIGHT = 8
"""With fewer in flight than there are nsqd, only some of them would deliver at a time."""


def peek(
    topic: str,
    channel: str,
    count: int,
    show: Callable[[Sequence[Message]], None],
    *,
    nsqd_tcp_addresses: Sequence[str],
    lookupd_http_addresses: Sequence[str] = (),
    options: ClientOptions,
    address_map: Mapping[str, str] | None = None,
    idle_s: float,
) -> int:
    """Show up to ``count`` messages, fewer when none came for ``idle_s``; return how many.

    Topic and channel must exist: subscribing creates them. Raises the connection error when no nsqd
    can be reached, and what ``show`` raises; every message is given back in any case.
    """
    spread = LEAST_IN_FLIGHT if lookupd_http_addresses else len(nsqd_tcp_addresses)
    consumer = Consumer(
        topic,
        channel,
        nsqd_tcp_addresses=nsqd_tcp_addresses,
        lookupd_http_addresses=lookupd_http_addresses,
        # none is given up: that would finish it
        options=replace(options, max_in_flight=max(count, spread), max_attempts=0),
        address_map=address_map,
    )
    held: list[Batch] = []
    with consumer:
        consumer.start(fail_fast=True)
        try:
            while sum(map(len, held)) < count:
                batch = consumer.next_batch(idle_s)
                if batch is None:
                    break
                held.append(batch)
            consumer.begin_stop(drain=True)
            held += iter(consumer.next_batch, None)
            messages = [message for batch in held for message in batch][:count]
            show(messages)
        finally:
            for batch in held:
                batch.requeue(0, backoff=False)
    return len(messages)
