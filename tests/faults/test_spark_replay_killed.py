"""A replay whose processes are killed loses nothing, and doubles little, which it says.

Killed are the Python workers, whose tasks Spark then runs again, and the driver with its JVM, after
which the replay is run again by hand. What nsqd had taken and the ledger did not know yet is
published twice: at most a window of unconfirmed batches for each task that was cut off.

Between Spark and nsqd is a proxy that holds back what is sent after a part of it, so that a kill
meets tasks in the middle of their work, however slow this test or quick the replay is.
"""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.network import TO_SERVER, ProxyTo
from plugins.processes import descendants, kill
from plugins.spark import RunSpark
from plugins.waiting import patience_s, wait_until

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.publishing.publish_task import BATCH_ROWS, MAX_OUTSTANDING

BEGIN = 1_790_000_000_000_000_000
SLOTS = 2
BODY_BYTES = 400
MESSAGE_BYTES = 4 + BODY_BYTES  # as MPUB sends it
WINDOW = SLOTS * (MAX_OUTSTANDING + 2) * BATCH_ROWS


def write_input(folder: Path, count: int) -> None:
    """Archives of bodies that compress badly, for there shall be several partitions."""
    dice = random.Random(count)
    folder.mkdir()

    def message(number: int) -> WireMessage:
        body = b"%07d %s" % (number, dice.randbytes((BODY_BYTES - 8) // 2).hex().encode())
        return WireMessage(BEGIN + number, 1, b"%016x" % number, body)

    for first in range(0, count, 20_000):
        spans = (range(begin, begin + 2500) for begin in range(first, first + 20_000, 2500))
        write_archive(folder / f"{first:07d}.gz", *([*map(message, span)] for span in spans))


def kill_workers(driver: subprocess.Popen[bytes]) -> None:
    """Kill the Python processes that run tasks: the children of the daemon that forks them."""
    found = descendants(driver.pid, "pyspark.daemon")
    daemons = {process.pid for process in found}
    workers = [process.pid for process in found if process.parent in daemons]
    assert workers, descendants(driver.pid)
    for pid in workers:
        kill(pid)


def kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """Kill the command and its JVM; the workers publish on for a moment, then end by themselves."""
    java = [process.pid for process in descendants(driver.pid, "SparkSubmit")]
    assert java
    for pid in (driver.pid, *java):
        kill(pid)
    driver.wait(patience_s(20))


@pytest.mark.parametrize(
    ("count", "runs", "kills_in_a_run"),
    [(40_000, 1, 1), pytest.param(400_000, 5, 3, marks=pytest.mark.slow)],
)
def test_killed_again_and_again_nothing_is_lost_and_what_is_doubled_is_said(
    count: int,
    runs: int,
    kills_in_a_run: int,
    nsqd: GoNsqd,
    proxy_to: ProxyTo,
    spawn_nsq: SpawnNsq,
    run_spark: RunSpark,
    spark_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """``runs`` are killed, and the one after them is not."""
    write_input(tmp_path / "in", count)
    nsqd.create_topic("clicks")
    proxy = proxy_to(nsqd.tcp_address)
    place = ["--nsqd-tcp-address", proxy.address, "--ledger", str(tmp_path / "ledger")]
    place += ["--master", f"local[{SLOTS},9]", "--spark-log", str(tmp_path / "spark.log")]
    args = ["spark", "replay", str(tmp_path / "in"), *place]
    step = count * MESSAGE_BYTES // ((runs + 1) * (kills_in_a_run + 1))

    kills = [kill_workers] * kills_in_a_run + [kill_driver]
    for _ in range(runs):
        proxy.pause_after(TO_SERVER, step)
        driver = spawn_nsq(args, spark_env)
        for kill_some in kills:
            wait_until(  # nsqd has been sent another part, and the tasks wait for its answers
                lambda d=driver: proxy.is_paused(TO_SERVER) or d.poll() is not None,
                what="progress",
                timeout_s=patience_s(90),  # a JVM starts, on a machine with other things to do
            )
            assert driver.poll() is None
            kill_some(driver)
            proxy.pause_after(TO_SERVER, step)
    proxy.resume(TO_SERVER)
    last = run_spark(*args[1:])

    assert last.status == 0, last.err
    assert last.out == b"topic\tmessages\nclicks\t%d\n" % count
    depth = nsqd.depth("clicks")
    found = {body[:7] for body in bodies_in(nsqd, "clicks", depth)}
    assert found == {b"%07d" % n for n in range(count)}
    said = re.search(r"up to (\d+) twice", last.err)
    assert depth - count <= (int(said[1]) if said else 0) <= runs * len(kills) * WINDOW
