"""Publishing: every message has exactly one outcome, which is correct."""

import gc
import math
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, InBackground, Produce, bodies_in
from plugins.http_server import AuthServer, MakeScripted
from plugins.network import TO_SERVER, ProxyTo
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, GoNsqd, MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Producer, Publication, errors
from nsqtools.client import producer_io
from nsqtools.client.producer_io import ProducerLink

DEAD = "127.0.0.1:1"
SENT_WITHIN_S = patience_s(0.2)


def outcome(publication: Publication) -> str:
    try:
        publication.wait(patience_s(10))
    except errors.PublishError as exc:
        return type(exc).__name__
    return "published"


def test_every_kind_of_publish_arrives(go_nsqd: MakeNsqd, produce: Produce) -> None:
    nsqd = go_nsqd("-max-body-size=1000", "-max-msg-size=500")
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = produce(nsqd.tcp_address, publish_max_body_size=1000, publish_max_msg_size=500)
    producer.publish(TOPIC, b"one")
    producer.publish_many(TOPIC, [b"x" * 488] * 9 + [b"y" * 500])
    producer.publish_deferred(TOPIC, b"later", 60)
    producer.submit(TOPIC, [b"four"]).wait(patience_s(5))
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 13, what="the channel has all of them")
    assert nsqd.channel_stats(TOPIC, CHANNEL)["deferred_count"] == 1


def test_nsqd_limits_the_delay_of_a_publish(any_nsqd: AnyNsqd, produce: Produce) -> None:
    nsqd = any_nsqd("--max-req-timeout=48h")
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = produce(nsqd.tcp_address)
    producer.publish_deferred(TOPIC, b"tomorrow", 86_400)
    wait_until(lambda: nsqd.channel_stats(TOPIC, CHANNEL)["deferred_count"] == 1, what="it waits")
    with pytest.raises(errors.PublishRejected, match="out of range 0-172800000"):
        producer.publish_deferred(TOPIC, b"next week", 604_800)


REFUSED: list[tuple[str, list[bytes], float | None]] = [
    ("bad topic", [b"x"], None),
    *(("t", bodies, None) for bodies in ([], [b"x", b""], [bytes(1 << 20)] * 5)),
    ("t", [bytes((1 << 20) + 1)], None),
    *(("t", [b"x"], defer_s) for defer_s in (-1, 1e10, float("nan"))),
    ("t", [b"x", b"y"], 1),
]


def test_invalid_publishes_are_not_sent(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    calls = [partial(producer.submit, to, bodies, defer_s=s) for to, bodies, s in REFUSED]
    # the last part has an empty body
    calls += [partial(producer.publish_many, "t", [*[bytes(1 << 20)] * 5, b""])]
    for call in calls:
        with pytest.raises(errors.PublishError) as refusal:  # all have one base class
            call()
        assert isinstance(refusal.value, errors.ConfigurationError), call
        assert refusal.value.category == "usage"
    producer.publish("t", b"x")
    assert nsqd.depth("t") == 1
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1


@pytest.mark.parametrize("linger_s", [0, 0.05])
def test_a_bad_body_fails_alone(go_nsqd: MakeNsqd, produce: Produce, linger_s: float) -> None:
    nsqd = go_nsqd("-max-body-size=1000", "-max-msg-size=100")
    producer = produce(nsqd.tcp_address, publish_max_body_size=1000, more={"linger_s": linger_s})
    bodies = [b"x" * (101 if number in (7, 33) else 40) for number in range(60)]
    publications = [producer.submit(TOPIC, [body]) for body in bodies]
    assert [outcome(publication) for publication in publications] == [
        "PublishRejected" if len(body) > 100 else "published" for body in bodies
    ]
    assert nsqd.depth(TOPIC) == 58


def test_unsent_publishes_are_not_unknown(
    nsqd: GoNsqd, proxy_to: ProxyTo, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body exceeds all buffers, so the next command was never passed to the socket."""
    monkeypatch.setattr(producer_io, "PUBLISH_WINDOW_BYTES", 1 << 30)
    monkeypatch.setattr(Producer, "_window_bytes", 1 << 30)
    proxy = proxy_to(nsqd.tcp_address)
    limit_s, large = patience_s(0.4), 1 << 24
    producer = produce(proxy.address, publish_timeout_s=limit_s, publish_max_msg_size=large)
    producer.publish(TOPIC, b"x")
    [link] = producer._io.links
    proxy.pause(TO_SERVER)
    publications = [producer.submit(TOPIC, [b"x" * (15 << 20)])]
    wait_until(lambda: link.connection.has_unsent, what="a jam")
    publications.append(producer.submit(TOPIC, [b"y" * 1000]))
    wait_until(lambda: len(link.outstanding) == 2, what="the second to be queued")
    assert [outcome(publication) for publication in publications] == [
        "PublishUnknown",
        "PublishNotSent",
    ]


def test_a_hanging_nsqd_has_at_most_two_windows(nsqd: GoNsqd, produce: Produce) -> None:
    """A publish after its timeout frees room in the window, but not on the connection."""
    producer = produce(nsqd.tcp_address, publish_timeout_s=patience_s(30))
    producer.publish(TOPIC, b"first")
    nsqd.pause()
    publications = (producer.submit(TOPIC, [bytes(1 << 20)], timeout_s=0.05) for _ in range(20))
    outcomes = list(map(outcome, publications))
    nsqd.resume()
    producer.publish(TOPIC, b"last", timeout_s=patience_s(30))
    assert outcomes.count("PublishUnknown") == nsqd.depth(TOPIC) - 2 < 12
    assert set(outcomes) <= {"PublishUnknown", "PublishNotSent"}


def test_a_read_failure_keeps_no_memory(dead_address: str, produce: Produce) -> None:
    """The traceback of its error refers to frames, which refer to the bodies."""
    producer = produce(dead_address)
    kept: list[weakref.ref[array[int]]] = []

    def publish() -> None:
        body = array("b", bytes(100))
        kept.append(weakref.ref(body))
        with suppress(errors.PublishNotSent):
            producer.publish(TOPIC, body)

    for _ in range(200):
        publish()
    gc.collect()
    assert sum(body() is not None for body in kept) < 50


@pytest.mark.alone
def test_a_deaf_address_costs_one_dial_timeout(unreachable_address: str, produce: Produce) -> None:
    producer = produce(unreachable_address, dial_timeout_s=0.3)
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(errors.PublishNotSent):
            producer.publish(TOPIC, b"x")
    # half a minute if each address had its own timeout
    assert time.monotonic() - began < 0.3 + patience_s(3)


def test_heartbeats_do_not_replace_an_answer(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    producer = produce(scripted_nsqd.address, publish_timeout_s=0.5)
    publication = producer.submit(TOPIC, [b"x"])
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")

    def settles() -> bool:
        with suppress(OSError):  # the client may just have closed the connection
            conn.heartbeat()
        return publication.is_settled

    wait_until(settles, what="the publication to be given up", timeout_s=5)
    with pytest.raises(errors.PublishUnknown, match="no answer to a publish"):
        publication.wait(patience_s(5))


def test_a_flood_of_publishes_stays_in_its_window(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    most = 0
    for _ in range(10_000):
        producer.submit(TOPIC, [b"x"])
        most = max(most, len(producer._unsettled))
    assert producer.flush(patience_s(10))
    assert most <= producer.options.max_outstanding
    assert nsqd.depth(TOPIC) == 10_000
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1


def test_an_unexpected_answer_closes_the_connection(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    publication = producer.submit(TOPIC, [b"x"])
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    conn.ok()
    conn.ok()
    conn.expect_closed()
    assert outcome(publication) == "published"


def test_a_stopped_producer_publishes_nothing(nsqd: GoNsqd, produce: Produce) -> None:
    started, fresh = produce(nsqd.tcp_address), produce(nsqd.tcp_address)
    started.publish(TOPIC, b"x")
    for producer in (started, fresh):
        assert producer.stop(patience_s(5))
        for _ in range(150):  # more than the window allows
            with pytest.raises(errors.PublishNotSent, match="stopped"):
                producer.publish(TOPIC, b"x")


def test_a_defect_on_the_io_thread_releases_waiting_threads(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    publication = producer.submit(TOPIC, [b"x"])
    scripted_nsqd.identified().expect(f"PUB {TOPIC}")
    producer._io.loop.call_soon(lambda: 1 // 0)
    assert outcome(publication) == "PublishUnknown"
    assert producer._io.loop.join(patience_s(5))


def test_buffers_are_copied(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    changing = bytearray(b"before")
    bodies: list[Any] = [memoryview(array("i", [1, 2, 3])), memoryview(b"abcdef")[::2]]
    bodies += [array("d", [1.5, 2.5]), changing]
    expected = sorted([memoryview(body).tobytes() for body in bodies] * 2)
    producer.publish_many(TOPIC, bodies)
    publications = [producer.submit(TOPIC, [body]) for body in bodies]
    changing[:] = b"after!"
    for publication in publications:
        publication.wait(patience_s(5))
    assert bodies_in(nsqd, TOPIC, 8) == expected


def test_a_callback_may_submit_but_not_wait(nsqd: GoNsqd, produce: Produce) -> None:
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
    producer = produce(nsqd.tcp_address, max_outstanding=2)
    caught: list[type[Exception]] = []
    calls: list[Callable[[], object]] = [
        lambda: producer.publish(TOPIC, b"x"),
        lambda: producer.publish_many(TOPIC, [b"x"]),
        producer.flush,
        lambda: [producer.submit(TOPIC, [b"x"]) for _ in range(3)],  # the window has room for two
    ]

    def call_all(publication: Publication) -> None:
        for call in calls:
            try:
                call()
            except (errors.ConfigurationError, errors.PublishError) as exc:
                caught.append(type(exc))

    producer.submit(TOPIC, [b"x"], on_settled=call_all).wait(patience_s(5))
    wait_until(lambda: len(caught) == 4, what="four errors")
    assert caught == [errors.ConfigurationError] * 3 + [errors.PublishNotSent]
    producer.publish(TOPIC, b"and it goes on")


def test_a_callback_can_begin_to_stop(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    producer = produce(scripted_nsqd.address)
    stopped: list[bool] = []
    first = producer.submit(TOPIC, [b"1"], on_settled=lambda _: stopped.append(producer.stop()))
    second = producer.submit(TOPIC, [b"2"])
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    conn.expect(f"PUB {TOPIC}")
    conn.ok()
    first.result(patience_s(5))
    wait_until(lambda: stopped == [False], what="the call")
    conn.ok()
    second.result(patience_s(5))
    assert producer.stop(patience_s(5))


def test_a_signal_handler_may_publish_flush_and_stop(
    nsqd: GoNsqd,
) -> None:
    """Return each line of the client that runs to publish, to consume and to stop."""
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = Producer(nsqd.tcp_address)
    interrupted: dict[tuple[str, int], None] = {}

    def handle(frame: FrameType, event: str, arg: object) -> Any:
        place = frame.f_code.co_name, frame.f_lineno
        is_ours = frame.f_globals["__name__"].startswith("nsqtools.client")
        if event == "line" and is_ours and place not in interrupted:
            interrupted[place] = None
            if not producer._is_stopped:
                producer.submit(TOPIC, [b"x"]).wait(patience_s(5))
                assert producer.flush(patience_s(5))
            with Producer(nsqd.tcp_address) as other:
                other.submit(TOPIC, [b"x"]).wait(patience_s(5))
        return handle

    tracer = sys.gettrace()
    sys.settrace(handle)
    try:
        producer.submit(TOPIC, [b"x"]).add_done_callback(lambda sent: None)
        producer.publish(TOPIC, b"x")
        with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
            next(iter(consumer)).finish()
        assert producer.stop(patience_s(5))
    finally:
        sys.settrace(tracer)
    assert {"_join", "wake", "_take", "join"} <= {name for name, _ in interrupted}


def test_a_publish_settles_within_its_timeout(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    waiting = producer.submit(TOPIC, [b"x"], timeout_s=0.2)
    with pytest.raises(errors.PublishNotSent, match=r"within 0\.2 s"):
        waiting.wait(patience_s(5))
    late = producer.submit(TOPIC, [b"late"], timeout_s=SENT_WITHIN_S)
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    with pytest.raises(errors.PublishUnknown, match=f"within {SENT_WITHIN_S:g} s"):
        late.wait(patience_s(5))
    after = producer.submit(TOPIC, [b"after"])
    conn.expect(f"PUB {TOPIC}")
    conn.ok()
    for timeout_s in (0.2, -1):
        with pytest.raises(TimeoutError):
            after.wait(timeout_s)
    conn.ok()
    after.wait(patience_s(5))


def test_a_confirmed_publish_leaves_no_timer_behind(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    producer.publish(TOPIC, b"x")  # the process has one loop, which may have timers of other tests
    timer_count = len(producer._io.loop.io_thread._timers)
    for _ in range(200):
        producer.publish(TOPIC, b"x", timeout_s=3600)
    assert len(producer._io.loop.io_thread._timers) < timer_count + 20
    assert not producer._io._expires_at


def test_a_full_window_blocks_for_the_timeout(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address, max_outstanding=1, publish_timeout_s=patience_s(60))
    producer.submit(TOPIC, [b"x"])
    assert not producer.flush(0.1)
    began = time.monotonic()
    with pytest.raises(errors.PublishNotSent, match="no room"):
        producer.publish(TOPIC, b"x", timeout_s=0.2)
    assert time.monotonic() - began < patience_s(30)
    assert not producer._waiters  # so that repeated attempts leak nothing


def test_threads_share_a_small_window(
    nsqd: GoNsqd, produce: Produce, in_background: InBackground
) -> None:
    """Each answer releases a few of the waiting threads, and so does a thread that times out."""
    producer = produce(nsqd.tcp_address, max_outstanding=1)

    def publish(timeout_s: float) -> None:
        for _ in range(20):
            with suppress(errors.PublishError):
                producer.publish(TOPIC, b"x", timeout_s=timeout_s)

    began = time.monotonic()
    publishing = [in_background(partial(publish, limit_s)) for limit_s in (0, 0.001, 300, 300) * 4]
    for task in publishing:
        task.result(patience_s(60))
    assert time.monotonic() - began < 300
    assert not producer._waiters


def test_leaving_the_block_waits_for_retries(nsqd: GoNsqd, in_background: InBackground) -> None:
    nsqd.stop()
    timeout_s = patience_s(0.1)  # also the timeout of nsqd's answer
    options = ClientOptions(publish_timeout_s=timeout_s)
    with Producer(nsqd.tcp_address, options, retry_timeout_s=math.inf) as producer:
        publication = producer.submit(TOPIC, [b"x"])
        started = in_background(lambda: (time.sleep(5 * timeout_s), nsqd.start()))
    started.result()
    assert publication.error is None
    assert nsqd.depth(TOPIC) == 1


# -- failures that nobody reads -------------------------------------------------------------------


def unseen(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "was never read" in line]


def test_unread_failures_are_logged_once(
    caplog: pytest.LogCaptureFixture, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(DEAD) as producer:
        for _ in range(20):
            producer.submit(TOPIC, [b"x", b"y"])
        producer.flush()
        with pytest.raises(errors.PublishNotSent):
            producer.publish(TOPIC, b"x")
        assert producer.submit(TOPIC, [b"x"], on_settled=lambda p: p.error) is not None
    producer.stop()
    [line] = unseen(caplog)
    assert "40 messages unconfirmed" in line
    assert f"cannot connect to {DEAD}" in line
    caplog.clear()
    monkeypatch.setattr(producer_io, "UNSEEN_S", 0.2)
    producer = produce(DEAD)
    producer.submit(TOPIC, [b"x"])
    wait_until(lambda: unseen(caplog), what="a warning")
    producer.stop()
    [line] = unseen(caplog)
    assert line.startswith(f"{DEAD}: 1 message unconfirmed")


@pytest.mark.parametrize("mode", ["failover", "round-robin"])
def test_unreachable_nsqd_lose_no_message(
    nsqd: GoNsqd, unreachable_address: str, produce: Produce, mode: str
) -> None:
    addresses = [DEAD, unreachable_address, nsqd.tcp_address]
    producer = produce(addresses, dial_timeout_s=patience_s(30), more={"mode": mode})
    began = time.monotonic()
    for number in range(50):
        producer.publish(TOPIC, b"%d" % number)
    assert time.monotonic() - began < patience_s(15)
    assert nsqd.depth(TOPIC) == 50


def test_round_robin_spreads_joined_messages(go_nsqd: MakeNsqd, produce: Produce) -> None:
    nsqds = [go_nsqd(), go_nsqd()]
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    producer = produce(addresses, more={"mode": "round-robin", "linger_s": 0.01})
    producer.publish(TOPIC, b"x")
    wait_until(lambda: all(link.connection for link in producer._io.links), what="both")
    for _ in range(20):
        producer.publish(TOPIC, b"x")
    depths = [nsqd.depth(TOPIC) for nsqd in nsqds]
    assert sum(depths) == 21
    assert min(depths) >= 10


def test_invalid_arguments_of_a_producer(produce: Produce) -> None:
    wrong: list[dict[str, Any]] = [{"mode": "all"}, {"retry_timeout_s": -1}]
    for more in ({"nsqd_tcp_addresses": []}, *wrong, {"linger_s": float("nan")}):
        with pytest.raises(errors.ConfigurationError):
            Producer(**{"nsqd_tcp_addresses": DEAD, **more})
    encode, several = "not str: encode it", "a list of messages"
    wrong: list[tuple[Any, str]] = [(["text"], encode), ([b"x", "text"], encode)]
    wrong += [([7], "bytes, not int"), ([None], "bytes, not NoneType")]
    wrong += [(b"one message", several), ("one message", several)]
    for bodies, complaint in wrong:
        with pytest.raises(TypeError, match=complaint):
            produce(DEAD).submit(TOPIC, bodies)


def test_a_refused_client_gets_publish_refused(
    go_nsqd: MakeNsqd, auth_server: AuthServer, produce: Produce
) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    producer = produce(nsqd.tcp_address, more={"retry_timeout_s": patience_s(60)})
    began = time.monotonic()
    with pytest.raises(errors.PublishRefused, match="requires authentication") as caught:
        producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < patience_s(30)
    assert not isinstance(caught.value, errors.PublishNotSent)
    assert isinstance(caught.value.__cause__, errors.RefusedError)
    assert caught.value.category == "refused"


def test_a_topic_that_is_refused_costs_one_connection_for_joined_messages(
    go_nsqd: MakeNsqd, auth_server: AuthServer, produce: Produce
) -> None:
    auth_server.allow("known", topic="other")
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    producer = produce(nsqd.tcp_address, auth_secret="known", more={"linger_s": 0.1})
    submitted = [producer.submit(TOPIC, [b"x"]) for _ in range(20)]
    assert all(isinstance(item.exception(), errors.PublishRejected) for item in submitted)
    assert len(auth_server.questions) < 10


def test_a_lone_publish_does_not_linger(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address, more={"linger_s": patience_s(2)})
    producer.publish(TOPIC, b"x")
    began = time.monotonic()
    for _ in range(100):
        producer.publish(TOPIC, b"x")
    assert time.monotonic() - began < patience_s(100)


def test_a_message_lingers_for_its_time(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    producer = produce(scripted_nsqd.address, more={"linger_s": patience_s(0.2)})
    producer.submit(TOPIC, [b"1"])
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    producer.submit(TOPIC, [b"2"])
    producer.submit(TOPIC, [b"3"])
    conn.expect(f"MPUB {TOPIC}")  # although the first one is not answered
    conn.ok()
    conn.ok()
    assert producer.flush(5)


def test_retries_keep_the_order(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    policy = {"retry_timeout_s": patience_s(30), "retry_unknown": True, "linger_s": patience_s(30)}
    producer = produce(scripted_nsqd.address, more=policy)
    publications = [producer.submit(TOPIC, [b"1"])]
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    publications += [producer.submit(TOPIC, bodies) for bodies in ([b"2", b"3"], [b"4"], [b"5"])]
    conn.expect(f"MPUB {TOPIC}")  # 4 and 5 linger
    wait_until(lambda: len(list(producer._io._queue)) == 2, what="two publishes linger")
    conn.close()
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    for number, command in enumerate(("PUB", "MPUB", "MPUB")):
        if number:
            conn.expect(f"{command} {TOPIC}")
        conn.ok()
    for publication in publications:
        publication.wait(patience_s(5))
    assert producer.repeated == 3


# -- nsqd that nsqlookupd lists -------------------------------------------------------------------


IN_TURN = {"mode": "round-robin", "retry_timeout_s": 10}


def links(producer: Producer) -> dict[str, ProducerLink]:
    return {str(link.address): link for link in producer._io.links}


def connected(producer: Producer) -> list[str]:
    return [name for name, link in links(producer).items() if link.connection is not None]


def publish_until_connected(producer: Producer, addresses: list[str]) -> None:
    def publish() -> bool:
        producer.publish(TOPIC, b"x")
        return sorted(connected(producer)) == sorted(addresses)

    wait_until(publish, what="connections to these alone", timeout_s=20)


def test_round_robin_uses_new_nsqd(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupds = [nsqlookupd(), nsqlookupd()]
    nsqds = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for lookupd in lookupds]
    for nsqd in nsqds:
        nsqd.create_topic(TOPIC)
    addresses = [lookupd.http_address for lookupd in lookupds]
    producer = produce(lookupd=[DEAD, *addresses], more=IN_TURN)
    for _ in range(2):
        publish_until_connected(producer, [nsqd.tcp_address for nsqd in nsqds])
        depths = {nsqd: nsqd.depth(TOPIC) for nsqd in nsqds}
        for _ in range(5 * len(nsqds)):
            producer.publish(TOPIC, b"x")
        assert {nsqd.depth(TOPIC) - count for nsqd, count in depths.items()} == {5}
        if len(nsqds) == 2:
            nsqds.append(go_nsqd(f"-lookupd-tcp-address={lookupds[0].tcp_address}"))
            nsqds[-1].create_topic(TOPIC)


def test_a_connection_outlives_its_listing(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    """nsqlookupd lists no nsqd after its start, then fails, and then stops."""
    lookupd, nsqd = scripted_lookupd(), go_nsqd()
    lookupd.list_nsqd(nsqd.tcp_address)
    producer = produce(lookupd=lookupd.address, more={"retry_timeout_s": 10})
    producer.publish(TOPIC, b"x")
    for lookupd.status in (200, 500):
        lookupd.list_nsqd()
        lookups = len(lookupd.requests)
        wait_until(lambda: len(lookupd.requests) > lookups + 2, what="rounds")  # noqa: B023
        producer.publish(TOPIC, b"x")
    lookupd.server_close()
    producer.publish(TOPIC, b"x")
    assert nsqd.depth(TOPIC) == 4


def test_a_drained_nsqd_gets_no_messages(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupd = nsqlookupd()
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    leaving, staying = go_nsqd(flag), go_nsqd(flag)
    leaving.create_topic(TOPIC)
    node = f"127.0.0.1:{leaving.http_address.rpartition(':')[2]}"
    wait_until(lambda: lookupd.producers(TOPIC), what="the topic")
    lookupd.post("/topic/tombstone", topic=TOPIC, node=node)
    producer = produce(lookupd=lookupd.http_address, more=IN_TURN)
    for _ in range(10):
        producer.publish(TOPIC, b"x")
    assert (leaving.depth(TOPIC), staying.depth(TOPIC)) == (0, 10)


def test_configured_nsqd_come_before_listed_ones(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupd, configured, listed = scripted_lookupd(), go_nsqd(), go_nsqd()
    lookupd.list_nsqd(listed.tcp_address, configured.tcp_address)
    producer = produce(
        [configured.tcp_address], lookupd=lookupd.address, more={"retry_timeout_s": 10}
    )
    producer.publish(TOPIC, b"x")
    wait_until(lambda: len(links(producer)) == 2, what="both")
    configured.stop()
    producer.publish(TOPIC, b"y")
    assert listed.depth(TOPIC) == 1


@patch.object(producer_io, "DELISTED_GRACE_S", 0.5)
def test_delisted_nsqd_are_forgotten(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupd, nsqd = scripted_lookupd(), go_nsqd("-tcp-address=0.0.0.0:0")
    port = nsqd.tcp_address.rpartition(":")[2]
    addresses = [f"127.0.1.{n}:{port}" for n in range(1, 251)]
    lookupd.list_nsqd(DEAD, *addresses)
    producer = produce(lookupd=lookupd.address, more=IN_TURN)
    publish_until_connected(producer, addresses)
    lookupd.list_nsqd(addresses[0])
    wait_until(lambda: list(links(producer)) == addresses[:1], what="the others to be forgotten")


def test_the_error_without_nsqd(scripted_lookupd: MakeScripted, produce: Produce) -> None:
    empty = "lists no nsqd that messages can be published to"
    for lookupd, complaint in ((scripted_lookupd().address, empty), (DEAD, DEAD)):
        with pytest.raises(errors.PublishNotSent, match=complaint):
            produce(lookupd=lookupd).publish(TOPIC, b"x")


def test_a_password_of_nsqlookupd_is_never_shown(
    nsqlookupd: MakeLookupd, produce: Produce, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    lookupd = f"http://me:hush@{nsqlookupd().http_address}/?token=hush"
    producer = produce(lookupd=lookupd)
    with pytest.raises(errors.PublishNotSent):
        producer.publish(TOPIC, b"x")
    producer.stop()
    with pytest.raises(errors.PublishNotSent) as caught:
        producer.publish(TOPIC, b"x")
    consume(lookupd=lookupd)
    wait_until(lambda: "does not list topic" in caplog.text, what="an answer")
    assert "hush" not in f"{producer!r} {caught.value} {caplog.text}"


def test_silent_nsqlookupd_delay_no_publish(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    producer = produce(lookupd=scripted_nsqd.address, lookupd_poll_timeout_s=patience_s(20))
    with pytest.raises(errors.PublishNotSent, match=f"{scripted_nsqd.address}: no answer within"):
        producer.publish(TOPIC, b"x", timeout_s=0.5)


def test_max_discovered_nsqd_limits_a_producer(
    scripted_lookupd: MakeScripted, produce: Produce
) -> None:
    lookupds = [scripted_lookupd() for _ in range(3)]
    for number, lookupd in enumerate(lookupds):
        lookupd.list_nsqd(*(f"127.0.{number}.{n}:1" for n in range(1, 11)))
    producer = produce(lookupd=[lookupd.address for lookupd in lookupds], max_discovered_nsqd=12)
    producer.start()
    wait_until(lambda: all(len(lookupd.requests) > 1 for lookupd in lookupds), what="rounds")
    assert len(links(producer)) <= 12
    assert producer.stop(patience_s(5))
    lookups = len(lookupds[0].requests)
    time.sleep(0.3)
    assert len(lookupds[0].requests) <= lookups + 1  # one lookup may have been in progress


# -- publishing continues while at least one nsqd works --------------------------------------------


def test_a_hanging_nsqd_does_not_block_all_threads(
    go_nsqd: MakeNsqd, in_background: InBackground, produce: Produce
) -> None:
    nsqds = [go_nsqd() for _ in range(3)]
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    producer = produce(addresses, publish_timeout_s=600, more={"mode": "round-robin"})
    confirmed: list[None] = []

    def publish() -> None:
        with suppress(errors.PublishError):
            while True:
                confirmed.append(producer.publish(TOPIC, b"x"))  # type: ignore[func-returns-value]

    for _ in range(8):
        in_background(publish)
    wait_until(lambda: len(confirmed) > 100, what="publishes")
    nsqds[0].pause()
    wait_until(lambda: len(confirmed) > 700, what="more of them", timeout_s=60)
    producer.stop(0)
    nsqds[0].resume()


def test_failover_avoids_a_hanging_nsqd(go_nsqd: MakeNsqd, produce: Produce) -> None:
    first, second = go_nsqd(), go_nsqd()
    options = {"publish_timeout_s": 600, "max_outstanding": 4}
    producer = produce([first.tcp_address, second.tcp_address], **options)
    producer.publish(TOPIC, b"x")
    first.pause()
    stuck = [producer.submit(TOPIC, [b"stuck"]) for _ in range(4)]  # the window is full

    def goes_on() -> bool:
        return not wait([producer.submit(TOPIC, [b"x"])], patience_s(0.2)).not_done

    wait_until(goes_on, what="the second to be used", timeout_s=20)
    assert not any(publication.is_settled for publication in stuck)
    first.resume()
    assert producer.flush(patience_s(20))
    assert all(publication.error is None for publication in stuck)
    depth = second.depth(TOPIC)
    producer.publish(TOPIC, b"back")
    assert second.depth(TOPIC) == depth


def test_a_delisted_nsqd_is_the_last_resort(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    """All nsqlookupd have restarted and list none, and the nsqd in use stops."""
    lookupd, nsqds = scripted_lookupd(), [go_nsqd() for _ in range(3)]
    lookupd.list_nsqd(*(nsqd.tcp_address for nsqd in nsqds))
    producer = produce(lookupd=lookupd.address, publish_timeout_s=600)
    producer.publish(TOPIC, b"x")
    lookupd.list_nsqd()
    lookups = len(lookupd.requests)
    wait_until(lambda: len(lookupd.requests) > lookups + 2, what="empty answers")
    used = max(nsqds, key=lambda nsqd: nsqd.depth(TOPIC) if nsqd.stats()["topics"] else 0)
    used.kill()
    wait_until(lambda: used.tcp_address not in connected(producer), what="the loss")
    for _ in range(10):
        producer.publish(TOPIC, b"y")
    lookupd.list_nsqd(used.tcp_address)
    used.start()
    publish_until_connected(producer, [used.tcp_address])  # a listed nsqd comes first


def test_retries_outlast_a_missing_auth_server(
    go_nsqd: MakeNsqd, auth_server: AuthServer, produce: Produce
) -> None:
    """nsqd renews an expired identity, and refuses commands if it cannot."""
    auth_server.allow("sesame", ttl_s=1)
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    options: dict[str, Any] = {"auth_secret": "sesame", "more": {"retry_timeout_s": 600}}
    producer = produce(nsqd.tcp_address, **options)
    producer.publish(TOPIC, b"x")
    auth_server.answer("sesame", 500, b"")
    waiting: list[Publication] = []

    def is_refused() -> bool:
        waiting.append(producer.submit(TOPIC, [b"y"]))
        return nsqd.log.count("AUTH failed") > 2

    wait_until(is_refused, what="refusals of PUB and of AUTH", timeout_s=20)
    auth_server.allow("sesame", ttl_s=3600)
    for publication in waiting:
        publication.wait(patience_s(20))
    assert nsqd.depth(TOPIC) == 1 + len(waiting)
    auth_server.answer("sesame", 500, b"")
    # this identity was never accepted
    with pytest.raises(errors.PublishRefused, match="E_AUTH_FAILED"):
        produce(nsqd.tcp_address, **options).publish(TOPIC, b"x")


def test_a_stop_does_not_wait_for_the_answer_to_a_publish_that_has_timed_out(
    scripted_nsqd: ScriptedNsqd, produce: Produce, in_background: InBackground
) -> None:
    producer = produce(scripted_nsqd.address, publish_timeout_s=patience_s(60))
    publishing = in_background(lambda: producer.publish(TOPIC, b"x", timeout_s=patience_s(0.5)))
    scripted_nsqd.identified(f"PUB {TOPIC}")
    with pytest.raises(errors.PublishUnknown):
        publishing.result(patience_s(5))
    assert producer.stop(patience_s(5))
