"""The faults of nsq_to_file: each one is shown not to be in ``nsq to-file``.

The tests run the real command against the real nsqd.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import finished_files, lines_of, messages_of, parts, text_of, unfinished
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer

TOPIC, CHANNEL = "clicks", "archive"
DEADLINE_S = patience_s(30.0)
RAW = ["--format", "raw"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def to_file(nsqd: GoNsqd, out: Path, *flags: str) -> list[str]:
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(out)]
    http = ["--nsqd-http-address", nsqd.http_address]
    # both addresses: the one to consume from, the other to ask about topics
    return ["to-file", "-t", TOPIC, "-c", CHANNEL, *place, *http, *flags]


def publish(nsqd: GoNsqd, *bodies: bytes) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *bodies)


def wait_until_drained(nsqd: GoNsqd) -> None:
    wait_until(
        lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=DEADLINE_S
    )


def stop(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, stderr.decode()
    return stderr.decode()


def wait_for_stderr(process: subprocess.Popen[bytes], text: str) -> str:
    """Read stderr up to the line with ``text``."""
    assert process.stderr is not None
    seen = ""
    while line := process.stderr.readline().decode():
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"it ended without {text!r}: {seen}")


def test_messages_are_never_discarded_after_some_attempts(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")
    deliver_and_requeue(nsqd, times=7)  # nsq_to_file discards at the sixth

    result = run_nsq(to_file(nsqd, out, "-n", "1"))

    assert result.status == 0
    (message,) = messages_of(out)
    assert message["body"] == b"one"
    assert message["attempts"] > 6


def deliver_and_requeue(nsqd: GoNsqd, times: int) -> None:
    options = ClientOptions(max_attempts=0, max_in_flight=1)
    with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=[nsqd.tcp_address], options=options) as got:
        for _, message in zip(range(times), got, strict=False):
            message.requeue(0, backoff=False)


def test_hup_with_a_work_directory_finishes_the_file_and_goes_on(
    nsqd: GoNsqd, out: Path, tmp_path: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"before")
    process = spawn_nsq(to_file(nsqd, out, *RAW, "--work-dir", str(tmp_path / "work")))
    wait_until_drained(nsqd)

    process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(finished_files(out)) == 1, what="the first file")
    publish(nsqd, b"after")
    wait_until_drained(nsqd)
    process.send_signal(signal.SIGHUP)  # and HUP, then TERM
    stop(process)

    assert [text_of(path) for path in finished_files(out)] == [b"before\n", b"after\n"]


def test_files_that_a_crash_left_in_the_work_directory_are_published(
    nsqd: GoNsqd, out: Path, tmp_path: Path, spawn_nsq: SpawnNsq, run_nsq: RunNsq
) -> None:
    args = to_file(nsqd, out, *RAW, "--work-dir", str(tmp_path / "work"))
    publish(nsqd, b"one", b"two")
    process = spawn_nsq(args)
    wait_until_drained(nsqd)
    process.kill()
    process.wait(DEADLINE_S)
    assert finished_files(out) == []

    assert run_nsq([*args, "--until-empty"]).status == 0

    assert lines_of(out) == [b"one", b"two"]
    assert parts(tmp_path / "work") == []


def test_a_disk_that_was_full_leaves_no_line_glued_to_another(
    go_nsqd: Callable[..., GoNsqd], small_disk: Path, spawn_nsq: SpawnNsq
) -> None:
    nsqd = go_nsqd()
    bodies = [b"%04d " % number + b"x" * 63 for number in range(2000)]
    publish(nsqd, *bodies)
    flags = ("--consumer-opt", "max_backoff_duration=1s", "--max-in-flight", "100")
    process = spawn_nsq(to_file(nsqd, small_disk, *RAW, *flags))
    told = wait_for_stderr(process, "No space left on device")
    assert str(small_disk) in told
    assert unfinished(nsqd, TOPIC, CHANNEL) > 0

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    wait_until_drained(nsqd)
    assert "trying again" not in stop(process), "it was reported before"
    assert sorted(lines_of(small_disk)) == bodies


def test_directories_are_fsynced_when_names_are_made(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(nsqd, b"one")
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)

    run_nsq(to_file(nsqd, out, "-n", "1"))

    assert synced.count(str(out)) >= 2  # begun, and finished


def test_the_work_directory_may_be_on_another_file_system(
    nsqd: GoNsqd, out: Path, small_disk: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one", b"two")

    result = run_nsq(to_file(nsqd, out, *RAW, "--work-dir", str(small_disk), "-n", "2"))

    assert result.status == 0, result.err
    assert lines_of(out) == [b"one", b"two"]
    assert parts(small_disk) == []


def test_a_file_that_cannot_be_published_now_is_published_later(
    nsqd: GoNsqd, small_disk: Path, tmp_path: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, small_disk, *RAW, "--work-dir", str(tmp_path / "work")))
    wait_until_drained(nsqd)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    process.send_signal(signal.SIGHUP)
    told = wait_for_stderr(process, "Read-only file system")
    assert str(small_disk) in told

    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    wait_until(lambda: finished_files(small_disk), what="the file", timeout_s=10)
    stop(process)

    assert lines_of(small_disk) == [b"one"]


def test_a_second_process_is_refused(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out))
    wait_until_drained(nsqd)

    second = run_nsq(to_file(nsqd, out))

    assert second.status == 2
    assert f"process {process.pid} archives channel {CHANNEL} of topic {TOPIC}" in second.err
    stop(process)


def test_messages_held_for_longer_than_their_timeout_are_touched(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one", b"two", b"three")
    timeout_s = patience_s(1)  # in which a busy machine lets it touch what it holds
    timeout = ["--consumer-opt", f"msg_timeout={timeout_s:g}s"]
    process = spawn_nsq(to_file(nsqd, out, "--sync-interval", f"{2 * timeout_s + 1:g}s", *timeout))
    wait_until_drained(nsqd)
    stop(process)

    assert [message["attempts"] for message in messages_of(out)] == [1, 1, 1]
    assert nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


def test_after_a_crash_zcat_reads_every_file(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq, run_nsq: RunNsq
) -> None:
    publish(nsqd, *[b"%d" % number for number in range(500)])
    args = to_file(nsqd, out, *RAW, "--gzip")
    process = spawn_nsq(args)
    wait_until_drained(nsqd)
    process.kill()
    process.wait(DEADLINE_S)
    (part,) = parts(out)
    with part.open("ab") as file:
        file.write(text_of_half_a_member())

    run_nsq([*args, "--until-empty"])

    assert sorted(map(int, lines_of(out))) == list(range(500))


def text_of_half_a_member() -> bytes:
    import gzip

    return gzip.compress(b"never finished\n" * 100)[:40]


def test_bodies_with_newlines_stay_distinguishable(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"a\nb", b"c")

    run_nsq(to_file(nsqd, out, "-n", "2"))

    messages = messages_of(out)
    assert [message["body"] for message in messages] == [b"a\nb", b"c"]
    assert {message["nsqd"] for message in messages} == {nsqd.tcp_address}


def test_raw_files_say_that_they_cannot(nsqd: GoNsqd, out: Path, run_nsq: RunNsq) -> None:
    publish(nsqd, b"a\nb", b"c")

    result = run_nsq(to_file(nsqd, out, *RAW, "-n", "2"))

    assert "bodies contain the delimiter" in result.err


def test_an_nsqd_that_is_down_is_an_error_and_not_an_idle_process(
    out: Path, run_nsq: RunNsq, nsqd: GoNsqd
) -> None:
    nsqd.kill()

    result = run_nsq(to_file(nsqd, out, "--consumer-opt", "dial_timeout=2s"))

    assert result.status == 4
    assert f"cannot connect to {nsqd.tcp_address}" in result.err


def test_a_format_that_names_no_file_is_refused_at_once(
    out: Path, run_nsq: RunNsq, nsqd: GoNsqd
) -> None:
    result = run_nsq(to_file(nsqd, out, "--filename-format", "../<TOPIC>"))

    assert result.status == 2
    assert "does not stay inside its directory" in result.err


def test_a_format_without_rev_gets_one_where_it_is_needed(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    for body in (b"one", b"two"):
        publish(nsqd, body)
        run_nsq(to_file(nsqd, out, *RAW, "--filename-format", "<TOPIC>.log", "-n", "1"))

    assert [path.name for path in finished_files(out)] == ["clicks-000001.log", "clicks.log"]


@pytest.fixture
def cluster(
    go_nsqd: Callable[..., GoNsqd], nsqlookupd: Callable[..., GoNsqlookupd]
) -> tuple[GoNsqlookupd, GoNsqd]:
    lookupd = nsqlookupd()
    return lookupd, go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")


def by_pattern(lookupd: GoNsqlookupd, out: Path, *flags: str) -> list[str]:
    asked = ["--lookupd-http-address", lookupd.http_address]
    pattern = ["--topic-pattern", "^orders", "--consumer-opt", "lookupd_poll_interval=200ms"]
    return ["to-file", *pattern, "-c", CHANNEL, *asked, "--output-dir", str(out), *flags]


def topics_known(lookupd: GoNsqlookupd) -> list[str]:
    topics: list[str] = json.loads(lookupd.get("/topics"))["topics"]
    return topics


def test_topics_are_found_at_once_though_a_lookupd_is_down(
    cluster: tuple[GoNsqlookupd, GoNsqd], out: Path, run_nsq: RunNsq
) -> None:
    lookupd, nsqd = cluster
    for topic in ("orders.new", "orders.old", "clicks"):
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, topic.encode())
    wait_until(lambda: len(topics_known(lookupd)) == 3, what="the topics at nsqlookupd")

    down = ["--lookupd-http-address", "127.0.0.1:1"]
    result = run_nsq(by_pattern(lookupd, out, *down, "--until-empty"))

    assert result.status == 0, result.err
    assert sorted(m["body"] for m in messages_of(out)) == [b"orders.new", b"orders.old"]


def test_the_trouble_of_one_topic_is_not_that_of_another(
    go_nsqd: Callable[..., GoNsqd], out: Path, spawn_nsq: SpawnNsq
) -> None:
    nsqd = go_nsqd()
    out.mkdir()
    (out / "broken").write_text("a file where the topic's folder should be")
    for topic in ("broken", "good"):
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, b"message of " + topic.encode())
    args = to_file(nsqd, out, "--filename-format", "<TOPIC>/<TOPIC><REV>.log")
    args[1:3] = ["-t", "broken", "-t", "good"]
    process = spawn_nsq([*args, "--consumer-opt", "max_backoff_duration=1s"])

    told = wait_for_stderr(process, "topic broken: cannot write")
    assert str(out / "broken") in told
    wait_until(lambda: unfinished(nsqd, "good", CHANNEL) == 0, what="the other topic's message")
    assert unfinished(nsqd, "broken", CHANNEL) == 1
    (out / "broken").unlink()
    wait_until(lambda: unfinished(nsqd, "broken", CHANNEL) == 0, what="writing again", timeout_s=20)
    stop(process)

    assert len(messages_of(out)) == 2


def test_an_nsqd_that_comes_back_is_consumed_again_soon(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"before")
    process = spawn_nsq(to_file(nsqd, out))
    wait_until_drained(nsqd)
    nsqd.stop()
    nsqd.start()
    publish(nsqd, b"after")

    began = time.monotonic()
    wait_until_drained(nsqd)

    assert time.monotonic() - began < patience_s(10)  # nsq_to_file: a minute
    stop(process)
    assert sorted(message["body"] for message in messages_of(out)) == [b"after", b"before"]


def test_term_with_a_frozen_nsqd_neither_spins_nor_waits_forever(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--consumer-opt", "drain_timeout=2s"))
    wait_until_drained(nsqd)
    nsqd.pause()

    process.send_signal(signal.SIGTERM)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)

    assert process.returncode == 143
    assert usage.ru_utime + usage.ru_stime < 3  # the whole run, start included
    assert len(messages_of(out)) == 1


def test_a_second_signal_leaves_at_once(nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--on-file", "sleep 60"))
    wait_until_drained(nsqd)

    process.send_signal(signal.SIGTERM)
    wait_until(lambda: finished_files(out), what="the finished file")
    process.send_signal(signal.SIGTERM)

    assert process.wait(patience_s(10)) == 143


def test_names_that_are_taken_cost_no_descriptors_and_end_nowhere(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    (out / "d-000000").mkdir(parents=True)
    for rev in range(50):
        folder = out / f"d-{rev:06d}"
        folder.mkdir(exist_ok=True)
        (folder / "clicks.log").write_text("taken")
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, *RAW, "--filename-format", "d<REV>/<TOPIC>.log"))
    wait_until_drained(nsqd)

    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 20
    stop(process)
    assert (out / "d-000050" / "clicks.log").read_bytes() == b"one\n"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--sync-interval", "-1s"], "negative"),
        (["--max-in-flight", "-1"], "less than 1"),
        (["--consumer-opt", "max_in_fligth=3"], "unknown client option"),
        (["--topic-pattern", "("], "not a regular expression"),
        (["--gzip-level", "0"], "less than 1"),
    ],
)
def test_what_cannot_work_is_refused(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq, flags: list[str], reason: str
) -> None:
    result = run_nsq(to_file(nsqd, out, *flags))

    assert result.status == 2
    assert reason in result.err


def test_a_sync_interval_of_nothing_flushes_at_once(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")

    assert run_nsq(to_file(nsqd, out, "--sync-interval", "0s", "-n", "1")).status == 0


def test_directories_may_be_spelled_in_any_way(
    nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")
    out, work = tmp_path / "o", tmp_path / "w"
    place = ["--output-dir", f"{out}/", "--work-dir", f"{tmp_path}/./x/../w"]

    assert run_nsq([*to_file(nsqd, out, *RAW, "-n", "1"), *place]).status == 0

    assert [path.parent for path in finished_files(out)] == [out]
    assert finished_files(work) == []


def test_an_invalid_topic_is_refused(nsqd: GoNsqd, out: Path, run_nsq: RunNsq) -> None:
    args = to_file(nsqd, out)
    args[2] = "bad topic"

    result = run_nsq([*args, "--create"])

    assert result.status == 2
    assert "invalid topic name" in result.err


def test_the_directory_is_asked_for_and_modes_are_private(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    assert "--output-dir" in run_nsq(["to-file", "-t", TOPIC]).err
    publish(nsqd, b"one")

    run_nsq(to_file(nsqd, out, "-n", "1", "--file-mode", "600", "--dir-mode", "700"))

    (path,) = finished_files(out)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_a_misspelt_topic_is_not_created(nsqd: GoNsqd, out: Path, run_nsq: RunNsq) -> None:
    nsqd.create_topic(TOPIC)
    args = to_file(nsqd, out)
    args[2] = "clikcs"

    result = run_nsq(args)

    assert result.status == 3
    assert "Did you mean clicks?" in result.err
    assert [topic["topic_name"] for topic in nsqd.stats()["topics"]] == [TOPIC]


def test_a_deleted_topic_is_not_brought_back(nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--exit-when-deleted"))
    wait_until_drained(nsqd)

    nsqd.post("/topic/delete", topic=TOPIC)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 3
    assert "was deleted" in stderr.decode()
    assert nsqd.stats()["topics"] == []
    assert len(messages_of(out)) == 1


def test_the_exit_status_and_the_summary_say_what_happened(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one", b"two")

    done = run_nsq(to_file(nsqd, out, "--until-empty"))
    short = run_nsq(to_file(nsqd, out, "-n", "5", "--for", "500ms"))

    assert done.status == 0
    assert "2 messages" in done.err
    assert "1 file finished" in done.err
    assert short.status == 7
