"""--durable in one process: confirmed publishes, data after a kill, and dropped messages."""

import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.cli import RunNsq, SpawnNsq
from plugins.disks import damage_body, full
from plugins.raw_client import TIMEOUT_S, RawClient, mpub, sized, subscribed
from plugins.servers import EmbeddedServer, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.server import durable_database, durable_path, durable_store
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import Changes, Database, Publish
from nsqtools.server.durable_path import DurablePath
from nsqtools.server.protocol_v2 import PublishCommands
from nsqtools.server.queues import topic
from nsqtools.server.queues.message_buffer import DiskHealth
from nsqtools.server.stored_queues import _is_locked

LONGEST_MS = 9_223_372_036_854  # 292 years, the limit of Go


@pytest.fixture
def nsqd(tmp_path: Path, serve: Serve) -> EmbeddedServer:
    flags = ("-mem-queue-size=5", f"-max-req-timeout={LONGEST_MS}ms")
    return serve(EmbeddedServer(tmp_path, "-durable", *flags))


def killed(nsqd: EmbeddedServer) -> EmbeddedServer:
    nsqd.kill()
    nsqd.start()
    return nsqd


@pytest.mark.parametrize("how", ["empty the channel", "delete the channel", "delete the topic"])
def test_dropped_messages_stay_dropped(nsqd: EmbeddedServer, how: str) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", *[b"%d" % number for number in range(20)])
    if how == "empty the channel":
        nsqd.post("/channel/empty", topic="t", channel="ch")
    elif how == "delete the channel":
        nsqd.post("/channel/delete", topic="t", channel="ch")
    else:
        nsqd.post("/topic/delete", topic="t")
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", *[b"new %d" % number for number in range(9)])

    for _ in range(2):
        killed(nsqd)
        assert nsqd.depth("t", "ch") == 9
    assert all(body.startswith(b"new") for body in consumed(nsqd, "t", 9))


def test_messages_wait_for_a_channel_through_kills(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [b"%d" % number for number in range(12)]
    nsqd.publish("t", *bodies)
    with RawClient(nsqd.tcp_address) as client:
        client.publish_deferred("t", 100, b"deferred")
    assert killed(nsqd).depth("t") == 13
    proceed, commit = Event(), Database.commit
    slow = lambda *args: proceed.wait(TIMEOUT_S) and commit(*args)  # noqa: E731
    monkeypatch.setattr(Database, "commit", slow)
    # The database is rewritten, and the step is retried.
    pages = [failing(sqlite3.SQLITE_CORRUPT, "malformed")] * 4
    monkeypatch.setattr(Database, "page", at_first(pages, Database.page))
    nsqd.create_channel("t", "ch")
    assert nsqd.depth("t") == 13  # including the messages being moved
    proceed.set()
    wait_until(lambda: nsqd.depth("t") == 0, what="the channel has them")
    # Each is delivered once, as it has left the topic.
    assert {*consumed(killed(nsqd), "t", 13)} == {*bodies, b"deferred"}


def test_ids_survive_clocks_set_back(nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With duplicate ids, the later message would be removed when the first is finished."""
    began_ns = time.time_ns()
    monkeypatch.setattr(topic, "time", SimpleNamespace(time_ns=lambda: began_ns))
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"old")
    killed(nsqd).publish("t", b"new")
    with subscribed(nsqd.tcp_address, "t", "ch", ready=2) as client:
        old, new = client.read_messages(2)
        client.finish([old])
        client.settle()
    with subscribed(killed(nsqd).tcp_address, "t", "ch", ready=2) as client:
        assert client.read_message().id == new.id != old.id


def test_the_answer_precedes_the_message_and_ephemeral_queues_end(nsqd: EmbeddedServer) -> None:
    with subscribed(nsqd.tcp_address, "other", "ch", ready=10) as client:
        for _ in range(20):
            client.publish("other", b"x")
            client.finish([client.read_message()])
    with subscribed(nsqd.tcp_address, "t", "ch#ephemeral", ready=1) as client:
        nsqd.publish("t", b"x")
        assert client.read_message().body == b"x"
        nsqd.publish("e#ephemeral", b"y")
    assert sum(topic["depth"] for topic in killed(nsqd).stats()["topics"]) == 0


def test_neither_kind_of_nsqd_starts_on_the_files_of_the_other(nsqd: EmbeddedServer) -> None:
    nsqd.publish("t", b"1")
    nsqd.stop()
    path = nsqd.data_path
    with pytest.raises(ConfigurationError, match="are those of an nsqd with --durable") as refused:
        EmbeddedServer(path).start()
    assert "--recover-only" in str(refused.value)
    [database] = path.glob("nsqd.durable.*.db")
    content = database.read_bytes()
    recover(path)
    database.write_bytes(content)  # as after a kill before its removal
    recover(path)
    assert not database.exists()
    with pytest.raises(ConfigurationError, match="are those of an nsqd without --durable"):
        nsqd.start()
    [data] = path.glob("t.diskqueue.0*")
    content = data.read_bytes()
    recover(path, "-durable")
    data.write_bytes(content)  # as after a kill before its removal
    recover(path, "-durable")
    assert not data.exists()
    nsqd.start()
    assert nsqd.depth("t") == 1
    (path / "nsqd.durable.000001.log").touch()
    with pytest.raises(ConfigurationError, match=r"nsqtools 0\.2 wrote"):
        killed(nsqd)


def test_a_publish_waits_while_another_program_writes(nsqd: EmbeddedServer) -> None:
    nsqd.publish("t", b"1")
    [database] = nsqd.data_path.glob("nsqd.durable.*.db")
    with (
        closing(sqlite3.connect(database, isolation_level=None)) as connection,
        RawClient(nsqd.tcp_address) as client,
    ):
        connection.execute("BEGIN IMMEDIATE")
        client.send(b"PUB t\n" + sized(b"2"))
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.read_response()
        connection.execute("COMMIT")
        client.socket.settimeout(TIMEOUT_S)
        assert client.read_response() == b"OK"
    assert "ERROR" not in nsqd.log


def test_a_signal_ends_a_recovery(nsqd: EmbeddedServer, spawn_nsq: SpawnNsq) -> None:
    nsqd.publish("t", b"1")
    nsqd.stop()
    path = nsqd.data_path
    with closing(sqlite3.connect(path / "nsqd.durable.1.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN IMMEDIATE")
        recovery = spawn_nsq(["nsqd", "-recover-only", f"-data-path={path}"])
        wait_until(lambda: _is_locked(path), what="it waits for the database now")
        recovery.terminate()
        assert recovery.wait(patience_s(10)) == -signal.SIGTERM


def recover(path: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "nsqtools", "nsqd", "-recover-only", *flags]
    result = subprocess.run([*command, f"-data-path={path}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_files_with_damage_enter_a_database(tmp_path: Path, serve: Serve, run_nsq: RunNsq) -> None:
    plain = serve(EmbeddedServer(tmp_path, "-mem-queue-size=0"))
    plain.publish("t", *[b"%d" % number for number in range(9)])
    plain.stop()
    file = tmp_path / "t.diskqueue.000000.dat"
    content = file.read_bytes()
    file.write_bytes(content[:31] + b"\xff" + content[32:])  # the length of the second record
    copy = file.with_name(f"{file.name}.bad")
    copy.symlink_to(tmp_path / "elsewhere")  # The link is not followed.
    (tmp_path / "nsqd.dat").write_bytes(b"\xff")  # The previous file is next to it.

    recover(tmp_path, "-durable")
    archive = tmp_path.parent / f"{tmp_path.name}.log"
    recovered = run_nsq(["queue", "recover", tmp_path, "-o", archive])

    assert serve(EmbeddedServer(tmp_path, "-durable")).depth("t") == 8
    assert copy.read_bytes()[31] == 255
    assert not copy.is_symlink()
    assert "nsq: 0 messages" in recovered.err  # The database has all messages of the copy.


def test_files_and_database_have_the_same_messages(nsqd: EmbeddedServer, serve: Serve) -> None:
    """Conversion to files of Go's nsqd and back keeps bodies, order, attempts, delays, pauses."""
    nsqd.create_channel("t", "ch")
    nsqd.create_channel("t", "paused")
    nsqd.post("/channel/pause", topic="t", channel="paused")
    nsqd.publish("waits", b"\0", bytes(range(256)) * 9)
    bodies = [b"%d" % number for number in range(50)]
    with RawClient(nsqd.tcp_address) as client:
        client.publish("t", b"given back", b"held", *bodies)
        client.publish_deferred("t", LONGEST_MS, b"deferred")
        client.subscribe("t", "ch", ready=1)
        client.send(b"REQ %b %d\n" % (client.read_message().id, LONGEST_MS))
        assert client.read_message().body == b"held"
        client.publish("t", b"last")
    nsqd.kill()
    recover(nsqd.data_path)
    plain = serve(EmbeddedServer(nsqd.data_path, "-mem-queue-size=0"))
    assert plain.channel_stats("t", "paused")["paused"]
    assert (plain.depth("t", "ch"), plain.depth("waits")) == (54, 2)
    plain.stop()
    recover(nsqd.data_path, "-durable")
    nsqd.start()
    with subscribed(nsqd.tcp_address, "t", "ch", ready=100) as client:
        messages = client.read_messages(52)
    assert [message.body for message in messages] == [b"held", *bodies, b"last"]
    assert [message.attempts for message in messages] == [2, *[1] * 51]
    assert nsqd.channel_stats("t", "ch")["deferred_count"] == 2
    assert nsqd.channel_stats("t", "paused")["paused"]
    assert consumed(nsqd, "waits", 2) == [b"\0", bytes(range(256)) * 9]


def consumed(nsqd: EmbeddedServer, topic: str, count: int) -> list[bytes]:
    with subscribed(nsqd.tcp_address, topic, "ch", ready=count) as client:
        return [message.body for message in client.read_messages(count)]


@pytest.mark.parametrize("mem_queue_size", [0, 5, 10_000])
def test_order_is_kept_in_memory_and_on_disk(
    tmp_path: Path, serve: Serve, mem_queue_size: int
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path, "-durable", f"-mem-queue-size={mem_queue_size}"))
    nsqd.create_channel("t", "ch")
    bodies = [b"%d" % number for number in range(3000)]
    with (
        subscribed(nsqd.tcp_address, "t", "ch", ready=7) as client,
        RawClient(nsqd.tcp_address) as producer,
    ):
        received: list[bytes] = []

        def consume(count: int) -> None:
            for _ in range(min(count, 3000 - len(received))):
                message = client.read_message()
                received.append(message.body)
                client.finish([message])

        for start in range(0, 3000, 100):
            producer.publish("t", *bodies[start : start + 100])
            consume(140 if start >= 1500 else 35)
        consume(3000)
        assert received == bodies
        producer.publish("t", b"again")
        for attempts in range(1, 4):
            message = client.read_message()
            assert (message.body, message.attempts) == (b"again", attempts)
            client.send(b"REQ %b %d\n" % (message.id, attempts % 2 * 30))
    assert killed(nsqd).depth("t", "ch") + nsqd.channel_stats("t", "ch")["deferred_count"] == 1


def test_requeued_messages_go_behind_waiting_ones(nsqd: EmbeddedServer) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", *[b"%d" % number for number in range(30)])
    with subscribed(nsqd.tcp_address, "t", "ch", ready=1) as client:
        received = []
        for _ in range(34):
            message = client.read_message()
            received.append(message.body)
            is_requeued = message.body in (b"0", b"1") and message.attempts < 3
            client.send((b"REQ %b 0\n" if is_requeued else b"FIN %b\n") % message.id)
        client.settle()
    assert received[:30] == [b"%d" % number for number in range(30)]
    assert sorted(received[30:]) == [b"0", b"0", b"1", b"1"]
    wait_until(lambda: nsqd.depth("t", "ch") == 0, what="all are finished")


def failing(code: int, text: str) -> Callable[..., object]:
    """Return a function that raises an error of SQLite."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return Mock(side_effect=error)


def at_first(failures: list[Callable[..., object]], real: Callable[..., object]) -> Any:
    """Raise these failures in turn, and then call the real function."""
    return lambda *args: (failures.pop(0) if failures else real)(*args)


def refusal(nsqd: EmbeddedServer, body: bytes) -> bytes:
    with RawClient(nsqd.tcp_address) as client:
        client.send(b"PUB t\n" + sized(body))
        return client.read_error()


def test_a_full_disk_defers_answers(nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nsqd.publish("t", b"1", b"2")
    with monkeypatch.context() as patch:  # The topic's messages are moved before the disk is full.
        patch.setattr(DiskHealth, "free_bytes", lambda _: 0)
        nsqd.create_channel("t", "ch")
        wait_until(lambda: nsqd.depth("t", "ch") == 2, what="the channel has them")
        assert b"0 bytes free on the disk" in refusal(nsqd, b"x")
    wait_until(lambda: nsqd.request("GET", "/ping")[0] == 200, what="room")
    with subscribed(nsqd.tcp_address, "t", "ch", ready=2) as client:
        first, second = client.read_messages(2)
        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", failing(sqlite3.SQLITE_FULL, "full"))
            client.finish([first])
            assert b"the disk is full; consume, or make room" in refusal(nsqd, b"3")
            assert nsqd.request("POST", "/pub?topic=t", b"x") == (503, b'{"message":"EXITING"}')
            assert nsqd.request("GET", "/ping")[0] == 500
        client.send(b"RDY 0\nREQ %b 3600000\n" % second.id)
        client.settle()
        wait_until(lambda: nsqd.request("POST", "/pub?topic=t", b"4")[0] == 200, what="room")
    assert nsqd.request("GET", "/ping") == (200, b"OK")
    assert consumed(killed(nsqd), "t", 1) == [b"4"]
    assert nsqd.channel_stats("t", "ch")["deferred_count"] == 1


def test_a_pause_fails_on_a_full_disk(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"1", b"2", b"3", b"4")
    is_full = Event()

    def commit(*_: object, **__: object) -> object:
        is_full.wait(patience_s(10))
        return failing(sqlite3.SQLITE_FULL, "full")()

    with subscribed(nsqd.tcp_address, "t", "ch", ready=4) as client:
        messages = client.read_messages(4)
        client.settle()
        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", commit)
            publishes = (b"PUB u\n" + sized(b"x")) * durable_store._STEP_COUNT
            client.send(b"".join(b"FIN %b\n%b" % (message.id, publishes) for message in messages))
            wait_until(lambda: nsqd.channel_stats("t", "ch")["in_flight_count"] == 0, what="FINs")
            is_full.set()
            assert nsqd.request("POST", "/channel/pause?topic=t&channel=ch")[0] == 500


def test_a_failed_sync_rewrites_the_database_before_a_publish_is_confirmed(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel("t", "ch")
    bodies = [b"%d" % number for number in range(20)]
    nsqd.publish("t", *bodies)
    old_name_file = nsqd.data_path.joinpath("nsqd.dat").read_bytes()
    with subscribed(nsqd.tcp_address, "t", "ch") as client:
        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", failing(sqlite3.SQLITE_IOERR, "disk I/O error"))
            patch.setattr(DurablePath, "renew", failing(sqlite3.SQLITE_IOERR, "still bad"))
            assert b"disk I/O error" in refusal(nsqd, b"refused")
            assert nsqd.data_path.joinpath("nsqd.dat").read_bytes() == old_name_file
            client.send(b"RDY 1\n")  # Its delivery is also written, and must not fail first.
        wait_until(lambda: nsqd.request("POST", "/pub?topic=t", b"new")[0] == 200, what="it is")
        assert nsqd.data_path.joinpath("nsqd.dat").read_bytes() != old_name_file
        assert len(list(nsqd.data_path.glob("nsqd.durable.*.db"))) == 1
        # It is damaged again, and the disk is full.
        pages = [failing(sqlite3.SQLITE_CORRUPT, "malformed")] * 2
        commits: list[Callable[..., object]] = []
        renew, twice = DurablePath.renew, [failing(sqlite3.SQLITE_FULL, "full")] * 2
        renewed = lambda *args: (renew(*args), commits.extend(twice))[0]  # noqa: E731
        monkeypatch.setattr(DurablePath, "renew", renewed)
        monkeypatch.setattr(Database, "page", at_first(pages, Database.page))
        monkeypatch.setattr(Database, "commit", at_first(commits, Database.commit))
        removals = at_first([full], durable_path.remove_database)
        monkeypatch.setattr(durable_path, "remove_database", removals)
        for body in [*bodies, b"new"]:
            message = client.read_message()
            assert (message.body, message.attempts) == (body, 1)
            client.finish([message])
        client.settle()
        wait_until(lambda: nsqd.request("POST", "/pub?topic=u", b"x")[0] == 200, what="room")
    assert killed(nsqd).depth("t", "ch") == 0


@pytest.mark.parametrize("fails", ["the database", "its opening", "the copy of the old one"])
def test_a_failed_rewrite_leaves_no_files(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def copy(source: Path, target: Path) -> None:
        target.touch()
        full()

    nsqd.publish("t", b"a body that is damaged")
    nsqd.stop()
    if fails == "the database":
        monkeypatch.setattr(durable_database, "_RECOUNT", "nonsense")
    else:
        damage_body(nsqd.data_path / "nsqd.durable.1.db", [b"a body"])
        monkeypatch.setattr(durable_path, "copy_readable", copy)
    files = DurablePath(nsqd.data_path, DaemonLog(None, ""))
    with closing(files.open()) as opened:
        old_files = sorted(nsqd.data_path.iterdir())
        if fails == "its opening":
            failure = failing(sqlite3.SQLITE_FULL, "full")
            monkeypatch.setattr(durable_path, "Database", failure)
        with pytest.raises((sqlite3.Error, OSError)):
            files.renew(opened, "it is damaged")
        assert sorted(nsqd.data_path.iterdir()) == old_files


def test_the_file_shrinks_when_its_messages_are_deleted(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_store, "_SHRINK_PAUSE_S", 0)
    nsqd.create_channel("large", "ch")
    for _ in range(5):
        nsqd.publish("large", *[bytes(20_000)] * 200)
    bodies = [bytes([number]) * 5_000 for number in range(9)]
    nsqd.publish("t", *bodies)  # They are at the end of the file, and moved from there.
    [database] = nsqd.data_path.glob("nsqd.durable.*.db")
    assert database.stat().st_size > 16_000_000
    nsqd.post("/channel/empty", topic="large", channel="ch")
    wait_until(lambda: database.stat().st_size < 9_000_000, what="the file shrinks")
    assert consumed(killed(nsqd), "t", 9) == bodies


def test_weakening_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        durable_database, "_SETTINGS", [*durable_database._SETTINGS, ("synchronous", "1")]
    )
    with pytest.raises(ConfigurationError, match="SQLite has synchronous"):
        EmbeddedServer(tmp_path, "-durable").start()


def test_deferred_messages_are_delivered_when_due(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is so slow that a message is due before it is written."""
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"first", b"second")
    is_written, is_second_due = Event(), Event()
    real_commit = Database.commit

    def commit(database: Database, step: Changes, publishes: list[Publish]) -> Counter[int]:
        come_due = real_commit(database, step, publishes)
        if step.come_due:
            is_written.set()
            is_second_due.wait(patience_s(10))
        return come_due

    with subscribed(nsqd.tcp_address, "t", "ch", ready=2) as client:
        first, second = client.read_messages(2)
        client.send(b"RDY 0\n")
        monkeypatch.setattr(Database, "commit", commit)
        client.send(b"REQ %b 1\n" % first.id)
        assert is_written.wait(patience_s(10))
        client.send(b"REQ %b 1\n" % second.id)
        client.settle()
        time.sleep(0.1)  # It becomes due in this time.
        is_second_due.set()
        wait_until(lambda: nsqd.channel_stats("t", "ch")["deferred_count"] == 0, what="both due")
        client.send(b"RDY 2\n")
        first, second = client.read_messages(2)
        # These failures make nsqd rewrite the database.
        looks = [failing(sqlite3.SQLITE_CORRUPT, "malformed")] * 2
        monkeypatch.setattr(Database, "next_due_ns", at_first(looks, Database.next_due_ns))
        client.send(b"RDY 0\nREQ %b 300\nREQ %b 1\n" % (second.id, first.id))
        client.settle()
        wait_until(lambda: nsqd.channel_stats("t", "ch")["deferred_count"] == 0, what="again")


def test_deferred_messages_of_a_topic_are_read_a_few_megabytes_at_a_time(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"x" * 1_000_000
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(10):
            client.send(b"DPUB t 60000\n" + sized(body))
            assert client.read_response() == b"OK"
    read = Database.deferred
    sizes: list[int] = []

    def deferred(*arguments: Any) -> list[tuple[int, int, bytes]]:
        messages = read(*arguments)
        sizes.append(sum(len(message) for _, _, message in messages))
        return messages

    monkeypatch.setattr(Database, "deferred", deferred)
    nsqd.create_channel("t", "ch")
    wait_until(lambda: nsqd.channel_stats("t", "ch")["deferred_count"] == 10, what="all moved")
    assert max(sizes) < 6_000_000


@pytest.mark.parametrize("count", [500, 2000])
def test_a_client_faster_than_the_disk_has_to_wait(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    waits = Event()
    wait_until_confirmed, real_commit = PublishCommands.wait_until_confirmed, Database.commit

    async def note(self: PublishCommands, limit: int) -> None:
        if limit:
            waits.set()
        await wait_until_confirmed(self, limit)

    def commit(*args: Any) -> object:
        assert waits.wait(patience_s(10))
        return real_commit(*args)

    monkeypatch.setattr(PublishCommands, "wait_until_confirmed", note)
    monkeypatch.setattr(Database, "commit", commit)
    publishes = [mpub("t", [b"x" * 1000] * count)] * (12_000 // count)
    with RawClient(nsqd.tcp_address) as client, ThreadPoolExecutor(1) as thread:
        thread.submit(client.send, b"".join(publishes))
        for _ in publishes:
            assert client.read_response() == b"OK"


def test_answers_keep_their_order_and_reach_a_half_closed_client(nsqd: EmbeddedServer) -> None:
    with RawClient(nsqd.tcp_address) as client:
        client.send(b"".join(b"PUB t\n" + sized(b"%d" % number) for number in range(50)))
        client.socket.shutdown(socket.SHUT_WR)
        for _ in range(50):
            assert client.read_response() == b"OK"
    assert nsqd.depth("t") == 50
    with RawClient(nsqd.tcp_address) as client:
        bodies = [b"x" * 100_000] * 200
        client.send(b"".join(b"PUB t\n" + sized(body) for body in bodies) + b"SUB t ch\nRDY 1\n")
        for _ in range(201):
            assert client.read_response() == b"OK"
        client.read_message()
        client.send(b"PUB t\n" + sized(b"y") + b"CLS\n")
        answers = [client.read() for _ in range(2)]
    assert [data for _, data in answers] == [b"OK", b"CLOSE_WAIT"]


def test_a_pipelined_request_is_told_to_continue_after_the_answers_before_it(
    nsqd: EmbeddedServer,
) -> None:
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    with RawClient(nsqd.http_address, magic=b"") as client:
        client.send(head + b"\r\na" + head + b"Expect: 100-continue\r\n\r\n")
        with client.socket.makefile("rb") as answers:
            while not answers.readline().endswith(b"HTTP/1.1 100 Continue\r\n"):
                pass
        client.send(b"b")
        wait_until(lambda: nsqd.depth("t") == 2, what="both are published")


def test_pipelined_http_requests_are_answered_in_order(nsqd: EmbeddedServer) -> None:
    def post(target: bytes, body: bytes) -> bytes:
        head = b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (target, len(body))
        return head + body

    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    with RawClient(nsqd.http_address, magic=b"") as web, RawClient(nsqd.tcp_address) as client:
        web.send(post(b"pub?topic=t", b"1") + ping + post(b"mpub?topic=t", b"2\n3"))
        web.send(post(b"pub?topic=t&defer=1", b"4") + post(b"mpub?topic=t", b"\n"))
        web.socket.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: web.socket.recv(1 << 16), b""))
        client.subscribe("t", "ch", ready=9)
        assert {message.body for message in client.read_messages(4)} == {b"1", b"2", b"3", b"4"}
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"\r\n\r\nOK") == 5
    is_of_nsq = [b"X-Nsq" in answer for answer in answers.split(b"HTTP/1.1 ")[1:]]
    assert is_of_nsq == [True, False, True, True, True]
