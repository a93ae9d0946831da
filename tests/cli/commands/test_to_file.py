"""``nsq to-file``: its files, its errors, and that it has none of nsq_to_file's faults."""

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    ended,
    finished_files,
    lines_of,
    messages_of,
    parts,
    text_of,
    unfinished,
    wait_until_archived,
)
from plugins.archives import to_file as arguments
from plugins.cli import NsqProcess, Result, RunNsq, SpawnNsq
from plugins.servers import AnyNsqd, GoNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer
from nsqtools.archive import part_file
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.files import durable

DEADLINE_S = patience_s(30.0)
RAW = ("--format", "raw")
SOON = ("--consumer-opt", "max_backoff_duration=1s")
ONE_NAME = ("--datetime-format", "now")  # by default, a file is finished every hour


@dataclass
class ToFile:
    """The command on one topic of an nsqd, into ``out``."""

    nsqd: Nsqd
    out: Path
    run_nsq: RunNsq
    spawn_nsq: SpawnNsq

    def args(self, *flags: str) -> list[str]:
        where = (*self.nsqd.options[1:], *ONE_NAME)
        return arguments(self.nsqd.tcp_address, self.out, *where, *flags)

    def run(self, *flags: str) -> Result:
        return self.run_nsq(self.args(*flags))

    def start(self, *flags: str) -> NsqProcess:
        """Start the command, and wait until the channel is empty."""
        process = self.spawn_nsq(self.args(*flags))
        wait_until_archived(self.nsqd)
        return process

    def publish(self, *bodies: bytes) -> None:
        self.nsqd.create_channel(TOPIC, CHANNEL)
        self.nsqd.publish(TOPIC, *bodies)

    def left(self, topic: str = TOPIC) -> int:
        return unfinished(self.nsqd, topic, CHANNEL)

    @property
    def finished(self) -> list[Path]:
        return finished_files(self.out)


@pytest.fixture
def to_file(nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq, spawn_nsq: SpawnNsq) -> ToFile:
    return ToFile(nsqd, tmp_path / "out", run_nsq, spawn_nsq)


def wait_for_stderr(process: NsqProcess, text: str) -> str:
    """Read stderr up to the line with ``text``, and return that line."""
    return next(line for line in map(bytes.decode, process.stderr) if text in line)


def test_an_unusable_folder_is_the_only_error(to_file: ToFile) -> None:
    to_file.nsqd.create_channel(TOPIC, "other")
    to_file.out.write_text("a file")
    result = to_file.run("--until-empty")
    error = f"nsq: error: cannot use {to_file.out} (File exists)\n"
    assert (result.status, result.err) == (1, error)


def test_a_file_in_progress_is_hidden_readable_and_locked(
    to_file: ToFile,
) -> None:
    to_file.publish(b"one")
    process = to_file.start(*RAW, "--gzip")

    assert to_file.finished == []
    (part,) = parts(to_file.out)
    with part.open("rb") as file:
        assert subprocess.check_output(["zcat"], stdin=file) == b"one\n"
    second = to_file.run()
    assert second.status == 2
    assert f"process {process.pid} archives channel {CHANNEL} of topic {TOPIC}" in second.err
    ended(process)


@pytest.mark.parametrize("name", ["archive", "upload"])
def test_to_file_ends_where_no_thread_can_be_started(
    to_file: ToFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    start, no = threading.Thread.start, Mock(side_effect=RuntimeError("can't start new thread"))
    to_file.publish(b"one", b"two")
    assert to_file.run("-n", "1").status == 0  # a finished file to upload
    monkeypatch.setattr("threading.Thread.start", lambda t: (no if name in t.name else start)(t))
    result = to_file.run("--upload", str(tmp_path / "kept"))
    assert (result.status, "nsq: error: can't start new thread" in result.err) == (1, True)


def test_a_raw_file_is_rotated_by_size_and_delimiters_are_reported(to_file: ToFile) -> None:
    to_file.publish(b"one\ntwo", *[b"%05d" % number for number in range(3000)])

    result = to_file.run(*RAW, "--rotate-size", "6000", "--rotate-interval", "0s", "-n", "3001")

    *full, last = [path.stat().st_size for path in to_file.finished]
    assert sum(full) + last == 18_008
    assert full
    assert min(full) >= 6000
    assert "bodies contain the delimiter" in result.err
    assert f"3001 messages, 18008 bytes, {len(full) + 1} files finished" in result.err


def test_supervisors_see_readiness_health_metrics_and_stopping(
    to_file: ToFile, tmp_path: Path
) -> None:
    to_file.publish(b"one", b"two")
    metrics = tmp_path / "nsq.prom"
    count = 'nsq_to_file_messages_total{topic="clicks"} 2\n'
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        flags = ("--listen-http", "0", "-v", "--metrics-file", str(metrics))
        process = to_file.spawn_nsq(to_file.args(*flags), environ)
        assert systemd.recv(100) == b"READY=1"
        (url,) = re.findall(r"http://\S+/metrics", wait_for_stderr(process, "/health"))
        wait_until_archived(to_file.nsqd)

        assert count in httpx.get(url, timeout=DEADLINE_S).text
        health = httpx.get(url.replace("metrics", "health"), timeout=DEADLINE_S)
        assert health.text == "archiving 1 topic\n"
        metrics.touch()
        wait_until(lambda: count in metrics.read_text(), what="the count in the file", timeout_s=20)
        ended(process)
        assert systemd.recv(100) == b"STOPPING=1"


def test_a_message_counts_as_received_before_it_is_flushed(
    to_file: ToFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle report must not claim that no message was received."""

    @contextmanager
    def watching(*args: Any, **_: Any) -> Iterator[None]:
        def watch() -> None:
            with suppress(AssertionError):
                wait_until(args[1], what="a message that came")
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch).start()
        yield

    monkeypatch.setattr(ChannelWatch, "idle_report", watching)
    to_file.publish(b"one")
    result = to_file.run("--sync-interval", "1h", "--for", f"{patience_s(10):g}s")
    assert (result.status, to_file.left()) == (143, 0)


def test_messages_are_never_discarded_for_their_attempts(to_file: ToFile) -> None:
    to_file.publish(b"one")
    options = ClientOptions(max_attempts=0, max_in_flight=1)
    address = [to_file.nsqd.tcp_address]
    with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=address, options=options) as got:
        for _, message in zip(range(7), got, strict=False):  # nsq_to_file discards at the sixth
            message.requeue(0, backoff=False)

    assert to_file.run("-n", "1").status == 0

    (message,) = messages_of(to_file.out)
    assert message["body"] == b"one"
    assert message["attempts"] > 6


def test_hup_finishes_the_file_in_a_work_directory_and_never_ends_nsq(
    to_file: ToFile, tmp_path: Path
) -> None:
    to_file.publish(b"before")
    command = f"sh -c 'until [ -e {tmp_path}/go ]; do sleep 0.1; done'"
    flags = ["--work-dir", str(tmp_path / "work"), "-n2", "--on-file", command]
    process = to_file.start(*RAW, *flags)

    process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(to_file.finished) == 1, what="the first file")
    to_file.publish(b"after")
    channel = to_file.nsqd.channel_stats
    wait_until(lambda: not channel(TOPIC, CHANNEL)["client_count"], what="the end", timeout_s=60)
    process.send_signal(signal.SIGHUP)  # while the --on-file command is running
    (tmp_path / "go").touch()

    assert process.wait(DEADLINE_S) == 0
    assert [text_of(path) for path in to_file.finished] == [b"before\n", b"after\n"]


def test_a_full_disk_joins_no_lines(to_file: ToFile, small_disk: Path) -> None:
    to_file.out = small_disk
    bodies = [b"%04d " % number + b"x" * 63 for number in range(2000)]
    to_file.publish(*bodies)
    process = to_file.spawn_nsq(to_file.args(*RAW, *SOON, "--max-in-flight", "100"))
    assert str(small_disk) in wait_for_stderr(process, "No space left on device")
    assert to_file.left() > 0

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    wait_until_archived(to_file.nsqd)
    assert "trying again" not in ended(process), "it was reported before"
    assert sorted(lines_of(small_disk)) == bodies


def test_a_file_is_published_when_the_disk_is_writable_again(
    to_file: ToFile, small_disk: Path, tmp_path: Path
) -> None:
    """The work directory is on another file system."""
    to_file.out = small_disk
    to_file.publish(b"one")
    process = to_file.start(*RAW, "--work-dir", str(tmp_path / "work"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    process.send_signal(signal.SIGHUP)
    assert str(small_disk) in wait_for_stderr(process, "Read-only file system")

    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    wait_until(lambda: to_file.finished, what="the file", timeout_s=10)
    ended(process)

    assert lines_of(small_disk) == [b"one"]
    assert parts(tmp_path / "work") == []


def test_messages_are_not_finished_while_the_directory_is_missing(to_file: ToFile) -> None:
    to_file.publish(b"one")
    process = to_file.start(*SOON)
    shutil.rmtree(to_file.out)

    to_file.publish(b"two")
    assert str(to_file.out) in wait_for_stderr(process, "cannot write")
    wait_until(lambda: to_file.left() == 1, what="it is kept")
    to_file.out.mkdir()
    wait_until_archived(to_file.nsqd)
    ended(process)

    assert [message["body"] for message in messages_of(to_file.out)] == [b"two"]


def test_messages_held_longer_than_their_timeout_are_touched(
    to_file: ToFile, embedded_nsqd: AnyNsqd
) -> None:
    """The embedded nsqd times messages out immediately; Go's checks a new channel after 5 s."""
    to_file.nsqd = embedded_nsqd()
    to_file.publish(b"one", b"two", b"three")
    timeout_s = max(2.0, patience_s(0.6))  # a busy machine needs that to touch in time
    timeout = ("--consumer-opt", f"msg_timeout={timeout_s:g}s")
    ended(to_file.start("--sync-interval", f"{1.3 * timeout_s + 0.3:g}s", *timeout))

    assert [message["attempts"] for message in messages_of(to_file.out)] == [1, 1, 1]
    assert to_file.nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


def test_an_unwritable_topic_does_not_stop_the_others(to_file: ToFile) -> None:
    nsqd, out = to_file.nsqd, to_file.out
    out.mkdir()
    (out / "broken").write_text("a file where the topic's folder should be")
    for topic in ("broken", "good"):
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, b"message of " + topic.encode())
    args = to_file.args("--filename-format", "<TOPIC>/<TOPIC><REV>.log", *SOON)
    process = to_file.spawn_nsq([args[0], "-t", "broken", "-t", "good", *args[3:]])

    assert str(out / "broken") in wait_for_stderr(process, "topic broken: cannot write")
    wait_until_archived(nsqd, "good")
    assert to_file.left("broken") == 1
    (out / "broken").unlink()
    wait_until_archived(nsqd, "broken")
    ended(process)

    assert len(messages_of(out)) == 2


REFUSALS = {
    "lock files": (fcntl, "flock", errno.ENOLCK),
    "rename files": (durable, "link_file", errno.ENOSYS),
    "write files": (os, "fdatasync", errno.EINVAL),
}


@pytest.mark.parametrize("operation", REFUSALS)
def test_an_operation_the_file_system_lacks_is_named_at_the_start(
    to_file: ToFile, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, number = REFUSALS[operation]
    to_file.publish(b"one")
    where = part_file if module is durable else module
    monkeypatch.setattr(where, name, Mock(side_effect=OSError(number, "Refused")))
    result = to_file.run(*SOON)
    assert f"cannot {operation} in {to_file.out} (Refused)" in result.err
    assert (result.status, to_file.left()) == (1, 1)
    assert list(to_file.out.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_directory_that_cannot_be_synced_is_used(
    to_file: ToFile, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "Refused")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    to_file.publish(b"one")
    assert to_file.run("-n", "1").status == 0
    assert len(messages_of(to_file.out)) == 1


def test_a_permanent_error_ends_the_job_and_finishes_no_message(to_file: ToFile) -> None:
    to_file.publish(b"one")
    result = to_file.run("--filename-format", "x" * 240 + "<TOPIC>.log", *SOON)
    assert "(File name too long)\nhint: Give a shorter --filename-format." in result.err
    assert (result.status, to_file.left()) == (1, 1)
    (to_file.out / "clicks").symlink_to("clicks")  # a loop
    result = to_file.run("--filename-format", "<TOPIC>/x.log", *SOON)
    assert "cannot write" in result.err
    assert (result.status, to_file.left()) == (1, 1)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_file_and_directory_modes_ignore_the_umask(to_file: ToFile, mask: int) -> None:
    to_file.publish(b"one")
    to_file.out /= "nested"
    previous_mask = os.umask(mask)
    try:
        args = ("--filename-format", "sub/<TOPIC>.log", "--file-mode", "664", "--dir-mode", "2775")
        assert to_file.run(*args, "-n", "1").status == 0
    finally:
        os.umask(previous_mask)
    sub = to_file.out / "sub"
    folders, files = [to_file.out.parent, to_file.out, sub], [*sub.glob("*.log")]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (*folders, *files)]
    assert modes == [0o2775, 0o2775, 0o2775, 0o664]


def test_term_with_a_frozen_nsqd_neither_spins_nor_waits_forever(to_file: ToFile) -> None:
    to_file.publish(b"one")
    process = to_file.start("--consumer-opt", "drain_timeout=500ms")
    to_file.nsqd.pause()

    process.send_signal(signal.SIGTERM)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)

    assert process.returncode == 143
    assert usage.ru_utime + usage.ru_stime < 3  # including the start
    assert len(messages_of(to_file.out)) == 1


def test_many_taken_names_leak_no_descriptors(to_file: ToFile) -> None:
    for rev in range(50):
        folder = to_file.out / f"d-{rev:06d}"
        folder.mkdir(parents=True)
        (folder / "clicks.log").write_text("taken")
    to_file.publish(b"one")
    process = to_file.start(*RAW, "--filename-format", "d<REV>/<TOPIC>.log")

    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 20
    ended(process)
    assert (to_file.out / "d-000050" / "clicks.log").read_bytes() == b"one\n"


def test_a_deleted_topic_is_not_created(to_file: ToFile) -> None:
    to_file.publish(b"one")
    process = to_file.start("--exit-when-deleted")
    to_file.nsqd.post("/topic/delete", topic=TOPIC)
    _, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 3
    assert f"topic {TOPIC} was deleted" in stderr.decode()
    assert to_file.nsqd.stats()["topics"] == []
    assert len(messages_of(to_file.out)) == 1
