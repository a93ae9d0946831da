"""INT and TERM: the first drains, the second leaves at once, handlers are put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from plugins.waiting import patience_s

from nsqtools.cli.running.runtime import SIGNALS, stopping

# Says "ready", then drains until stdin ends. The lock is what a consumer's stop() takes, too.
PROGRAM = """
import sys, threading
from nsqtools.cli.running.runtime import stopping

stopped, lock = threading.Event(), threading.Lock()

def stop():
    with lock:
        stopped.set()

with stopping(stop) as signals:
    with lock:
        print("ready", flush=True)
        while not signals.received:
            lock.locked()
    stopped.wait(30)
    print("draining", flush=True)
    sys.stdin.read()
print("drained", flush=True)
raise SystemExit(signals.status(otherwise=9))
"""


def test_the_first_signal_drains() -> None:
    """What leaves at once at the second is tried in test_tail.py and test_to_file.py."""
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "ready\n"

        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "draining\n"
        program.stdin.close()

        assert program.stdout.read() == "drained\n"
        assert program.wait(patience_s(30)) == 130


def test_stop_runs_on_another_thread_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    threads: list[threading.Thread] = []
    called = threading.Event()

    def stop() -> None:
        threads.append(threading.current_thread())
        called.set()

    with stopping(stop) as signals:
        assert signals.status(otherwise=7) == 7
        os.kill(os.getpid(), signal.SIGTERM)
        assert called.wait(patience_s(30))

    assert threads[0] is not threading.main_thread()
    assert signals.status(otherwise=7) == 143
    assert [signal.getsignal(number) for number in SIGNALS] == before
