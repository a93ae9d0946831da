"""`nsq to-file`, stopped for longer than msg_timeout, writes no message twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from plugins.archives import CHANNEL, TOPIC, ended, messages_of, to_file, wait_until_archived
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.waiting import wait_until


def test_a_pause_of_the_archiver_doubles_no_row(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    archiver = spawn_nsq(to_file(nsqd.tcp_address, tmp_path))
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["clients"], what="the archiver", timeout_s=20
    )
    os.kill(archiver.pid, signal.SIGSTOP)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(50)])
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"],
        what="messages that time out",
        timeout_s=20,
    )
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until_archived(nsqd)
    ended(archiver)
    ids = [message["id"] for message in messages_of(tmp_path)]
    assert len(ids) == len(set(ids)) == 50
