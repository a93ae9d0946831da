"""What a run reports at its end is the same in every command: counts, damage, exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

from nsqtools.protocol.message import WireMessage

TOO_LARGE = b"x" * (1 << 20) + b"x"
NOBODY = "127.0.0.1:1"


def archive(path: Path, *bodies: bytes) -> Path:
    return write_archive(
        path, [WireMessage(n * 10**9, 1, b"%016x" % n, body) for n, body in enumerate(bodies, 1)]
    )


@pytest.mark.parametrize(
    ("bodies", "status", "counts"),
    [
        ([b"a", b"b"], 0, "2 confirmed, 0 rejected, 0 unknown, 0 unsent"),
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
    replayed = run_nsq(["replay", str(tmp_path / "a.gz"), *to])

    assert (published.status, replayed.status) == (status, status)
    assert f"nsq: {counts}\n" in published.err
    assert f"nsq: {counts}\n" in replayed.err


def test_pub_and_replay_say_alike_that_nothing_could_be_sent(
    run_nsq: RunNsq, tmp_path: Path
) -> None:
    to = ["--nsqd-tcp-address", NOBODY, "--retry-timeout", "0s"]
    archive(tmp_path / "a.gz", b"a")

    published = run_nsq(["pub", "-t", "clicks", *to], stdin=b"a\n")
    replayed = run_nsq(["replay", str(tmp_path / "a.gz"), *to])

    assert (published.status, replayed.status) == (4, 4)
    assert published.err == replayed.err
    assert "nsq: 0 confirmed, 0 rejected, 0 unknown, 1 unsent\n" in published.err


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
    replayed = run_nsq(["replay", *both, *to])

    results = (printed, planned, replayed)
    assert [result.status for result in results] == [6, 6, 6]
    reported = [line for line in printed.err.splitlines() if line.startswith(f"nsq: {damaged}: ")]
    assert reported
    for result in results:
        assert [line for line in result.err.splitlines() if str(damaged) in line] == reported


def test_mode_all_says_what_each_nsqd_has(run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path) -> None:
    both = ["--nsqd-tcp-address", nsqd.tcp_address, "--nsqd-tcp-address", NOBODY]
    options = ["--retry-timeout", "300ms", "--unsent-file", str(tmp_path / "unsent"), "--json"]

    result = run_nsq(["pub", "-t", "fan", *both, *options], stdin=b"1\n2\n3\n")

    assert result.status == 6
    assert f"nsq: {nsqd.tcp_address}: 3 confirmed, 0 rejected, 0 unknown, 0 unsent" in result.err
    assert f"nsq: {NOBODY}: 0 confirmed, 0 rejected, 0 unknown, 3 unsent" in result.err
    document = json.loads(result.out)
    assert (document["confirmed"], document["unsent"]) == (0, 3)
    confirmed = {each["nsqd"]: each["confirmed"] for each in document["destinations"]}
    assert confirmed == {nsqd.tcp_address: 3, NOBODY: 0}
    assert (tmp_path / f"unsent.{NOBODY}").read_bytes() == b"1\n2\n3\n"
    assert (tmp_path / f"unsent.{nsqd.tcp_address}").read_bytes() == b""


def test_the_counts_are_on_stdout_as_json_when_asked(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    to = ["--nsqd-tcp-address", nsqd.tcp_address, "--json", "--quiet"]
    archive(tmp_path / "a.gz", b"a", b"", TOO_LARGE)

    published = run_nsq(["pub", "-t", "clicks", *to], stdin=b"a\n\n" + TOO_LARGE + b"\n")
    replayed = run_nsq(["replay", str(tmp_path / "a.gz"), *to])

    expected = {"confirmed": 1, "rejected": 1, "unknown": 0, "unsent": 0, "skipped": 1}
    expected |= {"filtered": 0, "repeated": 0, "destinations": []}
    assert json.loads(published.out) == json.loads(replayed.out) == expected
    assert (published.status, replayed.status) == (6, 6)


def test_to_file_ends_with_its_counts_as_json(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", b"one", b"two")
    to = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(tmp_path / "out")]

    result = run_nsq(["to-file", "-t", "clicks", "-c", "archive", *to, "-n", "2", "--json"])

    assert result.status == 0
    document = json.loads(result.out)
    assert (document["messages"], document["files"], document["failures"]) == (2, 1, 0)
    assert document["bytes"] > 0
    assert "1 file finished" in result.err


def test_verify_and_repair_say_as_json_what_is_damaged(run_nsq: RunNsq, tmp_path: Path) -> None:
    archive(tmp_path / "a.gz", b"a")
    damaged = archive(tmp_path / "b.gz", *(os.urandom(1000) for _ in range(100)))
    damaged.write_bytes(damaged.read_bytes()[:-1000])

    verified = run_nsq(["archive", "verify", str(tmp_path), "--json"])
    repaired = run_nsq(["archive", "repair", str(tmp_path), "--json"])
    again = run_nsq(["archive", "verify", str(tmp_path), "--json"])

    document = json.loads(verified.out)
    assert (verified.status, document["files"]) == (1, 2)
    [found] = document["damaged"]
    assert found["file"] == str(damaged)
    assert found["problems"]
    [mended] = json.loads(repaired.out)["repaired"]
    assert mended["file"] == str(damaged)
    assert (again.status, json.loads(again.out)["damaged"]) == (0, [])


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"nodes --json --nsqd-http-address {NOBODY}", 4),
        (f"topic list --nsqd-http-address {NOBODY} --json", 4),
        ("stat --json --filter depth", 2),
        (f"pub -t clicks --json --retry-timeout 0s --nsqd-tcp-address {NOBODY} -m hello", 4),
    ],
)
def test_an_error_is_a_line_of_json_when_json_is_asked_for(
    run_nsq: RunNsq, line: str, status: int
) -> None:
    result = run_nsq(line.split())

    assert result.status == status
    [error] = [json.loads(each) for each in result.err.splitlines() if each.startswith("{")]
    assert error["status"] == status
    assert error["message"]
    assert set(error) == {"code", "message", "hint", "address", "status"}
    assert "nsq: error:" not in result.err
