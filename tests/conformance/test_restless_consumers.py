"""Consumers that requeue, defer, touch, hold back and go away: every message gets finished."""

from __future__ import annotations

import random
import select
import threading
from collections import Counter
from collections.abc import Callable

from plugins.http_api import Nsqd
from plugins.raw_client import RawClient, Received, received
from plugins.waiting import patience_s
from plugins.wire import ERROR

COUNT = 3000
CONSUMERS = 4


class Restless:
    """Consumes until ``left`` is empty, in every bad manner there is."""

    def __init__(self, address: str, finished: Counter[bytes], done: threading.Event) -> None:
        self._address = address
        self._finished = finished
        self._done = done
        self._chance = random.Random(id(self))

    def run(self) -> None:
        while not self._done.is_set():
            with RawClient(self._address) as client:
                client.identify(output_buffer_timeout=25)
                client.subscribe("t", "ch", ready=self._chance.choice([1, 10, 300]))
                for _ in range(self._chance.randrange(1, 600)):
                    if not has_more(client):
                        break
                    kind, data = client.read()
                    if kind == ERROR:  # its answer was late: the message comes again
                        assert b" failed ID not in flight" in data, data
                    else:
                        self._answer(client, received(data))
                client.send(b"CLS\n")
                while client.read()[1] != b"CLOSE_WAIT":
                    pass  # what comes after CLS was on its way, and times out

    def _answer(self, client: RawClient, message: Received) -> None:
        action = self._chance.random()
        if action < 0.1:
            client.send(b"REQ %b %d\n" % (message.id, self._chance.choice([0, 1, 50])))
        elif action < 0.12:
            pass  # leave it to its timeout
        else:
            if action < 0.2:
                client.send(b"TOUCH %b\n" % message.id)
            self._finished[message.body] += 1
            if len(self._finished) == COUNT:
                self._done.set()
            client.finish([message])


def has_more(client: RawClient) -> bool:
    """Whether something comes within a moment."""
    return bool(client._buffer or select.select([client.socket], [], [], 0.3)[0])


def test_every_message_is_finished(any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd("-msg-timeout=1s", "-mem-queue-size=100", "-max-bytes-per-file=20000")
    nsqd.create_channel("t", "ch")
    finished: Counter[bytes] = Counter()
    done = threading.Event()
    consumers = [
        threading.Thread(target=Restless(nsqd.tcp_address, finished, done).run)
        for _ in range(CONSUMERS)
    ]
    for consumer in consumers:
        consumer.start()
    bodies = [b"%d" % number for number in range(COUNT)]
    for start in range(0, COUNT, 100):
        nsqd.publish("t", *bodies[start : start + 100])

    assert done.wait(patience_s(40)), f"{COUNT - len(finished)} are missing"
    for consumer in consumers:
        consumer.join()
    assert set(finished) == set(bodies)
