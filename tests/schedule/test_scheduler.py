"""The scheduler as a process: kills, restarts of nsqd, takeover, dead letters, and its entries."""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from plugins.archives import unfinished
from plugins.cli import NSQ, RunNsq
from plugins.clients import bodies_in
from plugins.clusters import ValidJson
from plugins.hostile_cluster import EVIL, raw_marks
from plugins.servers import AnyNsqd, GoNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Consumer, Producer, PublishInvalid
from nsqtools.client.message import Message, batches_of
from nsqtools.errors import OutputError, PublishRejected, ServerError
from nsqtools.protocol.schedule_request import (
    SCHEDULE_TOPIC,
    encode_cancellation,
    encode_request,
)
from nsqtools.schedule.request import CatchUp, Entry
from nsqtools.schedule.scheduler import RETRY_S, WINDOW, CheckedClock, Rejected, Scheduler
from nsqtools.schedule.store import Rank, ScheduleStore
from nsqtools.testing import fake_message

StartScheduler = Callable[..., subprocess.Popen[bytes]]
S = 1_000_000_000

LARGER_IN_ITS_ENVELOPE = json.dumps(
    {"topic": "later", "at": "+0s", "envelope": True, "body": "x" * 925}
).encode()
"""A request below 1,000 bytes. With its key and due time, the published message is above."""


@pytest.fixture
def schedule(tmp_path: Path, nsq_env: dict[str, str]) -> Iterator[StartScheduler]:
    """Start ``nsq schedule serve`` on an nsqd; the directory is ``tmp_path/data``."""
    with ExitStack() as cleanup:

        def start(nsqd: Nsqd, *options: str) -> subprocess.Popen[bytes]:
            log = cleanup.enter_context((tmp_path / "log").open("ab"))
            words = ["schedule", "serve", "--data-path", str(tmp_path / "data")]
            words += ["--nsqd-tcp-address", nsqd.tcp_address, *options]
            process = subprocess.Popen([*NSQ, *words], stderr=log, env=nsq_env)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            return process

        yield start


def request_later(nsqd: Nsqd, *requests: bytes) -> None:
    with Producer(nsqd.tcp_address) as producer:
        producer.publish_many(SCHEDULE_TOPIC, requests)


def listed(run_nsq: RunNsq, directory: Path) -> list[dict[str, Any]]:
    result = run_nsq(["schedule", "list", "--data-path", str(directory / "data"), "--json"])
    entries: list[dict[str, Any]] = json.loads(result.out) if result.status == 0 else []
    return entries


def metrics(directory: Path) -> dict[str, float]:
    """Return the metrics of a scheduler that logs its address."""
    text = (directory / "log").read_text()
    if "serving http://" not in text:
        return {}
    address = text.partition("serving http://")[2].split("/")[0]
    with urlopen(f"http://{address}/metrics", timeout=5) as response:
        text = response.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("nsq_")]
    return {name: float(value) for name, value in map(str.split, lines)}


class Arrivals:
    """Consume numbers with due times from the topic ``later``, and record when they arrive."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.copies: Counter[int] = Counter()
        self.late_s: list[float] = []
        self._consumer = Consumer("later", "check", nsqd_tcp_addresses=nsqd.tcp_address)
        self._consumer.start()
        self._thread = threading.Thread(target=self._consume)
        self._thread.start()

    def _consume(self) -> None:
        for message in self._consumer:
            number, due_ns = message.body.split()
            self.late_s.append((time.time_ns() - int(due_ns)) / S)
            self.copies[int(number)] += 1
            message.finish()

    def stop(self) -> None:
        self._consumer.stop()
        self._thread.join()


@pytest.mark.parametrize(
    ("entries", "kills"), [(1_500, 3), pytest.param(100_000, 20, marks=pytest.mark.slow)]
)
def test_no_kill_loses_an_entry_or_publishes_it_early(
    nsqd: GoNsqd, schedule: StartScheduler, tmp_path: Path, entries: int, kills: int
) -> None:
    nsqd.create_channel("later", "check")
    arrivals = Arrivals(nsqd)
    try:
        process = schedule(nsqd)
        start_ns, chance = time.time_ns(), random.Random(59)
        span_s = max(4.0, entries / 2000)
        due = [start_ns + round((1 + span_s * chance.random()) * S) for _ in range(entries)]
        bodies = [b"%d %d" % (number, due_ns) for number, due_ns in enumerate(due)]
        requests = [
            encode_request("later", body, at_ns=due_ns, key=body.decode())
            for body, due_ns in zip(bodies, due, strict=True)
        ]
        request_later(nsqd, *requests)
        cancelled = set(chance.sample([n for n in range(entries) if due[n] > start_ns + 3 * S], 50))
        request_later(nsqd, *[encode_cancellation(bodies[n].decode()) for n in cancelled])
        for _ in range(kills):
            time.sleep(span_s / kills * chance.random())  # a kill at any moment
            process.kill()
            process.wait()
            process = schedule(nsqd)
        expected = entries - len(cancelled)
        wait_until(
            lambda: len(arrivals.copies.keys() - cancelled) == expected,
            timeout_s=60,
            what="every entry that was not cancelled has arrived",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience_s(20)) == 128 + signal.SIGTERM
    finally:
        arrivals.stop()
    assert min(arrivals.late_s) >= 0
    assert sum(arrivals.copies.values()) - len(arrivals.copies) <= kills * 500


def test_requests_and_entries_survive_a_restart_of_nsqd(
    go_nsqd: MakeNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd()
    nsqd.create_channel("later", "check")
    schedule(nsqd)
    due_ns = time.time_ns() + int(patience_s(2) * S)
    request_later(nsqd, encode_request("later", b"x", at_ns=due_ns, key="k"))
    wait_until(lambda: len(listed(run_nsq, tmp_path)) == 1, what="the entry is kept")
    nsqd.stop()
    time.sleep(max(0.0, (due_ns - time.time_ns()) / S))  # it is due while nsqd is down
    nsqd.start()
    wait_until(lambda: unfinished(nsqd, "later", "check") == 1, what="it is published")
    assert time.time_ns() >= due_ns
    wait_until(lambda: listed(run_nsq, tmp_path) == [], what="it is published once")


def test_a_producer_schedules_a_message(nsqd: GoNsqd, schedule: StartScheduler) -> None:
    schedule(nsqd)
    due = datetime.now(UTC) + timedelta(seconds=patience_s(1))  # both must arrive before
    with Producer(nsqd.tcp_address) as producer:
        producer.publish("later", b"first", at=due, key="k")
        producer.publish("later", b"second \xff", at=due, key="k")
    assert bodies_in(nsqd, "later", 1) == [b"second \xff"]
    assert datetime.now(UTC) >= due


@pytest.mark.parametrize(
    ("body", "at", "key"),
    [
        (b"x", datetime(2030, 1, 1), ""),
        (b"x", datetime(1969, 1, 1, tzinfo=UTC), ""),
        (b"x", datetime(2030, 1, 1, tzinfo=UTC), "k" * 257),
        (b"", datetime(2030, 1, 1, tzinfo=UTC), ""),
        (b"x", None, "k"),
    ],
)
def test_a_producer_refuses_what_the_scheduler_would_refuse(
    body: bytes, at: datetime | None, key: str
) -> None:
    with Producer("127.0.0.1:9") as producer, pytest.raises(PublishInvalid):
        producer.publish("later", body, at=at, key=key)


def test_a_second_scheduler_takes_over_after_a_kill(
    nsqd: GoNsqd, schedule: StartScheduler, tmp_path: Path
) -> None:
    nsqd.create_channel("later", "check")
    nsqd.create_channel(SCHEDULE_TOPIC, "scheduler")
    first = schedule(nsqd)
    wait_until(lambda: (tmp_path / "data" / "schedule.db").exists(), what="the first has started")
    second = schedule(nsqd)
    log = tmp_path / "log"
    wait_until(lambda: b"waiting for the scheduler" in log.read_bytes(), what="the second waits")

    def consumers() -> set[str]:
        clients = nsqd.channel_stats(SCHEDULE_TOPIC, "scheduler")["clients"]
        return {client["remote_address"] for client in clients}

    of_first = wait_until(consumers, what="the first consumes")
    first.kill()
    # A message that nsqd sends to a connection just before it notices the kill is redelivered only
    # after --msg-timeout.
    wait_until(lambda: not of_first & consumers(), what="nsqd notices the kill")
    request_later(nsqd, encode_request("later", b"x", at_ns=time.time_ns()))
    wait_until(
        lambda: unfinished(nsqd, "later", "check") == 1, what="the second publishes", timeout_s=20
    )
    second.send_signal(signal.SIGTERM)
    assert second.wait(patience_s(20)) == 128 + signal.SIGTERM


def test_a_waiting_scheduler_ends_on_term(
    nsqd: GoNsqd, schedule: StartScheduler, tmp_path: Path
) -> None:
    schedule(nsqd)
    wait_until(lambda: (tmp_path / "data" / "schedule.db").exists(), what="the first has started")
    second = schedule(nsqd)
    log = tmp_path / "log"
    wait_until(lambda: b"waiting for the scheduler" in log.read_bytes(), what="the second waits")
    second.send_signal(signal.SIGTERM)
    assert second.wait(patience_s(10)) == 128 + signal.SIGTERM


def test_a_key_replaces_and_cancels_whatever_the_order_of_delivery(
    any_nsqd: AnyNsqd,
    schedule: StartScheduler,
    run_nsq: RunNsq,
    valid_json: ValidJson,
    tmp_path: Path,
) -> None:
    nsqd = any_nsqd()
    soon_ns, later_ns = time.time_ns() + 600 * S, time.time_ns() + 3600 * S
    request_later(
        nsqd,
        encode_request("orders", b"old", at_ns=soon_ns, key="a"),
        encode_request("orders", b"gone", at_ns=soon_ns, key="b"),
        encode_request("orders", b"new", at_ns=later_ns, key="a"),
        encode_cancellation("b"),
    )
    with Consumer(SCHEDULE_TOPIC, "scheduler", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        messages = [next(iter(consumer)) for _ in range(4)]
        for message in reversed(messages):  # the oldest comes last
            message.requeue(0, backoff=False)
    schedule(nsqd)
    wait_until(
        lambda: (
            unfinished(nsqd, SCHEDULE_TOPIC, "scheduler") == 0 and listed(run_nsq, tmp_path) != []
        ),
        what="the requests are taken",
    )
    assert [(entry["key"], entry["bytes"]) for entry in listed(run_nsq, tmp_path)] == [("a", 3)]
    data = str(tmp_path / "data")
    printed = run_nsq(["schedule", "show", "a", "--data-path", data])
    assert json.loads(printed.out)["body"] == "new"
    valid_json("schedule show", printed.out)
    valid_json("schedule list", run_nsq(["schedule", "list", "--data-path", data, "--json"]).out)
    assert run_nsq(["schedule", "show", "b", "--data-path", data]).status == 3


@pytest.mark.parametrize("key", ["", "k" * 257, "\udcff"], ids=["empty", "long", "not UTF-8"])
def test_a_key_that_no_entry_can_have_is_refused(run_nsq: RunNsq, tmp_path: Path, key: str) -> None:
    data = ["--data-path", str(tmp_path)]
    for words in (["show", key, *data], ["cancel", key]):
        result = run_nsq(["schedule", *words])
        assert (result.status, result.err.count("key ")) == (2, 1), result.err


def test_control_characters_of_a_key_do_not_reach_the_terminal(
    nsqd: GoNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    schedule(nsqd)
    key = EVIL.encode("utf-8", "replace").decode()[:256]
    request_later(nsqd, encode_request("later", b"\x1b]0;x\x07", at_ns=2**62, key=key))
    wait_until(lambda: listed(run_nsq, tmp_path), what="the entry is listed")
    where = ["--data-path", str(tmp_path / "data")]
    for words in (["list"], ["show", key], ["show", f"{key[1:]}?"], ["cancel", key]):
        options = ["--nsqd-tcp-address", nsqd.tcp_address] if words[0] == "cancel" else where
        result = run_nsq(["schedule", *words, *options], terminal=True)
        assert not raw_marks(result.out, is_one_line=False), (words, result.out)
        assert result.status in (0, 3), result.out


def test_a_recurring_entry_is_published_at_each_due_time(
    any_nsqd: AnyNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("ticks", "check")
    start_ns = time.time_ns()
    request = encode_request("ticks", b"tick", at_ns=start_ns, every="1s", key="t", envelope=True)
    request_later(nsqd, request)
    schedule(nsqd)
    wait_until(lambda: unfinished(nsqd, "ticks", "check") >= 3, what="three ticks have arrived")
    assert run_nsq(["schedule", "cancel", "t", "--nsqd-tcp-address", nsqd.tcp_address]).status == 0
    wait_until(lambda: listed(run_nsq, tmp_path) == [], what="it is cancelled")
    ticks = map(json.loads, bodies_in(nsqd, "ticks", unfinished(nsqd, "ticks", "check")))
    due = [tick["due"] for tick in ticks]
    assert len(set(due)) == len(due)


def test_a_message_that_nsqd_always_refuses_becomes_a_dead_letter(
    go_nsqd: MakeNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-max-msg-size=1000")
    letters = tmp_path / "letters.jsonl"
    schedule(nsqd, "--dead-letter-file", str(letters))
    request_later(nsqd, LARGER_IN_ITS_ENVELOPE, b"no request")
    wait_until(
        lambda: letters.exists() and letters.read_bytes().count(b"\n") == 2,
        what="both are dead letters",
    )
    errors = {json.loads(line)["error"] for line in letters.read_bytes().splitlines()}
    assert any("not a request" in error for error in errors)
    assert any("E_BAD_MESSAGE" in error for error in errors)
    assert listed(run_nsq, tmp_path) == []


def test_a_message_as_large_as_nsqd_accepts_is_published(
    go_nsqd: MakeNsqd, schedule: StartScheduler
) -> None:
    nsqd, body = go_nsqd("-max-msg-size=3000000"), b"x" * 2_000_000
    nsqd.create_channel("later", "check")
    nsqd.publish(SCHEDULE_TOPIC, encode_request("later", body, at_ns=time.time_ns()))
    schedule(nsqd)
    assert bodies_in(nsqd, "later", 1) == [body]


def test_without_dead_letters_a_refused_message_stays_with_its_error(
    go_nsqd: MakeNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-max-msg-size=1000")
    schedule(nsqd)
    request_later(nsqd, LARGER_IN_ITS_ENVELOPE)
    wait_until(
        lambda: [entry["error"] for entry in listed(run_nsq, tmp_path) if entry["error"]] != [],
        what="the entry has its error",
    )
    [entry] = listed(run_nsq, tmp_path)
    assert "E_BAD_MESSAGE" in entry["error"]
    assert entry["due"] is None


def test_check_reports_a_scheduler_while_it_cannot_publish(
    nsqd: GoNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    schedule(nsqd, "--listen-http", "0", "-v")
    address = wait_until(
        lambda: re.search(r"serving http://(\S+)/metrics", (tmp_path / "log").read_text()),
        what="it serves /health",
    )[1]
    request_later(nsqd, encode_request("later", b"x", at_ns=time.time_ns() + S))
    wait_until(lambda: listed(run_nsq, tmp_path), what="the entry is listed")
    nsqd.kill()

    def problems() -> list[dict[str, Any]]:
        words = ["check", "--nsqd-http-address", nsqd.http_address, "--health", address]
        document = json.loads(run_nsq([*words, "--window", "0s", "--json"]).out)
        return [row for row in document["problems"] if row["node"] == address]

    [problem] = wait_until(problems, what="the scheduler has a problem", timeout_s=30)
    assert (problem["kind"], problem["severity"]) == ("not healthy", "critical")
    assert nsqd.tcp_address in problem["text"]
    nsqd.start()
    wait_until(lambda: not problems(), what="the scheduler is healthy", timeout_s=30)


def test_a_scheduler_with_overdue_entries_is_unhealthy(tmp_path: Path) -> None:
    address = "127.0.0.1:9"
    with closing(ScheduleStore(tmp_path)) as store:
        scheduler = Scheduler(
            store,
            Consumer(SCHEDULE_TOPIC, "scheduler", nsqd_tcp_addresses=address),
            Producer(address),
            CheckedClock(time.time_ns, time.monotonic_ns),
            keep_rejected=lambda rejected: False,
        )
        assert scheduler.health() == (True, "scheduling")
        scheduler.counts.late_s = 31.0
        assert scheduler.health() == (False, "late: the earliest entry has been due for 31 s")


def take(tmp_path: Path, message: Message, given_up: list[Rejected]) -> list[str]:
    """Have a scheduler take one message; return the keys of its entries."""
    consumer: Any = SimpleNamespace(next_batch=lambda wait_s: batches_of([message])[0])
    with closing(ScheduleStore(tmp_path)) as store:
        scheduler = Scheduler(
            store,
            consumer,
            Producer("127.0.0.1:9"),
            CheckedClock(time.time_ns, time.monotonic_ns),
            keep_rejected=lambda rejected: given_up.append(rejected) is None,
            on_round=lambda: scheduler.stop(),
        )
        scheduler.run()
        return [stored.entry.key for stored in store.entries(10)]


def test_an_id_that_is_not_ascii_is_a_key(tmp_path: Path) -> None:
    request = encode_request("later", b"x", at_ns=2**62)
    message = fake_message(request, id=b"\xff" * 16, nsqd="n:4150")
    assert take(tmp_path, message, []) == ["n:4150/" + "\xff" * 16]
    assert message.answers == ["finish"]


def test_a_cron_request_waits_for_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = fake_message(encode_request("later", b"x", cron="* * * * *"))
    given_up: list[Rejected] = []
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert take(tmp_path, message, given_up) == []
    assert (message.answers, given_up) == (["requeue"], [])


def test_a_publish_that_never_reached_nsqd_is_no_repetition(
    nsqd: GoNsqd, schedule: StartScheduler, run_nsq: RunNsq, tmp_path: Path
) -> None:
    schedule(nsqd, "--listen-http", "0", "-v")
    due_ns = time.time_ns() + int(patience_s(1) * S)
    request_later(nsqd, encode_request("later", b"x", at_ns=due_ns))
    wait_until(lambda: listed(run_nsq, tmp_path), what="the entry is listed")
    nsqd.kill()
    log = tmp_path / "log"
    wait_until(lambda: "not published yet" in log.read_text(), what="a try has failed")
    nsqd.start()
    wait_until(
        lambda: metrics(tmp_path)["nsq_schedule_published_total"] == 1, what="it is published"
    )
    assert metrics(tmp_path)["nsq_schedule_repeated_total"] == 0


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (SCHEDULE_TOPIC, "dead letters cannot go to nsq.schedule"),
        ("no topic", "invalid topic name 'no topic'"),
    ],
)
def test_a_topic_that_cannot_have_dead_letters_is_refused(
    run_nsq: RunNsq, tmp_path: Path, topic: str, error: str
) -> None:
    words = ["--data-path", str(tmp_path), "--dead-letter-topic", topic]
    result = run_nsq(["schedule", "serve", *words])
    assert result.status == 2
    assert error in result.err


def scheduler_without_nsqd(
    store: ScheduleStore,
    submit: Callable[[str, list[bytes]], Any],
    *,
    keep_rejected: Callable[[Rejected], bool],
    on_round: Callable[[], None],
) -> Scheduler:
    """Return a scheduler that gets no requests, and publishes with ``submit``."""
    consumer: Any = SimpleNamespace(next_batch=lambda wait_s: time.sleep(0.01))
    producer: Any = SimpleNamespace(submit=submit)
    return Scheduler(
        store,
        consumer,
        producer,
        CheckedClock(time.time_ns, time.monotonic_ns),
        keep_rejected=keep_rejected,
        on_round=on_round,
    )


def test_a_topic_that_nsqd_cannot_store_delays_no_other(tmp_path: Path) -> None:
    refusal = ServerError("E_PUB_FAILED", "no space left on device", fatal=True)
    published = []

    def submit(topic: str, bodies: list[bytes]) -> Any:
        error = PublishRejected("not published", cause=refusal) if topic == "full" else None
        if error is None:
            published.append(topic)
        return SimpleNamespace(exception=lambda: error)

    now_ns = time.time_ns()
    topics = ["full"] * (WINDOW + 1) + ["later"]
    entries = [
        (Rank(n, b""), Entry(f"{n}", now_ns - S + n, topic, b"x", None, CatchUp.last, False))
        for n, topic in enumerate(topics)
    ]
    with closing(ScheduleStore(tmp_path)) as store:
        store.apply(entries, now_ns)
        scheduler = scheduler_without_nsqd(
            store,
            submit,
            keep_rejected=lambda rejected: False,
            on_round=lambda: scheduler.stop() if scheduler.counts.published else None,
        )
        in_time = threading.Timer(patience_s(RETRY_S), scheduler.stop)
        in_time.start()
        scheduler.run()
        in_time.cancel()
        assert published == ["later"]
        assert scheduler.health() == (False, "not published")


def test_a_dead_letter_that_cannot_be_written_repeats_no_publish(tmp_path: Path) -> None:
    refusal = ServerError("E_BAD_MESSAGE", "PUB message too big", fatal=True)
    published: list[str] = []

    def submit(topic: str, bodies: list[bytes]) -> Any:
        published.append(topic)
        error = PublishRejected("not published", cause=refusal) if topic == "large" else None
        return SimpleNamespace(exception=lambda: error)

    def fail(rejected: Rejected) -> bool:
        raise OutputError("cannot write letters.jsonl (No space left on device)")

    now_ns = time.time_ns()
    entries = [
        (Rank(n, b""), Entry(topic, now_ns - S, topic, b"x"))
        for n, topic in enumerate(["before", "large", "behind"])
    ]
    with closing(ScheduleStore(tmp_path)) as store:
        store.apply(entries, now_ns)
        scheduler = scheduler_without_nsqd(
            store,
            submit,
            keep_rejected=fail,
            on_round=lambda: scheduler.stop() if published.count("large") == 2 else None,
        )
        scheduler.run()
        assert published == ["before", "large", "behind", "large"]
        assert scheduler.counts.refused == 0
        assert scheduler.health()[1].startswith("cannot write letters.jsonl")


def test_metrics_count_entries_and_publishes(
    nsqd: GoNsqd, schedule: StartScheduler, tmp_path: Path
) -> None:
    schedule(nsqd, "--listen-http", "0", "-v")
    request_later(
        nsqd,
        encode_request("later", b"x", at_ns=time.time_ns()),
        encode_request("later", b"y", at_ns=time.time_ns() + 3600 * S),
    )
    wait_until(
        lambda: (
            metrics(tmp_path).get("nsq_schedule_published_total") == 1
            and metrics(tmp_path).get("nsq_schedule_entries") == 1
        ),
        what="one is published and one waits",
        timeout_s=20,  # entries are counted every five seconds
    )
    assert metrics(tmp_path)["nsq_schedule_requests_total"] == 2
