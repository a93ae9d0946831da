"""What was not published is kept: durably, for its owner only, wherever the user wants it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from plugins.power_cut import PowerCut
from plugins.waiting import patience_s

from nsqtools.errors import OutputError
from nsqtools.publish.publish_job import UnsentFiles

RECORDS = [b"record %d" % number for number in range(10)]


def test_what_was_kept_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PowerCut(tmp_path, monkeypatch) as record:
        with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
            for number, each in enumerate(RECORDS):
                unsent.write(each)
                if number == 4:
                    unsent.sync()
                    record.note(*RECORDS[:5])
        record.note(*RECORDS[5:])

    cuts = list(record.cuts())
    assert [promised for promised, _ in cuts][-1] == RECORDS
    for promised, cut in cuts:
        assert set(promised) <= set(cut.files.get("unsent", b"").splitlines())


def test_only_its_owner_may_read_it_and_what_it_had_stays(tmp_path: Path) -> None:
    for each in RECORDS[:2]:
        with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
            unsent.write(each)

    assert (tmp_path / "unsent").read_bytes() == b"record 0\nrecord 1\n"
    assert (tmp_path / "unsent").stat().st_mode & 0o777 == 0o600


def test_a_link_and_a_pipe_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    for name in ("link", "pipe"):
        with UnsentFiles(tmp_path / name, b"\n") as unsent:
            unsent.write(b"record")
    reader.join(patience_s(10))

    assert (tmp_path / "file").read_bytes() == b"record\n"
    assert read == [b"record\n"]


def test_a_full_disk_is_one_clear_error() -> None:
    unsent = UnsentFiles(Path("/dev/full"), b"\n")
    unsent.write(b"record")
    with (
        pytest.raises(OutputError, match=r"cannot write /dev/full \(No space left on device\)"),
        unsent,
    ):
        pass
