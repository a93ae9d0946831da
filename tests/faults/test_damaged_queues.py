"""Directories that a killed Go nsqd left, damaged at random: only what was damaged is missing."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd
from plugins.damage import damaged
from plugins.raw_client import RawClient
from plugins.servers import DataPath, Serve
from plugins.waiting import wait_until

from nsqtools.records.envelope import decode

pytestmark = pytest.mark.real_nsqd

COUNT = 600
CONSUMED = 40


def left_by_a_kill(path: Path, serve: Serve) -> None:
    """Leave messages of many lengths in several files, the first of them read in part."""
    nsqd = serve(GoNsqd(path, "-mem-queue-size=0", "-max-bytes-per-file=20000"))
    nsqd.create_channel("t", "ch")
    chance = random.Random(7)
    texts = (
        b"%d " % number + b"0123456789abcdef" * chance.randrange(12) for number in range(COUNT)
    )
    nsqd.publish("t", *texts)
    wait_until(lambda: nsqd.depth("t", "ch") == COUNT, what="the channel has them")
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1)
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


def state_of(directory: Path) -> dict[str, bytes]:
    return {each.name: hashlib.sha256(each.read_bytes()).digest() for each in directory.iterdir()}


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_only_messages_within_a_damaged_record_are_missing(
    times: int, serve: Serve, data_path: DataPath, run_nsq: RunNsq, tmp_path: Path
) -> None:
    source = data_path()
    left_by_a_kill(source, serve)
    files = sorted(source.glob("t:ch.diskqueue.0*.dat"))
    assert len(files) > 3
    position = (source / "t:ch.diskqueue.meta.dat").read_text().split("\n")[1].split(",")
    read_file, start = int(position[0]), int(position[1])
    written: dict[str, list[bytes]] = {}
    for path in files:
        records = records_of(path)
        if int(path.name[-10:-4]) == read_file:
            unread = path.read_bytes()[start:]
            records = [each for each in records if each in unread]
        written[path.name] = records
    everything = {each for path in files for each in records_of(path)}
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
        invented = found - {(each[14:30], each[30:]) for each in everything}
        changed = sum(
            each not in next(path.glob(f"{name}*")).read_bytes()
            for name, records in written.items()
            for each in records
        )
        assert len(invented) <= changed + len(touched), f"seed {seed}"
        assert state_of(path) == before
        shutil.rmtree(path)
