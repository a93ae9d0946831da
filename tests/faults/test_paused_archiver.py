"""`nsq to-file`, stopped for longer than msg_timeout, writes no message twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until


def test_a_pause_of_the_archiver_doubles_no_row(
    go_nsqd: Callable[..., GoNsqd], tmp_path: Path
) -> None:
    nsqd = go_nsqd("--msg-timeout=2s")
    nsqd.create_channel("clicks", "archive")
    archiver = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nsqtools",
            "to-file",
            "-t",
            "clicks",
            "-c",
            "archive",
            "--nsqd-tcp-address",
            nsqd.tcp_address,
            "--output-dir",
            str(tmp_path),
            "--format",
            "jsonl",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: nsqd.channel_stats("clicks", "archive")["clients"],
            what="the archiver",
            timeout_s=20,
        )
        os.kill(archiver.pid, signal.SIGSTOP)
        nsqd.publish("clicks", *[b"%d" % number for number in range(50)])
        wait_until(  # nsqd looks for timeouts in a new channel after five seconds
            lambda: nsqd.channel_stats("clicks", "archive")["timeout_count"],
            what="messages that time out",
            timeout_s=20,
        )
        os.kill(archiver.pid, signal.SIGCONT)
        wait_until(
            lambda: (
                not any(
                    nsqd.channel_stats("clicks", "archive")[name]
                    for name in ("depth", "in_flight_count", "deferred_count")
                )
            ),
            what="an empty channel",
            timeout_s=20,
        )
        archiver.terminate()
        assert archiver.wait(patience_s(20)) == 143
    finally:
        archiver.kill()
        archiver.wait()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    lines = [line for path in files for line in path.read_bytes().splitlines()]
    ids = [json.loads(line)["id"] for line in lines if line.startswith(b"{")]
    assert len(ids) == len(set(ids)) == 50
