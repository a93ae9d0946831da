"""taskiq on NSQ: the program of nsq-tasks(7), kills, delays and stops.

taskiq is imported inside tests, because every worker of a test run imports this file.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.readme import parse
from plugins.servers import GoNsqd, MakeLookupd, MakeNsqd
from plugins.task_workers import TaskWorker, running_worker
from plugins.waiting import wait_until

from nsqtools import ConfigurationError
from nsqtools.errors import PublishInvalid, PublishNotSent

if TYPE_CHECKING:
    from nsqtools.taskiq import NsqBroker

GUIDE = Path(__file__).parents[2] / "man" / "nsq-tasks.7.md"

MAX_IN_FLIGHT = 5

TASKS = """
import time

def note(text):
    with open("runs", "a") as file:
        file.write(text + "\\n")

@broker.task
async def work(name: str, seconds: float = 0.0) -> None:
    note(f"{name} began")
    await asyncio.sleep(seconds)
    note(f"{name} ended")

@broker.task
def work_in_thread(name: str, seconds: float) -> None:
    note(f"{name} began")
    time.sleep(seconds)
    note(f"{name} ended")
"""


def new_broker(*topic: str, **addresses: Any) -> NsqBroker:
    from nsqtools.taskiq import NsqBroker

    return NsqBroker(*topic, **addresses)


class Site:
    """The broker.py of the guide in a directory, connected to an nsqd."""

    def __init__(self, directory: Path, nsqd: GoNsqd) -> None:
        self.directory, self.nsqd = directory, nsqd
        blocks = parse(GUIDE.name, GUIDE.read_text("utf-8"))
        program = next(b.text for b in blocks if (b.heading, b.language) == ("taskiq", "python"))
        address = '"127.0.0.1:4150"'
        assert address in program
        options = f'"{nsqd.tcp_address}", options=ClientOptions(max_in_flight={MAX_IN_FLIGHT})'
        program = "from nsqtools import ClientOptions\n" + program.replace(address, options)
        (directory / "broker.py").write_text(program + TASKS)

    @contextmanager
    def worker(self, *options: str) -> Iterator[TaskWorker]:
        arguments = ["taskiq", "worker", "broker:broker", "--workers=1", *options]
        with running_worker(arguments, self.directory, ready="connected to") as worker:
            yield worker

    def send(self, *tasks: tuple[str, float], name: str = "work", **labels: Any) -> None:
        """Send tasks as a program would."""

        async def send() -> None:
            broker = new_broker(nsqd_tcp_addresses=self.nsqd.tcp_address)
            task = broker.register_task(lambda: None, f"broker:{name}")
            await broker.startup()
            await asyncio.gather(*(task.kicker().with_labels(**labels).kiq(*t) for t in tasks))
            await broker.shutdown()

        asyncio.run(send())

    def runs(self, ending: str = "") -> list[str]:
        path = self.directory / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.endswith(ending)]

    def channel(self) -> dict[str, Any]:
        answer = json.loads(self.nsqd.get("/stats", format="json", topic="taskiq"))
        [channel] = answer["topics"][0]["channels"]
        return dict(channel)


def encoded_task(task: str, *arguments: str, **labels: Any) -> bytes:
    from taskiq import TaskiqMessage

    broker = new_broker(nsqd_tcp_addresses="127.0.0.1:4150")
    message = TaskiqMessage(
        task_id="1", task_name=task, labels=labels, args=list(arguments), kwargs={}
    )
    return broker.formatter.dumps(message).message


def test_the_program_of_the_guide_finishes_tasks_after_they_have_run(
    go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    site = Site(tmp_path, go_nsqd("-msg-timeout=1s"))
    with site.worker() as worker:
        site.send(("1", 0.0), ("2", 0.0))
        wait_until(lambda: len(site.runs("ended")) == 2, what="two runs")
        site.send((1, 2), name="add")
        worker.wait_for("1 + 2 = 3")
        # After a restart nsqd has forgotten the delay, so the worker must defer the task again.
        began = time.monotonic()
        site.nsqd.publish("taskiq", encoded_task("broker:work", "late", delay=3))
        wait_until(lambda: site.runs("late ended"), what="the task", timeout_s=20)
        assert time.monotonic() - began >= 3
        site.nsqd.publish("taskiq", b"not of taskiq")
        worker.wait_for("Cannot parse message")
        site.send(("long", 3.0))
        site.send(("thread", 3.0), name="work_in_thread")
        wait_until(lambda: len(site.runs("began")) == 5, what="long tasks")
        worker.terminate()
        assert worker.wait() == 0
    assert {line.split()[0] for line in site.runs("ended")} == {"1", "2", "late", "long", "thread"}
    assert len(site.runs("ended")) == 5
    stats = site.channel()
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (0, 0, 0)


def test_a_stop_returns_tasks_that_have_not_begun(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    site = Site(tmp_path, go_nsqd())
    with site.worker("--max-async-tasks=1") as worker:
        site.send(*((str(n), 1.0) for n in range(30)))
        wait_until(lambda: site.runs("began"), what="a task")
        worker.terminate()
        assert worker.wait() == 0
    begun = len(site.runs("began"))
    assert len(site.runs("ended")) == begun < 30
    stats = site.channel()
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (30 - begun, 0, 0)


def has_run(site: Site, count: int) -> bool:
    return len(site.runs("ended")) >= count


def run_with_kills(site: Site, count: int, kills: int) -> None:
    options = f"--max-async-tasks={MAX_IN_FLIGHT}", "--workers=2"
    site.send(*((str(n), 0.01) for n in range(count)))
    for target in range(count // (kills + 1), count, count // (kills + 1) + 1):
        with site.worker(*options) as worker:
            wait_until(partial(has_run, site, target), what="runs", timeout_s=60)
            worker.kill()
    with site.worker(*options):
        names = {f"{n} ended" for n in range(count)}
        wait_until(lambda: set(site.runs("ended")) == names, what="each task", timeout_s=60)
    assert len(site.runs("ended")) <= count + kills * 2 * MAX_IN_FLIGHT  # two processes


def test_each_task_runs_although_workers_are_killed(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    run_with_kills(Site(tmp_path, go_nsqd("-msg-timeout=2s")), count=60, kills=1)


@pytest.mark.slow
def test_a_thousand_tasks_run_although_workers_are_killed_five_times(
    go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    run_with_kills(Site(tmp_path, go_nsqd("-msg-timeout=2s")), count=1000, kills=5)


@pytest.mark.parametrize(
    ("arguments", "labels", "error", "message"),
    [
        (
            ("x",),
            {"delay": 7200},
            ConfigurationError,
            "a delay of 7200 s is above nsqd's",
        ),
        (("x" * 2_000_000,), {}, PublishInvalid, "above the limit of 1048576"),
    ],
)
def test_a_task_that_nsqd_would_refuse_is_reported(
    arguments: tuple[str], labels: dict[str, Any], error: type, message: str, go_nsqd: MakeNsqd
) -> None:
    from taskiq.exceptions import SendTaskError

    nsqd = go_nsqd()

    async def send() -> None:
        broker = new_broker(nsqd_tcp_addresses=nsqd.tcp_address)
        task = broker.register_task(lambda text: None, "task")
        try:
            await task.kicker().with_labels(**labels).kiq(*arguments)
        finally:
            await broker.shutdown()

    with pytest.raises(SendTaskError) as caught:
        asyncio.run(send())
    assert isinstance(caught.value.__cause__, error)
    assert message in str(caught.value.__cause__)


def test_addresses_and_names_are_checked(go_nsqd: MakeNsqd) -> None:
    from taskiq.exceptions import SendTaskError

    with pytest.raises(ConfigurationError, match="a producer needs an address"):
        new_broker()
    with pytest.raises(ConfigurationError, match="invalid topic name 'a b'"):
        new_broker("a b", nsqd_tcp_addresses="127.0.0.1:4150")

    async def send() -> None:
        broker = new_broker(nsqd_tcp_addresses="127.0.0.1:1")
        task = broker.register_task(lambda: None, "task")
        try:
            await task.kiq()
        finally:
            await broker.shutdown()

    with pytest.raises(SendTaskError) as caught:
        asyncio.run(send())
    assert isinstance(caught.value.__cause__, PublishNotSent)
    assert "cannot connect to 127.0.0.1:1 (connection refused)" in str(caught.value.__cause__)


def test_nsqlookupd_leads_to_the_nsqd(go_nsqd: MakeNsqd, nsqlookupd: MakeLookupd) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    nsqd.create_channel("taskiq", "taskiq")
    wait_until(lambda: lookupd.producers("taskiq"), what="a registered topic")

    async def send_and_receive() -> bytes:
        broker = new_broker(lookupd_http_addresses=lookupd.http_address)
        await broker.startup()
        await broker.register_task(lambda: None, "task").kiq()
        try:
            async for message in broker.listen():
                message.ack()
                return message.data
        finally:
            await broker.shutdown()
        return b""

    assert json.loads(asyncio.run(send_and_receive()))["task_name"] == "task"
