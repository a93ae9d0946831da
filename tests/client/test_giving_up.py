"""Which messages were tried too often, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, bodies_in, take
from plugins.embedded import EmbeddedServer
from plugins.servers import DataPath, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Message
from nsqtools.client.giving_up import Attempts, GivingUp, Policy
from nsqtools.errors import ConfigurationError, PublishNotSent
from nsqtools.testing import FakeProducer, Published, fake_batch


def giving_up(policy: Policy = "requeue", dead_letter: str = "", on: Any = None) -> GivingUp:
    return GivingUp(ClientOptions(max_attempts=5), on, policy, dead_letter)


def test_there_is_a_limit_only_where_a_message_has_somewhere_to_go() -> None:
    assert giving_up().max_attempts == 0
    assert giving_up("finish").max_attempts == 5
    assert giving_up(dead_letter="clicks.dead").max_attempts == 5
    assert giving_up(on=lambda message: True).max_attempts == 5


@pytest.mark.parametrize(
    ("policy", "outcome", "answer"),
    [
        ("finish", None, "give_up"),
        ("finish", RuntimeError("a defect of the user's"), "give_up"),
        ("requeue", True, "give_up"),
        ("requeue", None, "requeue"),
        ("requeue", "true enough", "requeue"),
        ("requeue", RuntimeError("a defect of the user's"), "requeue"),
    ],
)
def test_only_who_says_so_takes_a_message(policy: Policy, outcome: object, answer: str) -> None:
    batch: Any = fake_batch([b"x", b"y"])
    on_giving_up = Mock(side_effect=[outcome] * 2)  # an exception is raised
    giving_up(policy, on=on_giving_up).messages(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert on_giving_up.call_args_list == [call(message) for message in batch]
    assert [message.has_backoff for message in batch] == [answer == "requeue"] * 2
    assert not batch[0].give_up()  # it was answered


@pytest.mark.parametrize(
    ("fate", "answer"),
    [
        ("published", "give_up"),
        ("failed", "requeue"),
        ("refused", "requeue"),
        ("taken", "give_up"),  # by the callback, and published nowhere
    ],
)
def test_a_dead_letter_is_finished_when_it_has_arrived(fate: str, answer: str) -> None:
    batch: Any = fake_batch([b"x", b"x"])
    on_giving_up = Mock(return_value=fate == "taken")
    producer, dead_letters = FakeProducer(), giving_up(dead_letter="clicks.dead", on=on_giving_up)
    if fate == "failed":
        producer.error = PublishNotSent("nsqd is away")
    if fate == "refused":
        producer.stop()
    dead_letters._dead_letters._producers[batch[0].nsqd] = producer
    dead_letters.messages(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert not any(message.has_backoff for message in batch)
    assert producer.published == [Published("clicks.dead", b"x")] * (2 * (fate == "published"))


def test_what_contradicts_itself_is_refused() -> None:
    wrong: Any = [("drop", ""), ("finish", "clicks.dead"), ("requeue", "no topic")]
    for policy, dead_letter in wrong:
        with pytest.raises(ConfigurationError):
            giving_up(policy, dead_letter)


KEY = ("nsqd:4150", b"0" * 16)
UNCOUNTED = ["does_not_count"] * 3


@pytest.mark.parametrize(
    ("keeps", "events", "verdicts"),
    [
        # no handler here has requeued it: never given up where that loses it
        (False, [], {6: "usual", 12: "usual", 65535: "usual"}),
        (True, [], {5: "usual", 6: "alone", 7: "alone", 8: "give up"}),
        (False, ["was_tried"], {1: "usual", 5: "usual", 6: "give up"}),
        # deliveries that ended without a word of a handler
        (True, ["does_not_count"], {6: "usual", 8: "alone"}),
        (True, ["does_not_count", "was_tried"], {6: "usual", 7: "give up"}),
        (False, UNCOUNTED, {100: "usual"}),
        (False, [*UNCOUNTED, "was_tried"], {8: "usual", 9: "give up"}),
        (False, [*UNCOUNTED, "was_tried", "does_not_count"], {9: "usual"}),
        (False, ["does_not_count", "late"], {5: "usual", 6: "give up"}),  # a late word counts
    ],
)
def test_what_a_handler_requeued_or_nobody_handled_is_given_up_or_alone(
    keeps: bool, events: list[str], verdicts: dict[int, str]
) -> None:
    known = Attempts(5, keeps=keeps)
    for event in events:
        if event == "late":
            known.was_tried(KEY, late=True)
        else:
            getattr(known, event)(KEY)
    assert {count: known.verdict(KEY, count) for count in verdicts} == verdicts


def test_nothing_is_remembered_without_a_limit_or_of_what_is_finished() -> None:
    for limit in (0, 5):
        known = Attempts(limit)
        known.was_tried(KEY)
        assert len(known) == (limit > 0)
        assert (known.verdict(KEY, 65535) == "usual") == (limit == 0)
        for _ in range(2):
            known.forget(KEY)
            assert len(known) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.client.giving_up.MAX_KNOWN", 2)
    known = Attempts(5)
    for number in range(3):
        known.was_tried(("nsqd:4150", b"%d" % number))
    assert len(known) == 2
    assert known.verdict(("nsqd:4150", b"0"), 6) == "usual"
    assert known.verdict(("nsqd:4150", b"2"), 6) == "give up"


# -- a message that kills its process, which is started again whenever it died --------------------


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
        *(pytest.param("threads", each, marks=pytest.mark.slow) for each in ([0], [10, 30])),
        *(
            pytest.param(how, [20], marks=pytest.mark.slow)
            for how in ("pool", "asyncio", "batches")
        ),
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


def test_a_dead_letter_may_be_as_large_as_the_message_that_nsqd_has_delivered(
    go_nsqd: MakeNsqd, consume: Consume, handle: Handle
) -> None:
    nsqd = go_nsqd("-max-msg-size=3000000")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, bytes(2_000_000))
    quick: dict[str, Any] = {"default_requeue_delay_s": 0.0, "max_backoff_duration_s": 0.0}
    more = {"dead_letter": "dead"}
    consumer = consume(nsqd.tcp_address, max_attempts=1, more=more, **quick)
    handle(consumer, lambda message: False)
    wait_until(lambda: consumer.stats.given_up == 1, what="the dead letter")
    assert nsqd.depth("dead") == 1


def test_a_handler_that_hangs_holds_up_what_is_to_be_alone_for_a_moment(go_nsqd: MakeNsqd) -> None:
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
