"""Directories that a killed nsqd left, damaged at random: only what was damaged is missing.

A database that starts in spite of damage logs it. A truncated log looks the same after a kill, so
no log is truncated here.
"""

import random
import shutil
from itertools import chain
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd
from plugins.disks import damaged, state_of
from plugins.examples import slow
from plugins.raw_client import RawClient, subscribed
from plugins.servers import DataPath, EmbeddedServer, Serve
from plugins.waiting import wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import decode

COUNT = 600
CONSUMED = 40


def left_by_a_kill(path: Path, serve: Serve) -> None:
    """Leave messages of many lengths in several files, the first of them read in part."""
    nsqd = serve(GoNsqd(path, "-mem-queue-size=0", "-max-bytes-per-file=20000"))
    nsqd.create_channel("t", "ch")
    chance = random.Random(7)
    texts = (b"%d " % n + b"0123456789abcdef" * chance.randrange(12) for n in range(COUNT))
    nsqd.publish("t", *texts)
    wait_until(lambda: nsqd.depth("t", "ch") == COUNT, what="the channel has them")
    with subscribed(nsqd.tcp_address, "t", "ch", ready=1) as client:
        for _ in range(CONSUMED):
            client.finish([client.read_message()])
    nsqd.kill()


def records_of(path: Path) -> list[bytes]:
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        found.append(data[at:end])
        at = end
    return found


@pytest.mark.real_nsqd
@pytest.mark.parametrize("times", [20, slow(200)])
def test_only_messages_within_a_damaged_record_are_missing(
    times: int, serve: Serve, data_path: DataPath, run_nsq: RunNsq, tmp_path: Path
) -> None:
    source = data_path()
    left_by_a_kill(source, serve)
    files = sorted(source.glob("t:ch.diskqueue.0*.dat"))
    assert len(files) > 3
    _, read, _ = (source / "t:ch.diskqueue.meta.dat").read_text().split()
    read_file, start = map(int, read.split(","))
    everything = {path.name: records_of(path) for path in files}
    written = everything | {
        path.name: [
            record for record in everything[path.name] if record in path.read_bytes()[start:]
        ]
        for path in files
        if int(path.name[-10:-4]) == read_file
    }
    assert sum(map(len, written.values())) >= COUNT - CONSUMED

    for seed in range(times):
        chance = random.Random(seed)
        path = tmp_path / str(seed)
        shutil.copytree(source, path)
        touched = set()
        for _ in range(chance.randrange(1, 4)):
            file = path / chance.choice(files).name
            noise = chance.randbytes(chance.choice((1, 1, 4, 30, 500)))
            change = (chance.choice(("flip", "zero", "insert", "cut")), chance.random(), noise)
            file.write_bytes(damaged(file.read_bytes(), [change]))
            touched.add(file)
        match chance.randrange(6):
            case 0:
                (path / "t:ch.diskqueue.meta.dat").unlink()
            case 1:
                file = chance.choice(sorted(touched))
                file.rename(f"{file}.bad")
            case 2:
                (path / "nsqd.dat").write_bytes(b"\0" * 100)
        state = state_of(path)

        archive = tmp_path / f"{seed}.log"
        done = run_nsq(["queue", "recover", path, "-o", archive, "--all", "-c", "ch"])
        lines = archive.read_bytes().splitlines()

        recovered = {(message.id, message.body) for message in map(decode, lines)}
        assert len(recovered) == len(lines)  # nothing twice
        for name, records in written.items():
            stored = next(path.glob(f"{name}*")).read_bytes()
            for record in records:
                if record in stored:
                    assert (record[14:30], record[30:]) in recovered, (
                        f"seed {seed}: {name} {done.err}"
                    )
        invented = recovered - {
            (record[14:30], record[30:]) for record in chain(*everything.values())
        }
        changed = sum(
            record not in next(path.glob(f"{name}*")).read_bytes()
            for name, records in written.items()
            for record in records
        )
        assert len(invented) <= changed + len(touched), f"seed {seed}"
        assert state_of(path) == state
        shutil.rmtree(path)


TOPICS = ("a", "b", "c")
NEIGHBORS = 150  # messages of a page, and messages reachable only through one page of the tree


def left_with_a_log(path: Path, serve: Serve) -> set[bytes]:
    """Leave a directory whose database and log both have messages; return their bodies."""
    nsqd = serve(EmbeddedNsqdProcess(path, "-durable"))
    want = set()
    for topic in TOPICS:
        nsqd.create_channel(topic, "ch")
    for number in range(15):
        if number == 10:
            nsqd.stop()  # a stop moves the log into the database
            nsqd.start()
        for topic in TOPICS:
            bodies = [b"%d %d " % (number, index) + topic.encode() * 300 for index in range(30)]
            nsqd.publish(topic, *bodies)
            want.update(bodies)
    nsqd.kill()
    return want


def damage(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    size = chance.choice((1, 1, 1, 16, 4096))
    at = chance.randrange(len(content)) // min(size, 16) * min(size, 16)
    if size == 1:
        content[at] ^= 1 << chance.randrange(8)
    else:
        content[at : at + size] = chance.randbytes(len(content[at : at + size]))
    path.write_bytes(content)


def consumed(nsqd: EmbeddedServer) -> set[bytes]:
    """Consume until no message is left."""
    bodies: set[bytes] = set()
    for topic in TOPICS:
        with subscribed(nsqd.tcp_address, topic, "ch", ready=200) as client:

            def take(client: RawClient = client, topic: str = topic) -> bool:
                stats = nsqd.channel_stats(topic, "ch")
                if count := stats["in_flight_count"]:
                    messages = client.read_messages(count)
                    bodies.update(message.body for message in messages)
                    client.finish(messages)
                return stats["depth"] + count == 0

            wait_until(take, what="all that is left")
    return bodies


@pytest.mark.parametrize("places", [6, slow(250)])
def test_damage_at_one_place_loses_few_messages_and_is_reported(
    data_path: DataPath, tmp_path: Path, serve: Serve, places: int
) -> None:
    whole, copy = data_path(), tmp_path / "damaged"
    want = left_with_a_log(whole, serve)
    large = 0
    for number in range(places):
        chance = random.Random(number)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        [database] = copy.glob("*.db")
        [log] = copy.glob("*.db-wal")
        path = chance.choice([database, database, log, log, copy / "nsqd.dat"])
        damage(path, chance)
        nsqd = EmbeddedServer(copy, "-durable", "-mem-queue-size=50", "-min-disk-free=1")
        try:
            serve(nsqd)
        except ConfigurationError as exc:
            if str(copy) not in str(exc):
                raise
            continue
        lost = want - consumed(nsqd)
        large += len(lost) > NEIGHBORS
        if lost:
            assert "DURABLE" in nsqd.log, (number, path)
            assert list(copy.glob("*.damaged.*")), (number, path)
        nsqd.stop()
    if places > 100:  # with few places, a page near the root of the tree weighs too much
        assert large <= places // 8
