"""A producer that is made before a server forks its workers: each worker has its own connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

APPLICATION = """
import os
from nsqtools import ClientOptions, Producer

producer = Producer(os.environ["NSQD"], linger_s=0.002)
producer.publish("orders", b"before the fork")


def application(environ, start_response):
    body = b"%d %s" % (os.getpid(), environ["PATH_INFO"].encode())
    producer.publish("orders", body)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"%d" % os.getpid()]
"""


@contextmanager
def gunicorn(directory: Path, nsqd: GoNsqd, *flags: str) -> Iterator[str]:
    """A server with its application loaded before it forks; its address."""
    (directory / "application.py").write_text(APPLICATION)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        command = [sys.executable, "-m", "gunicorn", "--preload", "--bind"]
        command += [f"fd://{listener.fileno()}", "--worker-tmp-dir", str(directory), *flags]
        with subprocess.Popen(
            [*command, "--graceful-timeout", "20", "application:application"],
            cwd=directory,
            env={**os.environ, "NSQD": nsqd.tcp_address},
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
        ) as server:
            try:
                yield f"127.0.0.1:{listener.getsockname()[1]}"
                server.send_signal(signal.SIGTERM)
                _, stderr = server.communicate(timeout=patience_s(30))
                assert server.returncode == 0, stderr.decode()
                assert b"Traceback" not in stderr, stderr.decode()
            finally:
                server.kill()


def test_workers_of_gunicorn_publish_with_the_producer_that_was_loaded_before(
    nsqd: GoNsqd, tmp_path: Path
) -> None:
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    pids: set[bytes] = set()
    sent: list[bytes] = [b"before the fork"]
    with gunicorn(tmp_path, nsqd, "--workers=3", "--threads=2") as address:

        def ask() -> bool:
            """Return whether two workers have answered."""
            path = f"/{len(sent)}"
            with urlopen(f"http://{address}{path}", timeout=patience_s(10)) as response:
                pid = response.read()
            pids.add(pid)
            sent.append(pid + b" " + path.encode())
            return len(pids) >= 2 and len(sent) > 20

        wait_until(ask, what="answers of two workers", timeout_s=20)
    assert bodies_in(nsqd, "orders", len(sent)) == sorted(sent)
