"""`nsq to-file`, stopped for longer than something may take, as on a machine that stands still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from plugins.archives import CHANNEL, TOPIC, ended, messages_of, to_file, wait_until_archived
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.network import TO_CLIENT, Proxy
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


def test_a_pause_of_the_archiver_while_it_connects_does_not_end_it(
    quick_nsqd: EmbeddedServer,
    proxy_to: Callable[[str], Proxy],
    spawn_nsq: SpawnNsq,
    tmp_path: Path,
) -> None:
    """A machine that stands still stops nsqd, too, which then answers when the time is over."""
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    proxy = proxy_to(nsqd.tcp_address)
    proxy.pause(TO_CLIENT)
    archiver = spawn_nsq(to_file(proxy.address, tmp_path, "-X", "dial_timeout=100ms"))
    wait_until(lambda: "desired protocol magic" in nsqd.log, what="the archiver", timeout_s=20)
    os.kill(archiver.pid, signal.SIGSTOP)
    time.sleep(7)  # a handshake may take 5 s
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until(
        lambda: archiver.poll() is not None or nsqd.log.count("desired protocol magic") > 1,
        what="a second try",
    )
    proxy.resume(TO_CLIENT)
    wait_until_archived(nsqd)
    ended(archiver)
    assert [message["body"] for message in messages_of(tmp_path)] == [b"x"]
