"""``nsq replay``: archived messages are published again, selected, paced, and not twice."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from plugins.archives import numbered, write_archive
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.publish.input import locked_checkpoint


def replay(nsqd: GoNsqd, *arguments: object) -> list[str]:
    return ["replay", "--yes", *map(str, arguments), "--nsqd-tcp-address", nsqd.tcp_address]


def test_speed_keeps_the_recorded_pace(nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq) -> None:
    write_archive(tmp_path / "a.gz", numbered(0, 6))
    (tmp_path / "bare.log").write_bytes(b"a body without a time\n")

    paced = [*replay(nsqd, tmp_path, "-t", "clicks"), "--speed"]
    dry = run_nsq([*paced, "0.00001x", "--dry-run"])  # a dry run does not wait
    began = time.monotonic()
    run_nsq([*paced, "10x"])

    assert time.monotonic() - began >= 0.5
    assert nsqd.topic_stats("clicks")["message_count"] == 7
    assert "7 messages would be published" in dry.err


@pytest.mark.parametrize(("end", "kills"), [(signal.SIGTERM, 1), (signal.SIGKILL, 3)])
def test_a_replay_continues_and_a_kill_repeats_at_most_a_batch(
    nsqd: GoNsqd,
    tmp_path: Path,
    spawn_nsq: SpawnNsq,
    run_nsq: RunNsq,
    end: signal.Signals,
    kills: int,
) -> None:
    (tmp_path / "in").mkdir()
    for name, begin in (("a", 0), ("b", 3000)):
        write_archive(tmp_path / "in" / f"{name}.gz", numbered(begin, begin + 3000, 1))
    args = replay(nsqd, tmp_path / "in", "--checkpoint", tmp_path / "c.json")
    nsqd.create_topic("clicks")
    for _ in range(kills):
        start = nsqd.depth("clicks")
        process = spawn_nsq([*args, "--rate", "300"])
        wait_until(lambda start=start: nsqd.depth("clicks") > start, what="some", timeout_s=20)  # type: ignore[misc]
        process.send_signal(end)
        assert process.wait(patience_s(20)) == (143 if end is signal.SIGTERM else -end)

    with locked_checkpoint(tmp_path / "c.json"):
        assert "another run uses the checkpoint" in run_nsq(args).err
    assert run_nsq(args).status == 0

    depth, expected = nsqd.depth("clicks"), [b"body %d" % number for number in range(6000)]
    tail = ["tail", "-t", "clicks", "-c", "check", "--create", *nsqd.options, "-n", str(depth)]
    bodies = run_nsq([*tail, f"--for={patience_s(20):g}s"]).out.splitlines()
    if end is signal.SIGTERM:
        assert bodies == expected
    assert set(bodies) == set(expected)
    assert depth - 6000 <= kills * 1000
    assert "0 confirmed" in run_nsq(args).err


def test_open_files_stay_within_the_limit_of_the_system(
    nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq
) -> None:
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 60
    for number in range(80):
        write_archive(tmp_path / f"{number}.gz", numbered(0, 2))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        run = run_nsq(replay(nsqd, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert (run.status, "160 confirmed" in run.err) == (0, True)
