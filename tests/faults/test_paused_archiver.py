"""`nsq to-file`, stopped for longer than msg_timeout, writes no message twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.waiting import patience_s, wait_until


def test_a_pause_of_the_archiver_doubles_no_row(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = quick_nsqd
    nsqd.create_channel("clicks", "archive")
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(tmp_path)]
    archiver = spawn_nsq(["to-file", "-t", "clicks", "-c", "archive", *place, "--format", "jsonl"])
    wait_until(
        lambda: nsqd.channel_stats("clicks", "archive")["clients"],
        what="the archiver",
        timeout_s=20,
    )
    os.kill(archiver.pid, signal.SIGSTOP)
    nsqd.publish("clicks", *[b"%d" % number for number in range(50)])
    wait_until(
        lambda: nsqd.channel_stats("clicks", "archive")["timeout_count"],
        what="messages that time out",
        timeout_s=20,
    )
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until(
        lambda: unfinished(nsqd, "clicks", "archive") == 0, what="an empty channel", timeout_s=20
    )
    archiver.terminate()
    _, stderr = archiver.communicate(timeout=patience_s(20))
    assert archiver.returncode == 143, stderr.decode()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    lines = [line for path in files for line in path.read_bytes().splitlines()]
    ids = [json.loads(line)["id"] for line in lines if line.startswith(b"{")]
    assert len(ids) == len(set(ids)) == 50
