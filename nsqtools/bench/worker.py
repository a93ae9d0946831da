"""The program of a worker process: it publishes or consumes, and sends its result.

A publisher sends batches as fast as nsqd confirms them, or on a schedule. With a rate each batch is
due at a fixed time, and its latency counts from then. Counting from the actual send would omit the
time that a batch waits behind a slow one (coordinated omission).

A consumer finishes every message and adds the word of its stamp to the checksum. It subscribes with
nothing in flight and raises RDY when the measurement begins, so that all consumers begin together.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from nsqtools.bench.bench_plan import (
    BACKLOG,
    HEAD_SIZE,
    BenchJob,
    BodyMaker,
    WorkerResult,
    first_word,
    has_stamp,
    read_stamps,
)
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import NsqError

SLEEP_S = 0.1  # between two checks for a stop
BACKLOG_SLEEP_S = 0.0002  # a fraction of the time that consumers need for a batch
BATCH_WAIT_S = 0.02


def main() -> None:
    """Do one job: receive it, answer that it is ready, receive the time to begin, send the result.

    The process ends when the measuring process does.
    """
    fileno, connections, counters = map(int, sys.argv[1:])
    connection: Connection[Any, Any] = Connection(fileno)
    logging.disable()  # the measuring process reports the error that is sent
    try:
        job = connection.recv()
        kind = LoadPublisher if job.publishes else LoadSubscriber
        work = kind(job, SharedCounts(connections, counters))
        connection.send(None)
        begin = connection.recv()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        connection.send(work.run(begin))
    except (EOFError, ConnectionError):
        os._exit(1)  # the measuring process has died
    except Exception as error:
        error.add_note(traceback.format_exc())  # for --debug
        connection.send(error)
    os._exit(0)  # without waiting for connections that do not answer


def _end_with(connection: Connection[Any, Any]) -> None:
    connection.poll(None)  # only the end of the stream can arrive now
    os._exit(1)


class LoadPublisher:
    """Publishes ``plan.count`` messages after the warm-up, or for ``plan.for_s``."""

    def __init__(self, job: BenchJob, counters: SharedCounts) -> None:
        self._job, self._plan, self._counters = job, job.plan, counters
        head = HEAD_SIZE if job.is_stamped else 0
        self._bodies = BodyMaker(job.plan.size, job.number, head)
        self._producer = Producer(job.nsqd_tcp_address, job.plan.producer_options)
        self._word = first_word(job.tag, job.number)
        self._rate = job.plan.rate / job.plan.connections
        self._measured_from = 0.0
        self._result = WorkerResult()
        self._error: NsqError | None = None

    def run(self, begin: float) -> WorkerResult:
        """Publish from the monotonic time ``begin`` on; the warm-up is not measured.

        Raises the error of the first publication that nsqd did not confirm.
        """
        plan, result = self._plan, self._result
        self._sleep_until(begin)
        self._measured_from = begin + plan.warm_up_s
        with self._producer:
            self._publish_between(begin, self._measured_from, None)
            began, cpu_s = time.monotonic(), time.process_time()
            ends_at = self._measured_from + plan.for_s if plan.for_s else None
            self._publish_between(self._measured_from, ends_at, plan.share(self._job.number))
        if self._error is not None:
            raise self._error
        result.cpu_s = time.process_time() - cpu_s
        result.cpu_messages = result.measured
        result.cpu_share = result.cpu_s / (time.monotonic() - began)
        return result

    def _publish_between(self, begin: float, ends_at: float | None, count: int | None) -> None:
        batch, published = self._plan.batch, 0
        while self._error is None and self._counters.may_publish:
            size = batch if count is None else min(batch, count - published)
            if size <= 0:
                return
            if self._job.is_stamped:
                self._wait_for_consumers(ends_at)
            now = time.monotonic()
            due = begin + published / self._rate if self._rate else now
            if ends_at is not None and max(due, now) >= ends_at:
                return
            if self._sleep_until(due):
                self._publish(size, due)
                published += size

    def _publish(self, size: int, due: float) -> None:
        if self._job.is_stamped:
            bodies = self._bodies.stamped(size, int(due * 1e9), self._word)
        else:
            bodies = self._bodies.batch(size)
        settled = partial(self._on_settled, due, self._word)
        self._word += size
        self._counters.published[self._job.number] += size
        try:
            self._producer.submit(self._job.topic, bodies, on_settled=settled)
        except NsqError as error:
            self._error = self._error or error

    def _on_settled(self, due: float, word: int, publication: Publication) -> None:
        """Record a publication. Runs on the I/O thread, in the order of publishing."""
        if publication.error is not None:
            self._error = self._error or publication.error
            return
        now = time.monotonic()
        result, count = self._result, len(publication.bodies)
        result.messages += count
        result.checksum += count * word + count * (count - 1) // 2
        if due >= self._measured_from:
            result.measured += count
            result.measured_bytes += sum(map(len, publication.bodies))
            began = due if self._rate else publication.submitted_at
            result.latencies.add(max(0.0, now - began) * 1000)
            result.ended_at = now

    def _wait_for_consumers(self, ends_at: float | None) -> None:
        """Wait until fewer than `BACKLOG` messages are unconsumed, or publishing has to end."""
        counters = self._counters
        while counters.unconsumed >= BACKLOG and counters.may_publish and self._error is None:
            if ends_at is not None and time.monotonic() >= ends_at:
                return
            time.sleep(BACKLOG_SLEEP_S)

    def _sleep_until(self, moment: float) -> bool:
        """Sleep until a monotonic time; return False if publishing was stopped meanwhile."""
        while (remaining_s := moment - time.monotonic()) > 0:
            if not self._counters.may_publish:
                return False
            time.sleep(min(remaining_s, SLEEP_S))
        return True


class LoadSubscriber:
    """Consumes until all consumers together have received the target.

    The constructor subscribes. Raises the error of the connection if it cannot.
    """

    def __init__(self, job: BenchJob, counters: SharedCounts) -> None:
        self._job = job
        self._counters = counters
        self._result = WorkerResult()
        self._consumer = Consumer(
            job.topic,
            job.channel,
            nsqd_tcp_addresses=job.nsqd_tcp_address,
            options=replace(job.plan.consumer_options, max_in_flight=0),
        )
        self._consumer.start(fail_fast=True)

    def run(self, begin: float) -> WorkerResult:
        """Consume from the monotonic time ``begin`` on, to the end or until asked to stop."""
        plan, counters, result = self._job.plan, self._counters, self._result
        time.sleep(max(0.0, begin - time.monotonic()))
        measured_from = begin + plan.warm_up_s
        # In e2e the publishers keep the time: consumers wait for the last messages.
        limit_s = None if self._job.is_stamped else plan.for_s
        cpu_s = time.process_time()
        self._consumer.set_max_in_flight(plan.consumer_options.max_in_flight)
        while counters.may_consume and sum(counters.consumed) < counters.target:
            if limit_s is not None and time.monotonic() >= measured_from + limit_s:
                break
            batch = self._consumer.next_batch(BATCH_WAIT_S)
            if batch is not None:
                self._count(batch, measured_from)
                batch.finish()
        result.cpu_s = time.process_time() - cpu_s
        result.cpu_messages = result.messages
        result.cpu_share = result.cpu_s / max(time.monotonic() - begin, 1e-9)
        self._consumer.stop()
        return result

    def _count(self, batch: Batch, measured_from: float) -> None:
        now_ns, job, result = time.monotonic_ns(), self._job, self._result
        now = now_ns / 1e9
        result.redelivered += sum([message.attempts > 1 for message in batch])
        bodies = [message.body for message in batch]
        if job.is_stamped and job.plan.topic is not None:  # other programs may publish there
            bodies = [body for body in bodies if has_stamp(body, job.tag)]
        result.messages += len(bodies)
        self._counters.consumed[job.number] += len(bodies)
        measured = len(bodies) if now >= measured_from else 0
        if job.is_stamped:
            times_ns, words = read_stamps(bodies)
            result.checksum += sum(words)
            from_ns = int(measured_from * 1e9)
            measured = 0
            for time_ns, count in Counter(times_ns).items():
                if time_ns >= from_ns:
                    result.latencies.add(max(0, now_ns - time_ns) / 1e6, count)
                    measured += count
        if measured:
            result.ended_at = now
            result.measured += measured
            size = sum(map(len, bodies))
            result.measured_bytes += round(size * measured / len(bodies))


# -- starting workers -----------------------------------------------------------------------------

# Workers are separate programs and not forks, so the caller's threads and its
# ``__main__`` do not matter. They run in their own session, since Ctrl-C at the terminal is for
# the measuring process alone: it asks them to end, and they end when it has died.

ANSWER_POLL_S = 0.1
BEGIN_AFTER_S = 0.02  # until each worker has read the time at which to begin
# Without -P a module in the current directory could replace ours.
WORKER = (sys.executable, "-P", "-c", "from nsqtools.bench.worker import main; main()")
UNKNOWN = (1 << 64) - 1


class SharedCounts:
    """Counters in shared memory: messages published and consumed, the target, and two stops.

    Another process opens the same memory by ``fileno``. Each worker writes only its own counter, so
    no lock is needed: an aligned write of eight bytes is atomic, and a reader sees the old value or
    the new one.

    ``published`` has the messages sent by each publisher, confirmed or not, and ``consumed`` the
    messages received by each consumer. ``target`` is the number to consume, `UNKNOWN` until the
    publishers have ended.
    """

    def __init__(self, connections: int, fileno: int | None = None) -> None:
        size = 8 * (3 + 2 * connections)
        is_first = fileno is None
        if fileno is None:
            with tempfile.TemporaryFile(prefix="nsq-bench-") as file:
                file.truncate(size)
                fileno = os.dup(file.fileno())
        self.fileno = fileno
        # target, stop publishing, stop consuming, then a counter for each worker
        self._cells = memoryview(mmap.mmap(fileno, size)).cast("Q")
        self.published = self._cells[3 : 3 + connections]
        self.consumed = self._cells[3 + connections :]
        if is_first:
            self.target = UNKNOWN

    @property
    def target(self) -> int:
        return self._cells[0]

    @target.setter
    def target(self, count: int) -> None:
        self._cells[0] = count

    @property
    def may_publish(self) -> bool:
        return not self._cells[1]

    @property
    def may_consume(self) -> bool:
        return not self._cells[2]

    def stop_publishing(self) -> None:
        """Ask the publishers to end. Callable from any thread, also after the measurement."""
        self._cells[1] = 1

    def stop_consuming(self) -> None:
        """Ask the consumers to end without the missing messages. Callable from any thread."""
        self._cells[2] = 1

    @property
    def unconsumed(self) -> int:
        """Messages that were sent and have not been consumed."""
        return sum(self.published) - sum(self.consumed)


class Crew:
    """One process for each of ``jobs``, started and ready. A context manager that ends them.

    ``on_poll`` is called ten times a second while the crew waits for answers, and may raise.
    """

    def __init__(
        self, jobs: Sequence[BenchJob], counters: SharedCounts, on_poll: Callable[[], None]
    ) -> None:
        self._on_poll = on_poll
        self._processes: dict[Connection[Any, Any], subprocess.Popen[bytes]] = {}
        try:
            for job in jobs:
                self._start(job, counters.fileno)
            self.results()
        except BaseException:
            self.end()
            raise

    def _start(self, job: BenchJob, counters: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._processes[ours] = subprocess.Popen(
                [*WORKER, str(theirs.fileno()), str(job.plan.connections), str(counters)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a stray print must not mix with the report
                pass_fds=[theirs.fileno(), counters],
                start_new_session=True,  # Ctrl-C must not reach the workers
            )
        _send(ours, job)

    def begin(self, at: float | None = None) -> float:
        """Have all begin at one monotonic time, by default as soon as possible; return it."""
        at = time.monotonic() + BEGIN_AFTER_S if at is None else at
        for connection in self._processes:
            _send(connection, at)
        return at

    def results(self) -> list[Any]:
        """Wait for the next answer of each worker. Raises the error that a worker sent."""
        answers: list[Any] = []
        pending = list(self._processes)
        while pending:
            ready = wait(pending, ANSWER_POLL_S)
            if not ready:
                self._on_poll()
            for connection in ready:
                assert isinstance(connection, Connection)
                answers.append(self._answer(connection))
                pending.remove(connection)
        return answers

    def _answer(self, connection: Connection[Any, Any]) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            status = self._processes[connection].wait()
            answer = NsqError(f"a worker process ended with status {status}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the workers that still run."""
        for connection, process in self._processes.items():
            process.kill()
            process.wait()
            connection.close()


def _send(connection: Connection[Any, Any], value: Any) -> None:
    # A worker that has ended left an answer or none: `_answer` reports either.
    with suppress(BrokenPipeError):
        connection.send(value)
