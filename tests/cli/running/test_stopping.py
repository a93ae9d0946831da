"""INT and TERM: handlers are put back, and what stops the work may take locks.

That the first drains and the second leaves at once is in test_tail.py and test_to_file.py.
"""

from __future__ import annotations

import os
import signal
import threading

from plugins.waiting import patience_s

from nsqtools.cli.running.runtime import SIGNALS, stopping


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
