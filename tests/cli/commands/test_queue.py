"""``nsq queue``: data directories of both nsqd, running and dead, are read and not changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, peak_kb_of
from plugins.disks import state_of
from plugins.raw_client import RawClient
from plugins.servers import AnyNsqd, EmbeddedServer, GoNsqd, Nsqd, Serve
from plugins.waiting import wait_until

from nsqtools.server import stored_queues

BODIES = [b"%03d " % number + b"x" * 40 for number in range(60)]
ON_DISK = ("-mem-queue-size=0", "-max-bytes-per-file=1000", "-sync-every=1")


def bodies_of(lines: bytes) -> list[bytes]:
    return [json.loads(line)["body"].encode() for line in lines.splitlines()]


def filled(nsqd: Nsqd) -> Nsqd:
    """Fill two channels of its topic ``t`` with all bodies."""
    for channel in ("ch", "other"):
        nsqd.create_channel("t", channel)
    nsqd.publish("t", *BODIES)
    wait_until(lambda: nsqd.depth("t", "ch") == len(BODIES), what="the channel has them")
    return nsqd


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param(GoNsqd, ON_DISK, id="Go", marks=pytest.mark.real_nsqd),
        pytest.param(EmbeddedServer, ON_DISK, id="files"),
        pytest.param(EmbeddedServer, ("-durable",), id="durable"),
    ],
)
def test_a_directory_is_read_while_nsqd_runs_and_after_it_was_killed(
    kind: Callable[..., Nsqd], flags: tuple[str, ...], serve: Serve, run_nsq: RunNsq, tmp_path: Path
) -> None:
    (path := tmp_path / "data").mkdir()
    nsqd = filled(serve(kind(path, *flags)))

    for is_running in (True, False):
        if not is_running:
            nsqd.kill()
        state_before = {} if is_running else state_of(path)
        listed = json.loads(run_nsq(["queue", "list", str(path), "--json"]).out)
        printed = run_nsq(["queue", "cat", str(path), "-t", "t", "-c", "ch", "--json"])
        both = run_nsq(["queue", "cat", str(path), "-t", "t"])
        verified = run_nsq(["queue", "verify", str(path)])
        archive = tmp_path / f"{is_running}.log.gz"
        recovered = run_nsq(["queue", "recover", str(path), "-o", str(archive), "--all"])

        rows = {(row["topic"], row["channel"]): row for row in listed}
        assert rows["t", "ch"]["messages"] == len(BODIES)
        assert rows["t", "ch"]["state"] == "good"
        assert bodies_of(printed.out) == BODIES
        assert sorted(both.out.splitlines()) == BODIES  # once, not per channel
        assert (verified.status, recovered.status) == (0, 0), verified.err
        assert sorted(bodies_of(run_nsq(["archive", "cat", str(archive)]).out)) == BODIES
        assert is_running or state_of(path) == state_before


@pytest.mark.parametrize("flags", [ON_DISK, ("-durable",)], ids=["files", "durable"])
def test_a_read_only_directory_is_read(
    flags: tuple[str, ...], embedded_nsqd: AnyNsqd, nsq_env: dict[str, str]
) -> None:
    (nsqd := filled(embedded_nsqd(*flags))).kill()
    path = nsqd.data_path
    for file in path.iterdir():
        file.chmod(0o400)
    path.chmod(0o500)
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv")
    command = as_others if os.geteuid() == 0 else []
    assert subprocess.run([*command, "touch", str(path / "x")], capture_output=True).returncode

    command += [sys.executable, "-m", "nsqtools", "queue", "cat", str(path), "-t", "t"]
    done = subprocess.run(command, env=nsq_env, capture_output=True)
    path.chmod(0o700)

    assert (done.returncode, done.stdout.splitlines()) == (0, BODIES), done.stderr


def test_deferred_messages_are_listed_and_printed(embedded_nsqd: AnyNsqd, run_nsq: RunNsq) -> None:
    nsqd = embedded_nsqd("-durable")
    path = nsqd.data_path
    nsqd.create_channel("t", "ch")
    with RawClient(nsqd.tcp_address) as client:
        client.publish_deferred("t", 3_600_000, b"later")
    wait_until(lambda: nsqd.channel_stats("t", "ch")["deferred_count"] == 1, what="it is deferred")

    rows = json.loads(run_nsq(["queue", "list", str(path), "--json"]).out)

    assert [(row["messages"], row["deferred"]) for row in rows if row["channel"]] == [(1, 1)]
    assert run_nsq(["queue", "cat", str(path), "-t", "t", "-c", "ch"]).out == b"later\n"
    nsqd.stop()
    assert run_nsq(["nsqd", "--recover-only", "--data-path", str(path)]).status == 0
    listed = run_nsq(["queue", "list", str(path)])
    assert f"{path / 'nsqd.deferred'} has the times of 1 deferred message: " in listed.err


def test_messages_in_memory_are_counted_with_an_address(
    embedded_nsqd: AnyNsqd, run_nsq: RunNsq, certificates: Certificates
) -> None:
    flags = certificates.server.nsqd_flags
    nsqd = filled(embedded_nsqd("-mem-queue-size=7", *flags))

    address = f"https://{nsqd.https_address}"
    command = ["queue", "list", str(nsqd.data_path), "--json", "--nsqd-http-address", address]
    assert run_nsq(command).status == 5
    rows = json.loads(run_nsq([*command, "--tls-ca-file", str(certificates.ca)]).out)

    held = {(row["channel"], row["messages"], row["memory"]) for row in rows if row["channel"]}
    assert held == {("ch", len(BODIES) - 7, 7), ("other", len(BODIES) - 7, 7)}


def test_recovery_takes_each_undeliverable_message_once(
    embedded_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    (nsqd := filled(embedded_nsqd(*ON_DISK))).stop()
    data_path = nsqd.data_path
    files = sorted(data_path.glob("t:ch.diskqueue.0*.dat"))
    aside = Path(f"{files[0]}.bad")
    files[0].rename(aside)
    aside.with_name("t:ch.diskqueue.000090.dat.bad").write_bytes(aside.read_bytes())
    (data_path / "t:other.diskqueue.meta.dat").unlink()  # now its files are orphaned
    shutil.copy(files[2], data_path / "gone.diskqueue.000000.dat")  # of an unknown topic
    state_before = state_of(data_path)
    (unread := data_path / "t:ch.diskqueue.000091.dat.bad").mkdir()  # as on a failing disk

    rows = json.loads(run_nsq(["queue", "list", str(data_path), "--json"]).out)
    archive = tmp_path / "out.log"
    done = run_nsq(["queue", "recover", str(data_path), "-o", str(archive), "-c", "ch"])
    recovered = bodies_of(run_nsq(["archive", "cat", str(archive)]).out)
    everything = tmp_path / "all.log.gz"
    run_nsq(["queue", "recover", str(data_path), "-o", str(everything)])

    states = {(row["topic"], row["channel"], row["state"]) for row in rows}
    assert states >= {
        ("t", "ch", "damaged"),
        ("t", "ch", "set aside"),
        ("t", "other", "orphaned"),
        ("gone", None, "orphaned"),
    }
    assert recovered
    assert recovered == BODIES[: len(recovered)]  # not twice, and no message of a good file
    assert f"{files[0]}: is not there, and in the metadata" in done.err
    assert f"{unread}: cannot be read (it is not a regular file)" in done.err
    unread.rmdir()
    assert done.status == 6
    assert sorted(bodies_of(run_nsq(["archive", "cat", str(everything), "-t", "t"]).out)) == BODIES
    assert state_of(data_path) == state_before


def test_the_undamaged_messages_of_a_database_are_recovered(
    embedded_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    (nsqd := filled(embedded_nsqd("-durable"))).stop()
    path = nsqd.data_path
    [database] = path.glob("nsqd.durable.*.db")
    content = database.read_bytes()
    database.write_bytes(content.replace(BODIES[30], b"!" * len(BODIES[30])))

    archive = tmp_path / "out.log"
    done = run_nsq(["queue", "recover", str(path), "-o", str(archive)])

    assert done.status == 6
    assert f"{database}: 1 of 60 messages cannot be read" in done.err
    recovered = bodies_of(run_nsq(["archive", "cat", str(archive)]).out)
    assert sorted(recovered) == [body for body in BODIES if body != BODIES[30]]


def test_a_recovery_that_ends_early_does_not_block_the_next(
    embedded_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    (nsqd := filled(embedded_nsqd(*ON_DISK))).stop()
    command = ["queue", "recover", str(nsqd.data_path), "-o", str(tmp_path / "out.log"), "--all"]
    with monkeypatch.context() as patch:
        patch.setattr(stored_queues, "recovered", end)
        assert (run_nsq(command).status, list(tmp_path.iterdir())) == (143, [])
        patch.setattr(shutil, "rmtree", Mock())  # as if killed before the cleanup
        assert (run_nsq(command).status, len(list(tmp_path.iterdir()))) == (143, 1)
    assert run_nsq(command).status == 0


@pytest.fixture
def stopped(tmp_path: Path, serve: Serve) -> Path:
    """The data path of a stopped nsqd, with several files for each of two channels."""
    (path := tmp_path / "data").mkdir()
    filled(serve(EmbeddedServer(path, *ON_DISK))).stop()
    return path


@pytest.mark.parametrize(
    ("positions", "problem"),
    [
        ("376793\n2239,0\n2239,0\n", "has a depth of 376793 messages, but the files have 0"),
        ("5\n0,0\n0,0\n", "has a depth of 5 messages, but the files have 0"),
        ("5\n0,0\n1000000,7\n", "t:ch.diskqueue.000000.dat: is not there, and in the metadata"),
        ("5\n3,9\n3,1\n", "the read position is past the write position"),
    ],
)
def test_verify_compares_metadata_with_files_that_do_not_exist(
    stopped: Path, run_nsq: RunNsq, positions: str, problem: str
) -> None:
    for path in stopped.glob("t:ch.diskqueue.0*"):
        path.unlink()
    (stopped / "t:ch.diskqueue.meta.dat").write_text(positions)
    done = run_nsq(["queue", "verify", str(stopped)])
    assert (done.status, problem in done.err) == (6, True), done.err


def test_verify_compares_nothing_while_an_nsqd_is_writing(
    embedded_nsqd: AnyNsqd, run_nsq: RunNsq
) -> None:
    nsqd = filled(embedded_nsqd(*ON_DISK))
    (nsqd.data_path / "t:ch.diskqueue.meta.dat").write_text("6\n0,0\n0,0\n")  # not synced yet
    done = run_nsq(["queue", "verify", str(nsqd.data_path)])
    assert (done.status, "is in use" in done.err) == (0, True), done.err


def test_a_file_shorter_than_its_read_position_is_recovered_whole(
    stopped: Path, run_nsq: RunNsq, tmp_path: Path
) -> None:
    _, read, write = (stopped / "t:ch.diskqueue.meta.dat").read_text().split()
    (stopped / "t:ch.diskqueue.meta.dat").write_text(f"60\n{read[0]},99999999\n{write}\n")
    archive = tmp_path / "out.log"
    (tmp_path / ".out.log.index").write_bytes(b"of an archive that is gone")
    done = run_nsq(["queue", "recover", str(stopped), "-o", str(archive), "-c", "ch", "--all"])
    assert f"nsq: 60 messages in {tmp_path / 'out-000001.log'}" in done.err
    assert bodies_of((tmp_path / "out-000001.log").read_bytes()) == BODIES


@pytest.mark.parametrize(
    "name",
    [
        *("u.diskqueue.meta.dat", "u.diskqueue.000000.dat", "nsqd.deferred"),
        *("nsqd.durable.9.db", "nsqd.durable.9.db-wal"),
    ],
)
@pytest.mark.parametrize("kind", ["a hole", "a FIFO", "a device"])
def test_an_endless_file_hides_no_queue(
    stopped: Path, run_nsq: RunNsq, tmp_path: Path, name: str, kind: str
) -> None:
    path = stopped / name
    if name.endswith("-wal"):
        path.with_suffix(".db").touch()
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    archive = tmp_path / "out.log"

    listed = run_nsq(["queue", "list", str(stopped), "--json"])
    printed = run_nsq(["queue", "cat", str(stopped), "-t", "t", "-c", "ch"])
    verified = run_nsq(["queue", "verify", str(stopped)])
    run_nsq(["queue", "recover", str(stopped), "-o", str(archive), "--all", "-c", "ch"])

    rows = [(row["topic"], row["channel"], row["messages"]) for row in json.loads(listed.out)]
    assert ("t", "ch", len(BODIES)) in rows
    assert printed.out.splitlines() == BODIES
    assert name == "nsqd.deferred" or str(path).removesuffix("-wal") in verified.err
    assert bodies_of(archive.read_bytes()) == BODIES


def test_an_endless_nsqd_dat_is_reported(stopped: Path, run_nsq: RunNsq) -> None:
    (stopped / "nsqd.dat").unlink()
    os.mkfifo(stopped / "nsqd.dat")
    listed = run_nsq(["queue", "list", str(stopped), "--json"])
    assert f"{stopped / 'nsqd.dat'}: cannot be read (it is not a regular file)" in listed.err
    assert "ch" in [row["channel"] for row in json.loads(listed.out)]


@pytest.mark.parametrize("command", ["queue cat", "queue recover", "nsqd --recover-only"])
def test_long_messages_take_little_memory(command: str, serve: Serve, tmp_path: Path) -> None:
    (path := tmp_path / "data").mkdir()
    nsqd = serve(EmbeddedServer(path, "-durable"))
    for _ in range(40):
        nsqd.publish("t", b"x" * 1_000_000)
    nsqd.stop()
    flags = {
        "queue cat": [str(path), "-t", "t"],
        "queue recover": [str(path), "-o", str(tmp_path / "all.log"), "--all"],
        "nsqd --recover-only": [f"--data-path={path}"],
    }
    assert peak_kb_of(*command.split(), *flags[command]) < 110_000
