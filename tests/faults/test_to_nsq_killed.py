"""``nsq to-nsq`` killed, and its nsqd restarted, again and again: nothing lost, doubles counted.

A message can be there twice when something ends between its arrival there and its FIN here, so each
time may double what was in flight, and no more. The command dies by SIGKILL; nsqd is stopped with
SIGTERM, because the Go nsqd keeps no promise about what it confirmed when it is killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "mirror"
IN_FLIGHT = 200
DEADLINE_S = patience_s(60.0)


def progress(source: Nsqd, process: subprocess.Popen[bytes]) -> int:
    """Wait until something more is finished; return what is left."""
    before = unfinished(source, TOPIC, CHANNEL)

    def moved() -> bool:
        assert process.poll() is None, "it ended by itself"
        return unfinished(source, TOPIC, CHANNEL) < before or before == 0

    wait_until(moved, what="progress", timeout_s=DEADLINE_S)
    return unfinished(source, TOPIC, CHANNEL)


@pytest.mark.parametrize(
    ("messages", "kills"), [(3_000, 2), pytest.param(30_000, 10, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("victim", ["command", "source", "destination"])
def test_killed_again_and_again_nothing_is_lost(
    go_nsqd: Callable[..., GoNsqd],
    quick_nsqd: EmbeddedServer,
    spawn_nsq: SpawnNsq,
    victim: str,
    messages: int,
    kills: int,
) -> None:
    rng = random.Random(f"{victim} {messages}")
    flags = (f"-mem-queue-size={messages}", "-msg-timeout=1s")
    source: Nsqd = quick_nsqd if victim == "command" else go_nsqd(*flags)
    target = go_nsqd(flags[0])  # a check that is held up for a second is to see no message twice
    source.create_channel(TOPIC, CHANNEL)
    target.create_channel(TOPIC, "check")
    published: list[bytes] = []

    def publish(count: int) -> None:
        for _ in range(0, count, 1000):
            numbers = range(len(published), len(published) + 1000)
            bodies = [b"%08d some text of a message" % number for number in numbers]
            source.publish(TOPIC, *bodies)
            published.extend(bodies)

    publish(messages)
    args = f"to-nsq -t {TOPIC} -c {CHANNEL} --max-in-flight {IN_FLIGHT} --no-loop-guard"
    args += f" --nsqd-tcp-address {source.tcp_address} -X reconnect_base=50ms"
    args += f" --destination-nsqd-tcp-address {target.tcp_address}"
    args += " --rate 2000"  # slow enough to be hit
    process = spawn_nsq(args.split())
    done = 0
    for _ in range(kills):
        while not progress(source, process):
            publish(messages)  # it was done before it was looked at
        threading.Event().wait(rng.uniform(0, 0.1))  # the random point
        done += 1
        if victim == "command":
            process.kill()
            process.wait(DEADLINE_S)
            process = spawn_nsq(args.split())
        else:
            nsqd = source if victim == "source" else target
            nsqd.stop()
            nsqd.start()
    wait_until(
        lambda: unfinished(source, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=60
    )
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, stderr.decode()

    arrived = unfinished(target, TOPIC, "check")
    found = Counter(bodies_in(target, TOPIC, arrived, channel="check"))
    doubled = sum(found.values()) - len(found)
    print(f"{victim}: {done} kills, {len(published)} messages, {doubled} doubled")
    assert set(published) - set(found) == set(), "messages were lost"
    assert doubled <= done * IN_FLIGHT
