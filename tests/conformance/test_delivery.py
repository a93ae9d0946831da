"""When messages reach consumers, and which: the same on the Go nsqd and on the embedded one.

Behavior without timing or chance is recorded in ``exchanges/clients-delivery.jsonl``.

The Go nsqd looks for new channels only every 5 s before it watches their timeouts, so the tests of
timeouts share a server whose channels are made at its start.
"""

import re
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from plugins.raw_client import HEARTBEAT, MESSAGE, RESPONSE, RawClient, received, subscribed
from plugins.servers import NSQD_KINDS, AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

SCAN_S = 6.0  # the longest time until the Go nsqd notices a timeout on a new channel


@pytest.fixture(scope="module", params=NSQD_KINDS)
def timed_nsqd(request: pytest.FixtureRequest) -> Iterator[Nsqd]:
    """Messages time out after 1 s, unless a client asks for more; each test has its own topic."""
    with (
        TemporaryDirectory(prefix="nsqd-") as directory,
        request.param(Path(directory), "-msg-timeout=1s") as nsqd,
    ):
        for topic in ("timeout", "gone", "requeue"):
            nsqd.create_channel(topic, "ch")
        yield nsqd


def test_consumers_of_a_channel_share_its_messages(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with ExitStack() as stack:
        for _ in range(2):
            client = subscribed(nsqd.tcp_address, "t", "ch", ready=2500)
            stack.enter_context(client).settle()

        def share() -> bool:  # The system may delay one client for long.
            nsqd.publish("t", b"x")
            clients = nsqd.channel_stats("t", "ch")["clients"]
            shares = [client["in_flight_count"] for client in clients]
            return sum(shares) >= 40 and min(shares) * 5 >= sum(shares)

        wait_until(share, what="a fifth for each of them")


def test_a_message_times_out_and_is_redelivered(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with RawClient(nsqd.tcp_address) as sleeper, RawClient(nsqd.tcp_address) as client:
        client.identify(msg_timeout=60_000)  # so that its FIN is not late
        client.subscribe("timeout", "ch")
        sleeper.subscribe("timeout", "ch", ready=1)
        started_s = time.monotonic()
        nsqd.publish("timeout", b"body")
        first = sleeper.read_message()
        sleeper.send(b"RDY 0\n")
        client.send(b"RDY 1\n")
        second = client.read_message()
        waited_s = time.monotonic() - started_s

        client.finish([second, second])
        failed = client.read_error()

    assert (second.id, second.timestamp_ns) == (first.id, first.timestamp_ns)
    assert waited_s > 0.9
    assert failed == b"E_FIN_FAILED FIN %b failed ID not in flight" % first.id
    timeouts = nsqd.channel_stats("timeout", "ch")["timeout_count"]
    # It is delivered once, unless the RDY 0 took longer than a second.
    assert (first.attempts, second.attempts) == (1, 1 + timeouts)
    assert timeouts >= 1


def test_messages_of_a_disconnected_client_wait_for_their_timeout(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with subscribed(nsqd.tcp_address, "gone", "ch", ready=1) as client:
        nsqd.publish("gone", b"body")
        held = client.read_message()
    wait_until(lambda: not nsqd.channel_stats("gone", "ch")["client_count"], what="it is gone")
    stats = nsqd.channel_stats("gone", "ch")
    assert stats["in_flight_count"] + stats["timeout_count"] == 1
    with subscribed(nsqd.tcp_address, "gone", "ch", ready=1) as client:
        assert client.read_message().attempts == held.attempts + 1


@pytest.mark.parametrize("timeout", ["0", "-1s"])
def test_without_a_timeout_a_message_is_not_redelivered_in_a_busy_loop(
    any_nsqd: AnyNsqd, timeout: str
) -> None:
    nsqd = any_nsqd(f"-msg-timeout={timeout}")
    nsqd.create_channel("busy", "ch")
    with subscribed(nsqd.tcp_address, "busy", "ch", ready=1):
        nsqd.publish("busy", b"body")
        time.sleep(1.0)
        assert nsqd.channel_stats("busy", "ch")["timeout_count"] < 20


def test_touch_extends_a_timeout_up_to_its_limit(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-msg-timeout=1s", "-max-msg-timeout=2s")
    nsqd.create_channel("touch", "ch")
    with subscribed(nsqd.tcp_address, "touch", "ch", ready=1) as client:
        began_s = sent_s = time.monotonic()
        longest_s = 0.0  # for which nsqd may have seen no touch
        nsqd.publish("touch", b"body")
        held = client.read_message()
        while not select.select([client.socket], [], [], 0.3)[0]:
            before_s, sent_s = sent_s, time.monotonic()
            client.send(b"TOUCH %b\n" % held.id)
            nsqd.get("/ping")
            longest_s = max(longest_s, time.monotonic() - before_s)
        while (frame := client.read())[0] != MESSAGE:
            pass  # A touch was too late.
        waited_s = time.monotonic() - began_s

    assert received(frame[1]).attempts == 2
    assert waited_s > 1.9 or max(longest_s, time.monotonic() - sent_s) > 0.9
    assert waited_s < patience_s(2 + SCAN_S)


def test_a_message_requeued_with_a_delay_is_deferred(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with RawClient(nsqd.tcp_address) as client:
        client.identify(msg_timeout=60_000)  # so that its REQ is not late
        client.subscribe("requeue", "ch", ready=1)
        nsqd.publish("requeue", b"long")
        client.send(b"REQ %b 60000\n" % client.read_message().id)
        client.settle()
        assert nsqd.channel_stats("requeue", "ch")["deferred_count"] == 1
        nsqd.publish("requeue", b"body")
        held = client.read_message()
        started_s = time.monotonic()
        client.send(b"REQ %b 500\n" % held.id)
        again = client.read_message()
        waited_s = time.monotonic() - started_s

    assert (again.id, again.attempts, again.body) == (held.id, 2, b"body")
    assert waited_s > 0.4


def test_ephemeral_channels_end_with_their_consumers(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    subscription = (nsqd.tcp_address, "t#ephemeral", "ch#ephemeral")
    with subscribed(*subscription), subscribed(*subscription):
        pass
    wait_until(lambda: not nsqd.stats()["topics"], what="channel and topic are gone")
    nsqd.post("/pub", b"late", topic="t", defer=300)
    started_s = time.monotonic()
    with subscribed(nsqd.tcp_address, "t", "ch", ready=1) as client:
        assert client.read_message().body == b"late"
    assert time.monotonic() - started_s > 0.25


def test_sampling_discards_and_output_is_buffered_for_its_timeout(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.identify(sample_rate=30)
        client.subscribe("t", "ch", ready=2000)
        nsqd.publish("t", *[b"x"] * 1000)

        def figures(*names: str) -> list[int]:
            stats = nsqd.channel_stats("t", "ch")
            return [stats[name] for name in names]

        wait_until(lambda: figures("message_count", "depth") == [1000, 0], what="it is drained")
        assert 150 < figures("in_flight_count")[0] < 480
    with RawClient(nsqd.tcp_address) as client:
        started_s = time.monotonic()  # From here on the buffer is flushed at intervals.
        client.identify(output_buffer_timeout=1000, output_buffer_size=16384)
        client.subscribe("u", "ch", ready=100)
        client.settle()
        for number in range(5):
            nsqd.publish("u", b"%d" % number)
        client.read_messages(5)
        waited_s = time.monotonic() - started_s

    assert waited_s > 0.9


@pytest.mark.parametrize(("size", "ready"), [(-1, 100), (16384, 1)], ids=["unbuffered", "no room"])
def test_output_that_needs_no_buffering_is_written_immediately(
    any_nsqd: AnyNsqd, size: int, ready: int
) -> None:
    """Buffered output would arrive after an hour, long after the deadline of a read."""
    nsqd = any_nsqd("-max-output-buffer-timeout=1h")
    with RawClient(nsqd.tcp_address) as client:
        client.identify(output_buffer_size=size, output_buffer_timeout=3_600_000)
        client.subscribe("t", "ch", ready=ready)
        client.settle()
        for number in range(5):
            nsqd.publish("t", b"%d" % number)
            client.finish([client.read_message()])


def test_only_a_complete_command_keeps_a_client_connected(any_nsqd: AnyNsqd) -> None:
    """Four clients at a time: one is silent, one never ends a body, one sends it byte by byte, and
    one answers."""
    with ExitStack() as stack:
        address = any_nsqd().tcp_address
        clients = [stack.enter_context(RawClient(address)) for _ in range(4)]
        silent, stuck, slow, alive = clients
        started_s = time.monotonic()
        for client in clients:
            client.identify(heartbeat_interval=1000)
        stuck.send(b"PUB t\n\0\0\0\x09half")
        slow.send(b"MPUB t\n\0\0\0\x64\0\0\0\x0a")
        while (refusal := slow.read_frame()) == (RESPONSE, HEARTBEAT):
            with suppress(ConnectionError):  # nsqd has closed, and the error is still to be read.
                slow.send(b"\0\0\0\1x")
            assert alive.read_frame() == (RESPONSE, HEARTBEAT)
            alive.send(b"NOP\n")
        assert refusal[1].startswith(b"E_BAD_MESSAGE MPUB failed to read message")
        while (refusal := stuck.read_frame()) == (RESPONSE, HEARTBEAT):
            pass
        assert refusal[1] == b"E_BAD_MESSAGE PUB failed to read message body"
        assert silent.read_frame() == (RESPONSE, HEARTBEAT)
        with pytest.raises(EOFError):
            [silent.read_frame() for _ in range(3)]
        assert time.monotonic() - started_s > 1.5
        for _ in range(2):
            assert alive.read_frame() == (RESPONSE, HEARTBEAT)
            alive.send(b"NOP\n")


def test_a_lone_surrogate_in_a_client_name_is_replaced(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.identify(hostname="\ud800", user_agent="\U0001f600")
        client.publish("t", b"x")
        page = nsqd.get("/stats").decode()
        [producer] = nsqd.stats()["producers"]
    assert re.search("V2 \ufffd:[0-9]+ \U0001f600", page)
    assert (producer["hostname"], producer["user_agent"]) == ("\ufffd", "\U0001f600")


def test_quantiles_measure_the_time_from_publish_to_finish(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-e2e-processing-latency-percentile=0.5,0.99")
    with subscribed(nsqd.tcp_address, "t", "ch", ready=102) as client:
        started_s = time.monotonic()
        nsqd.publish("t", *[b"x"] * 102)
        # One message is in flight, one was requeued: neither is a sample.
        requeued, _, *messages = client.read_messages(102)
        client.send(b"REQ %b 60000\n" % requeued.id)
        client.settle()
        unused = nsqd.channel_stats("t", "ch")["e2e_processing_latency"]
        client.finish(messages[:90])
        client.settle()
        quick_ns = (time.monotonic() - started_s) * 1e9
        time.sleep(0.2)
        client.finish(messages[90:])
        client.settle()
        topic = nsqd.topic_stats("t")
        [latency, of_topic] = (
            stats["e2e_processing_latency"] for stats in (topic["channels"][0], topic)
        )

    assert (unused["count"], [entry["value"] for entry in unused["percentiles"]]) == (0, [0, 0])
    assert (latency["count"], of_topic["count"]) == (100, 100)
    assert [entry["quantile"] for entry in latency["percentiles"]] == [0.99, 0.5]
    slow_ns, median_ns = (entry["value"] for entry in latency["percentiles"])
    assert slow_ns > 190e6
    assert 0 < median_ns < 190e6 + quick_ns
    assert of_topic["percentiles"] == latency["percentiles"]
