"""The merge of archives by time, and the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.archives import write_archive

from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import TimeRange, index_of
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.replay import replay
from nsqtools.replay.replay import Checkpoint, merge


def messages(*times: int) -> list[WireMessage]:
    return [WireMessage(time, 1, b"%016d" % time, b"%d" % time) for time in times]


def merged(directory: Path, within: TimeRange | None = None) -> list[int]:
    problems: list[str] = []
    archives = find_archives([directory])
    span = within or TimeRange()
    found = merge(archives, lambda path, problem: problems.append(problem), within=span)
    times = [archived.message.timestamp_ns for archived in found]
    assert problems == []
    return times


@pytest.mark.parametrize("has_index", [True, False])
def test_files_are_merged_by_time(tmp_path: Path, has_index: bool) -> None:
    for name, times in {"a": (1, 4, 9), "b": (2, 3), "c": (5, 10)}.items():
        path = write_archive(tmp_path / f"{name}.gz", messages(*times))
        if not has_index:
            index_of(path).unlink()

    assert merged(tmp_path) == [1, 2, 3, 4, 5, 9, 10]


def test_a_file_is_opened_when_its_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        write_archive(tmp_path / f"{number:02d}.gz", messages(number * 10 + 1, number * 10 + 2))
    running = most = 0
    real = replay.read_messages

    def counted(*args: object, **named: object):  # type: ignore[no-untyped-def]
        nonlocal running, most
        running += 1
        most = max(most, running)
        yield from real(*args, **named)  # type: ignore[arg-type]
        running -= 1

    monkeypatch.setattr(replay, "read_messages", counted)

    assert len(merged(tmp_path)) == 100
    assert most <= 2


def test_members_outside_of_a_range_are_not_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.gz", messages(1, 2), messages(3, 4), messages(5, 6))
    data = bytearray(path.read_bytes())
    data[5:40] = bytes(35)  # the first member is corrupt, and nobody notices
    path.write_bytes(data)

    assert merged(tmp_path, TimeRange(4, 6)) == [4, 5]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 9, "done": {}}', "nonsense"])
def test_another_file_is_not_taken_for_a_checkpoint(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)

    with pytest.raises(ConfigurationError, match="not the checkpoint"):
        Checkpoint(tmp_path / "c.json")
