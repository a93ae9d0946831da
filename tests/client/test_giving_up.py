"""Messages that failed too often: verdicts, callbacks and dead letters."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, bodies_in, start_worker, take
from plugins.examples import slow
from plugins.servers import AnyNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, ConfigurationError, Consumer, Message, PublishNotSent
from nsqtools.client.attempts import Attempts
from nsqtools.client.dead_letters import GivingUp, Policy
from nsqtools.testing import FakeProducer, Published, fake_batch


def giving_up(policy: Policy = "requeue", dead_letter: str = "", on: Any = None) -> GivingUp:
    return GivingUp(ClientOptions(max_attempts=5), on, policy, dead_letter)


def test_max_attempts_needs_a_destination() -> None:
    assert giving_up().max_attempts == 0
    assert giving_up("finish").max_attempts == 5
    assert giving_up(dead_letter="clicks.dead").max_attempts == 5
    assert giving_up(on=lambda message: True).max_attempts == 5
    wrong: Any = [("drop", ""), ("finish", "clicks.dead"), ("requeue", "no topic")]
    for policy, dead_letter in wrong:
        with pytest.raises(ConfigurationError):
            giving_up(policy, dead_letter)


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
def test_on_giving_up_takes_a_message_by_returning_true(
    policy: Policy, outcome: object, answer: str
) -> None:
    batch: Any = fake_batch([b"x", b"y"])
    on_giving_up = Mock(side_effect=[outcome] * 2)  # side_effect raises an exception
    giving_up(policy, on=on_giving_up).give_up(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert on_giving_up.call_args_list == [call(message) for message in batch]
    assert [message.has_backoff for message in batch] == [answer == "requeue"] * 2
    assert not batch[0]._give_up()  # it was answered


@pytest.mark.parametrize(
    ("fate", "answer"),
    [
        ("published", "give_up"),
        ("failed", "requeue"),
        ("refused", "requeue"),
        ("taken", "give_up"),  # the callback took it, so it is not published
    ],
)
def test_a_dead_letter_is_finished_when_confirmed(fate: str, answer: str) -> None:
    batch: Any = fake_batch([b"x", b"x"])
    on_giving_up = Mock(return_value=fate == "taken")
    producer, dead_letters = FakeProducer(), giving_up(dead_letter="clicks.dead", on=on_giving_up)
    if fate == "failed":
        producer.error = PublishNotSent("nsqd is away")
    if fate == "refused":
        producer.stop()
    dead_letters._dead_letters._producers[batch[0].nsqd] = producer
    dead_letters.give_up(batch)
    assert [message.answers for message in batch] == [[answer]] * 2
    assert not any(message.has_backoff for message in batch)
    assert producer.published == [Published("clicks.dead", b"x")] * (2 * (fate == "published"))
    with patch.object(producer, "stop", side_effect=lambda timeout_s: dead_letters.stop()) as stop:
        dead_letters.stop()  # a signal handler stops again during the wait
    stop.assert_called_once()


def test_a_stop_waits_for_dead_letters() -> None:
    consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses="127.0.0.1:1", dead_letter="dead")
    with patch.object(consumer._giving_up, "give_up"):  # the messages are being given up
        consumer._io.delivery.give_up(fake_batch([b"x"]))
    assert consumer.stop()


KEY = (TOPIC, "nsqd:4150", b"0" * 16)
DISCOUNTED = ["discount"] * 3


@pytest.mark.parametrize(
    ("keeps", "events", "verdicts"),
    [
        # No handler of this consumer has requeued it, so it is not given up if this would lose it.
        (False, [], {6: "deliver", 12: "deliver", 65535: "deliver"}),
        (True, [], {5: "deliver", 6: "isolate", 7: "isolate", 8: "give up"}),
        (False, ["fail"], {1: "deliver", 5: "deliver", 6: "give up"}),
        # Deliveries that ended without an answer of a handler do not count.
        (True, ["discount"], {6: "deliver", 8: "isolate"}),
        (True, ["discount", "fail"], {6: "deliver", 7: "give up"}),
        (False, DISCOUNTED, {100: "deliver"}),
        (False, [*DISCOUNTED, "fail"], {8: "deliver", 9: "give up"}),
        (False, [*DISCOUNTED, "fail", "discount"], {9: "deliver"}),
        (False, ["discount", "fail late"], {5: "deliver", 6: "give up"}),
    ],
)
def test_verdict_after_discounted_and_failed_deliveries(
    keeps: bool, events: list[str], verdicts: dict[int, str]
) -> None:
    attempts = Attempts(5, keeps=keeps)
    for event in events:
        if event == "discount":
            attempts.discount(KEY)
        else:
            attempts.record_failure(KEY, late=event == "fail late")
    assert {count: attempts.verdict(KEY, count) for count in verdicts} == verdicts


@pytest.mark.parametrize(("limit", "verdict"), [(0, "deliver"), (5, "give up")])
def test_a_finished_message_is_forgotten(limit: int, verdict: str) -> None:
    attempts = Attempts(limit)
    attempts.record_failure(KEY)
    assert len(attempts.records) == (limit > 0)
    assert attempts.verdict(KEY, 65535) == verdict
    for _ in range(2):
        attempts.forget(KEY)
        assert len(attempts.records) == 0


def test_the_oldest_messages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.client.attempts.MAX_RECORDS", 2)
    attempts = Attempts(5)
    keys = [(TOPIC, "nsqd:4150", b"%d" % number) for number in range(3)]
    for key in keys:
        attempts.record_failure(key)
    verdicts = [attempts.verdict(key, 6) for key in keys]
    assert verdicts == ["deliver", "give up", "give up"]


# -- a message that kills its process, which is restarted after each death ------------------------


MAX_ATTEMPTS = 2
COUNT, WAYS = 40, ("pool", "asyncio", "batches")


@pytest.mark.parametrize(
    ("how", "poisoned"),
    [
        ("threads", [20]),
        *(slow("threads", poisoned) for poisoned in ([0], [10, 30])),
        *(slow(how, [20]) for how in WAYS),
    ],
)
def test_only_the_poison_reaches_the_dead_letters(
    how: str, poisoned: list[int], embedded_nsqd: AnyNsqd, tmp_path: Path
) -> None:
    """Use the embedded nsqd, which scans a new channel for timeouts immediately."""
    # a pending message that expires is redelivered, which the next process counts as an attempt
    nsqd = embedded_nsqd(f"--msg-timeout={max(1.0, patience_s(0.3)):.1f}s")
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = [b"order %d" % number for number in range(COUNT)]
    for number in poisoned:
        bodies[number] = b"poison %d" % number
    for body in bodies:
        nsqd.publish(TOPIC, body)
    arguments = {"dead_letter": "dead", "options": {"max_attempts": MAX_ATTEMPTS}}
    deaths = 0
    while unfinished(nsqd, TOPIC, CHANNEL):
        worker = start_worker(tmp_path, how, 8, 0.01, [nsqd.tcp_address], **arguments)
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
    if len(poisoned) == 1:  # messages between several poisoned ones may be given up with them
        assert dead == [b"poison %d" % poisoned[0]]


def test_a_dead_letter_may_be_large(go_nsqd: MakeNsqd, consume: Consume, handle: Handle) -> None:
    nsqd = go_nsqd("-max-msg-size=3000000")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, bytes(2_000_000))
    quick: dict[str, Any] = {"default_requeue_delay_s": 0.0, "max_backoff_duration_s": 0.0}
    arguments = {"dead_letter": "dead"}
    consumer = consume(nsqd.tcp_address, max_attempts=1, more=arguments, **quick)
    handle(consumer, lambda message: False)
    wait_until(lambda: consumer.stats.given_up == 1, what="the dead letter")
    assert nsqd.depth("dead") == 1


def test_a_hanging_handler_delays_suspects_briefly(go_nsqd: MakeNsqd) -> None:
    nsqd = go_nsqd("-msg-timeout=4s")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"came too often")
    handled: list[bytes] = []
    release = threading.Event()

    def handle(message: Message) -> None:
        handled.append(message.body)
        if message.body == b"hangs":
            release.wait(patience_s(30))

    arguments = {"nsqd_tcp_addresses": nsqd.tcp_address, "options": ClientOptions(max_attempts=1)}
    consumer = Consumer(TOPIC, CHANNEL, dead_letter="dead", **arguments)
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 3})
    try:
        with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as other:
            take(other, 1)  # leaving requeues it
            other.set_max_in_flight(0)
            thread.start()
            nsqd.publish(TOPIC, b"hangs")
            wait_until(lambda: handled == [b"hangs"], what="the handler to hang")
        wait_until(lambda: b"came too often" in handled, what="the other one", timeout_s=3)
        nsqd.publish(TOPIC, b"usual")
        wait_until(lambda: b"usual" in handled, what="things to go on as usual", timeout_s=3)
    finally:
        release.set()
        consumer.abort()
        thread.join(patience_s(10))
    assert handled.count(b"came too often") == 1
