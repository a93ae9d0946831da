"""The end of programs: no answer is lost, no message stays in flight, no thread hangs."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, InBackground, bodies_in, fill, run_program
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client import handling

COUNT = 300
STATE_CLOSING = 4  # as defined by nsqd

BEGINNING = """
import os, signal, sys, time
from nsqtools import Consumer
from nsqtools.client.options import ClientOptions
count = 0
def handle(message):
    print("handled", flush=True)
    time.sleep(0.02)
options = ClientOptions(output_buffer_timeout_s=0.025)
consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1], options=options)
"""

NEVER_RETURNS = """
def stuck(message):
    print("stuck", flush=True)
    while True:
        try:
            time.sleep(0.1)  # Python 3.14 may sleep on where a signal comes just before
        except Exception:
            pass
"""


@contextmanager
def program(nsqd: GoNsqd, text: str) -> Iterator[subprocess.Popen[str]]:
    fill(nsqd, COUNT)
    command = [sys.executable, "-c", BEGINNING + textwrap.dedent(text), nsqd.tcp_address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def left(nsqd: GoNsqd) -> tuple[int, int]:
    """Return the depth, and the number of messages that the next consumer would wait for."""
    # the program has ended, but nsqd may still read its last commands
    wait_until(lambda: not nsqd.channel_stats(TOPIC, CHANNEL)["client_count"], what="no client")
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    return stats["depth"] + stats["deferred_count"], stats["in_flight_count"]


@pytest.mark.parametrize(
    "text",
    [
        "consumer.run(handle, signals=False)",
        "for m in consumer: handle(m); m.finish()",
        "with consumer:\n    for m in consumer: handle(m); m.finish()",
        "for b in consumer.batches(): handle(b[0]); b.finish()",
    ],
    ids=["run without signals", "a loop", "a loop in with", "batches"],
)
def test_after_an_interrupt_no_message_stays_in_flight(nsqd: GoNsqd, text: str) -> None:
    with program(nsqd, text) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=patience_s(20))
    assert process.returncode == -signal.SIGINT
    assert left(nsqd)[1] == 0


ASYNCIO = """
import asyncio
from nsqtools import aio
async def handle_in_task(message):
    print("handled", flush=True)
    await asyncio.sleep(0.05)
consumer = aio.Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1])
asyncio.run(consumer.run(handle_in_task))
"""
DRAINS = {
    "consumer.run(handle, workers=1)": signal.SIGTERM,
    "consumer.run(handle, workers=4)": signal.SIGINT,
    ASYNCIO: signal.SIGINT,
}


@pytest.mark.parametrize("text", DRAINS, ids=["one", "four", "asyncio"])
def test_a_worker_drains_at_a_signal(nsqd: GoNsqd, text: str) -> None:
    with program(nsqd, f"{text}\nprint('over')") as process:
        first = process.stdout.readline()
        process.send_signal(DRAINS[text])
        # not communicate(), which loses bytes that readline() has read beyond the line
        out, err = process.stdout.read(), process.stderr.read()
        status = process.wait(patience_s(20))
    assert (status, err) == (0, "")
    assert out.endswith("over\n")
    assert left(nsqd) == (COUNT - (first + out).count("handled"), 0)


@pytest.mark.parametrize(
    "text",
    [
        "for m in consumer:\n    m.finish(); count += 1\n    if count == 10: break",
        "with consumer:\n    for m in consumer:\n        m.finish(); count += 1\n"
        "        if count == 10: raise ValueError",
        """
        import multiprocessing
        def consume():
            consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1])
            for count, message in enumerate(consumer, 1):
                message.finish()
                if count == 10: break
        child = multiprocessing.get_context("fork").Process(target=consume)
        child.start()
        child.join()
        """,
        # the program's name for the consumer is deleted before the answers are sent
        "def main():\n    global consumer\n    mine = consumer\n    del consumer\n"
        "    for count, m in enumerate(mine, 1):\n        m.finish()\n        if count == 10: break"
        "\nmain()",
    ],
    ids=["without with", "an exception", "a child of multiprocessing", "the last reference"],
)
def test_finishes_are_sent_before_the_interpreter_ends(nsqd: GoNsqd, text: str) -> None:
    with program(nsqd, textwrap.dedent(text)) as process:
        process.communicate(timeout=patience_s(20))
    assert left(nsqd) == (COUNT - 10, 0)


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_second_signal_ends_stuck_handlers(nsqd: GoNsqd, workers: int, number: int) -> None:
    with program(nsqd, NEVER_RETURNS + f"consumer.run(stuck, workers={workers})") as process:
        process.stdout.readline()
        process.send_signal(number)
        stats = partial(nsqd.channel_stats, TOPIC, CHANNEL)
        wait_until(lambda: stats()["clients"][0]["state"] == STATE_CLOSING, what="the first CLS")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(number)
        process.communicate(timeout=patience_s(20))
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert left(nsqd) == (COUNT, 0)


def test_a_signal_sent_twice_in_a_moment_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) signals the process and then its process group."""
    monkeypatch.setattr(handling, "SIGNAL_DEBOUNCE_S", 600.0)
    calls: list[str] = []
    with handling.StopSignals(
        True, stop=lambda: calls.append("stop"), end=lambda: calls.append("end")
    ):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["stop"]


def test_a_signal_handler_of_the_program_is_kept(nsqd: GoNsqd) -> None:
    text = """
    signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), consumer.begin_stop()))
    consumer.run(handle)
    """
    with program(nsqd, text) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "mine\n" in process.stdout.read()
        assert process.wait(patience_s(20)) == 0
    assert left(nsqd)[1] == 0


def test_leaving_the_block_requeues_messages(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground
) -> None:
    fill(nsqd, 10)
    consumer = consume(nsqd.tcp_address, drain_timeout_s=3600)

    def leave() -> None:
        with consumer:
            next(iter(consumer)).touch()

    in_background(leave).result(patience_s(10))
    assert left(nsqd) == (10, 0)


def test_a_stop_within_the_block_waits_for_answers(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground, caplog: pytest.LogCaptureFixture
) -> None:
    fill(nsqd, 1)
    consumer = consume(nsqd.tcp_address, drain_timeout_s=3600)

    def leave() -> None:
        with consumer:
            consumer.begin_stop()

    [message] = consumer.next_batch(patience_s(5)) or []
    leaving = in_background(leave)
    wait_until(lambda: "at most for 1 unanswered message" in caplog.text, what="the reason to wait")
    assert not leaving.done()
    assert message.finish()
    leaving.result(patience_s(10))
    assert left(nsqd) == (0, 0)


# -- producers after a fork, and at the end of the interpreter -------------------------------------


def test_forked_workers_publish_with_an_inherited_producer(nsqd: GoNsqd) -> None:
    program = """
        import multiprocessing, os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from nsqtools import Producer
        producer = Producer(sys.argv[1])
        producer.publish("orders", b"parent")
        def task(number):
            producer.publish("orders", b"%03d" % number)
            return os.getpid()
        with multiprocessing.get_context("fork").Pool(4, maxtasksperchild=5) as pool:
            pids = set(pool.map(task, range(40), chunksize=1))
            assert len(pids) >= 8, pids  # each child makes five
            pool.close()
            pool.join()
        producer.publish("orders", b"parent again")
        producer.stop()  # and with it the thread, which a later fork finds ended
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        """
    assert run_program(program, nsqd.tcp_address) == ""
    expected = [b"%03d" % number for number in range(40)] + [b"parent", b"parent again"]
    assert bodies_in(nsqd, "orders", len(expected)) == expected


def test_a_child_does_not_wait_for_publishes_of_its_parent() -> None:
    run_program(
        """
        import os, signal, sys, warnings
        from nsqtools import Producer, PublishUnknown
        warnings.simplefilter("ignore", DeprecationWarning)
        signal.alarm(20)
        producer = Producer(sys.argv[1], retry_timeout_s=60)
        publication = producer.submit("forked", [b"x"])
        pid = os.fork()
        if not pid:
            try:
                publication.wait()
                os._exit(3)
            except PublishUnknown as error:
                os._exit(4 if "parent" in str(error) else 5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        producer.stop(0)
        """,
        "127.0.0.1:1",
    )


def test_unpublished_messages_are_logged_at_exit() -> None:
    log = run_program(
        """
        from nsqtools import ClientOptions, Producer
        options = ClientOptions(publish_timeout_s=0.5)
        producers = [Producer("127.0.0.1:1", options, retry_timeout_s=60) for _ in range(10)]
        for producer in [*producers, *producers]:
            producer.submit("end", [b"x"])
        class Late:
            def __init__(self):
                self.producer = Producer("127.0.0.1:1")
            def __del__(self):
                self.producer.publish("end", b"x")
        late = Late()
        """
    )
    assert "can't create new thread at interpreter shutdown" in log
    assert log.count("the program ended with 2 messages unconfirmed") == 10
    assert "127.0.0.1:1" in log


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_publishes_its_submitted_messages(
    nsqd: GoNsqd, tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            from nsqtools import Producer

            def work(first):
                producer = Producer(sys.argv[2])
                for number in range(first, first + 20):
                    producer.submit("children", [b"%02d" % number])
                    Producer(sys.argv[2]).start()
                assert len(multiprocessing.util._finalizer_registry) < 20  # one is for all

            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[1])
                children = [context.Process(target=work, args=(first,)) for first in (0, 20)]
                for child in children:
                    child.start()
                for child in children:
                    child.join()
                    assert child.exitcode == 0
            """
        )
    )
    command = [sys.executable, program, method, nsqd.tcp_address]
    subprocess.run(command, check=True, timeout=patience_s(30))
    assert bodies_in(nsqd, "children", 40) == [b"%02d" % number for number in range(40)]


def test_a_publish_in_a_later_atexit_function_is_not_lost(nsqd: GoNsqd) -> None:
    """An example is a log handler that publishes, because logging registers its end at import."""
    program = """
        import atexit, sys
        def publish():
            try:
                producer = Producer(sys.argv[1])
                for _ in range(5):
                    producer.submit("clicks", [b"x"])
            except PublishNotSent:  # since Python 3.12 no thread can be started then
                print("not sent", file=sys.stderr)
        atexit.register(publish)
        from nsqtools import Producer, PublishNotSent
        """
    nsqd.create_topic(TOPIC)
    is_refused = "not sent" in run_program(program, nsqd.tcp_address)
    assert nsqd.topic_stats(TOPIC)["message_count"] == (0 if is_refused else 5)
