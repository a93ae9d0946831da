"""Consumers and producers under test: started on request, ended with the test.

`consume` and `produce` take fields of ClientOptions as keywords, and other arguments in ``more``.
Their clients are aborted at the end of the test, which fails if this takes long. `handle` runs a
handler on its own threads, `in_background` any call. A test that is a coroutine runs in its own
event loop.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugins.daemons import Nsqd
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.waiting import patience_s

from nsqtools.client import consumer_io, in_flight_limit
from nsqtools.client.consumer import Consumer
from nsqtools.client.in_flight_limit import InFlightLimit
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer

TOPIC, CHANNEL = "clicks", "archive"
END_WITHIN_S = patience_s(5.0)

# Short timeouts and delays instead of the long defaults, and no waiting for a buffer.
OPTIONS = ClientOptions(
    output_buffer_timeout_s=0.025,
    reconnect_base_s=0.05,
    reconnect_max_s=0.2,
    lookupd_poll_interval_s=0.1,
    lookupd_poll_timeout_s=patience_s(2.0),
    drain_timeout_s=3.0,
    rdy_redistribute_interval_s=0.05,
)

Consume = Callable[..., Consumer]
Produce = Callable[..., Producer]
Dialog = Callable[..., tuple[Consumer, Connection]]
Handle = Callable[..., "Future[None]"]
InBackground = Callable[..., "Future[Any]"]


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop, with a timeout."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), patience_s(20)))
    return True


def bodies_in(nsqd: Nsqd, topic: str, count: int, channel: str = "check") -> list[bytes]:
    """Consume ``count`` messages of a topic; return their sorted bodies."""
    bodies: list[bytes] = []
    with Consumer(topic, channel, nsqd_tcp_addresses=[nsqd.tcp_address]) as consumer:
        for batch in consumer.batches(timeout_s=patience_s(5)):
            bodies += [message.body for message in batch]
            batch.finish()
            if len(bodies) >= count:
                break
    return sorted(bodies)


def take(consumer: Consumer, count: int) -> list[Message]:
    """Wait for ``count`` messages at least, and leave them unanswered."""
    messages: list[Message] = []
    while len(messages) < count:
        batch = consumer.next_batch(timeout_s=patience_s(10))
        assert batch is not None, f"{len(messages)} of {count} messages"
        messages += batch
    return messages


def fill(nsqd: Nsqd, count: int, channel: str = CHANNEL) -> list[bytes]:
    """Publish numbered messages to a channel of ``clicks``; return their bodies."""
    nsqd.create_channel(TOPIC, channel)
    bodies = [b"%d" % number for number in range(count)]
    nsqd.publish(TOPIC, *bodies)
    return bodies


def run_program(program: str, *arguments: str) -> str:
    """Run a program, which must succeed, in its own process; return its stderr.

    Leaked threads and sockets show there as warnings.
    """
    command = [sys.executable, "-W", "default", "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(30))
    assert done.returncode == 0, done.stderr
    return done.stderr


WORKER = """
import asyncio, json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from nsqtools import ClientOptions, Consumer, aio

way, count, handler_s, options, more, *addresses = sys.argv[1:]
count, handler_s, more = int(count), float(handler_s), json.loads(more)
more["options"] = ClientOptions(**json.loads(options))
log = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(message):
    if message.body.startswith(b"poison"):
        os._exit(9)
    os.write(log, message.body + b"\\n")

def handle(message):
    time.sleep(handler_s)
    note(message)

async def handle_in_task(message):
    await asyncio.sleep(handler_s)
    note(message)

def handle_in_pool(message):
    pool.submit(lambda: (handle(message), message.finish()))

Kind = aio.Consumer if way == "asyncio" else Consumer
consumer = Kind("clicks", "archive", nsqd_tcp_addresses=addresses, **more)
if way == "asyncio":
    asyncio.run(consumer.run(handle_in_task, concurrency=count))
elif way == "pool":
    with ThreadPoolExecutor(count) as pool:
        consumer.run(handle_in_pool, auto_answer=False)
elif way == "batches":
    for batch in consumer.batches(size=20, within_s=0.1):
        for message in batch:
            handle(message)
        batch.finish()
else:
    consumer.run(handle, workers=count)
"""


def start_worker(
    directory: Path,
    way: str,
    count: int,
    handler_s: float,
    addresses: Sequence[str],
    options: dict[str, Any] | None = None,
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that consumes in a ``way``, and logs handled messages to ``handled``."""
    arguments = [way, str(count), str(handler_s), json.dumps(options or {}), json.dumps(more)]
    command = [sys.executable, "-c", WORKER, *arguments, *addresses]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, cwd=directory, env=environment)


@pytest.fixture
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """Call a function on a thread; its future must have a result at the end of the test."""
    with ThreadPoolExecutor(max_workers=64) as threads:
        yield threads.submit


@pytest.fixture
def consume(in_background: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Consume]:
    """A factory of started consumers of ``clicks/archive``.

    They always use all of max_in_flight: neither the low limit of an unknown handler, nor a lower
    one after a test on a busy machine has left a message unanswered for a while.
    """
    monkeypatch.setattr(in_flight_limit, "START", 1 << 20)
    monkeypatch.setattr(InFlightLimit, "adapt", lambda *_, **answers: None)
    with ExitStack() as consumers:

        def make(
            nsqd: str | Sequence[str] = (),
            *,
            lookupd: str | Sequence[str] = (),
            topic: str = TOPIC,
            fail_fast: bool = False,
            started: bool = True,
            more: dict[str, Any] | None = None,
            **options: Any,
        ) -> Consumer:
            consumer = Consumer(
                topic,
                CHANNEL,
                nsqd_tcp_addresses=nsqd,
                lookupd_http_addresses=lookupd,
                options=replace(OPTIONS, **options),
                **(more or {}),
            )
            consumers.callback(end, consumer)
            if started:
                consumer.start(fail_fast=fail_fast)
            return consumer

        yield make


def end(consumer: Consumer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_io, "STEP_TIMEOUT_S", 0.05)  # a scripted nsqd does not answer CLS
        consumer.abort()
        assert consumer.stop(timeout_s=END_WITHIN_S), "the consumer did not stop in time"


@pytest.fixture
def handle(consume: Consume, in_background: Callable[..., Future[None]]) -> Handle:
    """Run a handler until the consumer stops: ``handle(consumer, handler, workers=1)``."""

    return lambda consumer, handler, workers=1: in_background(
        consumer.run, handler, workers=workers
    )


@pytest.fixture
def dialog(scripted_nsqd: ScriptedNsqd, consume: Consume) -> Dialog:
    """A consumer and the other end of its connection: ``consumer, conn = dialog("RDY 200")``."""

    def begin(ready: str = "", **options: Any) -> tuple[Consumer, Connection]:
        consumer = consume(scripted_nsqd.address, **options)
        return consumer, scripted_nsqd.subscribed(ready)

    return begin


@pytest.fixture
def produce() -> Iterator[Produce]:
    with ExitStack() as producers:

        def make(
            nsqd: str | Sequence[str] | None = None,
            *,
            lookupd: str | Sequence[str] = (),
            more: dict[str, Any] | None = None,
            **options: Any,
        ) -> Producer:
            producer = Producer(
                nsqd, replace(OPTIONS, **options), lookupd_http_addresses=lookupd, **(more or {})
            )
            # does not wait for unfinished publishes of a test
            producers.callback(producer.stop, 0.1)
            return producer

        yield make
