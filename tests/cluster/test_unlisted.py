"""Who waits for a channel to be empty does not wait for a topic that no nsqd has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from plugins.archives import messages_of
from plugins.cli import RunNsq
from plugins.embedded import EmbeddedLookupServer, EmbeddedServer
from plugins.scripted_lookupd import MakeScripted, ScriptedLookupd
from plugins.servers import MakeLookupd, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.running import consuming
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster import topics
from nsqtools.cluster.topics import UnlistedTopics
from nsqtools.errors import NotFoundError


class Clock:
    """Stands still until the test turns it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def turn(self, seconds: float) -> None:
        self.now_s += seconds


def listing(lookupd: ScriptedLookupd, *topics: str) -> None:
    lookupd.list_nsqd("127.0.0.1:4150")
    lookupd.answer["producers"][0]["topics"] = [*topics]


def test_a_topic_is_given_up_when_no_nsqd_was_named_for_it_for_long(
    scripted_lookupd: MakeScripted,
) -> None:
    lookupd = scripted_lookupd()
    listing(lookupd, "other")
    connection = ConnectionSettings((), (lookupd.address,))
    clock = Clock()
    asked = UnlistedTopics(connection, clock)
    assert asked.among({"ghost", "other"}) == set()
    clock.turn(19)
    assert asked.among({"ghost", "other"}) == set()

    listing(lookupd, "ghost")  # its nsqd was restarted: the time begins again
    clock.turn(2)
    assert asked.among({"ghost"}) == set()
    listing(lookupd)
    clock.turn(2)
    assert asked.among({"ghost"}) == set()
    clock.turn(10)
    asked.among(set())  # it had a connection meanwhile: again
    for _ in range(2):
        assert asked.among({"ghost"}) == set()
        clock.turn(10)
    assert asked.among({"ghost"}) == {"ghost"}
    with pytest.raises(NotFoundError, match="no nsqd has topic ghost"):
        asked.refuse(["ghost", "other"])
    asked.refuse(["other"])

    lookupd.status = 500  # nobody answers: nothing is known
    clock.turn(2)
    assert asked.among({"ghost"}) == set()


def test_an_nsqd_given_by_address_is_waited_for(scripted_lookupd: MakeScripted) -> None:
    lookupd = scripted_lookupd()
    connection = ConnectionSettings(("127.0.0.1:4150",), (lookupd.address,))
    clock = Clock()
    asked = UnlistedTopics(connection, clock)
    for _ in range(3):
        assert asked.among({"ghost"}) == set()
        clock.turn(100)
    assert not lookupd.requests


def test_waiting_for_the_end_of_a_topic_that_only_nsqlookupd_knows_ends_with_status_3(
    serve: Serve, run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", 0.1)
    monkeypatch.setattr(topics, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(consuming, "EMPTY_AFTER_S", 0.3)
    lookupd = serve(EmbeddedLookupServer())
    lookupd.post("/topic/create", topic="ghost")
    asked = ["-t", "ghost", "--until-empty", "--lookupd-http-address", lookupd.http_address]
    (tmp_path / "target").mkdir()
    target = serve(EmbeddedServer(tmp_path / "target")).tcp_address
    elsewhere = ["-c", "copies", "--destination-nsqd-tcp-address", target]

    def run(*args: str) -> None:
        result = run_nsq([*args, *asked])
        assert (result.status, result.err.count("no nsqd has topic ghost")) == (3, 1), result.err

    run("to-file", "--output-dir", str(tmp_path / "out"))
    run("tail")
    run("to-nsq", *elsewhere)
    result = run_nsq(
        ["to-file", "--topic-pattern", "^gh", *asked[2:], "--output-dir", str(tmp_path)]
    )
    assert result.status == 0, result.err  # that nsqlookupd keeps old names is no fault


def test_an_nsqd_that_is_restarted_is_waited_for(
    nsqlookupd: MakeLookupd,
    go_nsqd: MakeNsqd,
    tmp_path: Path,
    run_nsq: RunNsq,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", patience_s(60))
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", b"one")
    wait_until(lambda: lookupd.producers("clicks"), what="its nsqd is registered")
    nsqd.stop()
    wait_until(lambda: not lookupd.producers("clicks"), what="its nsqd is gone")
    asked = lookupd.log.count("GET /lookup")

    def start_once_asked() -> None:
        wait_until(lambda: lookupd.log.count("GET /lookup") > asked, what="it is asked")
        nsqd.start()

    starting = threading.Thread(target=start_once_asked)
    starting.start()
    place = ["--lookupd-http-address", lookupd.http_address, "--output-dir", str(tmp_path / "out")]
    often = ["-X", "lookupd_poll_interval=200ms"]

    result = run_nsq(["to-file", "-t", "clicks", "-c", "archive", "--until-empty", *place, *often])

    starting.join()
    assert result.status == 0, result.err
    assert [message["body"] for message in messages_of(tmp_path / "out")] == [b"one"]
