"""Celery on NSQ: the programs of nsq-tasks(7), kills, and the transport without Celery's worker."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import chord, group
from kombu import Connection, Consumer, Queue
from plugins.certificates import Certificates
from plugins.http_server import AuthServer
from plugins.readme import parse
from plugins.servers import GoNsqd, MakeLookupd, MakeNsqd
from plugins.task_workers import running_worker
from plugins.waiting import patience_s, wait_until

import nsqtools.celery
from nsqtools import ConfigurationError, NsqError

GUIDE = Path(__file__).parents[2] / "man" / "nsq-tasks.7.md"
FOREIGN = [
    b"\xff",
    b"[]",
    b'{"body": "a", "headers": null, "properties": {"delivery_info": {}, "body_encoding": null}}',
    b'{"body": "a", "headers": {}, "properties": {"delivery_info": 1, "body_encoding": null}}',
    b'{"body": "a", "headers": {}, "properties": {"delivery_info": {}, "body_encoding": "base64"}}',
    b'{"body": "a", "headers": {}, "properties": {"delivery_info": {}, "body_encoding": "rot13"}}',
    b"[" * 100_000,
]
FAST = {"default_requeue_delay": "10ms"}

TASKS = """
import os, signal, time

app.conf.task_reject_on_worker_lost = True
app.conf.broker_transport_options = {"default_requeue_delay": "10ms"}

def note(text):
    with open("runs", "a") as file:
        file.write(text + "\\n")

@app.task
def work(name, seconds=0.0):
    note(f"{name} began")
    time.sleep(seconds)
    note(f"{name} ended")

@app.task
def total(numbers):
    return sum(numbers)

@app.task
def die_once(name):
    with open("runs") as file:
        is_first = f"{name} began" not in file.read()
    note(f"{name} began")
    if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return name
"""


class Shop:
    """The tasks.py of the guide in a directory, connected to an nsqd."""

    def __init__(self, directory: Path, broker: str) -> None:
        self.directory = directory
        blocks = parse(GUIDE.name, GUIDE.read_text("utf-8"))
        program = next(b.text for b in blocks if (b.heading, b.language) == ("Celery", "python"))
        (directory / "results").mkdir()
        for old, new in {
            "nsq://127.0.0.1:4150": broker,
            "file:///tmp/results": f"file://{directory}/results",
        }.items():
            assert old in program
            program = program.replace(old, new)
        (directory / "tasks.py").write_text(program + TASKS)
        spec = importlib.util.spec_from_file_location("tasks", directory / "tasks.py")
        assert spec
        assert spec.loader
        self.tasks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tasks)
        self.app = self.tasks.app

    def worker(self, *options: str) -> Any:
        arguments = ["celery", "-A", "tasks", "worker", "--loglevel=INFO", *options]
        return running_worker(arguments, self.directory, ready="connected to")

    def runs(self, ending: str = "") -> list[str]:
        path = self.directory / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.endswith(ending)]

    def close(self) -> None:
        self.app.close()
        self.app.pool.force_close_all()


MakeShop = Callable[[str], Shop]


@pytest.fixture
def make_shop(tmp_path: Path) -> Iterator[MakeShop]:
    shops: list[Shop] = []

    def make(broker: str) -> Shop:
        shops.append(Shop(tmp_path, broker))
        return shops[-1]

    yield make
    for shop in shops:
        shop.close()


def get(result: Any) -> Any:
    return result.get(timeout=patience_s(20), interval=0.05)


def channel_stats(nsqd: GoNsqd, topic: str = "celery") -> dict[str, Any]:
    topics = json.loads(nsqd.get("/stats", format="json", topic=topic))["topics"]
    [channel] = topics[0]["channels"]
    return dict(channel)


# -- with a worker --------------------------------------------------------------------------------


def test_first_steps_canvas_delays_and_lost_processes_work(
    go_nsqd: MakeNsqd, make_shop: MakeShop
) -> None:
    nsqd = go_nsqd("-msg-timeout=5s")
    shop = make_shop(f"nsq://{nsqd.tcp_address}")
    # A child process is replaced after five tasks, by a fork while nsqd is connected.
    with shop.worker("--concurrency=2", "--max-tasks-per-child=5") as worker:
        assert get(shop.tasks.add.delay(4, 4)) == 8
        failing = shop.tasks.add.delay(4, "4")
        with pytest.raises(TypeError):
            get(failing)
        numbers = group(shop.tasks.add.s(n, n) for n in range(20))
        assert get(numbers()) == [2 * n for n in range(20)]
        # The chord publishes from a child process, and polls by retries with a countdown.
        assert get(chord([shop.tasks.add.s(n, n) for n in range(5)])(shop.tasks.total.s())) == 20
        began = time.monotonic()
        assert get(shop.tasks.add.apply_async((1, 2), countdown=1.5)) == 3
        assert time.monotonic() - began >= 1.5
        shop.tasks.work.delay("x")
        wait_until(lambda: shop.runs("ended"), what="a file of the task")
        assert get(shop.tasks.die_once.delay("victim")) == "victim"
        wait_until(lambda: not channel_stats(nsqd)["in_flight_count"], what="all acknowledged")
        worker.terminate()
        assert worker.wait() == 0
    stats = channel_stats(nsqd)
    assert (stats["depth"], stats["deferred_count"], stats["timeout_count"]) == (0, 0, 0)
    assert shop.runs("victim began") == ["victim began"] * 2


@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        "solo",
        *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("threads", "gevent")),
    ],
)
def test_a_long_task_runs_once_and_a_stop_returns_tasks_not_begun(
    pool: str, go_nsqd: MakeNsqd, make_shop: MakeShop
) -> None:
    nsqd = go_nsqd("-msg-timeout=1s")
    shop = make_shop(f"nsq://{nsqd.tcp_address}")
    with shop.worker(f"--pool={pool}", "--concurrency=1", "--prefetch-multiplier=3") as worker:
        shop.tasks.work.delay("0", 2.0)
        wait_until(lambda: shop.runs("0 began"), what="the first has begun")
        for n in (1, 2):
            shop.tasks.work.delay(str(n), 2.0)
            # A child process reports to the worker that its task has begun. A stop returns the
            # task if the worker has not read the report, and it reads one in each iteration.
            if pool == "prefork":
                wait_until(lambda: worker.log.count("] received") > n, what="received")  # noqa: B023
        wait_until(lambda: channel_stats(nsqd)["in_flight_count"] == 3, what="three in flight")
        worker.terminate()
        assert worker.wait() == 0
    # All greenlets that Celery has created run to their end.
    ended = 3 if pool == "gevent" else 1
    assert shop.runs() == [f"{n} {event}" for n in range(ended) for event in ("began", "ended")]
    stats = channel_stats(nsqd)
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (3 - ended, 0, 0)


def has_run(shop: Shop, count: int) -> bool:
    return len(shop.runs("ended")) >= count


def run_with_kills(shop: Shop, count: int, kills: int) -> None:
    concurrency, multiplier = 4, 2
    options = f"--concurrency={concurrency}", f"--prefetch-multiplier={multiplier}"
    for n in range(count):
        shop.tasks.work.delay(str(n), 0.01)
    for target in range(count // (kills + 1), count, count // (kills + 1) + 1):
        with shop.worker(*options) as worker:
            wait_until(partial(has_run, shop, target), what="runs", timeout_s=60)
            worker.kill()
    with shop.worker(*options):
        names = {f"{n} ended" for n in range(count)}
        wait_until(lambda: set(shop.runs("ended")) == names, what="each task", timeout_s=60)
    in_flight = concurrency * multiplier
    assert len(shop.runs("ended")) <= count + kills * in_flight


def test_each_task_runs_although_workers_and_children_are_killed(
    go_nsqd: MakeNsqd, make_shop: MakeShop
) -> None:
    nsqd = go_nsqd("-msg-timeout=2s")
    run_with_kills(make_shop(f"nsq://{nsqd.tcp_address}"), count=60, kills=1)


@pytest.mark.slow
def test_a_thousand_tasks_run_although_workers_are_killed_five_times(
    go_nsqd: MakeNsqd, make_shop: MakeShop
) -> None:
    nsqd = go_nsqd("-msg-timeout=2s")
    run_with_kills(make_shop(f"nsq://{nsqd.tcp_address}"), count=1000, kills=5)


def test_a_worker_with_nsqlookupd_survives_a_restart_of_nsqd(
    go_nsqd: MakeNsqd, nsqlookupd: MakeLookupd, make_shop: MakeShop
) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-msg-timeout=2s")
    nsqd.create_channel("celery", "celery")
    wait_until(lambda: lookupd.producers("celery"), what="a registered topic")
    shop = make_shop(f"nsqlookupd://{lookupd.http_address}")
    shop.app.conf.broker_transport_options |= {"lookupd_poll_interval": "200ms"}
    with shop.worker("--concurrency=1"):
        assert get(shop.tasks.add.delay(1, 1)) == 2
        began = time.monotonic()
        deferred = shop.tasks.add.apply_async((2, 2), countdown=4)
        nsqd.stop()
        nsqd.start()
        # nsqd forgets delays when it stops. The worker must defer the task again.
        assert get(deferred) == 4
        assert time.monotonic() - began >= 4
        assert get(shop.tasks.add.delay(3, 3)) == 6


# -- refused in one line --------------------------------------------------------------------------


def test_features_that_nsq_lacks_are_refused_in_one_line(
    go_nsqd: MakeNsqd, make_shop: MakeShop
) -> None:
    nsqd = go_nsqd()
    shop = make_shop(f"nsq://{nsqd.tcp_address}")
    add = shop.tasks.add
    refused: dict[str, Callable[[], object]] = {
        "--max-req-timeout": lambda: add.apply_async((1, 2), countdown=7200),
        "priorities": lambda: add.apply_async((1, 2), priority=3),
        "remote control": lambda: shop.app.control.inspect().ping(),
        "revoke": lambda: add.AsyncResult("id").revoke(),
        "above the limit": lambda: add.delay("x" * 2_000_000, 1),
        "invalid topic name 'a b'": lambda: add.apply_async((1, 2), queue="a b"),
    }
    for text, act in refused.items():
        with pytest.raises(ConfigurationError, match=text) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert json.loads(nsqd.get("/stats", format="json"))["topics"] == []
    ping = [sys.executable, "-m", "celery", "-A", "tasks", "inspect", "ping"]
    done = subprocess.run(ping, cwd=shop.directory, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (69, 1)
    assert "remote control" in done.stderr


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nsq://h:x", {}, "invalid address 'h:x'"),
        ("nsq://h:4150/vhost", {}, "nsq://h:4150/vhost: NSQ has no virtual hosts"),
        ("nsq://joe:s3cret@h", {}, "nsq://h: NSQ has no users"),
        ("nsq://h?auth_secret=s3cret", {}, "auth_secret in a URL would be printed"),
        ("nsq://h?tls_v2=true", {}, "unknown client option 'tls_v2'"),
        ("nsq://h", {"max_in_flight": "x"}, "invalid value 'x' for client option max_in_flight"),
        ("nsq://h;nsqlookupd://h", {}, "nsqlookupd:// and nsq:// cannot be one broker"),
    ],
)
def test_a_wrong_url_is_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Connection(url, transport_options=options).connect()
    assert str(caught.value) == message
    assert "s3cret" not in caught.value.hint


def test_settings_come_from_all_urls_and_the_options() -> None:
    client = Connection(
        "nsq://:a%2Fb@h1;nsq://h2:5000//",
        transport_options={"tls_v1": True, "max_retries": 3, "nsqd_http_addresses": "h1:1 h2:2"},
    )
    settings = nsqtools.celery.read_settings("nsq", client)
    assert settings.nsqd_tcp_addresses == ("h1:4150", "h2:5000")
    assert settings.nsqd_http_addresses == ("h1:1", "h2:2")
    assert settings.options == {"tls_v1": "true", "auth_secret": "a/b"}
    client = Connection("nsqlookupd://h1;nsqlookupd://h2:1?snappy=true", ssl=True)
    settings = nsqtools.celery.read_settings("nsqlookupd", client)
    assert settings.nsqd_tcp_addresses == ()
    assert settings.lookupd_http_addresses == ("h1:4161", "h2:1")
    assert settings.options == {"tls_v1": "true", "snappy": "true"}


def test_an_unreachable_nsqd_is_reported() -> None:
    with pytest.raises(NsqError, match=r"cannot connect to 127\.0\.0\.1:1 \(connection refused\)"):
        Connection("nsq://127.0.0.1:1").transport.establish_connection()


@pytest.mark.parametrize("zone", [UTC, None])
def test_an_eta_without_a_zone_is_in_the_zone_of_the_app(zone: Any) -> None:
    eta = (datetime.now(zone or UTC) + timedelta(seconds=60)).replace(tzinfo=zone)
    assert 58 < nsqtools.celery.seconds_until_eta({"eta": eta.isoformat()}) <= 60
    assert nsqtools.celery.seconds_until_eta({"eta": None}) == 0
    assert nsqtools.celery.seconds_until_eta({"eta": "soon"}) == 0


# -- without a worker -----------------------------------------------------------------------------


@contextmanager
def consuming(connection: Any, queue: Any) -> Iterator[list[Any]]:
    received: list[Any] = []
    callback = [lambda body, message: received.append(message)]
    consumer = Consumer(connection, [queue], callbacks=callback, accept=["json", "text/plain"])
    consumer.qos(prefetch_count=3)
    with consumer:
        yield received


def drain(connection: Any, received: list[Any], count: int) -> None:
    while len(received) < count:
        connection.drain_events(timeout=patience_s(10))


def test_kombu_acknowledges_rejects_and_reads_foreign_messages(go_nsqd: MakeNsqd) -> None:
    nsqd = go_nsqd()
    queue = Queue("orders", no_declare=False)
    with Connection(f"nsq://{nsqd.tcp_address}", transport_options=FAST) as connection:
        producer = connection.Producer()
        producer.publish({"n": 1}, routing_key="orders", declare=[queue])
        nsqd.publish("orders", b"not of kombu")
        for body in FOREIGN:
            assert nsqtools.celery.decode_payload(body)["content-type"] == "text/plain"
        with consuming(connection, queue) as received:
            drain(connection, received, 2)
            [own] = [m for m in received if m.content_type == "application/json"]
            [foreign] = [m for m in received if m is not own]
            assert (own.payload, own.delivery_info["redelivered"]) == ({"n": 1}, False)
            assert foreign.payload == "not of kombu"
            foreign.ack()
            own.requeue()
            drain(connection, received, 3)
            assert received[2].delivery_info["redelivered"]
            received[2].reject()
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.2)
            producer.publish({"n": 2}, routing_key="orders")
            drain(connection, received, 4)
    # The end of the connection has requeued unanswered messages.
    stats = channel_stats(nsqd, "orders")
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (1, 0, 0)


def test_purge_and_length_ask_the_nsqd_over_http(go_nsqd: MakeNsqd) -> None:
    nsqd = go_nsqd()
    nsqd.create_channel("orders", "celery")
    nsqd.publish("orders", *[b"x"] * 5)
    options = {"nsqd_http_addresses": nsqd.http_address}
    with Connection(f"nsq://{nsqd.tcp_address}", transport_options=options) as connection:
        queue = Queue("orders", channel=connection.default_channel)
        assert queue.queue_declare(passive=True).message_count == 5
        assert queue.purge() == 5
        assert queue.queue_declare(passive=True).message_count == 0


def test_tls_and_an_auth_secret_are_used(
    go_nsqd: MakeNsqd, certificates: Certificates, auth_server: AuthServer
) -> None:
    auth_server.allow("s3cret", topic="orders", permissions=["publish"])
    nsqd = go_nsqd(
        *certificates.server.nsqd_flags,
        "-tls-required=tcp-https",
        f"-auth-http-address={auth_server.address}",
    )
    query = f"tls_v1=true&tls_root_ca_file={certificates.ca}"
    with Connection(f"nsq://:s3cret@{nsqd.tcp_address}?{query}") as connection:
        assert "s3cret" not in connection.as_uri()
        connection.Producer().publish({}, routing_key="orders", declare=[Queue("orders")])
    with (
        Connection(f"nsq://:wrong@{nsqd.tcp_address}?{query}") as connection,
        pytest.raises(NsqError, match="E_AUTH_FAILED"),
    ):
        connection.connect()


def test_a_forked_child_leaves_the_messages_of_its_parent_alone(go_nsqd: MakeNsqd) -> None:
    nsqd = go_nsqd()
    queue = Queue("orders")
    with Connection(f"nsq://{nsqd.tcp_address}") as connection:
        producer = connection.Producer()
        producer.publish({"n": 1}, routing_key="orders", declare=[queue])
        with consuming(connection, queue) as received:
            drain(connection, received, 1)
            if not (child := os.fork()):
                try:
                    producer.publish({"n": 2}, routing_key="orders")
                    received[0].ack()
                    connection.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            stats = channel_stats(nsqd, "orders")
            assert stats["in_flight_count"] + stats["depth"] == 2
            assert (stats["requeue_count"], len(stats["clients"])) == (0, 1)
            drain(connection, received, 2)
            for message in received:
                message.ack()
    assert channel_stats(nsqd, "orders")["in_flight_count"] == 0
