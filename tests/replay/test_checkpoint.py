"""A checkpoint never passes a message that may not have arrived."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from plugins.archives import write_archive
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd

from nsqtools import ClientOptions
from nsqtools.archive.reader import find_archives
from nsqtools.protocol.message import WireMessage
from nsqtools.publish.publisher import PublishCounts, PublishOptions
from nsqtools.replay.checkpoint import Checkpoint
from nsqtools.replay.replay import MessageSelection, Replay

FAST = ClientOptions(dial_timeout_s=1, publish_timeout_s=3)
MESSAGES = [WireMessage(n * 10**9, 1, b"%016x" % n, b"body %d" % n) for n in range(1, 4)]


def replay_of(archive: Path, address: str, checkpoint: Path) -> Replay:
    return Replay(
        find_archives([archive]),
        [address],
        MessageSelection(),
        client_options=FAST,
        options=PublishOptions(retry_timeout_s=0.3),
        checkpoint=Checkpoint(checkpoint),
        on_damage=lambda path, problem: None,
    )


def test_messages_of_unknown_fate_are_not_noted_and_come_again(
    scripted_nsqd: ScriptedNsqd, nsqd: GoNsqd, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "a.gz", MESSAGES)
    checkpoint = tmp_path / "checkpoint.json"
    first = replay_of(archive, scripted_nsqd.address, checkpoint)
    worker = threading.Thread(target=first.run)
    worker.start()
    connection = scripted_nsqd.accept()
    connection.expect("IDENTIFY")
    connection.reply_identify()
    connection.expect("MPUB clicks")
    connection.close()
    worker.join(10)

    assert first.counts == PublishCounts(unknown=3)
    assert not checkpoint.exists() or json.loads(checkpoint.read_bytes())["done"] == {}

    again = replay_of(archive, nsqd.tcp_address, checkpoint)
    again.run()

    assert again.counts == PublishCounts(confirmed=3)
    assert nsqd.depth("clicks") == 3
    assert list(json.loads(checkpoint.read_bytes())["done"].values()) == [3]


def test_messages_that_could_not_be_sent_are_not_noted(
    unreachable_address: str, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "a.gz", MESSAGES)
    checkpoint = tmp_path / "checkpoint.json"
    job = replay_of(archive, unreachable_address, checkpoint)
    job.run()

    assert job.counts == PublishCounts(unsent=3)
    assert not checkpoint.exists()
