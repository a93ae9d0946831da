"""Damaged files of ``--durable``: it starts, or says what to do; little is lost, nothing silently.

Not told from a kill is a log that was cut off, so no file is cut here.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from plugins.daemons import EmbeddedNsqdProcess
from plugins.embedded import EmbeddedServer
from plugins.raw_client import RawClient
from plugins.servers import DataPath, Serve
from plugins.waiting import wait_until

from nsqtools.errors import ConfigurationError

TOPICS = ("a", "b", "c")
NEIGHBORS = 150  # messages of a page, and of those that only a page of the tree leads to


def left_by_a_kill(path: Path, serve: Serve) -> set[bytes]:
    """Leave a directory whose database and log both have messages; return those."""
    nsqd = serve(EmbeddedNsqdProcess(path, "-durable"))
    want = set()
    for topic in TOPICS:
        nsqd.create_channel(topic, "ch")
    for number in range(15):
        if number == 10:
            nsqd.stop()  # which brings the log into the file
            nsqd.start()
        for topic in TOPICS:
            bodies = [b"%d %d " % (number, each) + topic.encode() * 300 for each in range(30)]
            nsqd.publish(topic, *bodies)
            want.update(bodies)
    nsqd.kill()
    return want


def damage(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    size = chance.choice((1, 1, 1, 16, 4096))
    at = chance.randrange(len(content)) // min(size, 16) * min(size, 16)
    before = content[at : at + size]
    while content[at : at + size] == before:
        new = before[0] ^ 1 << chance.randrange(8)
        content[at : at + size] = bytes([new]) if size == 1 else chance.randbytes(len(before))
    path.write_bytes(content)


def consumed(nsqd: EmbeddedServer) -> set[bytes]:
    """Take what comes until nothing is left."""
    found: set[bytes] = set()
    for topic in TOPICS:
        with RawClient(nsqd.tcp_address) as client:
            client.subscribe(topic, "ch", ready=200)

            def take(client: RawClient = client, topic: str = topic) -> bool:
                stats = nsqd.channel_stats(topic, "ch")
                if count := stats["in_flight_count"]:
                    messages = client.read_messages(count)
                    found.update(each.body for each in messages)
                    client.finish(messages)
                return stats["depth"] + count == 0

            wait_until(take, what="all that is left")
    return found


@pytest.mark.parametrize("places", [6, pytest.param(250, marks=pytest.mark.slow)])
def test_a_damaged_place_loses_little_and_says_so(
    data_path: DataPath, tmp_path: Path, serve: Serve, places: int
) -> None:
    whole, damaged = data_path(), tmp_path / "damaged"
    want = left_by_a_kill(whole, serve)
    refusals: list[str] = []
    large = 0
    for number in range(places):
        chance = random.Random(number)
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        [database] = damaged.glob("*.db")
        [log] = damaged.glob("*.db-wal")
        path = chance.choice([database, database, log, log, damaged / "nsqd.dat"])
        damage(path, chance)
        nsqd = EmbeddedServer(damaged, "-durable", "-mem-queue-size=50", "-min-disk-free=1")
        try:
            nsqd.start()
        except ConfigurationError as exc:
            refusals.append(str(exc))
            continue
        try:
            lost = want - consumed(nsqd)
            large += len(lost) > NEIGHBORS
            if lost:
                assert "DURABLE" in nsqd.log, (number, path)
                assert list(damaged.glob("*.damaged.*")), (number, path)
        finally:
            nsqd.stop()
    if places > 100:  # a page near the root of the tree is in few of many places only
        assert large <= places // 8
    assert all(str(damaged) in each for each in refusals)
