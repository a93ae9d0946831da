"""Directories that a killed nsqd left, damaged at random: only what was damaged is missing.

A database that starts nevertheless says so. Not told from a kill is a log that was cut off, so none
is cut here.
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
        path.name: [each for each in everything[path.name] if each in path.read_bytes()[start:]]
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
            some = chance.randbytes(chance.choice((1, 1, 4, 30, 500)))
            change = (chance.choice(("flip", "zero", "insert", "cut")), chance.random(), some)
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
        before = state_of(path)

        archive = tmp_path / f"{seed}.log"
        done = run_nsq(["queue", "recover", path, "-o", archive, "--all", "-c", "ch"])
        lines = archive.read_bytes().splitlines()

        found = {(each.id, each.body) for each in map(decode, lines)}
        assert len(found) == len(lines)  # nothing twice
        for name, records in written.items():
            stored = next(path.glob(f"{name}*")).read_bytes()
            for each in records:
                if each in stored:
                    assert (each[14:30], each[30:]) in found, f"seed {seed}: {name} {done.err}"
        invented = found - {(each[14:30], each[30:]) for each in chain(*everything.values())}
        changed = sum(
            each not in next(path.glob(f"{name}*")).read_bytes()
            for name, records in written.items()
            for each in records
        )
        assert len(invented) <= changed + len(touched), f"seed {seed}"
        assert state_of(path) == before
        shutil.rmtree(path)


TOPICS = ("a", "b", "c")
NEIGHBORS = 150  # messages of a page, and of those that only a page of the tree leads to


def left_with_a_log(path: Path, serve: Serve) -> set[bytes]:
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
    if size == 1:
        content[at] ^= 1 << chance.randrange(8)
    else:
        content[at : at + size] = chance.randbytes(len(content[at : at + size]))
    path.write_bytes(content)


def consumed(nsqd: EmbeddedServer) -> set[bytes]:
    """Take what comes until nothing is left."""
    found: set[bytes] = set()
    for topic in TOPICS:
        with subscribed(nsqd.tcp_address, topic, "ch", ready=200) as client:

            def take(client: RawClient = client, topic: str = topic) -> bool:
                stats = nsqd.channel_stats(topic, "ch")
                if count := stats["in_flight_count"]:
                    messages = client.read_messages(count)
                    found.update(each.body for each in messages)
                    client.finish(messages)
                return stats["depth"] + count == 0

            wait_until(take, what="all that is left")
    return found


@pytest.mark.parametrize("places", [6, slow(250)])
def test_a_damaged_place_loses_little_and_says_so(
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
    if places > 100:  # a page near the root of the tree is in few of many places only
        assert large <= places // 8
