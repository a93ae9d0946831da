"""Archives that the Go nsq_to_file wrote, torn ones too, are read, repaired and replayed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd
from plugins.servers import GoProgram
from plugins.waiting import wait_until

TOPIC, CHANNEL = "clicks", "archive"
COUNT = 3000


@pytest.fixture
def torn(nsqd: GoNsqd, tmp_path: Path, go_program: GoProgram) -> tuple[Path, list[bytes]]:
    """A file of several gzip members, the last one cut off, and the lines of the others."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"message %d" % number for number in range(COUNT)])
    place = [f"-topic={TOPIC}", f"-channel={CHANNEL}", f"-nsqd-tcp-address={nsqd.tcp_address}"]
    place += [f"-output-dir={tmp_path}", "-gzip", "-sync-interval=1s"]
    program = subprocess.Popen([go_program("nsq_to_file"), *place], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="the archive", timeout_s=20)
    finally:
        program.kill()
        program.wait()
    (path,) = tmp_path.glob("*.gz")
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-30])
    partly = subprocess.run(["zcat", path], capture_output=True, check=False)
    assert partly.returncode != 0
    *whole, _ = partly.stdout.split(b"\n")
    return path, whole


def test_a_torn_file_is_printed_as_far_as_zcat_reads_it_and_replayed_once_it_is_repaired(
    torn: tuple[Path, list[bytes]], nsqd: GoNsqd, run_nsq: RunNsq
) -> None:
    path, whole = torn
    printed = run_nsq(["archive", "cat", str(path)])
    assert printed.status == 6
    assert "cut off in the member" in printed.err
    assert printed.out.split(b"\n")[: len(whole)] == whole

    assert run_nsq(["archive", "repair", str(path)]).status == 0
    assert subprocess.check_output(["zcat", path]).split(b"\n")[:-1] == whole

    address = ["--nsqd-tcp-address", nsqd.tcp_address]
    result = run_nsq(["replay", str(path), "--topic", "again", *address])

    assert result.status == 0
    assert nsqd.topic_stats("again")["message_count"] == len(whole)
