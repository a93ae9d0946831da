"""Consumer.run(inline=True): the handler's thread is that of the I/O, too.

How such programs end is in test_program_ends.py.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Produce, bodies_in
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.servers import Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.client.handling import RequeueWithoutBackoff
from nsqtools.client.io_loop import SLICE
from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError, NsqError

InBackground = Callable[..., Future[Any]]


def fill(nsqd: GoNsqd | EmbeddedServer, count: int) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(count)])


@pytest.mark.parametrize("max_in_flight", [2500, 2 * SLICE])
def test_many_connections_bring_each_message_and_get_each_answer(
    serve: Serve,
    data_path: Callable[[], Path],
    consume: Consume,
    in_background: InBackground,
    max_in_flight: int,
) -> None:
    """More than a turn reads, and with the smaller limit more than may have RDY."""
    nsqd = serve(EmbeddedServer(data_path(), "--tcp-address=0.0.0.0:0"))
    fill(nsqd, 2000)
    port = nsqd.tcp_address.rpartition(":")[2]
    addresses = [f"127.0.0.{number}:{port}" for number in range(1, 3 * SLICE)]
    seen: collections.Counter[bytes] = collections.Counter()

    def handler(message: Message) -> object:
        seen[message.body] += 1
        if message.body.endswith(b"7") and message.attempts == 1:
            raise RequeueWithoutBackoff(0)
        return message.finish() if message.body.endswith(b"3") else None

    consumer = consume(addresses, started=False, max_in_flight=max_in_flight)
    running = in_background(consumer.run, handler, inline=True)
    wait_until(lambda: consumer.stats.finished == 2000, what="all FINs")
    wait_until(lambda: not nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"], what="nsqd")
    consumer.stop()
    running.result(patience_s(10))
    assert (len(seen), seen.total()) == (2000, 2200)
    assert nsqd.channel_stats(TOPIC, CHANNEL)["depth"] == 0


def test_a_slow_handler_holds_up_nobody_else_and_keeps_its_connection_by_touching(
    nsqd: GoNsqd, consume: Consume, produce: Produce, in_background: InBackground
) -> None:
    """It takes longer than the two heartbeat intervals after which nsqd closes a connection, and
    longer than msg_timeout."""
    fill(nsqd, 1)
    lost: list[NsqError] = []
    quick = {"heartbeat_interval_s": 1, "msg_timeout_s": 2, "more": {"on_error": lost.append}}
    producer = produce(nsqd.tcp_address, heartbeat_interval_s=1)
    other = consume(nsqd.tcp_address, topic="others", **quick)

    def handler(message: Message) -> None:
        until = time.monotonic() + 2.6
        while time.monotonic() < until:
            time.sleep(0.2)
            assert message.touch()
        producer.publish("others", b"from the handler")

    consumer = consume(nsqd.tcp_address, started=False, **quick)
    running = in_background(consumer.run, handler, inline=True)
    [message] = other.next_batch(timeout_s=patience_s(10)) or []
    assert message.finish()
    wait_until(lambda: consumer.stats.finished == 1, what="the FIN")
    consumer.stop()
    running.result(patience_s(10))
    assert lost == []
    assert nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


def test_failures_back_off_and_end_as_dead_letters(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground
) -> None:
    fill(nsqd, 3)
    nsqd.create_channel("dead", "check")
    attempts: list[int] = []

    def handler(message: Message) -> bool:
        attempts.append(message.attempts)
        return message.body != b"1"

    consumer = consume(
        nsqd.tcp_address,
        started=False,
        more={"dead_letter": "dead"},
        max_attempts=2,
        backoff_multiplier_s=0.01,
        default_requeue_delay_s=0,
    )
    running = in_background(consumer.run, handler, inline=True)
    wait_until(lambda: consumer.stats.given_up == 1, what="the dead letter")
    assert bodies_in(nsqd, "dead", 1) == [b"1"]
    wait_until(lambda: not nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"], what="its FIN")
    consumer.stop()
    running.result(patience_s(10))
    assert sorted(attempts) == [1, 1, 1, 2]


def test_answers_of_other_threads_leave_while_nothing_comes(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground
) -> None:
    fill(nsqd, 1)
    kept: list[Message] = []
    consumer = consume(nsqd.tcp_address, started=False)
    running = in_background(consumer.run, kept.append, inline=True, auto_answer=False)
    wait_until(lambda: len(kept) == 1, what="the message")
    answering = threading.Timer(0.1, kept[0].finish)
    answering.start()
    wait_until(lambda: not nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"], what="the FIN")
    answering.join()
    consumer.stop()
    running.result(patience_s(10))


def test_what_cannot_be_inline_is_refused(nsqd: GoNsqd, consume: Consume) -> None:
    consumer = consume(nsqd.tcp_address)
    with pytest.raises(ConfigurationError, match="has not been started"):
        consumer.run(print, inline=True)
    for refused in ({"workers": 2}, {"auto_touch": True}):
        with pytest.raises(ConfigurationError, match="one worker and no auto_touch"):
            consumer.run(print, inline=True, **refused)


INTERRUPTED = """
import os, random, signal, sys
from nsqtools import Consumer
from nsqtools.client.options import ClientOptions
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
options = ClientOptions(output_buffer_timeout_s=0.025, msg_timeout_s=600)
def handle(message):
    print(message.body.decode(), flush=True)
for _ in range(int(sys.argv[2])):
    consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1], options=options)
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.01, 0.2))
    try:
        consumer.run(handle, inline=True, signals=False)
    except KeyboardInterrupt:
        consumer.abort()
        consumer.wait_for_end()
"""


@pytest.mark.parametrize("rounds", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment_lose_nothing(nsqd: GoNsqd, rounds: int) -> None:
    """One in the midst of a turn of the loop ends the connection: an answer that was not sent yet
    is given again after msg_timeout. `signals=True` waits for the end of the turn."""
    count = 4000 * rounds
    fill(nsqd, count)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, nsqd.tcp_address, str(rounds)],
        capture_output=True,
        text=True,
        timeout=patience_s(20 + rounds),
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    wait_until(lambda: not nsqd.channel_stats(TOPIC, CHANNEL)["client_count"], what="no client")
    there = unfinished(nsqd, TOPIC, CHANNEL)
    handled = {int(line) for line in done.stdout.splitlines()}
    assert len(handled) + there >= count
    assert handled
