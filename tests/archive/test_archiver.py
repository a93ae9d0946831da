"""Archiver: topics that start under the limit of open files, and options of their consumers."""

import os
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.waiting import wait_until

from nsqtools.archive import archiver as archiver_module
from nsqtools.archive.archive_run import FileHook
from nsqtools.archive.archiver import Archiver
from nsqtools.archive.part_file import Directories
from nsqtools.archive.topic_writer import THROUGHPUT, ArchiveSettings, ArchiveTotals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import OutputError

TWO = ConnectionSettings(nsqd_tcp_addresses=("a:4150", "b:4150"))


def fleet(connection: ConnectionSettings, tmp_path: Path) -> Archiver:
    topics, options = ConsumedTopics([], connection, "^o"), connection.client_options(**THROUGHPUT)
    return Archiver(topics, "archive", options, ArchiveSettings(Directories(tmp_path, tmp_path)))


def test_topics_start_within_the_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 5
    monkeypatch.setattr(archiver_module, "free_descriptors", lambda: free)
    archiver = fleet(TWO, tmp_path)
    assert archiver._within_fd_limit([]) == []
    assert archiver._within_fd_limit("abcd") == ["a", "b"]
    running = Mock(topic="a", last_error=None)
    running.consumer.connections = [Mock()]  # of two: the second is not connected yet
    running.writer.totals, running.writer.held_count = ArchiveTotals(), 0
    archiver._archivers["a"] = running
    free = 3
    assert archiver._within_fd_limit("cd") == ["c"]
    free = -7
    assert archiver._within_fd_limit("d") == []
    assert (archiver._waiting, archiver.health[0]) == (["d"], False)
    free = 5
    assert archiver._within_fd_limit("de") == ["d", "e"]
    assert [text.partition(" ")[0] for text in caplog.messages] == ["2", "1"]
    assert caplog.messages[1].endswith("(raise ulimit -n): d")


def test_many_topics_share_memory_and_poll_nsqlookupd_less_often(tmp_path: Path) -> None:
    lookup = ConnectionSettings(lookupd_http_addresses=("lookup:4161",))
    archiver = fleet(lookup, tmp_path)
    all_options = [archiver._shared_options(topics) for topics in (1, 10, 1000, 10_000)]
    assert [options.lookupd_poll_interval_s for options in all_options] == [
        60.0,
        60.0,
        200.0,
        300.0,
    ]
    assert [options.max_in_flight_bytes >> 17 for options in all_options] == [256, 102, 8, 8]
    chosen = replace(lookup, options={"lookupd_poll_interval": "10s", "max_in_flight_bytes": "0"})
    explicit = fleet(chosen, tmp_path)._shared_options(1000)
    assert (explicit.lookupd_poll_interval_s, explicit.max_in_flight_bytes) == (10.0, 1 << 20)


def test_close_waits_for_a_slow_command_and_bounds_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqtools.archive.archive_run.SLOW_HOOK_S", 0.01)
    os.mkfifo(path := tmp_path / "x")
    hook = FileHook("sh -c 'cat {path} >&2; exit 3'")
    hook.put(path)
    closing = threading.Thread(target=hook.close)
    closing.start()
    wait_until(lambda: caplog.messages, what="a line about the wait")
    output = b"progress\n" * 1_000_000 + b"no way\n"
    tracemalloc.start()
    path.write_bytes(output)
    closing.join()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    failed = f"the command for {path} failed (status 3 no way)"
    assert (hook.failures, caplog.messages[1:]) == (1, [failed])


def test_a_waiting_topic_that_fails_to_start_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver = fleet(TWO, tmp_path)
    archiver._topics = topics = ConsumedTopics(["a"], TWO)
    archiver._waiting = ["a"]  # it was beyond the limit of open files
    fails = Mock(side_effect=OutputError("cannot use a (Too many open files)"))
    monkeypatch.setattr(archiver, "_start", fails)
    archiver._start_all(["a"])
    assert (archiver._waiting, topics.current(), topics._awaited) == ([], set(), {"a"})
