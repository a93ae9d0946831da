"""``nsq pub`` as a process: pipelines, counts, exit statuses, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.auth_server import AuthServer
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until


def to(nsqd: Nsqd, topic: str = "events") -> list[str]:
    return ["pub", "-t", topic, "--nsqd-tcp-address", nsqd.tcp_address]


def type_line(process: subprocess.Popen[bytes], line: bytes = b"line\n") -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def wait_for(nsqd: Nsqd, count: int) -> None:
    wait_until(
        lambda: nsqd.stats("events")["topics"] and nsqd.depth("events") == count,
        what="what was typed is published while the input stays open",
    )


def test_a_line_of_a_live_log_is_not_kept_waiting_and_an_interrupt_settles_it(
    spawn_nsq: SpawnNsq, nsqd: GoNsqd
) -> None:
    process = spawn_nsq(to(nsqd))
    for count in (1, 2):
        type_line(process)
        wait_for(nsqd, count)
    process.send_signal(signal.SIGINT)

    # the input stays open: communicate() would close it
    assert process.wait(patience_s(10)) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b"nsq: 2 confirmed, 0 rejected, 0 unknown, 0 unsent\n"


def test_a_record_is_sent_again_while_the_input_is_silent(
    spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = EmbeddedServer(tmp_path)
    type_line(spawn_nsq(to(nsqd)))
    time.sleep(1.0)  # it was tried at least once
    nsqd.start()
    try:
        wait_for(nsqd, 1)
    finally:
        nsqd.stop()


def test_it_gives_up_while_the_input_is_silent(spawn_nsq: SpawnNsq) -> None:
    address = ["--nsqd-tcp-address", "127.0.0.1:1"]
    process = spawn_nsq(["pub", "-t", "events", *address, "--retry-timeout", "0s"])
    type_line(process)

    assert process.wait(patience_s(10)) == 4


@pytest.mark.alone
def test_a_high_rate_is_kept(spawn_nsq: SpawnNsq, nsqd: GoNsqd, tmp_path: Path) -> None:
    """Low ones, to the message, are in tests/publish/test_publisher.py."""
    rate = lines = 100_000
    path = tmp_path / "lines"
    path.write_bytes(b"x\n" * lines)
    nsqd.create_topic("events")
    started = time.monotonic()
    process = spawn_nsq([*to(nsqd), "-f", str(path), "--rate", str(rate)])

    def published() -> int:
        count: int = nsqd.topic_stats("events")["message_count"]
        return count

    wait_until(published, what="publishing has begun")
    seen = time.monotonic()
    wait_until(lambda: published() == lines, what="all is published", timeout_s=10)
    ended = time.monotonic()

    assert process.wait(patience_s(10)) == 0
    # the first may be seen late, so the lower bound starts before it
    assert ended - started > 0.9
    assert ended - seen < patience_s(2)  # generous: the machine may be busy


def test_a_refused_secret_is_status_5_and_never_shown(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd], auth_server: AuthServer, tmp_path: Path
) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")

    without = run_nsq(to(nsqd), stdin=b"x\n")
    wrong = run_nsq([*to(nsqd), "--auth-secret-file", str(secret)], stdin=b"x\n")

    assert without.status == wrong.status == 5
    assert "requires authentication" in without.err
    assert "E_AUTH_FAILED" in wrong.err
    assert "hunter2" not in wrong.err
