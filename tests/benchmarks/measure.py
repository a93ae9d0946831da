"""Message rates as nsqd sees them: one yardstick for every program, whatever it prints.

A measurement asks nsqd's statistics every few milliseconds, and runs from the last answer that
shows nothing done to the first that shows all done. So the start-up of a program does not count,
and the error is at most two such intervals: take messages enough for a second or more.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks import bare_loop
from benchmarks.contestants import Contestant, Job
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

POLL_S = 0.01
STALLED_S = 10.0

BODY = b"x" * 200
BATCH_SIZE = 500

_job_numbers = itertools.count(1)


def drain_rate(
    nsqd: Nsqd, contestant: Contestant, messages: int, *, into_pipe: bool = False
) -> float:
    """Messages finished a second, while the output goes to /dev/null, or through a pipe to cat."""
    messages = contestant.portion(messages)
    with new_job(nsqd) as job:
        nsqd.create_channel(job.topic, job.channel)
        fill(nsqd, job, messages)

        def finished() -> int:
            channel = nsqd.channel_stats(job.topic, job.channel)
            unfinished: int = channel["depth"] + channel["in_flight_count"]
            return messages - unfinished

        with ExitStack() as programs:
            output: Any = subprocess.DEVNULL
            if into_pipe:
                cat = running(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                output = programs.enter_context(cat).stdin
            program = programs.enter_context(running(contestant.command(job), stdout=output))
            return messages / seconds_for(finished, messages, program)


def publish_rate(nsqd: Nsqd, contestant: Contestant, messages: int) -> float:
    """Lines published a second from a pipe; the program must end well and have sent exactly all."""
    messages = contestant.portion(messages)
    make_lines = ["sh", "-c", f"yes {BODY.decode()} | head -n {messages}"]
    with new_job(nsqd) as job:
        nsqd.create_topic(job.topic)

        def published() -> int:
            count: int = nsqd.topic_stats(job.topic)["message_count"]
            return count

        with (
            running(make_lines, stdout=subprocess.PIPE) as lines,
            running(contestant.command(job), stdin=lines.stdout) as program,
        ):
            seconds = seconds_for(published, messages, program)
            status = program.wait(STALLED_S)
        if status != 0 or published() != messages:
            raise RuntimeError(f"{contestant.name}: {published()} of {messages} published")
        return messages / seconds


def seconds_for(done: Callable[[], int], goal: int, program: subprocess.Popen[bytes]) -> float:
    began = last_progress = time.monotonic()
    before = 0
    while (now_done := done()) < goal:
        now = time.monotonic()
        if now_done == 0:
            began = now
        if now_done != before:
            before, last_progress = now_done, now
        if program.poll() or now - last_progress > STALLED_S:
            raise RuntimeError(f"{program.args!r} stopped at {now_done} of {goal} messages")
        time.sleep(POLL_S)
    return time.monotonic() - began


def fill(nsqd: Nsqd, job: Job, messages: int) -> None:
    """Put messages into the topic and wait until the channel has them all."""
    full, rest = divmod(messages, BATCH_SIZE)
    batches = itertools.repeat(bare_loop.packed([BODY] * BATCH_SIZE), full)
    last = [bare_loop.packed([BODY] * rest)] if rest else []
    bare_loop.publish(job.tcp_address, job.topic, [*batches, *last])
    wait_until(
        lambda: nsqd.depth(job.topic, job.channel) == messages,
        what="the channel to be filled",
        timeout_s=60,
    )


@contextmanager
def new_job(nsqd: Nsqd) -> Iterator[Job]:
    """A topic of its own, deleted afterwards to give its memory back."""
    address = nsqd.tcp_address.replace("[::]", "127.0.0.1")
    job = Job(address, topic=f"benchmark_{next(_job_numbers)}", channel="archive")
    yield job
    nsqd.post("/topic/delete", topic=job.topic)


@contextmanager
def running(command: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as a user would: without the settings that tests run under."""
    testing = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    environment = {name: value for name, value in os.environ.items() if name not in testing}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, **streams
    ) as program:
        try:
            yield program
        finally:
            program.kill()  # pynsq would take five seconds to end by itself
