"""A message that kills its process: it alone is given up, and its neighbors are handled.

The consumer is a process of its own, which is started again whenever it died.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, bodies_in, take
from plugins.embedded import EmbeddedServer
from plugins.servers import DataPath, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Message

MAX_ATTEMPTS = 2
COUNT = 40

WORKER = """
import asyncio, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from nsqtools import ClientOptions, Consumer, aio

how, address, max_attempts = sys.argv[1:]
log = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def handle(message):
    time.sleep(0.01)
    if message.body.startswith(b"poison"):
        os._exit(9)
    os.write(log, message.body + b"\\n")

async def handle_in_task(message):
    await asyncio.sleep(0.01)
    handle(message)

def handle_in_pool(message):
    pool.submit(lambda: (handle(message), message.finish()))

Kind = aio.Consumer if how == "asyncio" else Consumer
consumer = Kind("clicks", "archive", nsqd_tcp_addresses=address, dead_letter="dead",
                options=ClientOptions(max_attempts=int(max_attempts)))
if how == "asyncio":
    asyncio.run(consumer.run(handle_in_task, concurrency=8))
elif how == "pool":
    with ThreadPoolExecutor(8) as pool:
        consumer.run(handle_in_pool, auto_answer=False)
elif how == "batches":
    for batch in consumer.batches(size=20, within_s=0.1):
        for message in batch:
            handle(message)
        batch.finish()
else:
    consumer.run(handle, workers=8)
"""


@pytest.mark.parametrize(
    ("how", "poisoned"),
    [
        ("threads", [20]),
        pytest.param("threads", [0], marks=pytest.mark.slow),
        pytest.param("threads", [10, 30], marks=pytest.mark.slow),
        pytest.param("pool", [20], marks=pytest.mark.slow),
        pytest.param("asyncio", [20], marks=pytest.mark.slow),
        pytest.param("batches", [20], marks=pytest.mark.slow),
    ],
)
def test_the_poison_alone_reaches_the_dead_letters(
    how: str, poisoned: list[int], serve: Serve, data_path: DataPath, tmp_path: Path
) -> None:
    """On the embedded nsqd, which looks for timeouts in a new channel at once."""
    # what expires while it waits comes once more, which the next process takes for a try
    nsqd = serve(EmbeddedServer(data_path(), f"--msg-timeout={patience_s(0.3):.1f}s"))
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = [b"order %d" % number for number in range(COUNT)]
    for number in poisoned:
        bodies[number] = b"poison %d" % number
    for body in bodies:
        nsqd.publish(TOPIC, body)
    command = [sys.executable, "-c", WORKER, how, nsqd.tcp_address, str(MAX_ATTEMPTS)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    deaths = 0
    while unfinished(nsqd, TOPIC, CHANNEL):
        worker = subprocess.Popen(command, cwd=tmp_path, env=environment)
        try:
            wait_until(
                lambda: worker.poll() is not None or not unfinished(nsqd, TOPIC, CHANNEL),  # noqa: B023
                what="a death, or the end",
                timeout_s=20,
            )
        finally:
            deaths += worker.poll() == 9
            worker.kill()
            worker.wait()
        assert deaths <= len(poisoned) * (MAX_ATTEMPTS + 2)
    handled = set((tmp_path / "handled").read_bytes().splitlines())
    dead = bodies_in(nsqd, "dead", nsqd.depth("dead"))
    assert handled.union(dead) == set(bodies)
    if len(poisoned) == 1:  # of several that come together, those between them may go with them
        assert dead == [b"poison %d" % poisoned[0]]


def test_a_handler_that_hangs_holds_up_what_is_to_be_alone_for_a_moment_only(
    go_nsqd: MakeNsqd,
) -> None:
    nsqd = go_nsqd("-msg-timeout=4s")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"came too often")
    seen: list[bytes] = []
    release = threading.Event()

    def handle(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"hangs":
            release.wait(patience_s(30))

    consumer = Consumer(
        TOPIC,
        CHANNEL,
        nsqd_tcp_addresses=nsqd.tcp_address,
        options=ClientOptions(max_attempts=1),
        dead_letter="dead",
    )
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 3})
    try:
        with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as other:
            take(other, 1)  # leaving requeues it
            other.set_max_in_flight(0)
            thread.start()
            nsqd.publish(TOPIC, b"hangs")
            wait_until(lambda: seen == [b"hangs"], what="the handler to hang")
        wait_until(lambda: b"came too often" in seen, what="the other one", timeout_s=3)
        nsqd.publish(TOPIC, b"usual")
        wait_until(lambda: b"usual" in seen, what="things to go on as usual", timeout_s=3)
    finally:
        release.set()
        consumer.abort()
        thread.join(patience_s(10))
    assert seen.count(b"came too often") == 1
