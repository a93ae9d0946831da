"""``nsq drain NODE``: each channel of an nsqd is moved exactly, whatever it has, under load."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.cli import RunNsq, SpawnNsq
from plugins.clusters import ValidJson
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.servers import DataPath, MakeLookupd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer

TOPICS, CHANNELS = ("clicks", "orders", "views"), ("archive", "billing", "email")
OPTIONS = ClientOptions(lookupd_poll_interval_s=0.1, max_in_flight=500)


@pytest.fixture
def lookupd(nsqlookupd: MakeLookupd) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def source(
    request: pytest.FixtureRequest, lookupd: GoNsqlookupd, data_path: DataPath, serve: Serve
) -> Nsqd:
    kind = getattr(request, "param", GoNsqd)
    register = f"-lookupd-tcp-address={lookupd.tcp_address}"
    return serve(
        kind(data_path(), f"-msg-timeout={patience_s(2):g}s", "-max-req-timeout=2h", register)
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(source: Nsqd, lookupd: GoNsqlookupd, *more: str) -> list[str]:
    http, tcp = lookupd.http_address, lookupd.tcp_address
    place = ["--lookupd-http-address", http, "--lookupd-tcp-address", tcp]
    return ["drain", source.http_address, *place, *more]


def left(source: Nsqd) -> int:
    return sum(
        each["depth"] + each["in_flight_count"] + each["deferred_count"]
        for topic in source.stats()["topics"]
        for each in topic["channels"]
    )


class Consumed:
    """What came to each channel, as (body, attempts), from wherever nsqlookupd says."""

    def __init__(self, lookupd: GoNsqlookupd, stack: ExitStack) -> None:
        self.seen: dict[tuple[str, str], list[tuple[bytes, int]]] = {}
        self._lookupd, self._stack = lookupd, stack

    def begin(self, topic: str, channel: str) -> None:
        address = self._lookupd.http_address
        consumer = Consumer(topic, channel, lookupd_http_addresses=address, options=OPTIONS)
        seen = self.seen.setdefault((topic, channel), [])

        def run() -> None:
            for batch in consumer.batches():
                seen.extend((message.body, message.attempts) for message in batch)
                batch.finish()

        self._stack.enter_context(consumer)
        consumer.start()
        thread = threading.Thread(target=run)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(consumer.stop)

    def counts(self, topic: str, channel: str) -> Counter[bytes]:
        return Counter(body for body, _ in self.seen[topic, channel])


@pytest.fixture
def consumed(lookupd: GoNsqlookupd) -> Iterator[Consumed]:
    with ExitStack() as stack:
        yield Consumed(lookupd, stack)


@pytest.mark.parametrize(
    ("source", "count"),
    [(EmbeddedServer, 40), pytest.param(GoNsqd, 5000, marks=pytest.mark.slow)],
    indirect=["source"],
)
def test_each_channel_gets_what_it_had_and_no_other_gets_it(
    source: Nsqd,
    lookupd: GoNsqlookupd,
    consumed: Consumed,
    spawn_nsq: SpawnNsq,
    valid_json: ValidJson,
    count: int,
) -> None:
    expected: dict[tuple[str, str], list[bytes]] = {}
    with Producer(source.tcp_address) as producer:
        for topic in TOPICS:
            for number, channel in enumerate(CHANNELS):  # the later ones have less
                source.create_channel(topic, channel)
                bodies = [b"%b %d %d" % (topic.encode(), number, n) for n in range(count)]
                source.publish(topic, *bodies)  # and wait: the next channel is to have none
                for known in CHANNELS[: number + 1]:
                    expected.setdefault((topic, known), []).extend(bodies)
            producer.publish_deferred(topic, b"deferred", 2.0)
        with Consumer("orders", "email", nsqd_tcp_addresses=source.tcp_address) as other:
            other.start()
            batch = other.next_batch(patience_s(5))
            assert batch is not None
            given_back = {message.body for message in batch}
            batch.requeue(1.0, backoff=False)

        job = spawn_nsq(command(source, lookupd, "--yes", "--json"))
        for number in range(100):  # under load
            producer.publish_many("views", [b"meanwhile %d %d" % (number, n) for n in range(10)])
    meanwhile = [b"meanwhile %d %d" % (number, n) for number in range(100) for n in range(10)]
    wait_until(lambda: left(source) == 0, what="the nsqd is empty", timeout_s=30)
    for topic, channel in expected:
        consumed.begin(topic, channel)
    out, said = job.communicate(timeout=patience_s(60))

    assert job.returncode == 0, said
    assert valid_json("drain", out)["left"] == 0
    for (topic, channel), bodies in expected.items():
        more = meanwhile if topic == "views" else []
        assert consumed.counts(topic, channel) == Counter([*bodies, b"deferred", *more])
    total = sum(map(len, expected.values())) + len(expected) + 3 * len(meanwhile)
    assert f"nsq: {total} messages moved, 0 left\n".encode() in said
    assert f"nsq: {total} messages consumed\n".encode() in said
    attempts = dict(consumed.seen["orders", "email"])
    assert {attempts[body] for body in given_back} == {2}  # as if it had not been moved
    assert attempts[b"deferred"] == 1


def test_what_was_moved_is_delivered_after_the_nsqd_is_gone(
    source: Nsqd, lookupd: GoNsqlookupd, consumed: Consumed, run_nsq: RunNsq, tmp_path: Path
) -> None:
    source.create_channel("orders", "billing")
    source.publish("orders", b"a", b"b")
    drain = command(source, lookupd, "--yes")

    alone = run_nsq([*drain, "--wait", "100ms"])
    place = next(tmp_path.glob("nsqd-127*"))
    assert (alone.status, left(source)) == (7, 0), alone.err
    assert alone.err.endswith(
        f"nsq: {place.name} has 2 messages, and how far this came: run it again\n"
    )
    source.stop()
    consumed.begin("orders", "billing")
    result = run_nsq(drain)

    assert result.status == 0, result.err
    assert f"; what {place.name} has of it is delivered\n" in result.err
    assert consumed.counts("orders", "billing") == {b"a": 1, b"b": 1}
    assert not place.exists()
    assert run_nsq(drain).status == 4
