"""What a run reports at its end is the same in every command: counts, damage, exit status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

from nsqtools.protocol.frames import WireMessage

TOO_LARGE = b"x" * (1 << 20) + b"x"


def archive(path: Path, *bodies: bytes) -> Path:
    return write_archive(
        path, [WireMessage(n * 10**9, 1, b"%016x" % n, body) for n, body in enumerate(bodies, 1)]
    )


@pytest.mark.parametrize(
    ("bodies", "status", "counts"),
    [
        ([b"a", TOO_LARGE], 6, "1 confirmed, 1 rejected, 0 unknown, 0 unsent"),
        ([TOO_LARGE], 1, "0 confirmed, 1 rejected, 0 unknown, 0 unsent"),
        ([b"a", b"", b"b"], 0, "2 confirmed, 0 rejected, 0 unknown, 0 unsent, 1 empty skipped"),
    ],
)
def test_pub_and_replay_count_and_end_alike(
    run_nsq: RunNsq,
    nsqd: GoNsqd,
    tmp_path: Path,
    bodies: list[bytes],
    status: int,
    counts: str,
) -> None:
    to = ["--nsqd-tcp-address", nsqd.tcp_address]
    archive(tmp_path / "a.gz", *bodies)

    published = run_nsq(["pub", "-t", "clicks", *to], stdin=b"".join(b + b"\n" for b in bodies))
    replayed = run_nsq(["replay", str(tmp_path / "a.gz"), "--yes", *to])

    assert (published.status, replayed.status) == (status, status)
    assert f"nsq: {counts}\n" in published.err
    assert f"nsq: {counts}\n" in replayed.err


def test_damage_is_one_line_in_every_command_and_the_work_is_partly_done(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    whole = archive(tmp_path / "a.gz", b"a")
    damaged = archive(tmp_path / "b.gz", *(os.urandom(1000) for _ in range(100)))
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    both = [str(whole), str(damaged)]
    to = ["--nsqd-tcp-address", nsqd.tcp_address]

    printed = run_nsq(["archive", "cat", *both])
    planned = run_nsq(["replay", *both, "--dry-run", *to])
    replayed = run_nsq(["replay", *both, "--yes", *to])

    results = (printed, planned, replayed)
    assert [result.status for result in results] == [6, 6, 6]
    reported = [line for line in printed.err.splitlines() if line.startswith(f"nsq: {damaged}: ")]
    assert reported
    for result in results:
        assert [line for line in result.err.splitlines() if str(damaged) in line] == reported
