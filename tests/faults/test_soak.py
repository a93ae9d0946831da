"""All programs together for a long time: every message is accounted for, and nothing grows.

Numbered messages are published to a Go and a durable embedded nsqd by ``nsq pub`` and a Producer;
both nsqd ask an auth server. Archivers, a tail, a forwarder, a command, an asyncio Consumer and
``nsq work``, whose handlers publish, consume them, each from its own channel. The messages that
``nsq work`` publishes become a Delta table with typed columns, which delta-rs reads. Celery gets
tasks and the scheduler requests, numbered as well; ten viewers use the console. Meanwhile daemons
are restarted, paused and (the durable one) killed, commands are killed, and topics are created and
deleted. At the end every program must have handled every number, and no process may have grown
since the second quarter of the time.

``-m slow`` runs it for two hours, or ``NSQTOOLS_SOAK_S`` seconds. The Go nsqd is stopped with
SIGTERM, because it promises nothing for kill -9.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from plugins.archives import bodies_at, unfinished
from plugins.cli import NSQ
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd, GoNsqlookupd
from plugins.servers import DataPath, MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

import nsqtools.celery  # noqa: F401, registers nsqlookupd://
from nsqtools import ClientOptions, Producer, PublishError
from nsqtools.authd.users import hash_token
from nsqtools.protocol.schedule_request import SCHEDULE_TOPIC
from nsqtools.schedule.store import ScheduleStore

TOPIC, COPY, DONE, TYPED = "soak", "soak.copy", "soak.done", "soak.typed"
LATER = "soak.later"  # the topic to which the scheduler publishes
TASK = "celery"  # the topic of Celery's default queue
CHANNELS = ("archive", "lake", "tailed", "mirror", "exec", "tasks", "work")
KILLED = (
    "archiver", "lake", "forwarder", "exec", "tasks", "work", "typed", "scheduler", "celery"
)  # fmt: skip
OTHERS = [(topic, "archive") for topic in (COPY, DONE, LATER)]
OTHERS += [(TYPED, "typed"), (TASK, "celery"), (SCHEDULE_TOPIC, "scheduler")]
RATE = 200  # messages a second to each nsqd
SECRET = "of the soak"
VIEWERS = 10
SAMPLES = 40
GROWTH_MB = 8.0  # plus a tenth: a heap may grow by this without a leak
GROWTH_DESCRIPTORS = 8  # short-lived connections: a lookup, a connection that is replaced
WITHOUT_FAULTS_S = 1.5

WRITE_DOWN = """
import json, sys
with open(sys.argv[1], "a") as out:
    for line in sys.stdin:
        out.write(json.loads(line)["body"] + "\\n")
        out.flush()
        print("ok", flush=True)
"""
TASKS = f"""
import asyncio, sys
from nsqtools import ClientOptions
from nsqtools.aio import Consumer, Message, Producer

async def main(lookupd, *nsqds):
    options = ClientOptions(
        auth_secret="{SECRET}",
        lookupd_poll_interval_s=1,
        reconnect_base_s=0.05,
        default_requeue_delay_s=1,  # of what it could not publish while an nsqd was away
    )
    consumer = Consumer("{TOPIC}", "tasks", lookupd_http_addresses=[lookupd], options=options)
    async with Producer(nsqds, options=options) as producer:
        async def handle(message: Message) -> None:
            await producer.publish("{DONE}", message.body)
        await consumer.run(handle, concurrency=50)

asyncio.run(main(*sys.argv[1:]))
"""
USERS = f"""\
[users.soak]
tokens = ["{hash_token(SECRET)}"]
publish = ['.*']
subscribe = {{ '.*' = ['.*'] }}
"""
WORK = f"""
import json, os
from nsqtools import ClientOptions, Producer

producer = Producer(
    os.environ["SOAK_NSQDS"].split(), options=ClientOptions(auth_secret="{SECRET}")
)

def publish(text: str) -> None:
    n = int(text)
    document = {{"n": n, "name": f"number {{n}}", "half": n / 2, "at": "2026-11-29T12:00:00Z"}}
    producer.publish("{TYPED}", json.dumps(document).encode())
"""
CELERY = """
import nsqtools.celery
from celery import Celery

app = Celery("soak_tasks", broker=BROKER)
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 1
app.conf.task_ignore_result = True
app.conf.broker_transport_options = {"default_requeue_delay": "1s", "reconnect_base": "50ms"}

@app.task
def note(number):
    with open(PATH, "a") as out:
        out.write(f"{number}\\n")
"""
READ_TABLE = """
import os, sys
from deltalake import DeltaTable

numbers = DeltaTable(sys.argv[1]).to_pyarrow_table(columns=["n"])["n"].to_pylist()
if sys.argv[2:] == ["count"]:  # for millions of numbers this process would not be flat
    numbers = [len(set(numbers))]
print(*numbers, sep="\\n", flush=True)
os._exit(0)  # a thread of pyarrow that still closes a file of deltalake's would abort Python
"""


class Cost(NamedTuple):
    """The resources of a process at one time."""

    memory_mb: float
    descriptors: int
    threads: int


def cost_of(pid: int) -> Cost:
    """Raises OSError or LookupError for a process that is not running."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    memory_mb = int(values["VmRSS"].split()[0]) / 1000
    return Cost(memory_mb, len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"]))


@dataclass
class Soak:
    """The cluster, its commands, and the number of published messages."""

    lookupd: GoNsqlookupd
    nsqds: list[GoNsqd]
    environment: dict[str, str]
    directory: Path
    over: threading.Event = field(default_factory=threading.Event)
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    faults: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # published numbers of each series
    views: int = 0
    readings: list[int] = field(default_factory=list)  # numbers in the table, by a foreign reader
    console: str = ""  # its address
    taking: threading.Lock = field(default_factory=threading.Lock)

    def start(self, name: str, *words: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        out = (self.directory / f"{name}.out").open("ab")
        with log, out:
            self.commands[name] = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                env=self.environment,
                cwd=self.directory,
                start_new_session=True,  # Celery's children are killed with it
            )

    def start_commands(self, rotate_s: float) -> None:
        lookupd = f"--lookupd-http-address {self.lookupd.http_address}"
        consume = f"{lookupd} -X lookupd_poll_interval=1s -X reconnect_base=50ms"
        to_file = f"to-file --format jsonl --gzip --rotate-interval {rotate_s}s {consume}"
        to_file += f" --output-dir {self.directory}"
        # publish again if an ending nsqd may have stored a message: this doubles, but loses nothing
        publish = "--retry-unknown --retry-timeout 120s"
        where = [f"--destination-nsqd-tcp-address={nsqd.tcp_address}" for nsqd in self.nsqds]
        commands = {
            "archiver": f"{to_file}/archive -t {TOPIC} -c archive",
            "archiver of copies": f"{to_file}/copies -t {COPY} -t {DONE} -c archive",
            "archiver of the scheduler": f"{to_file}/later -t {LATER} -c archive",
            "lake": f"{to_file}/lake -t {TOPIC} -c lake --store parquet",
            "typed": f"{to_file}/typed -t {TYPED} -c typed --store delta --body json",
            "work": f"work work_handler:publish --decode text --dead-letter-file dead"
            f" -t {TOPIC} -c work --workers 4 -X default_requeue_delay=1s {consume}",
            "scheduler": f"schedule serve --data-path {self.directory}/schedule {consume}",
            "tail": f"tail -t {TOPIC} -c tailed {consume}",
            "forwarder": f"to-nsq -t {TOPIC} -c mirror --destination-topic {COPY}"
            f" {' '.join(where)} --destination-auth-secret-file secret {consume}",
            "console": f"web --listen 127.0.0.1:0 {lookupd}",
        }
        for name, words in commands.items():
            self.start(name, *NSQ, *words.split())
        write_down = (sys.executable, "-c", WRITE_DOWN, str(self.directory / "exec.numbers"))
        to_exec = f"to-exec -t {TOPIC} -c exec --persistent {consume} --"
        self.start("exec", *NSQ, *to_exec.split(), *write_down)
        nsqds = [nsqd.tcp_address for nsqd in self.nsqds]
        self.start("tasks", sys.executable, "-c", TASKS, self.lookupd.http_address, *nsqds)
        worker = "-m celery -A soak_tasks worker --concurrency 2"
        self.start("celery", sys.executable, *worker.split())
        for number, nsqd in enumerate(self.nsqds):
            words = f"pub -t {TOPIC} {publish} --nsqd-tcp-address {nsqd.tcp_address}"
            self.start(f"publisher {number}", *NSQ, *words.split())

    # -- the load, each method in its own thread ---------------------------------------------------

    def ticks(self, interval_s: float) -> Iterator[int]:
        """Count at an interval until the end of the run."""
        for number in itertools.count():
            if self.over.wait(interval_s):
                return
            yield number

    def publish(self) -> None:
        """Write numbers to the publishers at a steady rate until the end of the run."""
        pipes = [self.commands[f"publisher {n}"].stdin for n in range(len(self.nsqds))]
        began = time.monotonic()
        for batch in itertools.count(1):
            if self.over.wait(max(began + batch * 0.1 - time.monotonic(), 0)):
                return
            for pipe in pipes:
                pipe.write(b"".join(b"%d\n" % n for n in self.numbers(RATE // 10)))
                pipe.flush()

    def numbers(self, count: int, series: str = TOPIC) -> range:
        """Reserve the next numbers of a series for a publisher."""
        with self.taking:
            self.counts[series] += count
            return range(self.counts[series] - count, self.counts[series])

    def produce(self) -> None:
        """Publish with a Producer, each number until its publication is confirmed."""
        options = ClientOptions(auth_secret=SECRET)
        with Producer([nsqd.tcp_address for nsqd in self.nsqds], options=options) as producer:
            for _ in self.ticks(0.1):
                for number in self.numbers(RATE // 20):
                    until_confirmed(lambda: producer.publish(TOPIC, b"%d" % number))  # noqa: B023

    def schedule(self) -> None:
        """Ask the scheduler to publish numbers two seconds later."""
        options = ClientOptions(auth_secret=SECRET)
        with Producer([nsqd.tcp_address for nsqd in self.nsqds], options=options) as producer:
            for _ in self.ticks(0.1):
                for number in self.numbers(2, LATER):
                    at = datetime.now(UTC) + timedelta(seconds=2)
                    until_confirmed(
                        lambda: producer.publish(LATER, b"%d" % number, at=at, key=f"{number}")  # noqa: B023
                    )

    def send_tasks(self) -> None:
        """Send Celery tasks that write down numbers."""
        app = Celery(broker=self.broker)
        for _ in self.ticks(0.2):
            for number in self.numbers(1, TASK):
                until_confirmed(lambda: app.send_task("soak_tasks.note", [number]))  # noqa: B023
        app.close()

    def read_table(self, interval_s: float) -> None:
        """Read the table while it is written: a number never disappears."""
        for _ in self.ticks(interval_s):
            if (self.directory / "typed" / "_delta_log").exists():
                self.readings += self.numbers_in_table("count")
                assert self.readings == sorted(self.readings), self.readings

    def numbers_in_table(self, *options: str) -> list[int]:
        run = [sys.executable, "-c", READ_TABLE, str(self.directory / "typed"), *options]
        answer = subprocess.run(run, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        return list(map(int, answer.stdout.split()))

    @property
    def broker(self) -> str:
        secret = SECRET.replace(" ", "%20")
        return f"nsqlookupd://:{secret}@{self.lookupd.http_address}?lookupd_poll_interval=1s"

    def view(self, page: str) -> None:
        """Request a page of the console every second."""
        for _ in self.ticks(1):
            with urllib.request.urlopen(self.console + page, timeout=patience_s(10)) as answer:
                assert answer.read()
            self.views += 1

    def disturb(self, interval_s: float) -> None:
        """Restart, pause and kill daemons and commands, one after the other."""
        go, durable = self.nsqds
        faults: list[Callable[[], None]] = [
            lambda: restart(go),
            lambda: restart(durable),
            lambda: pause(go),
            lambda: pause(durable),
            lambda: restart(self.lookupd),
            lambda: restart(durable, kill=True),
            *(lambda name=name: self.start(name, *self.kill(name).args) for name in KILLED),  # type: ignore[misc]
        ]
        for number in self.ticks(interval_s):
            faults[number % len(faults)]()
            self.faults += 1

    def kill(self, name: str) -> subprocess.Popen[bytes]:
        process = self.commands[name]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
        return process

    def churn(self, interval_s: float) -> None:
        """Create topics and delete them again, on whichever nsqd answers."""
        for number in self.ticks(interval_s):
            nsqd, topic = self.nsqds[number % 2], f"churn-{number}"
            with suppress(OSError, AssertionError):  # it is being restarted
                nsqd.create_channel(topic, "c")
                nsqd.publish(topic, b"x", b"y")
                nsqd.post("/topic/delete", topic=topic)

    def measure(self, interval_s: float) -> None:
        for _ in self.ticks(interval_s):
            pids = {name: process.pid for name, process in self.commands.items()}
            for name, pid in {**pids, "this process": os.getpid()}.items():
                with suppress(OSError, LookupError):
                    self.costs.setdefault(name, []).append(cost_of(pid))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every published message has arrived, then end the commands."""
        for number in range(len(self.nsqds)):
            publisher = self.commands[f"publisher {number}"]
            publisher.stdin.close()
            assert publisher.wait(patience_s(150)) == 0, self.log(f"publisher {number}")
        wait_until(
            lambda: not pending(self.directory / "schedule"),
            what="the end of the schedule",
            timeout_s=60,
        )
        for topic, channel in [*((TOPIC, name) for name in CHANNELS), *OTHERS]:
            for nsqd in (server for server in self.nsqds if server.stats(topic)["topics"]):
                wait_until(
                    lambda: not unfinished(nsqd, topic, channel),  # noqa: B023
                    what=f"the end of {topic}/{channel}",
                    timeout_s=60,
                )
        for name, process in self.commands.items():
            if not name.startswith("publisher"):
                assert process.poll() is None, self.log(name)
                process.send_signal(signal.SIGTERM)
                ends = 0 if name in ("tasks", "celery") else 143
                assert process.wait(patience_s(60)) == ends, self.log(name)

    def address_of(self, name: str) -> str:
        """The address at which a command listens, as soon as it prints it."""
        address = re.compile(r"http://([0-9.:]+)")
        return wait_until(lambda: address.search(self.log(name)), what=name, timeout_s=20)[1]

    def log(self, name: str) -> str:
        return f"{name}: {(self.directory / f'{name}.log').read_text()}"

    def arrived(self) -> dict[str, list[int]]:
        """The numbers that arrived, by the program that wrote them down."""
        places = {name: [self.directory / name] for name in ("archive", "lake", "later")}
        for topic in (COPY, DONE):
            places[topic] = [*self.directory.glob(f"copies/{topic}.*")]
        bodies = {name: bodies_at(*archives) for name, archives in places.items()}
        for file in ("tail.out", "exec.numbers", "celery.numbers"):
            bodies[file] = (self.directory / file).read_bytes().split()
        arrived = {name: list(map(int, numbers)) for name, numbers in bodies.items()}
        return arrived | {"typed": self.numbers_in_table()}


def until_confirmed(publish: Callable[[], object]) -> None:
    """Publish again while nsqd is unavailable."""
    while True:
        with suppress(PublishError, OperationalError):
            publish()
            return


def pending(directory: Path) -> int:
    """Count the entries that the scheduler still has."""
    with closing(ScheduleStore(directory, read_only=True)) as store:
        return len(store.entries(10))


def restart(daemon: GoNsqd | GoNsqlookupd, *, kill: bool = False) -> None:
    (daemon.kill if kill else daemon.stop)()
    time.sleep(0.3)
    daemon.start()


def pause(daemon: GoNsqd) -> None:
    daemon.pause()
    time.sleep(1.5)
    daemon.resume()


def grown(costs: list[Cost]) -> list[str]:
    """List the resources of which the last quarter has more than the second."""
    quarter = len(costs) // 4
    before, after = costs[quarter : 2 * quarter], costs[-quarter:]
    growth = []
    for name, of, factor, margin in (
        ("memory_mb", median, 1.1, GROWTH_MB),
        ("descriptors", max, 1, GROWTH_DESCRIPTORS),
        ("threads", median, 1, 1),  # a restarted command resolves names in threads
    ):
        first, last = (of(getattr(cost, name) for cost in sample) for sample in (before, after))
        if last > first * factor + margin:
            growth.append(f"{name} {first:.1f} -> {last:.1f}")
    return growth


def soak_for(soak: Soak, duration_s: float) -> None:
    """Run the soak, and check that every message arrived."""
    for nsqd in soak.nsqds:
        for topic, channel in [*((TOPIC, name) for name in CHANNELS), *OTHERS]:
            nsqd.create_channel(topic, channel)
    (soak.directory / "secret").write_text(SECRET)
    (soak.directory / "work_handler.py").write_text(WORK)
    names = {"BROKER": soak.broker, "PATH": str(soak.directory / "celery.numbers")}
    lines = [f"{name} = {value!r}" for name, value in names.items()]
    (soak.directory / "soak_tasks.py").write_text("\n".join([*lines, CELERY]))
    soak.start_commands(max(5.0, duration_s / 240))
    soak.console = f"http://{soak.address_of('console')}"
    with ThreadPoolExecutor(8 + VIEWERS) as pool:
        doing = [
            pool.submit(soak.publish),
            pool.submit(soak.produce),
            pool.submit(soak.schedule),
            pool.submit(soak.send_tasks),
            pool.submit(soak.read_table, max(2.0, duration_s / 120)),
            pool.submit(soak.disturb, min(30.0, max(duration_s / 14, WITHOUT_FAULTS_S))),
            pool.submit(soak.churn, 2.0),
            pool.submit(soak.measure, duration_s / SAMPLES),
            *(pool.submit(soak.view, ("/", "/metrics")[n % 2]) for n in range(VIEWERS)),
        ]
        try:
            time.sleep(duration_s)
        finally:
            soak.over.set()
        for future in doing:
            future.result()
    soak.finish()
    print(f"{dict(soak.counts)} messages, {soak.faults} faults, {soak.views} views")
    print(f"{len(soak.readings)} readings of the table: {soak.readings[-1:]}")
    for name, costs in soak.costs.items():
        print(f"{name}: {costs[len(costs) // 4]}, at the end {costs[-1]}")
    arrived = soak.arrived()
    series = {"later": LATER, "celery.numbers": TASK}
    missing = {
        name: sorted(set(range(soak.counts[series.get(name, TOPIC)])) - set(numbers))[:10]
        for name, numbers in arrived.items()
    }
    assert not any(missing.values()), missing
    assert min(*soak.counts.values(), soak.faults, soak.views) > 0
    assert not (soak.directory / "dead").stat().st_size, "nsq work gave messages up"


@pytest.fixture
def soak(
    nsqlookupd: MakeLookupd,
    go_nsqd: MakeNsqd,
    serve: Callable[[GoNsqd], GoNsqd],
    data_path: DataPath,
    nsq_env: dict[str, str],
    tmp_path: Path,
) -> Iterator[Soak]:
    lookupd = nsqlookupd()
    soak = Soak(lookupd, [], nsq_env | {"NSQ_AUTH_SECRET": SECRET}, tmp_path)
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    soak.start("authd", *NSQ, "authd", "serve", "--users", str(users), "--listen", "127.0.0.1:0")
    flags = (
        f"-lookupd-tcp-address={lookupd.tcp_address}",
        f"-auth-http-address={soak.address_of('authd')}",
        "-msg-timeout=10s",
    )
    durable = EmbeddedNsqdProcess(data_path(), *flags, "--durable")
    soak.nsqds += [go_nsqd(*flags), serve(durable)]
    nsqds = " ".join(nsqd.tcp_address for nsqd in soak.nsqds)
    soak.environment["SOAK_NSQDS"] = nsqds
    yield soak
    for name in soak.commands:
        soak.kill(name)


def test_all_programs_together_for_a_moment(soak: Soak) -> None:
    soak_for(soak, 5)


@pytest.mark.slow
def test_all_programs_together_for_hours(soak: Soak) -> None:
    soak_for(soak, float(os.environ.get("NSQTOOLS_SOAK_S", "7200")))
    growth = {name: grown(costs) for name, costs in soak.costs.items()}
    assert not any(growth.values()), growth
