"""``nsq to-http`` killed, and its endpoint restarted, again and again: nothing is lost.

What comes twice has the same Idempotency-Key, and is at most what was in flight each time.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.http_server import HttpServer
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "hook"
IN_FLIGHT = 50
DEADLINE_S = patience_s(30.0)


@pytest.mark.parametrize(
    ("messages", "kills"), [(800, 2), pytest.param(15_000, 10, marks=pytest.mark.slow)]
)
def test_killed_again_and_again_nothing_is_lost(
    quick_nsqd: EmbeddedServer,
    spawn_nsq: SpawnNsq,
    http_server: Callable[..., HttpServer],
    messages: int,
    kills: int,
) -> None:
    rng = random.Random(messages)
    nsqd, server = quick_nsqd, http_server()
    server.answer = lambda request: 0 if rng.random() < 0.01 else 200  # and some answers are lost
    nsqd.create_channel(TOPIC, CHANNEL)
    published = [b"%06d" % number for number in range(messages)]
    for begin in range(0, messages, 1000):
        nsqd.publish(TOPIC, *published[begin : begin + 1000])
    args = f"to-http -t {TOPIC} -c {CHANNEL} --max-in-flight {IN_FLIGHT} --post {server.url}"
    args += f" --nsqd-tcp-address {nsqd.tcp_address} --rate 1000 --concurrency 20"
    args += " -X reconnect_base=50ms"
    before = len(published)
    process = spawn_nsq(args.split())
    for _ in range(kills):
        wait_until(
            lambda before=before: unfinished(nsqd, TOPIC, CHANNEL) < before,  # type: ignore[misc]
            what="progress",
            timeout_s=20,
        )
        threading.Event().wait(rng.uniform(0, 0.1))  # the random point
        process.kill()
        process.wait(DEADLINE_S)
        more = [b"%06d" % number for number in range(len(published), len(published) + 100)]
        nsqd.publish(TOPIC, *more)  # it may have been done with what there was
        published += more
        before = unfinished(nsqd, TOPIC, CHANNEL)
        process = spawn_nsq(args.split())
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=60)
    keys = {request.body: request.headers["Idempotency-Key"] for request in server.requests}
    found = Counter(request.body for request in server.requests)
    doubled = sum(found.values()) - len(found)
    print(f"{kills} kills, {messages} messages, {doubled} came again")
    assert set(published) - set(found) == set(), "messages were lost"
    assert all(keys[each.body] == each.headers["Idempotency-Key"] for each in server.requests)
    assert doubled <= kills * IN_FLIGHT + messages // 20
