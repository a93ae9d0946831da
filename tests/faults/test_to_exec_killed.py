"""``nsq to-exec`` and its commands killed again and again: nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL, IN_FLIGHT = "clicks", "run", 50
DEADLINE_S = patience_s(30.0)

# each appends its bodies to a file, and then says so
ONCE = ["--batch", "10", "--batch-wait", "50ms", "--", "sh", "-c", "exec cat >>$0"]
PERSISTENT = """
import json, os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
with open(sys.argv[2], "a") as file:
    file.write(f"{os.getpid()}\\n")
for line in sys.stdin:
    os.write(fd, json.loads(line)["body"].encode() + b"\\n")
    print("ok", flush=True)
"""


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize(
    ("messages", "kills"), [(200, 2), pytest.param(20_000, 10, marks=pytest.mark.slow)]
)
def test_killed_again_and_again_nothing_is_lost(
    quick_nsqd: EmbeddedServer,
    spawn_nsq: SpawnNsq,
    tmp_path: Path,
    messages: int,
    kills: int,
    is_persistent: bool,
) -> None:
    rng = random.Random(messages)
    nsqd, done, pids = quick_nsqd, tmp_path / "done", tmp_path / "pids"
    nsqd.create_channel(TOPIC, CHANNEL)
    done.touch()
    pids.touch()
    published = [b"%06d" % number for number in range(messages)]
    for begin in range(0, messages, 1000):
        nsqd.publish(TOPIC, *published[begin : begin + 1000])
    given = f"to-exec -t {TOPIC} -c {CHANNEL} --max-in-flight {IN_FLIGHT} --workers 2"
    given += f" --nsqd-tcp-address {nsqd.tcp_address} --rate {200 if messages < 1000 else 1500}"
    given += " -X reconnect_base=50ms"
    more = [*ONCE, str(done)]
    if is_persistent:
        more = ["--persistent", "--", "python3", "-c", PERSISTENT, str(done), str(pids)]
    before = len(published)
    process = spawn_nsq([*given.split(), *more])
    for number in range(kills):
        wait_until(
            lambda before=before: unfinished(nsqd, TOPIC, CHANNEL) < before,  # type: ignore[misc]
            what="progress",
            timeout_s=20,
        )
        threading.Event().wait(rng.uniform(0, 0.1))  # the random point
        if is_persistent and number % 2:
            for pid in pids.read_text().split()[-2:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        else:
            process.kill()
            process.wait(DEADLINE_S)
            process = spawn_nsq([*given.split(), *more])
        before = unfinished(nsqd, TOPIC, CHANNEL)
        if not before:
            break
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=90)
    found = Counter(done.read_bytes().split())
    doubled = sum(found.values()) - len(found)
    print(f"{kills} kills, {messages} messages, {doubled} came again")
    assert set(published) - set(found) == set(), "messages were lost"
    assert doubled <= kills * IN_FLIGHT
