"""What a fork and the end of the interpreter mean to a producer, in programs of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from plugins.clients import bodies_in, run_program
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s


def test_a_pool_that_forks_publishes_with_the_producer_of_its_parent(nsqd: GoNsqd) -> None:
    """In a program of its own, which has no threads but ours at the fork."""
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
    done = run_program(program, nsqd.tcp_address)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [b"%03d" % number for number in range(40)] + [b"parent", b"parent again"]
    assert bodies_in(nsqd, "orders", len(expected)) == expected


def test_what_the_parent_has_under_way_is_not_waited_for_in_the_child(nsqd: GoNsqd) -> None:
    done = run_program(
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
                os._exit(4 if "forked" in str(error) else 5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        producer.stop(0)
        """,
        "127.0.0.1:1",
    )
    assert done.returncode == 0, done.stderr


def test_the_interpreter_says_at_its_end_what_was_not_published() -> None:
    done = run_program(
        """
        from nsqtools import ClientOptions, Producer
        options = ClientOptions(publish_timeout_s=0.5)
        producers = [Producer("127.0.0.1:1", options, retry_timeout_s=60) for _ in range(10)]
        for producer in [*producers, *producers]:
            producer.submit("end", [b"x"])
        """
    )
    assert done.returncode == 0
    assert done.stderr.count("the program ended with 2 messages unconfirmed") == 10
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_publishes_what_it_submitted(
    nsqd: GoNsqd, tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            from nsqtools import Producer

            def work(address, first):
                producer = Producer(address)
                for number in range(first, first + 20):
                    producer.submit("children", [b"%02d" % number])

            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[1])
                children = [
                    context.Process(target=work, args=(sys.argv[2], first)) for first in (0, 20)
                ]
                for child in children:
                    child.start()
                for child in children:
                    child.join()
                    assert child.exitcode == 0
            """
        )
    )
    subprocess.run(
        [sys.executable, program, method, nsqd.tcp_address], check=True, timeout=patience_s(30)
    )
    assert bodies_in(nsqd, "children", 40) == [b"%02d" % number for number in range(40)]
