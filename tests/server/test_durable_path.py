"""The files that --durable uses, keeps and removes, and how it retries reads."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from plugins.cli import RunNsq
from plugins.disks import damage_body
from plugins.raw_client import subscribed
from plugins.servers import EmbeddedServer, Serve
from plugins.waiting import wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.server import durable_database, durable_path
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import Changes, Database, Publish, all_rows
from nsqtools.server.durable_path import DurablePath

DATABASE = "nsqd.durable.1.db"
BODIES = [b"message %03d" % number for number in range(20)]
GO_EMPTY = '{"topics":null,"version":"1.3.0"}'
GO_TOPIC = '{"topics":[{"name":"x","paused":false,"channels":null}],"version":"1.3.0"}'


@pytest.fixture
def left(tmp_path: Path, serve: Serve) -> Path:
    """The data path of an nsqd with --durable that was stopped, with BODIES in topic ``t``."""
    (path := tmp_path / "data").mkdir()
    nsqd = serve(EmbeddedServer(path, "-durable"))
    nsqd.publish("t", *BODIES)
    nsqd.stop()
    return path


def recovered_bodies(path: Path, run_nsq: RunNsq, *flags: str) -> list[bytes]:
    archive = path.with_name(f"{len(list(path.parent.iterdir()))}.log")
    run_nsq(["queue", "recover", str(path), "-o", str(archive), *flags])
    lines = archive.read_bytes().splitlines() if archive.exists() else []
    return sorted(json.loads(line)["body"].encode() for line in lines)


@pytest.mark.parametrize("flags", [[], ["--durable"]], ids=["export", "adopt"])
@pytest.mark.parametrize("content", [GO_EMPTY, GO_TOPIC])
def test_recover_only_keeps_a_database_that_nsqd_dat_does_not_name(
    left: Path, run_nsq: RunNsq, flags: list[str], content: str
) -> None:
    (left / "nsqd.dat").write_text(content)
    for _ in range(2):  # The second run finds an orphan.
        result = run_nsq(["nsqd", "--recover-only", *flags, f"--data-path={left}"])
        assert result.status == 0, result.err
    listed = json.loads(run_nsq(["queue", "list", str(left), "--json"]).out)
    assert ("t", 20, "orphaned") in [
        (row["topic"], row["messages"], row["state"]) for row in listed
    ]
    assert recovered_bodies(left, run_nsq) == BODIES


@pytest.mark.parametrize("content", [GO_EMPTY, GO_TOPIC])
@pytest.mark.parametrize("remedy", ["move nsqd.dat away", "begin without them"])
def test_a_start_is_refused_with_hints_that_work(
    left: Path, serve: Serve, run_nsq: RunNsq, content: str, remedy: str
) -> None:
    (left / "nsqd.dat").write_text(content)
    with pytest.raises(
        ConfigurationError, match=r"nsqd\.durable\.1\.db has 20 messages"
    ) as refused:
        EmbeddedServer(left, "-durable").start()
    assert "move nsqd.dat away" in str(refused.value)
    command = str(refused.value).partition("run `nsq ")[2].partition("`")[0].split()
    if remedy == "move nsqd.dat away":
        (left / "nsqd.dat").rename(left.parent / "nsqd.dat")
    else:
        assert run_nsq(command).status == 0

    nsqd = serve(EmbeddedServer(left, "-durable"))

    if remedy == "move nsqd.dat away":
        assert nsqd.depth("t") == 20
    else:
        assert "t" not in nsqd.topics()
        assert recovered_bodies(left, run_nsq) == BODIES


def test_an_nsqd_without_durable_reports_a_database(left: Path, serve: Serve) -> None:
    (left / "nsqd.dat").write_text(GO_EMPTY)
    nsqd = serve(EmbeddedServer(left))
    assert "nsqd.durable.1.db has 20 messages" in nsqd.log
    assert (left / "nsqd.durable.1.db").exists()


def test_a_second_database_is_kept_and_an_unfinished_one_removed(
    left: Path, serve: Serve, run_nsq: RunNsq
) -> None:
    shutil.copy(left / "nsqd.durable.1.db", left / "nsqd.durable.7.db")
    for name in ("nsqd.durable.8.new", "nsqd.durable.8.new-wal"):
        (left / name).write_bytes(b"not whole")
    nsqd = serve(EmbeddedServer(left, "-durable"))
    nsqd.post("/topic/empty", topic="t")
    nsqd.stop()
    assert "nsqd.durable.7.db.orphan.1 now" in nsqd.log
    assert not list(left.glob("*.new*"))
    assert recovered_bodies(left, run_nsq) == BODIES


def test_a_topic_named_like_an_unfinished_database_keeps_its_messages(
    tmp_path: Path, serve: Serve, run_nsq: RunNsq
) -> None:
    plain = serve(EmbeddedServer(tmp_path, "-mem-queue-size=0"))
    plain.publish("nsqd.durable.1.new", *BODIES)
    plain.stop()
    assert run_nsq(["nsqd", "--recover-only", "--durable", f"--data-path={tmp_path}"]).status == 0
    nsqd = serve(EmbeddedServer(tmp_path, "-durable"))
    assert nsqd.depth("nsqd.durable.1.new") == len(BODIES)


@pytest.mark.parametrize("flags", [[], ["--durable"]], ids=["export", "adopt"])
def test_queue_files_with_other_messages_are_kept(
    left: Path, tmp_path: Path, serve: Serve, run_nsq: RunNsq, flags: list[str]
) -> None:
    """Go's nsqd has run there, and then the nsqd.dat of --durable was restored."""
    plain = serve(EmbeddedServer(tmp_path, "-mem-queue-size=0"))
    other_bodies = [b"other %03d" % number for number in range(9)]
    plain.publish("t", *other_bodies)
    plain.stop()
    for path in tmp_path.glob("t.diskqueue.*"):
        shutil.copy(path, left)
    assert run_nsq(["nsqd", "--recover-only", *flags, f"--data-path={left}"]).status == 0
    assert recovered_bodies(left, run_nsq, "--all") == sorted(BODIES + other_bodies)


def test_files_below_the_read_position_survive_an_adoption(
    tmp_path: Path, serve: Serve, run_nsq: RunNsq
) -> None:
    (path := tmp_path / "data").mkdir()
    plain = serve(EmbeddedServer(path, "-mem-queue-size=0", "-max-bytes-per-file=300"))
    plain.publish("t", *BODIES)
    plain.stop()
    (path / "t.diskqueue.meta.dat").write_text("20\n99,0\n99,0\n")
    assert run_nsq(["nsqd", "--recover-only", "--durable", f"--data-path={path}"]).status == 0
    assert recovered_bodies(path, run_nsq) == BODIES


LATER = "format 2 of --durable, of a later version of nsqtools"
OTHER = "is a database of another program, or of another version"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("PRAGMA user_version=2", LATER),
        ("PRAGMA application_id=252006674", OTHER),
        ("ALTER TABLE queue ADD COLUMN more", OTHER),
        ("ALTER TABLE message ADD COLUMN more", OTHER),
        ("CREATE TABLE more (a)", OTHER),
    ],
)
def test_another_format_is_refused_by_name(
    left: Path, run_nsq: RunNsq, change: str, refusal: str
) -> None:
    database = left / "nsqd.durable.1.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(change)
    content = database.read_bytes()
    with pytest.raises(ConfigurationError, match=refusal) as refused:
        EmbeddedServer(left, "-durable").start()
    assert str(database) in str(refused.value)
    for command in ("list", "verify"):
        result = run_nsq(["queue", command, str(left)])
        assert (result.status != 0, refusal in result.err, str(database) in result.err) == (
            True,
        ) * 3
    assert database.read_bytes() == content


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / DATABASE
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE other (a)")
    content = database.read_bytes()
    with pytest.raises(ConfigurationError, match="of another program"):
        EmbeddedServer(tmp_path, "-durable").start()
    assert database.read_bytes() == content


OF_0_3 = """DROP TRIGGER delete_body; DROP TABLE message; DROP TABLE body;
    CREATE TABLE message (queue INTEGER, due INTEGER, turn INTEGER, attempts INTEGER, crc INTEGER,
        frame BLOB, PRIMARY KEY (queue, due, turn)) WITHOUT ROWID;
    PRAGMA journal_mode=delete; PRAGMA page_size=4096; PRAGMA auto_vacuum=none; VACUUM;
    PRAGMA journal_mode=wal; PRAGMA user_version=0; PRAGMA application_id=0"""


def as_0_3(path: Path) -> None:
    """Give the database of a data path the format of nsqtools 0.3.0."""
    rows = [(*row[:4], crc32(row[4], row[0]), row[4]) for row in all_rows(path / DATABASE)]
    with closing(sqlite3.connect(path / DATABASE)) as connection:
        connection.executescript(OF_0_3)
        connection.executemany("INSERT INTO message VALUES (?,?,?,?,?,?)", rows)
        connection.commit()


def format_of(path: Path) -> tuple[int, ...]:
    [database] = path.glob("nsqd.durable.*.db")
    with closing(sqlite3.connect(database)) as connection:
        pragmas = ("application_id", "user_version", "page_size", "auto_vacuum")
        return tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas)


CURRENT = (0x6E737164, 1, 16384, 2)
# Migrates a data path in a process that is killed before its n-th operation on a file, for all n.
KILLED_BEFORE_EACH_STEP = """
import os, shutil, signal, sys
from itertools import count
from pathlib import Path
from nsqtools.server import durable_database
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_path import DurablePath

# A kill loses nothing that was not synced, so do without, which is faster.
os.fsync = os.fdatasync = lambda descriptor: None
durable_database._SETTINGS += (("synchronous", 0),)

def kill_before(step):
    steps = count(1)
    operations = ("sqlite3.connect", "os.rename", "os.remove")
    def hook(event, args):
        is_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (is_write or event in operations) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

source, target = map(Path, sys.argv[1:])
for step in count(1):
    path = target / f"{step:03}"
    shutil.copytree(source, path)
    if not (child := os.fork()):
        files = DurablePath(path, DaemonLog(None, ""))
        database = files.open()
        kill_before(step)
        files.migrate(database)
        os._exit(0)
    if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        break
"""


def test_a_migration_that_is_killed_at_any_step_continues(
    left: Path, tmp_path: Path, serve: Serve
) -> None:
    as_0_3(left)
    (target := tmp_path / "killed").mkdir()
    subprocess.run([sys.executable, "-c", KILLED_BEFORE_EACH_STEP, left, target], check=True)
    paths = sorted(target.iterdir())
    states = {
        (frozenset(file.name for file in path.iterdir()), (path / "nsqd.dat").read_bytes()): path
        for path in paths
    }
    assert len(paths) > 20
    assert len(states) > 6
    assert format_of(paths[-1]) == CURRENT
    for path in states.values():
        nsqd = serve(EmbeddedServer(path, "-durable"))
        with subscribed(nsqd.tcp_address, "t", "ch", ready=20) as client:
            assert [message.body for message in client.read_messages(20)] == BODIES
        nsqd.kill()
        assert "ERROR" not in nsqd.log
        assert format_of(path) == CURRENT
        [database] = path.glob("nsqd.durable.*.db")
        suffixes = ("", "-wal", "-shm")
        names = {"nsqd.dat", *(f"{database.name}{suffix}" for suffix in suffixes)}
        assert {file.name for file in path.iterdir()} <= names
        assert (path / "nsqd.dat").read_bytes().endswith(b"in %b\n" % database.name.encode())


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
@pytest.mark.parametrize(
    ("size", "free"), [(900, 200_000), (5_000, 600_000)], ids=["known at once", "while writing"]
)
def test_a_full_disk_postpones_a_migration(
    small_disk: Path, left: Path, serve: Serve, size: int, free: int
) -> None:
    nsqd = serve(EmbeddedServer(left, "-durable"))
    bodies = [b"%d " % number * (size // 4) for number in range(100, 100 + 300_000 // size)]
    nsqd.publish("t", *bodies)
    nsqd.stop()
    as_0_3(left)
    shutil.copytree(left, small_disk, dirs_exist_ok=True)
    (small_disk / "else").write_bytes(bytes(shutil.disk_usage(small_disk).free - free))

    nsqd = serve(EmbeddedServer(small_disk, "-durable", "-min-disk-free=1"))
    assert "keeps the pages of nsqtools 0.3.0" in nsqd.log
    nsqd.publish("t", b"new")
    nsqd.stop()
    assert format_of(small_disk)[1:3] == (1, 4096)
    assert not list(small_disk.glob("*.new*"))

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    nsqd.start()
    with subscribed(nsqd.tcp_address, "t", "ch", ready=999) as client:
        received = [message.body for message in client.read_messages(len(bodies) + 21)]
    assert received == [*BODIES, *bodies, b"new"]
    nsqd.stop()
    assert format_of(small_disk) == CURRENT


@pytest.mark.parametrize("size", [960, 2000, 6000, 9000, 40_000])
def test_messages_share_pages(tmp_path: Path, size: int) -> None:
    count = 2_000_000 // size
    with closing(Database(path := tmp_path / DATABASE, is_new=True)) as database:
        rows = [(1, 0, turn, 0, bytes(size + 34)) for turn in range(count)]
        database.commit(Changes(), [Publish(rows, [], lambda _: None, True)])
    assert path.stat().st_size < 1.3 * count * size


def test_channels_share_a_long_body_until_the_last_of_them_has_finished_it(
    tmp_path: Path, serve: Serve
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path, "-durable", "-mem-queue-size=3"))
    for channel in "ab":
        nsqd.create_channel("t", channel)
    sizes = [966, 967, 5_000, 40_000, 70_000, 1_200]
    bodies = [bytes([size % 251]) * size for size in sizes]
    nsqd.publish("t", *bodies)
    [path] = tmp_path.glob("nsqd.durable.*.db")

    def stored() -> list[int]:
        with closing(sqlite3.connect(path)) as connection:
            return [row[0] for row in connection.execute("SELECT length(data) FROM body")]

    nsqd.stop()
    files = DurablePath(tmp_path, DaemonLog(None, ""))
    with closing(files.open()) as opened:
        files.renew(opened, "is damaged").close()
    [path] = tmp_path.glob("nsqd.durable.*.db")
    nsqd.start()
    for channel in "ab":
        assert sorted(stored()) == [1_200, 967 + 5_000 + 40_000, 70_000]
        with subscribed(nsqd.tcp_address, "t", channel, ready=6) as client:
            for message in client.read_messages(6):
                client.send(b"REQ %b 1\n" % message.id)
            client.read_messages(6)
        nsqd.kill()
        nsqd.start()
        with subscribed(nsqd.tcp_address, "t", channel, ready=6) as client:
            messages = client.read_messages(6)
            client.finish(messages)
            client.settle()
        assert sorted(message.body for message in messages) == sorted(bodies)
    wait_until(lambda: not stored(), what="the bodies are deleted")


@pytest.mark.parametrize("name", ["_DELIVER", "_FINISH", "_DELETE", "_MOVE"])
def test_a_change_finds_its_messages_by_their_keys(tmp_path: Path, name: str) -> None:
    explain = f"EXPLAIN QUERY PLAN {getattr(durable_database, name)}"
    with closing(Database(tmp_path / DATABASE, is_new=True)) as database:
        plan = {step for *_, step in database._writer.execute(explain, {"rows": "{}"})}
    search = "SEARCH message USING PRIMARY KEY (queue=? AND due=? AND turn=?)"
    assert {step for step in plan if " message" in step} == {search}


class FlakyReads:
    """Connections whose reads of messages fail after a few rows, for a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int, rows: int) -> None:
        self.failures = failures
        self._rows = rows
        connect = durable_database._connect
        pread = os.pread

        def failing_pread(*args: int) -> bytes:
            if self.failures:
                raise OSError(5, "Input/output error")
            return pread(*args)

        monkeypatch.setattr(durable_database, "_connect", lambda path: self.wrap(connect(path)))
        monkeypatch.setattr(durable_database, "_READ_PAUSE_S", 0)
        monkeypatch.setattr(os, "pread", failing_pread)

    def wrap(self, connection: sqlite3.Connection) -> Any:
        def execute(statement: str, *values: Any) -> Any:
            rows = connection.execute(statement, *values)
            return self.cut(rows) if "FROM message WHERE" in statement else rows

        return SimpleNamespace(execute=execute, close=connection.close)

    def cut(self, rows: sqlite3.Cursor) -> Iterator[Any]:
        for number, row in enumerate(rows):
            if self.failures and number >= self._rows:
                self.failures -= 1
                error = sqlite3.DatabaseError("database disk image is malformed")
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error
            yield row


@pytest.mark.parametrize(("failures", "rows"), [(30, 1), (30, 0), (4, 7)])
def test_transient_read_errors_lose_and_repeat_nothing(
    left: Path, monkeypatch: pytest.MonkeyPatch, failures: int, rows: int
) -> None:
    FlakyReads(monkeypatch, failures, rows)
    frames = [frame for *_, frame in all_rows(left / "nsqd.durable.1.db")]
    assert [frame[-11:] for frame in frames] == BODIES


def test_an_unreadable_sector_costs_only_its_own_messages(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_database, "_READ_PATIENCE_S", 0)
    FlakyReads(monkeypatch, 1 << 30, 5)
    frames = [frame for *_, frame in all_rows(left / "nsqd.durable.1.db")]
    assert {frame[-11:] for frame in frames} == {*BODIES[:5], *BODIES[-5:]} or len(frames) == 20


def test_copies_are_kept_of_a_few_databases_that_lost_messages(
    left: Path, monkeypatch: pytest.MonkeyPatch, run_nsq: RunNsq
) -> None:
    monkeypatch.setattr(durable_path, "_MAX_COPIES", 2)
    files = DurablePath(left, DaemonLog(None, ""))
    database = files.open()
    for lost in (0, 1, 1, 1):
        if lost:
            database.close()
            damage_body(database.path, BODIES)
            database = Database(database.path)
        old, database = database, files.renew(database, "is damaged")
        old.close()
        durable_database.remove_database(old.path)
        copies = list(left.glob("*.damaged.*"))
        assert not copies if not lost else copies
    database.close()
    assert len([path for path in copies if not path.name.endswith("-wal")]) == 2
    assert recovered_bodies(left, run_nsq) == BODIES[1:3]  # The first copy did not have BODIES[0].
    rows = json.loads(run_nsq(["queue", "list", str(left), "--json"]).out)
    assert {row["state"] for row in rows} == {"good", "set aside"}
