"""``nsq to-file --upload``: what it stores and reports, and what a store that is away changes."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from plugins.archives import finished_files, unfinished
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd
from plugins.object_store import Bucket
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.finding import find_archives

TOPIC, CHANNEL = "clicks", "archive"
DEADLINE_S = patience_s(60.0)
BLOCKED = ["--filename-format", "blocked/<TOPIC>.<HOST><REV>.<DATETIME>.log"]
"""Files go to a folder of that name in the store."""


@pytest.fixture
def nsqd(go_nsqd: Callable[..., GoNsqd]) -> GoNsqd:
    nsqd = go_nsqd("-msg-timeout=10s")
    nsqd.create_channel(TOPIC, CHANNEL)
    return nsqd


def to_file(nsqd: GoNsqd, out: Path, *more: str) -> list[str]:
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(out)]
    return ["to-file", "-t", TOPIC, "-c", CHANNEL, *place, *more]


def messages_at(url: str) -> int:
    return sum(archive.messages or 0 for archive in find_archives([url]))


def test_what_was_archived_is_stored_before_the_command_ends(
    nsqd: GoNsqd, tmp_path: Path, bucket: Bucket, run_nsq: RunNsq
) -> None:
    nsqd.publish(TOPIC, b"one", b"two")
    upload = ["--upload", f"{bucket.url}/lake", "--upload-hive", "--delete-uploaded"]

    result = run_nsq(
        to_file(nsqd, tmp_path, "-n", "2", *upload, "--host-identifier", "web 1", "--json")
    )

    assert result.status == 0
    document = json.loads(result.out)
    assert (document["uploaded"], document["not_uploaded"]) == (1, 0)
    assert finished_files(tmp_path) == []
    [archive] = find_archives([bucket.url])
    assert archive.messages == 2
    assert archive.name.startswith("lake/topic=clicks/date=")
    assert ".web_1-" in archive.name


def test_what_could_not_be_stored_is_status_6_and_the_next_run_stores_it(
    nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.archive.upload.LONGEST_FAILURE_S", 0.5)
    out, blocked = tmp_path / "out", tmp_path / "lake" / "blocked"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    nsqd.publish(TOPIC, b"one")
    upload = ["--upload", str(blocked.parent), *BLOCKED]

    result = run_nsq(to_file(nsqd, out, "-n", "1", *upload))

    assert result.status == 6
    assert "1 file not uploaded; the next run continues" in result.err
    assert str(blocked) in result.err
    assert len(finished_files(out)) == 1
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0

    blocked.unlink()
    assert run_nsq(to_file(nsqd, out, "--for", "500ms", *upload)).status in (0, 7)
    assert messages_at(str(blocked.parent)) == 1


def test_consumption_pauses_at_the_limit_and_goes_on_when_the_store_is_back(
    nsqd: GoNsqd, tmp_path: Path, spawn_nsq: SpawnNsq
) -> None:
    out, blocked = tmp_path / "out", tmp_path / "lake" / "blocked"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    sent = 60
    limits = ["--rotate-text-size", "10KB", "--max-in-flight", "10", "--max-local-bytes", "100KB"]
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"x" * 1000] * sent)
    more = ["--upload", str(blocked.parent), *BLOCKED, *limits, "--listen-http", "0", "-v"]
    process = spawn_nsq(to_file(nsqd, out, *more))
    assert process.stderr is not None
    said = next(line for line in iter(process.stderr.readline, b"") if b"/health" in line)
    (url,) = re.findall(r"http://\S+/metrics", said.decode())
    wait_until(
        lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0,
        what="archiving while the store is away",
        timeout_s=DEADLINE_S,
    )

    def is_paused() -> bool:
        nonlocal sent
        if (left := unfinished(nsqd, TOPIC, CHANNEL)) < 20:
            nsqd.publish(TOPIC, *[b"x" * 1000] * 5)
            sent += 5
            return False
        time.sleep(0.5)
        return unfinished(nsqd, TOPIC, CHANNEL) == left

    wait_until(is_paused, what="a pause", timeout_s=DEADLINE_S)
    assert sum(path.stat().st_size for path in finished_files(out)) >= 100_000
    assert httpx.get(url.replace("metrics", "health"), timeout=DEADLINE_S).status_code == 503

    blocked.unlink()
    wait_until(
        lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=DEADLINE_S
    )
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 143
    assert b"consumption pauses" in stderr
    assert b"consumption goes on" in stderr
    assert stderr.count(b"cannot upload") == 1
    assert messages_at(str(blocked.parent)) == sent


def test_a_bucket_that_is_not_there_is_named_before_a_message_is_taken(
    run_nsq: RunNsq, nsqd: GoNsqd, bucket: Bucket, tmp_path: Path
) -> None:
    nsqd.publish(TOPIC, b"one")

    result = run_nsq(to_file(nsqd, tmp_path / "out", "--upload", "s3://nope/nsq"))

    error = "nsq: error: cannot use s3://nope/nsq (bucket nope does not exist)\n"
    assert (result.status, result.err) == (3, error)
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"], stats["requeue_count"]) == (1, 0)
