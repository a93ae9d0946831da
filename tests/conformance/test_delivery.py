"""How messages reach consumers: the same on the Go nsqd and on the embedded one.

The Go nsqd looks for new channels only every 5 s before it watches their timeouts, so the tests of
timeouts share a server whose channels are made at its start.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from plugins.http_api import Nsqd
from plugins.raw_client import HEARTBEAT, RawClient, Received, received, sized
from plugins.servers import NSQD_KINDS
from plugins.waiting import patience_s, wait_until
from plugins.wire import MESSAGE, RESPONSE

SCAN_S = 6.0  # the slowest that the Go nsqd notices a timeout on a channel that is new

AnyNsqd = Callable[..., Nsqd]


@pytest.fixture(scope="module", params=NSQD_KINDS)
def timed_nsqd(request: pytest.FixtureRequest) -> Iterator[Nsqd]:
    """Messages time out after 1 s, unless a client asks for more; each test has its own topic."""
    with TemporaryDirectory(prefix="nsqd-") as directory:
        nsqd: Nsqd = request.param(Path(directory), "-msg-timeout=1s")
        nsqd.start()
        for topic in ("timeout", "gone", "requeue"):
            nsqd.create_channel(topic, "ch")
        yield nsqd
        nsqd.kill()


def test_every_channel_gets_every_message_with_the_same_identity(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as a, RawClient(nsqd.tcp_address) as b:
        a.subscribe("t", "a", ready=1)
        b.subscribe("t", "b", ready=1)
        nsqd.publish("t", b"body")

        assert a.read_message() == b.read_message()


def test_the_first_channel_gets_the_backlog_and_the_second_does_not(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    nsqd.publish("t", b"1", b"2")
    nsqd.create_channel("t", "first")
    wait_until(lambda: nsqd.depth("t", "first") == 2, what="the backlog is copied")
    nsqd.create_channel("t", "second")
    nsqd.publish("t", b"3")

    wait_until(lambda: nsqd.depth("t", "second") == 1, what="the new message is copied")
    assert (nsqd.depth("t"), nsqd.depth("t", "first")) == (0, 3)


def test_consumers_of_a_channel_share_its_messages(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with (
        RawClient(nsqd.tcp_address) as a,
        RawClient(nsqd.tcp_address) as b,
        RawClient(nsqd.tcp_address) as producer,
    ):
        for client in (a, b):
            client.subscribe("t", "ch", ready=2500)
            client.settle()
        shares: list[int] = [0]
        for published in range(40, 2000, 40):  # the system may let one of them wait for long
            for number in range(40):
                producer.publish("t", b"%d" % number)
            stats = wait_until(
                lambda count=published: (  # type: ignore[misc]
                    (found := nsqd.channel_stats("t", "ch"))["in_flight_count"] == count and found
                ),
                what="all are in flight",
            )
            shares = [each["in_flight_count"] for each in stats["clients"]]
            if min(shares) * 5 >= published:
                break

    assert min(shares) * 5 >= sum(shares)


def test_a_message_times_out_and_comes_again(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with RawClient(nsqd.tcp_address) as sleeper, RawClient(nsqd.tcp_address) as client:
        client.identify(msg_timeout=60_000)  # so that its FIN is in time
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
    # once, unless the RDY 0 took longer than a second
    assert (first.attempts, second.attempts) == (1, 1 + timeouts)
    assert timeouts >= 1


def test_what_a_client_held_when_it_went_away_waits_for_its_timeout(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("gone", "ch", ready=1)
        nsqd.publish("gone", b"body")
        held = client.read_message()
    stats = wait_until(
        lambda: (found := nsqd.channel_stats("gone", "ch"))["client_count"] == 0 and found,
        what="it is gone",
    )
    assert stats["in_flight_count"] + stats["timeout_count"] == 1

    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("gone", "ch", ready=1)
        assert client.read_message().attempts == held.attempts + 1


def test_touch_keeps_a_message_and_its_limit_holds(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-msg-timeout=1s", "-max-msg-timeout=2s")
    nsqd.create_channel("touch", "ch")
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("touch", "ch", ready=100)
        for number in range(20):
            began_s = time.monotonic()
            nsqd.publish("touch", b"%d" % number)
            while (held := client.read_message()).body != b"%d" % number:
                pass
            again, longest_s = touch_until_it_comes_again(client, held, began_s)
            waited_s = time.monotonic() - began_s
            if longest_s < 0.9:  # otherwise a touch was late, and another message is tried
                break

    assert again.attempts == 2
    assert 1.9 < waited_s < patience_s(2 + SCAN_S)


def touch_until_it_comes_again(
    client: RawClient, held: Received, began_s: float
) -> tuple[Received, float]:
    """It, and the longest that nsqd may have seen no touch; it was delivered after ``began_s``."""
    longest_s, sent_s = 0.0, began_s
    while True:
        before_s, sent_s = sent_s, time.monotonic()
        client.send(b"TOUCH %b\nPUB settled#ephemeral\n" % held.id + sized(b"x"))
        came = []
        while (found := client.read()) != (RESPONSE, b"OK"):
            came += [received(found[1])] if found[0] == MESSAGE else []
        longest_s = max(longest_s, time.monotonic() - before_s)
        if not came and select.select([client.socket], [], [], 0.3)[0]:
            came = [client.read_message()]
            longest_s = max(longest_s, time.monotonic() - sent_s)
        for again in came:
            if again.id == held.id:
                return again, longest_s


def test_only_the_owner_answers_a_message(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as owner, RawClient(nsqd.tcp_address) as other:
        owner.subscribe("t", "ch", ready=1)
        other.subscribe("t", "ch")
        nsqd.publish("t", b"body")
        held = owner.read_message()
        failures = []
        for command in (b"FIN %b\n", b"REQ %b 0\n", b"TOUCH %b\n"):
            other.send(command % held.id)
            failures.append(other.read_error().split(b" failed ")[1])

    assert failures == [b"client does not own message"] * 3


def test_each_answer_of_a_run_counts_for_itself(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    unknown = b"0123456789abcdef"
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=4)
        nsqd.publish("t", b"a", b"b", b"c", b"d")
        a, b, c, d = (message.id for message in client.read_messages(4))
        client.send(b"RDY 0\n")
        runs = (
            [b"TOUCH %b\n" % each for each in (d, unknown, c)],
            [b"REQ %b %d\n" % each for each in ((b, 0), (unknown, 0), (b, 5), (c, 60_000))],
            [b"FIN %b\n" % each for each in (a, unknown, a, d)],
        )
        client.send(b"".join(b"".join(run) for run in runs))
        errors = [client.read_error() for _ in range(5)]
        client.settle()
        stats = nsqd.channel_stats("t", "ch")

    failed = [(b"TOUCH", unknown), (b"REQ", unknown), (b"REQ", b), (b"FIN", unknown), (b"FIN", a)]
    assert errors == [
        b"E_%b_FAILED %b %b failed ID not in flight" % (command, command, each)
        for command, each in failed
    ]
    counts = ("depth", "deferred_count", "in_flight_count", "requeue_count")
    assert [stats[count] for count in counts] == [1, 1, 0, 2]
    assert [each["finish_count"] for each in stats["clients"]] == [2]


def test_requeued_with_a_delay_it_waits(timed_nsqd: Nsqd) -> None:
    nsqd = timed_nsqd
    with RawClient(nsqd.tcp_address) as client:
        client.identify(msg_timeout=60_000)  # so that its REQ is in time
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


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_what_is_paused_holds_messages_back(any_nsqd: AnyNsqd, what: str) -> None:
    nsqd = any_nsqd()
    names = {"topic": "t", "channel": "ch"} if what == "channel" else {"topic": "t"}
    with RawClient(nsqd.tcp_address) as client:
        # not ready with one in flight: what is ready may take a message before it hears of a pause
        client.subscribe("t", "ch", ready=1)
        nsqd.publish("t", b"1")
        first = client.read_message()
        nsqd.post(f"/{what}/pause", **names)
        nsqd.publish("t", b"2")
        client.finish([first])
        client.settle()
        wait_until(lambda: nsqd.depth(*names.values()) == 1, what="the message waits")
        nsqd.post(f"/{what}/unpause", **names)

        assert client.read_message().body == b"2"


def test_emptying_a_channel_forgets_what_is_in_flight(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1)
        nsqd.publish("t", b"1", b"2")
        dropped = client.read_message()
        client.send(b"RDY 0\n")  # or it may get the second while the channel is emptied
        client.settle()
        nsqd.post("/channel/empty", topic="t", channel="ch")
        client.finish([dropped])
        assert b"ID not in flight" in client.read_error()
        client.send(b"RDY 1\n")
        nsqd.publish("t", b"3")

        assert client.read_message().body == b"3"


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_deleting_closes_the_consumers(any_nsqd: AnyNsqd, what: str) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1)
        names = {"topic": "t", "channel": "ch"} if what == "channel" else {"topic": "t"}
        nsqd.post(f"/{what}/delete", **names)

        with pytest.raises((EOFError, ConnectionError)):
            client.read()
    assert list(nsqd.data_path.glob("t:ch*")) == []


def test_an_ephemeral_channel_goes_with_its_last_consumer(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as a, RawClient(nsqd.tcp_address) as b:
        a.subscribe("t#ephemeral", "ch#ephemeral")
        b.subscribe("t#ephemeral", "ch#ephemeral")
    wait_until(lambda: not nsqd.stats()["topics"], what="channel and topic are gone")


def test_an_ephemeral_channel_drops_the_newest(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-mem-queue-size=2")
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch#ephemeral")
        for number in range(1, 5):  # together two of them might wait on the disk of the topic
            nsqd.publish("t", b"%d" % number)
        client.send(b"RDY 5\n")
        assert [message.body for message in client.read_messages(2)] == [b"1", b"2"]
        assert nsqd.depth("t", "ch#ephemeral") == 0


def test_a_channel_takes_no_more_consumers_than_allowed(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-max-channel-consumers=1")
    with RawClient(nsqd.tcp_address) as first, RawClient(nsqd.tcp_address) as second:
        first.subscribe("t", "ch")
        second.send(b"SUB t ch\n")

        assert (
            second.read_error() == b"E_SUB_FAILED SUB failed consumers for t:ch exceeds limit of 1"
        )


def test_sampling_discards(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.identify(sample_rate=30)
        client.subscribe("t", "ch", ready=2000)
        nsqd.publish("t", *[b"x"] * 1000)
        stats = wait_until(
            lambda: (
                (found := nsqd.channel_stats("t", "ch"))["message_count"] == 1000
                and found["depth"] == 0
                and found
            ),
            what="the channel is drained",
        )

    assert 150 < stats["in_flight_count"] < 480


def test_output_is_buffered_for_its_timeout(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        started_s = time.monotonic()  # the buffer leaves at intervals from here on
        client.identify(output_buffer_timeout=1000, output_buffer_size=16384)
        client.subscribe("t", "ch", ready=100)
        client.settle()
        for number in range(5):
            nsqd.publish("t", b"%d" % number)
        client.read_messages(5)
        waited_s = time.monotonic() - started_s

    assert waited_s > 0.9


@pytest.mark.parametrize(("size", "ready"), [(-1, 100), (16384, 1)], ids=["unbuffered", "no room"])
def test_what_need_not_wait_leaves_at_once(any_nsqd: AnyNsqd, size: int, ready: int) -> None:
    """Else it would come after an hour, long after the deadline of a read."""
    nsqd = any_nsqd("-max-output-buffer-timeout=1h")
    with RawClient(nsqd.tcp_address) as client:
        client.identify(output_buffer_size=size, output_buffer_timeout=3_600_000)
        client.subscribe("t", "ch", ready=ready)
        client.settle()
        for number in range(5):
            nsqd.publish("t", b"%d" % number)
            client.finish([client.read_message()])


def test_only_a_whole_command_breaks_the_silence_of_two_heartbeats(any_nsqd: AnyNsqd) -> None:
    """Three clients at a time: one is silent, one never ends a body, one sends it byte by byte."""
    address = any_nsqd().tcp_address
    with RawClient(address) as silent, RawClient(address) as stuck, RawClient(address) as slow:
        started_s = time.monotonic()
        for client in (silent, stuck, slow):
            client.identify(heartbeat_interval=1000)
        stuck.send(b"PUB t\n\0\0\0\x09half")
        slow.send(b"MPUB t\n\0\0\0\x64\0\0\0\x0a")
        while (refusal := slow.read_frame()) == (RESPONSE, HEARTBEAT):
            with suppress(ConnectionError):  # it has closed, and the error is still to be read
                slow.send(b"\0\0\0\1x")
        assert refusal[1].startswith(b"E_BAD_MESSAGE MPUB failed to read message")
        while (refusal := stuck.read_frame()) == (RESPONSE, HEARTBEAT):
            pass
        assert refusal[1] == b"E_BAD_MESSAGE PUB failed to read message body"
        assert silent.read_frame() == (RESPONSE, HEARTBEAT)
        with pytest.raises(EOFError):
            [silent.read_frame() for _ in range(3)]
        assert time.monotonic() - started_s > 1.5


def test_a_command_resets_the_silence(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.identify(heartbeat_interval=1000)
        for _ in range(3):
            assert client.read_frame() == (RESPONSE, HEARTBEAT)
            client.send(b"NOP\n")


def test_a_restart_makes_deferred_messages_depth(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("t", "ch")
    with RawClient(nsqd.tcp_address) as client:
        client.publish_deferred("t", 3_600_000, b"in an hour")
    assert nsqd.channel_stats("t", "ch")["deferred_count"] == 1
    nsqd.stop()
    nsqd.start()
    stats = nsqd.channel_stats("t", "ch")
    assert (stats["depth"], stats["deferred_count"]) == (1, 0)
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1)
        assert client.read_message().body == b"in an hour"


def test_deferred_publishes_without_a_channel_wait_from_then_on(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        client.publish_deferred("t", 300, b"late")
        started_s = time.monotonic()
        client.subscribe("t", "ch", ready=1)
        assert client.read_message().body == b"late"

    assert time.monotonic() - started_s > 0.25
