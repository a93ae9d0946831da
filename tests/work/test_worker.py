"""A handler as a service, on an embedded nsqd: answers, dead letters, probes and stops."""

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import bodies_in
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until
from prometheus_client.parser import text_string_to_metric_families

from nsqtools import ClientOptions, GiveUp, Message, RequeueWithoutBackoff, serve
from nsqtools.errors import ConfigurationError
from nsqtools.records.prometheus import encode_metrics
from nsqtools.work import Decoding
from nsqtools.work.worker import WorkService, WorkSettings

# The first message is alone until its answer, at most for an eighth of msg_timeout.
QUICK = ClientOptions(msg_timeout_s=5.0, default_requeue_delay_s=0.0, max_backoff_duration_s=0.0)

Work = Callable[..., WorkService]


@pytest.fixture
def source(request: pytest.FixtureRequest, embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd(*getattr(request, "param", ()))
    nsqd.create_channel("orders", "billing")
    return nsqd


@pytest.fixture
def work(source: Nsqd) -> Iterator[Work]:
    """Run a handler of orders/billing until the end of the test."""
    with ExitStack() as stack:

        def work(handler: Any, options: ClientOptions = QUICK, **settings: Any) -> WorkService:
            addresses = (source.tcp_address,)
            worker = WorkService(
                handler,
                WorkSettings(
                    topics=["orders"],
                    channel="billing",
                    nsqd_tcp_addresses=addresses,
                    options=options,
                    **settings,
                ),
            )
            thread = threading.Thread(target=worker.run)
            stack.callback(thread.join)
            stack.callback(worker.stop)
            thread.start()
            return worker

        yield work


@dataclass
class Order:
    id: int


def wait_until_done(source: Nsqd) -> None:
    wait_until(lambda: unfinished(source, "orders", "billing") == 0, what="all finished")


@pytest.mark.parametrize("is_async", [False, True])
def test_the_outcome_of_the_handler_is_the_answer(
    work: Work, source: Nsqd, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tries: Counter[bytes] = Counter()

    def handle(message: Message) -> object:
        tries[message.body] += 1
        if tries[message.body] > 1:
            return None
        if message.body == b"raises":
            raise ValueError("no such customer")
        if message.body == b"later":
            raise RequeueWithoutBackoff(0)
        if message.body == b"exits":
            sys.exit(3)
        return message.body != b"refuses"

    async def handle_async(message: Message) -> object:
        return handle(message)

    bodies = [b"fine", b"raises", b"later", b"exits", b"refuses"]
    source.publish("orders", *bodies)
    worker = work(handle_async if is_async else handle)
    wait_until_done(source)
    assert tries == {body: 1 if body == b"fine" else 2 for body in bodies}
    assert "the handler called sys.exit(3)" in caplog.text
    assert worker.summary() == "6 messages handled, 3 failed"


@pytest.mark.parametrize("is_async", [False, True])
def test_as_many_messages_as_workers_are_handled_concurrently(
    work: Work, source: Nsqd, is_async: bool
) -> None:
    barrier, reached = threading.Barrier(4, timeout=patience_s(10)), asyncio.Barrier(4)

    async def handle_async(message: Message) -> None:
        async with asyncio.timeout(patience_s(10)):
            await reached.wait()

    source.publish("orders", *[b"%d" % number for number in range(8)])
    worker = work(handle_async if is_async else lambda message: barrier.wait() and None, workers=4)
    wait_until_done(source)
    assert worker.summary() == "8 messages handled"


@pytest.mark.parametrize("is_async", [False, True])
def test_bodies_that_do_not_fit_go_to_the_dead_letter_topic(
    work: Work, source: Nsqd, is_async: bool
) -> None:
    orders = []

    def bill(order: Order) -> None:
        if order.id == 404:
            raise GiveUp("no such order")
        orders.append(order)

    async def bill_later(order: Order) -> None:
        bill(order)

    source.publish("orders", b'{"id": 1}', b"no JSON", b'{"id": 404}', b'{"id": 2}')
    letters = {"dead_letter_topic": "orders.dead"}
    work(bill_later if is_async else bill, decoding=Decoding.json, **letters)
    wait_until_done(source)
    assert sorted(order.id for order in orders) == [1, 2]
    assert set(bodies_in(source, "orders.dead", 2)) == {b"no JSON", b'{"id": 404}'}


def test_a_file_of_dead_letters_has_their_reasons(work: Work, source: Nsqd, tmp_path: Path) -> None:
    def bill(order: Order) -> None:
        raise LookupError(f"no customer {order.id}")

    source.publish("orders", b'{"id": 1}', b'{"id": "x"}')
    path = tmp_path / "dead.jsonl"
    work(bill, decoding=Decoding.json, dead_letter_file=path, max_attempts=2)
    wait_until_done(source)
    letters = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["body"])
    assert [letter["error"] for letter in letters] == [
        "the body does not fit: "
        "id: Input should be a valid integer, unable to parse string as an integer",
        "LookupError: no customer 1",
    ]


def test_a_relative_file_of_dead_letters_stays_when_the_handler_changes_its_directory(
    work: Work, source: Nsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def bill(message: Message) -> None:
        os.chdir(tmp_path / "elsewhere")
        raise GiveUp("no customer")

    work(bill, dead_letter_file=Path("dead.jsonl"))
    source.publish("orders", b"one")
    wait_until_done(source)
    assert json.loads((tmp_path / "dead.jsonl").read_text())["error"] == "no customer"


def test_a_dead_letter_that_cannot_be_written_stays_in_its_queue(
    work: Work, source: Nsqd, tmp_path: Path
) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    path = folder / "dead.jsonl"
    source.publish("orders", b"no JSON")
    worker = work(lambda order: None, decoding=Decoding.json, dead_letter_file=path)
    wait_until_done(source)
    path.unlink()
    folder.rmdir()
    source.publish("orders", b"no JSON either")
    wait_until(lambda: worker.consumer.stats.requeued > 0, what="a requeue")
    folder.mkdir()
    wait_until_done(source)
    assert json.loads(path.read_text())["body"] == "no JSON either"


def test_a_dead_letter_that_is_written_late_has_its_reason(
    work: Work, source: Nsqd, tmp_path: Path
) -> None:
    def bill(message: Message) -> None:
        raise LookupError("no customer")

    path = tmp_path / "letters" / "dead.jsonl"
    path.parent.mkdir()
    worker = work(bill, dead_letter_file=path, max_attempts=1)
    path.unlink()
    path.parent.rmdir()
    source.publish("orders", b"one")
    wait_until(lambda: worker.consumer.stats.requeued > 2, what="it could not be written")
    path.parent.mkdir()
    wait_until_done(source)
    assert json.loads(path.read_text())["error"] == "LookupError: no customer"


@pytest.mark.parametrize("source", [["--max-msg-timeout=1s"]], indirect=True)
def test_a_worker_is_alive_until_every_handler_hangs(
    work: Work, source: Nsqd, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    options = ClientOptions(msg_timeout_s=1.0, drain_timeout_s=0.2)
    try:
        source.publish("orders", b"one")
        worker = work(lambda message: release.wait() and None, options, workers=2)
        wait_until(lambda: len(worker.consumer.health().overdue) == 1, what="a hung handler")
        assert worker.health() == (True, f"connected to {source.tcp_address}")
        source.publish("orders", b"two")
        reason = "every worker has a message that has timed out"
        wait_until(lambda: worker.health() == (False, reason), what="no free worker")
        worker.stop()
        wait_until(lambda: "a handler has not returned" in caplog.text, what="the end")
    finally:
        release.set()


def test_metrics_have_a_histogram_of_handling_times(work: Work, source: Nsqd) -> None:
    source.publish("orders", b"fails", *[b"%d" % number for number in range(9)])

    def handle(message: Message) -> None:
        if message.body == b"fails" and message.attempts == 1:
            raise ValueError("once")

    worker = work(handle)
    wait_until_done(source)
    text = encode_metrics(worker.metrics())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    times = families["nsq_work_handling_seconds"]
    assert times.type == "histogram"
    counts = {
        (sample.name.rpartition("_")[2], sample.labels["outcome"]): sample.value
        for sample in times.samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }
    assert counts["bucket", "ok"] == counts["count", "ok"] == 10
    assert counts["bucket", "error"] == counts["count", "error"] == 1
    assert 0 < counts["sum", "ok"] < patience_s(10)
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["nsq_work_finished_messages"] == 10
    assert values["nsq_work_requeued_messages"] == 1
    assert values["nsq_work_connections"] == 1


def test_an_async_handler_and_a_sync_one_cannot_replace_each_other(
    work: Work,
    source: Nsqd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = tmp_path / "shop_changes.py"
    module.write_text("def bill(message): ...\n")
    try:
        worker = work("shop_changes:bill")
        module.write_text("async def bill(message): ...\n")
        worker._wants_reload = True
        wait_until(lambda: "needs a restart" in caplog.text, what="the refusal")
        source.publish("orders", b"one")
        wait_until_done(source)
    finally:
        del sys.modules["shop_changes"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"workers": 0}, "workers must be a whole number"),
        ({"decode": "json"}, "decode needs dead_letter_topic or dead_letter_file"),
        ({"max_attempts": 3}, "max_attempts needs dead_letter_topic or dead_letter_file"),
        (
            {"dead_letter_topic": "dead", "dead_letter_file": "dead"},
            "give either dead_letter_topic or dead_letter_file",
        ),
        ({"dead_letter_topic": "orders"}, "dead letters cannot go to orders"),
        ({"decode": "yaml", "dead_letter_topic": "dead"}, "decode must be json, text or bytes"),
    ],
)
def test_serve_refuses_settings_that_cannot_work(settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        serve(print, "orders", "billing", nsqd_tcp_addresses="127.0.0.1:1", **settings)


def test_serve_returns_when_a_handler_returns_pending_work(source: Nsqd) -> None:
    async def later() -> None: ...

    source.publish("orders", b"one")
    run = partial(serve, nsqd_tcp_addresses=source.tcp_address)
    with pytest.raises(ConfigurationError, match="returns a coroutine"):
        run(lambda message: later(), "orders", "billing")
    assert unfinished(source, "orders", "billing") == 1
