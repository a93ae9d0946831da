"""A producer in a service: callbacks, timeouts, several nsqd, retries, joined publishes."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from plugins.auth_server import AuthServer
from plugins.clients import TOPIC, InBackground, Produce, bodies_in
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import (
    ClientOptions,
    ConfigurationError,
    Producer,
    Publication,
    PublishError,
    PublishNotSent,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
    RefusedError,
)
from nsqtools.client import producer_io

Make = Callable[..., Producer]
DEAD = "127.0.0.1:1"
SENT_WITHIN_S = patience_s(0.2)


@pytest.fixture
def make() -> Any:
    """A factory of producers that takes all that `Producer` takes."""
    made: list[Producer] = []

    def make(addresses: Any, options: ClientOptions | None = None, **more: Any) -> Producer:
        made.append(Producer(addresses, options, **more))
        return made[-1]

    yield make
    for producer in made:
        producer.stop(patience_s(5))


# -- bodies ---------------------------------------------------------------------------------------


def test_whatever_holds_bytes_is_published_whole_and_as_it_was(
    nsqd: GoNsqd, produce: Produce
) -> None:
    producer = produce(nsqd.tcp_address)
    changing = bytearray(b"before")
    bodies: list[Any] = [memoryview(array("i", [1, 2, 3])), memoryview(b"abcdef")[::2]]
    bodies += [array("d", [1.5, 2.5]), changing]
    expected = sorted([memoryview(body).tobytes() for body in bodies] * 2)
    producer.publish_many(TOPIC, bodies)
    sent = [producer.submit(TOPIC, [body]) for body in bodies]
    changing[:] = b"after!"
    for publication in sent:
        publication.wait(patience_s(5))
    assert bodies_in(nsqd, TOPIC, 8) == expected


@pytest.mark.parametrize(
    ("bodies", "complaint"),
    [
        (["text"], "not str: encode it"),
        ([b"x", "text"], "not str: encode it"),
        ([7], "bytes, not int"),
        ([None], "bytes, not NoneType"),
        (b"one message", "a list of messages"),
        ("one message", "a list of messages"),
    ],
    ids=repr,
)
def test_what_is_not_bytes_is_refused_clearly(
    produce: Produce, bodies: Any, complaint: str
) -> None:
    producer = produce(DEAD)
    with pytest.raises(TypeError, match=complaint):
        producer.submit(TOPIC, bodies)


# -- callbacks ------------------------------------------------------------------------------------


def test_a_callback_can_submit_the_next_one_even_with_a_window_of_one(
    nsqd: GoNsqd, produce: Produce
) -> None:
    producer = produce(nsqd.tcp_address, max_outstanding=1)
    done = threading.Event()

    def next_one(publication: Publication) -> None:
        number = int(publication.bodies[0])
        if number == 10:
            done.set()
        else:
            producer.submit(TOPIC, [b"%d" % (number + 1)], on_settled=next_one)

    producer.submit(TOPIC, [b"1"], on_settled=next_one)
    assert done.wait(patience_s(5))
    assert nsqd.depth(TOPIC) == 10


def test_a_callback_that_finds_the_window_full_is_refused_at_once(
    nsqd: GoNsqd, produce: Produce
) -> None:
    producer = produce(nsqd.tcp_address, max_outstanding=2)
    caught: list[Exception] = []

    def flood(publication: Publication) -> None:
        try:
            for _ in range(3):
                producer.submit(TOPIC, [b"x"])  # waiting would be for ever: it runs on that thread
        except PublishError as exc:
            caught.append(exc)

    producer.submit(TOPIC, [b"x"], on_settled=flood).wait(patience_s(5))
    wait_until(lambda: bool(caught), what="an error")
    assert isinstance(caught[0], PublishNotSent)
    producer.publish(TOPIC, b"and it goes on")


def test_a_callback_cannot_wait_for_its_own_thread(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    caught: list[Exception] = []
    calls: list[Callable[[], object]] = [
        lambda: producer.publish(TOPIC, b"x"),
        lambda: producer.publish_many(TOPIC, [b"x"]),
        producer.flush,
    ]

    def call_all(publication: Publication) -> None:
        for call in calls:
            try:
                call()
            except ConfigurationError as exc:
                caught.append(exc)

    producer.submit(TOPIC, [b"x"], on_settled=call_all).wait(patience_s(5))
    wait_until(lambda: len(caught) == 3, what="three errors")


# -- time -----------------------------------------------------------------------------------------


def test_a_publish_ends_within_its_own_timeout(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    waiting = producer.submit(TOPIC, [b"x"], timeout_s=0.2)
    with pytest.raises(PublishNotSent, match=r"within 0\.2 s"):
        waiting.wait(patience_s(5))
    scripted_nsqd.identified()
    sent = producer.submit(TOPIC, [b"y"], timeout_s=SENT_WITHIN_S)
    with pytest.raises(PublishUnknown, match=f"within {SENT_WITHIN_S:g} s"):
        sent.wait(patience_s(5))


def test_a_confirmed_publish_leaves_no_timer_behind(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    producer.publish(TOPIC, b"x")  # the loop is that of the process: others may have left timers
    before = len(producer._io.loop._own._timers)
    for _ in range(200):
        producer.publish(TOPIC, b"x", timeout_s=3600)
    assert len(producer._io.loop._own._timers) < before + 20
    assert not producer._io._timed


def test_an_answer_after_the_timeout_is_not_taken_for_another(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    late = producer.submit(TOPIC, [b"late"], timeout_s=SENT_WITHIN_S)
    conn = scripted_nsqd.identified()
    conn.expect(f"PUB {TOPIC}")
    with pytest.raises(PublishError):
        late.wait(patience_s(5))
    after = producer.submit(TOPIC, [b"after"])
    conn.expect(f"PUB {TOPIC}")
    conn.ok()
    with pytest.raises(TimeoutError):
        after.wait(0.2)
    conn.ok()
    after.wait(patience_s(5))


def test_a_full_window_costs_no_more_than_the_timeout_of_the_call(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address, max_outstanding=1, publish_timeout_s=patience_s(60))
    producer.submit(TOPIC, [b"x"])
    assert not producer.flush(0.1)
    began = time.monotonic()
    with pytest.raises(PublishNotSent, match="no room"):
        producer.publish(TOPIC, b"x", timeout_s=0.2)
    assert time.monotonic() - began < patience_s(30)


def test_leaving_the_block_keeps_the_time_for_retries(
    nsqd: GoNsqd, in_background: InBackground
) -> None:
    nsqd.stop()
    options = ClientOptions(publish_timeout_s=0.1)
    with Producer(nsqd.tcp_address, options, retry_timeout_s=patience_s(20)) as producer:
        publication = producer.submit(TOPIC, [b"x"])
        started = in_background(lambda: (time.sleep(0.5), nsqd.start()))
    started.result()
    assert publication.error is None
    assert nsqd.depth(TOPIC) == 1


# -- failures that nobody looks at ----------------------------------------------------------------


def unseen(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "was not looked at" in line]


def test_failures_that_nobody_looked_at_are_logged_once_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Producer(DEAD) as producer:
        for _ in range(20):
            producer.submit(TOPIC, [b"x", b"y"])
        producer.flush()
        with pytest.raises(PublishNotSent):
            producer.publish(TOPIC, b"x")
        assert producer.submit(TOPIC, [b"x"], on_settled=lambda p: p.error) is not None
    producer.stop()
    [line] = unseen(caplog)
    assert "40 messages unconfirmed" in line
    assert f"cannot connect to {DEAD}" in line


def test_they_are_logged_while_the_producer_goes_on(
    caplog: pytest.LogCaptureFixture, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_io, "UNSEEN_S", 0.2)
    producer = make(DEAD)
    producer.submit(TOPIC, [b"x"])
    wait_until(lambda: unseen(caplog) != [], what="a warning")
    assert unseen(caplog)[0].startswith(f"{DEAD}: 1 message unconfirmed")
    producer.stop()
    assert len(unseen(caplog)) == 1


# -- several nsqd ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["failover", "round-robin"])
def test_a_dead_nsqd_costs_no_message(
    go_nsqd: Callable[..., GoNsqd], make: Make, mode: str
) -> None:
    nsqd = go_nsqd()
    producer = make([DEAD, nsqd.tcp_address, "127.0.0.1:2"], mode=mode)
    for number in range(50):
        producer.publish(TOPIC, b"%d" % number)
    assert nsqd.depth(TOPIC) == 50


def test_round_robin_shares_what_is_joined(go_nsqd: Callable[..., GoNsqd], make: Make) -> None:
    nsqds = [go_nsqd(), go_nsqd()]
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    producer = make(addresses, mode="round-robin", linger_s=0.01)
    producer.publish(TOPIC, b"x")
    wait_until(lambda: all(link.connection for link in producer._io.links), what="both")
    for _ in range(20):
        producer.publish(TOPIC, b"x")
    depths = [nsqd.depth(TOPIC) for nsqd in nsqds]
    assert sum(depths) == 21
    assert min(depths) >= 10


def test_an_address_that_swallows_packets_delays_a_publish_by_seconds_at_most(
    nsqd: GoNsqd, unreachable_address: str, make: Make
) -> None:
    options = ClientOptions(dial_timeout_s=patience_s(30))
    producer = make([unreachable_address, nsqd.tcp_address], options)
    began = time.monotonic()
    producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < patience_s(15)


@pytest.mark.parametrize(
    ("addresses", "more"),
    [
        ([], {}),
        ([DEAD], {"mode": "all"}),
        ([DEAD], {"retry_timeout_s": -1}),
        ([DEAD], {"linger_s": float("nan")}),
    ],
    ids=["no address", "mode all", "negative time", "no number"],
)
def test_what_cannot_work_is_refused(addresses: list[str], more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Producer(addresses, **more)


# -- retries --------------------------------------------------------------------------------------


def test_retrying_ends_with_the_retry_timeout(make: Make) -> None:
    producer = make(DEAD, retry_timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(PublishNotSent, match=f"connect to {DEAD}"):
        producer.publish(TOPIC, b"x")
    assert time.monotonic() - began >= 0.5


def test_a_refused_client_is_not_told_that_publishing_again_is_safe(
    go_nsqd: Callable[..., GoNsqd], auth_server: AuthServer, make: Make
) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    producer = make(nsqd.tcp_address, retry_timeout_s=patience_s(60))
    began = time.monotonic()
    with pytest.raises(PublishRefused, match="requires authentication") as caught:
        producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < patience_s(30)
    assert not isinstance(caught.value, PublishNotSent)
    assert isinstance(caught.value.__cause__, RefusedError)
    assert caught.value.category == "refused"


# -- joined publishes -----------------------------------------------------------------------------


def test_a_bad_body_fails_only_its_own_publish(go_nsqd: Callable[..., GoNsqd], make: Make) -> None:
    nsqd = go_nsqd("-max-body-size=1000", "-max-msg-size=100")
    options = ClientOptions(publish_max_body_size=1000)
    producer = make(nsqd.tcp_address, options, linger_s=0.05)
    bodies = [b"x" * (101 if number in (7, 33) else 40) for number in range(60)]
    publications = [producer.submit(TOPIC, [body]) for body in bodies]
    assert producer.flush(patience_s(10))
    kinds = [type(publication.error) for publication in publications]
    assert kinds == [PublishRejected if len(body) > 100 else type(None) for body in bodies]
    assert nsqd.depth(TOPIC) == 58


def test_a_lone_publish_does_not_linger(nsqd: GoNsqd, make: Make) -> None:
    producer = make(nsqd.tcp_address, linger_s=patience_s(2))
    producer.publish(TOPIC, b"x")
    began = time.monotonic()
    for _ in range(100):
        producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < patience_s(100)


def test_a_message_lingers_no_longer_than_it_should(
    scripted_nsqd: ScriptedNsqd, make: Make
) -> None:
    producer = make(scripted_nsqd.address, linger_s=patience_s(0.2))
    producer.submit(TOPIC, [b"1"])
    conn = scripted_nsqd.identified()
    conn.expect(f"PUB {TOPIC}")
    producer.submit(TOPIC, [b"2"])
    producer.submit(TOPIC, [b"3"])
    conn.expect(f"MPUB {TOPIC}")  # though the first is not answered
    conn.ok()
    conn.ok()
    assert producer.flush(5)
