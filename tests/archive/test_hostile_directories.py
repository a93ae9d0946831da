"""Directories that others can write to: links are not followed, and FIFOs do not block."""

import json
import os
import stat
from pathlib import Path

import pytest
from plugins.archives import journal_in, numbered, write_archive
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd

from nsqtools.archive.finding import find_archives
from nsqtools.archive.journal import TopicLock
from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import LOCKS, index_of
from nsqtools.archive.members import Plain
from nsqtools.archive.part_file import Directories, PartFile, recover_parts
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import repair
from nsqtools.archive.table_writer import TablePlan
from nsqtools.archive.upload import (
    NotUploadable,
    UploadPlan,
    UploadRecord,
    files_to_upload,
    upload,
    uploaded_of,
)
from nsqtools.files.opening import FolderLocks


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_recovery_follows_no_link_and_does_not_block_on_a_fifo(victim: Path, output: Path) -> None:
    (output / ".a.log.part").symlink_to(victim)
    (output / ".a.log.index").touch()
    (output / ".b.log.part").write_text("line\n")
    (output / ".b.log.index").symlink_to(victim)
    os.mkfifo(output / ".c.log.part")
    (output / ".d.log.part").write_text("line\n")
    assert output / "d.log" in recover_parts(Directories(output, output))
    assert victim.read_text() == "precious\n"


def begin_archiving(output: Path) -> None:
    TopicLock(FolderLocks(output / LOCKS), output, "clicks", "archive")
    PartFile(output / "clicks.log", 0o640, Plain, 0.0)


@pytest.mark.parametrize(
    "name", [LOCKS, ".clicks@archive.lock", ".clicks.log.part", ".clicks.log.index"]
)
def test_no_file_is_written_through_a_link(victim: Path, output: Path, name: str) -> None:
    (output / name).symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        begin_archiving(output)
    assert victim.read_text() == "precious\n"


SOMEBODY = 54321  # an unused user id
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def planted(path: Path, content: str = "") -> Path:
    path.write_text(content)
    path.chmod(0o666)
    os.chown(path, SOMEBODY, SOMEBODY)
    return path


@as_root
@pytest.mark.parametrize("name", [LOCKS, ".clicks@nsq_to_file.lock"])
def test_a_lock_of_another_user_is_refused_with_a_clear_line(
    output: Path, nsqd: GoNsqd, run_nsq: RunNsq, name: str
) -> None:
    nsqd.create_channel("clicks", "nsq_to_file")
    nsqd.publish("clicks", b"one")
    lock = planted(output / name)
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(output)]
    result = run_nsq(["to-file", "-t", "clicks", *place, "--until-empty"])
    assert f"cannot use {lock} (it belongs to another user, {SOMEBODY})" in result.err
    assert result.status == 1
    assert lock.read_text() == ""
    assert nsqd.depth("clicks", "nsq_to_file") == 1


@as_root
@pytest.mark.parametrize("suffix", ["part", "index"])
def test_recovery_skips_files_of_another_user(
    output: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A forged index could cut off messages, and forged data could add some."""
    part = output / ".clicks.log.part"
    part.write_text("line\n")
    (output / ".clicks.log.index").write_text("")
    path = planted(output / f".clicks.log.{suffix}", "line\n" if suffix == "part" else "")
    assert recover_parts(Directories(output, output)) == []
    assert f"cannot recover {path} (it belongs to another user, {SOMEBODY})" in caplog.text
    assert part.read_text() == "line\n"


@as_root
@pytest.mark.parametrize("name", [".nsq-landing", ".nsq-landing/state.json"])
def test_a_landing_state_of_another_user_is_refused(
    output: Path, tmp_path: Path, name: str
) -> None:
    """The state names files to add to the table, and files to remove."""
    plan, secret = TablePlan(str(tmp_path / "lake"), False, "web1"), tmp_path / "secret"
    secret.write_text("precious")
    (output / ".nsq-landing").mkdir()
    table = {"path": "topic=t/date=2026-01-01/x.parquet", "bytes": 8, "rows": 1}
    intent = {"drafts": [{"path": str(secret), "file": table}], "logs": [str(secret)]}
    state = {"url": plan.url, "fields": None, "app": "x", "number": 1, "intent": intent}
    (output / ".nsq-landing/state.json").write_text(json.dumps(state))
    os.chown(output / name, SOMEBODY, SOMEBODY)

    with pytest.raises(OSError, match="belongs to another user"):
        Lander(plan, output).land([])

    assert secret.read_text() == "precious"
    assert not (tmp_path / "lake").exists()


@as_root
def test_an_upload_record_of_another_user_is_ignored(output: Path, tmp_path: Path) -> None:
    path = write_archive(output / "a.log", numbered(0, 1))
    planted(uploaded_of(path), UploadRecord("/x", "a.log").encode().decode())
    plan = UploadPlan(output, parse_place(str(tmp_path / "lake")), "web1", deletes=True)
    upload(path, plan)
    assert len(find_archives([tmp_path / "lake"])) == 1


@as_root
def test_files_of_the_owner_of_the_directory_are_recovered(output: Path) -> None:
    """Root recovers the files of an archiver that ran as another user."""
    planted(output / ".clicks.log.part", "line\n")
    os.chown(output, SOMEBODY, SOMEBODY)
    assert recover_parts(Directories(output, output)) == [output / "clicks.log"]


@as_root
def test_a_file_that_root_repairs_keeps_its_owner_and_loses_setuid(output: Path) -> None:
    path = write_archive(output / "a.log", numbered(0, 1))
    path.write_bytes(path.read_bytes() + b"{rubbish}\n")
    os.chown(path, SOMEBODY, SOMEBODY)
    path.chmod(0o4755)  # Repair keeps content that is not messages, so this could be a program.

    (archive,) = find_archives([path])
    assert repair(archive) == 1

    for repaired in (path, index_of(path)):
        status = repaired.stat()
        assert (status.st_uid, status.st_gid) == (SOMEBODY, SOMEBODY)
        assert stat.S_IMODE(status.st_mode) == 0o755


def test_a_journal_that_is_not_a_regular_file_is_not_read(output: Path) -> None:
    os.mkfifo(output / ".clicks@archive@1-000000.journal")
    (output / ".clicks@archive@1-000001.journal").symlink_to("/dev/zero")
    journal_in(output, run="2").close()


def test_a_link_is_neither_uploaded_nor_landed(output: Path, tmp_path: Path) -> None:
    """Another user may have linked to a file that only the archiver may read."""
    secret, link = write_archive(tmp_path / "a.log", numbered(0, 1)), output / "a.log"
    link.symlink_to(secret)
    index_of(link).write_bytes(index_of(secret).read_bytes())
    plan = UploadPlan(output, parse_place(str(tmp_path / "lake")), "web1")
    with pytest.raises(NotUploadable, match="it is a symbolic link"):
        upload(link, plan)

    landed = Lander(TablePlan(str(tmp_path / "lake"), False, "web1"), output).land([link])

    assert (landed.files, landed.refused) == ([], {link: "it is a symbolic link"})
    assert not (tmp_path / "lake").exists()


@as_root
@pytest.mark.parametrize("owner", [SOMEBODY, 0])
def test_a_link_of_another_user_to_a_directory_is_not_followed(
    output: Path, tmp_path: Path, owner: int
) -> None:
    """The link may lead to files that only the archiver may change, upload or remove."""
    path = write_archive(tmp_path / "other/a.log", numbered(0, 1))
    (tmp_path / "other/.b.log.part").write_text("line\n")
    (output / "link").symlink_to(path.parent)
    os.lchown(output / "link", owner, owner)

    names = [path.name for path in files_to_upload(output)]
    names += [path.name for path in recover_parts(Directories(output, output))]

    assert names == ([] if owner else ["a.log", "b.log"])


def test_an_unreadable_directory_is_reported_and_the_others_are_listed(
    output: Path, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(output / "a" / "x.log", numbered(0, 1))
    (output / "b").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path) == str(output / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for command in ("info", "cat", "verify"):
        result = run_nsq(["archive", command, str(output)])
        text = result.err + result.out.decode()
        assert f"{output / 'b'}" in text
        assert "cannot be read (Permission denied)" in text
        assert "x.log" in text or "body 0" in text or "1 message," in text
        assert result.status == {"info": 0, "cat": 6, "verify": 1}[command]


def test_a_file_whose_path_lacks_the_topic_is_skipped(
    output: Path, tmp_path: Path, run_nsq: RunNsq
) -> None:
    for topic in ("clicks", "orders"):
        (output / topic).mkdir()
        (output / topic / "data.json").write_text(f"of {topic}\n")
    convert = ["archive", "convert", str(output), "-o", str(tmp_path / "lake"), "-t", "clicks"]
    result = run_nsq(convert)
    assert f"{output / 'orders/data.json'}: skipped: its name lacks clicks" in result.err
    assert (result.status, len(find_archives([tmp_path / "lake"]))) == (6, 1)
