"""Publishing: every message has one outcome, and it is the right one.

A producer has one nsqd, so there is no test that it avoids a closed connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Produce
from plugins.daemons import GoNsqd
from plugins.network import TO_SERVER, Proxy
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client import producer as producer_module
from nsqtools.client.publication import Publication
from nsqtools.errors import ConfigurationError, PublishError, PublishNotSent, PublishUnknown


def outcome(publication: Publication) -> str:
    try:
        publication.wait(patience_s(10))
    except PublishError as exc:
        return type(exc).__name__
    return "published"


def test_every_way_of_publishing_arrives(nsqd: GoNsqd, produce: Produce) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = produce(nsqd.tcp_address)
    producer.publish(TOPIC, b"one")
    producer.publish_many(TOPIC, [b"two", b"three"])
    producer.publish_deferred(TOPIC, b"later", 60)
    producer.submit(TOPIC, [b"four"]).wait(patience_s(5))
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 5, what="the channel has all of them")
    assert nsqd.channel_stats(TOPIC, CHANNEL)["deferred_count"] == 1


def test_many_messages_are_split_at_the_limit_of_nsqd(
    go_nsqd: Callable[..., GoNsqd], produce: Produce
) -> None:
    nsqd = go_nsqd("-max-body-size=1000", "-max-msg-size=500")
    producer = produce(nsqd.tcp_address, publish_max_body_size=1000, publish_max_msg_size=500)
    producer.publish_many(TOPIC, [b"x" * 488] * 9 + [b"y" * 500])
    assert nsqd.depth(TOPIC) == 10


@pytest.mark.parametrize(
    ("topic", "bodies", "defer_s"),
    [
        ("bad topic", [b"x"], None),
        ("t", [], None),
        ("t", [b"x", b""], None),
        ("t", [b"x" * ((1 << 20) + 1)], None),
        ("t", [b"x" * (1 << 20)] * 5, None),
        ("t", [b"x"], -1),
        ("t", [b"x"], 3601),
        ("t", [b"x"], float("nan")),
        ("t", [b"x", b"y"], 1),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_nsqd_would_refuse_never_reaches_it(
    nsqd: GoNsqd, produce: Produce, topic: str, bodies: list[bytes], defer_s: float | None
) -> None:
    producer = produce(nsqd.tcp_address)
    with pytest.raises(PublishError) as refusal:  # of the one family
        producer.submit(topic, bodies, defer_s=defer_s)
    assert isinstance(refusal.value, ConfigurationError)
    assert refusal.value.category == "usage"
    producer.publish("t", b"x")
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1


def test_a_real_rejection_fails_no_other_publish(
    go_nsqd: Callable[..., GoNsqd], produce: Produce
) -> None:
    nsqd = go_nsqd("-max-msg-size=100")
    producer = produce(nsqd.tcp_address)
    producer.publish(TOPIC, b"first")
    sent = [producer.submit(TOPIC, [body]) for body in [b"x" * 101] + [b"y"] * 20]
    outcomes = [outcome(publication) for publication in sent]
    assert outcomes == ["PublishRejected"] + ["published"] * 20
    assert nsqd.depth(TOPIC) == 21


def test_what_no_byte_was_sent_of_is_not_unknown(
    nsqd: GoNsqd,
    proxy_to: Callable[[str], Proxy],
    produce: Produce,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than the buffers on the way hold: what came after it was never offered."""
    monkeypatch.setattr(producer_module, "WINDOW_BYTES", 1 << 30)
    proxy = proxy_to(nsqd.tcp_address)
    producer = produce(
        proxy.address, publish_timeout_s=patience_s(0.4), publish_max_msg_size=1 << 24
    )
    producer.publish(TOPIC, b"x")
    proxy.pause(TO_SERVER)
    sent = [producer.submit(TOPIC, [b"x" * (15 << 20)])]
    wait_until(lambda: next(iter(producer._io.links)).connection.has_unsent, what="a jam")
    sent.append(producer.submit(TOPIC, [b"y" * 1000]))
    wait_until(
        lambda: len(next(iter(producer._io.links)).outstanding) == 2, what="the second to be queued"
    )
    assert [outcome(publication) for publication in sent] == ["PublishUnknown", "PublishNotSent"]


@pytest.mark.alone
def test_an_address_that_does_not_answer_costs_one_dial_timeout(
    unreachable_address: str, produce: Produce
) -> None:
    producer = produce(unreachable_address, dial_timeout_s=0.3)
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(PublishNotSent):
            producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < 0.3 + patience_s(3)  # half a minute if each costs one


def test_heartbeats_do_not_stand_in_for_an_answer(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address, publish_timeout_s=0.5)
    publication = producer.submit(TOPIC, [b"x"])
    conn = scripted_nsqd.identified()
    conn.expect(f"PUB {TOPIC}")

    def settles() -> bool:
        with contextlib.suppress(OSError):  # the connection may just have been given up
            conn.heartbeat()
        return publication.is_settled

    wait_until(settles, what="the publication to be given up", timeout_s=5)
    with pytest.raises(PublishUnknown, match="no answer to a publish"):
        publication.wait(patience_s(5))


def test_a_flood_stays_in_its_window(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    most = 0
    publications = []
    for _ in range(10_000):
        publications.append(producer.submit(TOPIC, [b"x"]))
        most = max(most, len(producer._unsettled))
    for publication in publications:
        publication.wait(patience_s(10))
    assert most <= 64
    assert nsqd.depth(TOPIC) == 10_000
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1


def test_an_answer_to_nothing_ends_the_connection(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    publication = producer.submit(TOPIC, [b"x"])
    conn = scripted_nsqd.identified()
    conn.expect(f"PUB {TOPIC}")
    conn.ok()
    conn.ok()
    conn.expect_closed()
    assert outcome(publication) == "published"
    again = producer.submit(TOPIC, [b"x"])
    next_conn = scripted_nsqd.identified()
    next_conn.expect(f"PUB {TOPIC}")
    next_conn.ok()
    assert outcome(again) == "published"


def test_a_stopped_producer_publishes_nothing(nsqd: GoNsqd, produce: Produce) -> None:
    started, fresh = produce(nsqd.tcp_address), produce(nsqd.tcp_address)
    started.publish(TOPIC, b"x")
    for producer in (started, fresh):
        assert producer.stop(patience_s(5))
        for _ in range(70):  # more than the window has places
            with pytest.raises(PublishNotSent, match="stopped"):
                producer.publish(TOPIC, b"x")


def test_a_defect_on_the_io_thread_leaves_nobody_waiting(
    scripted_nsqd: ScriptedNsqd, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    producer = produce(scripted_nsqd.address)
    publication = producer.submit(TOPIC, [b"x"])
    scripted_nsqd.identified().expect(f"PUB {TOPIC}")
    producer._io.loop.call_soon(lambda: 1 // 0)
    assert outcome(publication) == "PublishUnknown"
    assert producer._io.loop.join(patience_s(5))
