"""The fleet: who begins, waits and rests under the limit of open files, and how often it asks."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from nsqtools.archive import archiver as archiver_module
from nsqtools.archive.archiver import REST_AFTER_S, Consumers, Waiting
from nsqtools.archive.topic_archiver import TopicArchiver
from nsqtools.archive.topic_writer import ArchiveSource
from nsqtools.client.backlog import Backlog
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import ClientOptions
from nsqtools.errors import OutputError

NOW = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: NOW)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(archiver_module, "free_descriptors", lambda: count)


def archiver(topic: str, idle_s: float | None = None, connections: int = 2) -> TopicArchiver:
    consumer = SimpleNamespace(connections=[object()] * connections)
    since = None if idle_s is None else NOW - idle_s
    made = SimpleNamespace(topic=topic, consumer=consumer, is_idle_since_s=since)
    return cast(TopicArchiver, made)


def test_as_many_begin_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(direct=2)
    free(monkeypatch, 5)
    assert waiting.fitting([], []) == []
    assert waiting.fitting("abcd", []) == ["a", "b"]
    assert (waiting.topics, waiting.unseen) == ({"c", "d"}, {"c", "d"})
    # of one that runs already a connection is still to be made
    assert waiting.fitting(waiting.take(), [archiver("a", connections=1)]) == ["c", "d"]
    free(monkeypatch, 4)
    assert waiting.fitting("ef", [archiver("a", connections=1)]) == ["e"]
    assert waiting.topics == {"f"}
    waiting.forget(["f", "unknown"])
    assert waiting.topics == set()


@pytest.mark.parametrize("count", [1, 0, -7])
def test_without_room_for_one_topic_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    free(monkeypatch, count)
    with pytest.raises(OutputError, match="even one topic"):
        Waiting(direct=2).fitting("a", [])
    assert Waiting(direct=2).fitting("a", [archiver("b")]) == []


def test_it_is_said_when_more_wait_than_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(direct=1)
    for topics in ("abc", "bc", "bcd", "d"):
        free(monkeypatch, 1)
        waiting.take()
        waiting.fitting(topics, [])
    assert [text.partition(" ")[0] for text in caplog.messages] == ["2", "2"]
    assert caplog.messages[1].endswith(": c, d")


@pytest.mark.parametrize(
    ("idle_s", "waiting_topics", "room", "rest"),
    [
        ([9, 99, 7, 8], "x", 0, ["b"]),  # who is quiet the longest, for one that waits
        ([9, 99, 7, 8], "xyz", 0, ["b"]),  # a quarter at most
        ([9, 99, 7, 8, 9], "xyz", 0, ["b", "a"]),
        ([9, 99, 7, 8], "", 0, []),  # nobody waits
        ([9, 99, 7, 8], "", -5, ["b", "a", "d"]),  # or there are too many connections
        ([REST_AFTER_S, REST_AFTER_S - 0.5, None, 0], "x", 0, ["a"]),
        ([0, None, 1, 2], "x", 0, []),
        ([], "x", -5, []),
    ],
)
def test_the_quiet_ones_rest_for_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
    idle_s: list[float | None],
    waiting_topics: str,
    room: int,
    rest: list[str],
) -> None:
    waiting = Waiting(direct=2)
    free(monkeypatch, 0)
    waiting.fitting(waiting_topics, [archiver("other")])
    archivers = [archiver(topic, idle) for topic, idle in zip("abcde", idle_s, strict=False)]
    free(monkeypatch, room)

    assert [each.topic for each in waiting.to_rest(archivers)] == rest

    assert set(waiting.quiet_since_s) == set(rest)
    for topic in "abcde":
        assert waiting.has_rested(topic) is (topic in rest)
        assert not waiting.has_rested(topic)  # it is told once
    assert waiting.take() == [*waiting_topics, *sorted(rest)]


def test_many_topics_of_a_fleet_ask_seldom_unless_the_user_chose_how_often() -> None:
    def interval_s(source: ArchiveSource, topics: int) -> float:
        consumers = Consumers(source, lambda topic: None, is_fleet=True)
        consumers.expect(topics)
        return consumers.make("orders", 10, Backlog()).options.lookupd_poll_interval_s

    connection = ConnectionSettings(lookupd_http_addresses=("lookup:4161",))
    source = ArchiveSource("archive", connection, ClientOptions())
    assert [interval_s(source, topics) for topics in (10, 1000, 10_000)] == [60.0, 200.0, 300.0]

    chosen = replace(connection, options={"lookupd_poll_interval": "10s"})
    source = ArchiveSource("archive", chosen, chosen.client_options())
    assert interval_s(source, 1000) == 10.0
