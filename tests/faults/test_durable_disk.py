"""``nsq nsqd --durable`` on a disk that has only what was synced, fails a sync, or is full.

The disk is a library that is preloaded, because SQLite calls the system itself; it needs a C
compiler.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.durable_load import OFTEN, Load
from plugins.daemons import EmbeddedNsqdProcess
from plugins.raw_client import RawClient, mpub
from plugins.servers import Serve
from plugins.waiting import wait_until

SOURCE = Path(__file__).with_name("unsynced_disk.c")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("disk") / "unsynced_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, SOURCE], check=True)
    return library


class OnSuchADisk(EmbeddedNsqdProcess):
    """Its `shadow` is what the disk has."""

    def __init__(self, data_path: Path, library: Path, shadow: Path) -> None:
        super().__init__(data_path, "-durable", "-mem-queue-size=20", "-min-disk-free=1")
        self.shadow = shadow
        self._library = library

    def _command(self) -> list[str | Path]:
        disk = [f"LD_PRELOAD={self._library}", f"SHADOW={self.shadow}", f"DISK={self.data_path}"]
        return ["env", *disk, sys.executable, "-c", OFTEN]

    def lose_power(self) -> None:
        self.kill()
        shutil.rmtree(self.data_path)
        shutil.copytree(self.shadow, self.data_path, ignore=lambda *_: {"fail", "full"})
        for path in self.data_path.glob("*.copying"):
            path.unlink()


class DiskLoad(Load):
    """A publisher and a consumer of ``t:ch`` until the nsqd is gone."""

    def __init__(self, nsqd: OnSuchADisk, name: int, chance: random.Random) -> None:
        super().__init__(nsqd)
        self.refused = 0
        self._name, self._chance = name, chance
        self.start(self._publish, self._consume)

    def _publish(self, client: RawClient) -> None:
        for number in range(1_000_000):
            bodies = [
                b"%d %d %d %d" % (self._name, self.refused, number, each) * 5 for each in range(7)
            ]
            client.send(mpub("t", bodies))
            if client.read()[1] != b"OK":
                self.refused += 1
                return
            self.confirmed.update(bodies)

    def _consume(self, client: RawClient) -> None:
        client.subscribe("t", "ch", ready=5)
        while True:
            message = client.read_message()
            if self._chance.random() < 0.7:
                self.finished.add(message.body)
                client.finish([message])
            else:
                client.send(b"REQ %b %d\n" % (message.id, self._chance.choice((0, 30))))


@pytest.mark.parametrize("how", ["power", "failed sync", "full"])
@pytest.mark.parametrize("rounds", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_confirmed_is_missing_whatever_the_disk_does(
    data_path: Callable[[], Path],
    tmp_path: Path,
    library: Path,
    serve: Serve,
    how: str,
    rounds: int,
) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    nsqd = serve(OnSuchADisk(data_path(), library, shadow))
    nsqd.create_channel("t", "ch")
    chance = random.Random(how)
    confirmed: set[bytes] = set()
    finished: set[bytes] = set()
    for number in range(rounds):
        load = DiskLoad(nsqd, number, chance)
        wait_until(lambda at=load: len(at.confirmed) > 20, what="publishing")  # type: ignore[misc]
        if how != "power":
            trouble = shadow / ("fail" if how == "failed sync" else "full")
            trouble.touch()
            if how == "full":
                wait_until(lambda at=load: at.refused > 0, what="a refusal")  # type: ignore[misc]
            else:
                wait_until(lambda at=trouble: not at.exists(), what="a sync")  # type: ignore[misc]
            trouble.unlink(missing_ok=True)
            before = len(load.confirmed)
            if number % 2:
                wait_until(lambda at=load, n=before: len(at.confirmed) > n, what="more")  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.2))
        if how == "full":
            nsqd.kill()
        else:
            nsqd.lose_power()
        load.join()
        confirmed |= load.confirmed
        finished |= load.finished
        nsqd.start()
    missing = confirmed - finished
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1000)
        while missing:
            message = client.read_message()
            missing.discard(message.body)
            client.finish([message])
