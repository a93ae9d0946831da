"""TAB where the cluster or the machine is slow: nothing at first, and soon the names, from a file.

Nothing here is timed. The daemon answers only when it is let: what TAB offers before and after that
shows who waited for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.waiting import wait_until

STATS = {
    "version": "1.3.0",
    "health": "OK",
    "start_time": 1_790_000_000,
    "topics": [{"topic_name": "clicks", "channels": [], "depth": 0, "message_count": 0}],
    "memory": {},
    "producers": [],
}


class SlowNsqd(ThreadingHTTPServer):
    """The HTTP API of an nsqd that answers once ``may_answer`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.may_answer = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def option(self) -> str:
        return f"--nsqd-http-address=127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: SlowNsqd

    def do_GET(self) -> None:
        self.server.may_answer.wait()
        body = json.dumps(STATS if self.path.startswith("/stats") else {"version": "1.3.0"})
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())
        except OSError:
            pass  # who asked is gone

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def slow_nsqd() -> Iterator[SlowNsqd]:
    nsqd = SlowNsqd()
    yield nsqd
    nsqd.may_answer.set()
    nsqd.shutdown()
    nsqd.server_close()


def test_names_that_came_too_late_are_there_for_the_next_tab_and_need_no_daemon_then(
    slow_nsqd: SlowNsqd, run_nsq: RunNsq, nsq_env: dict[str, str]
) -> None:
    ask = ["__complete_line", "bash", f"nsq tail {slow_nsqd.option} -t ", ""]

    first = run_nsq(ask, own_process=True)  # it ends, although nobody answers
    slow_nsqd.may_answer.set()
    cache = Path(nsq_env["HOME"]) / ".cache/nsqtools"
    wait_until(
        lambda: any("clicks" in each.read_text() for each in cache.glob("names-????????")),
        what="the names that a process in the background asked for",
        timeout_s=30,
    )
    slow_nsqd.shutdown()
    slow_nsqd.server_close()
    kept = run_nsq(ask, own_process=True)

    assert (first.status, first.out.count(b"clicks"), first.err) == (0, 0, "")
    assert (kept.status, kept.out) == (0, b"words 0\nclicks\n")
