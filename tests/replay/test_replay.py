"""The merge of archives by time, and the checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.archives import Writer, numbered, write_archive
from plugins.cli import RunNsq
from plugins.clients import InBackground
from plugins.daemons import GoNsqd
from plugins.power_cut import PowerCut
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s

from nsqtools import ClientOptions, replay
from nsqtools.archive.finding import ArchiveFile, find_archives
from nsqtools.archive.layout import TimeRange, index_of
from nsqtools.archive.table import convert
from nsqtools.archive.table_writer import TablePlan
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.publish.publish_job import UnsentFiles
from nsqtools.publish.publisher import PublishCounts, Publisher, PublishOptions
from nsqtools.records.envelope import Envelope
from nsqtools.replay import Checkpoint, MessageSelection, Replay, ReplayInputs, merge


def messages(*times: int) -> list[WireMessage]:
    return [WireMessage(time, 1, b"%016d" % time, b"%d" % time) for time in times]


def merged(directory: Path, within: TimeRange | None = None) -> list[int]:
    archives, within = find_archives([directory]), within or TimeRange()
    messages = merge(archives, lambda *problem: pytest.fail(str(problem)), within=within)
    return [archived.message.timestamp_ns for archived in messages]


@pytest.mark.parametrize("has_index", [True, False])
def test_files_are_merged_by_time(tmp_path: Path, has_index: bool) -> None:
    for name, times in {"a": (1, 4, 9), "b": (2, 3), "c": (5, 10)}.items():
        path = write_archive(tmp_path / f"{name}.gz", messages(*times))
        if not has_index:
            index_of(path).unlink()
    assert merged(tmp_path) == [1, 2, 3, 4, 5, 9, 10]


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        write_archive(tmp_path / f"{number:02d}.gz", messages(number * 10 + 1, number * 10 + 2))
    open_files = [0]  # the number after each open and close
    original = replay.read_messages

    def counted(*args: Any, **named: Any) -> Iterator[Envelope]:
        open_files.append(open_files[-1] + 1)
        yield from original(*args, **named)
        open_files.append(open_files[-1] - 1)

    monkeypatch.setattr(replay, "read_messages", counted)

    assert len(merged(tmp_path)) == 100
    assert max(open_files) <= 2


def test_members_outside_of_a_range_are_not_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.gz", messages(1, 2), messages(3, 4), messages(5, 6))
    data = bytearray(path.read_bytes())
    data[5:40] = bytes(35)  # damages the first member
    path.write_bytes(data)
    assert merged(path.parent, TimeRange(4, 6)) == [4, 5]
    index = index_of(path)
    index.write_bytes(index.read_bytes().splitlines(keepends=True)[0])  # without the other members
    assert merged(path.parent, TimeRange(4, 6)) == [4, 5]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 9, "done": {}}', "nonsense", "[" * 100_000]
)
def test_a_file_of_another_kind_is_refused_as_a_checkpoint(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ConfigurationError, match="not a checkpoint"):
        Checkpoint(tmp_path / "c.json")


LIMIT = 20
MESSAGES = numbered(1, 4)


def replay_of(
    archive: Path,
    address: str,
    checkpoint: Path | None,
    unsent: UnsentFiles | None = None,
    **options_of_start: Any,
) -> tuple[Replay, Publisher]:
    options = ClientOptions(dial_timeout_s=1, publish_timeout_s=3, publish_max_msg_size=LIMIT)
    publisher = Publisher([address], options, PublishOptions(retry_timeout_s=0.3))
    inputs = ReplayInputs(find_archives([archive]), MessageSelection(), checkpoint=checkpoint)
    replay = Replay(inputs, publisher, on_damage=Mock(), unsent=unsent, **options_of_start)
    return replay, publisher


def test_a_wait_is_limited_to_the_longest_wait_of_python(
    unreachable_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_archive(tmp_path / "a.gz", messages(1, 9 * 10**15))
    job, publisher = replay_of(
        archive, unreachable_address, tmp_path / "c", speed=1e-6, dry_run=True
    )
    waits: list[float] = []
    monkeypatch.setattr(publisher.stopped, "wait", waits.append)
    job.run()
    assert 0 < max(waits) <= TIMEOUT_MAX


def test_all_messages_are_kept_as_unsent_after_the_publisher_has_given_up(
    unreachable_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_archive(tmp_path / "a.gz", messages(1, 2, 9 * 10**15))
    monkeypatch.setattr("nsqtools.replay.BATCH_RECORDS", 1)
    with UnsentFiles(tmp_path / "unsent", b"") as unsent:
        job, publisher = replay_of(archive, unreachable_address, None, unsent, speed=1)
        publisher.has_given_up = True
        job.run()
    assert publisher.counts == PublishCounts(unsent=3)
    assert len((tmp_path / "unsent").read_bytes().splitlines()) == 3


def test_messages_with_an_unknown_outcome_are_published_again(
    scripted_nsqd: ScriptedNsqd,
    unreachable_address: str,
    nsqd: GoNsqd,
    in_background: InBackground,
    tmp_path: Path,
) -> None:
    archive = write_archive(tmp_path / "a.gz", MESSAGES)
    checkpoint = tmp_path / "checkpoint.json"
    # The checkpoint is written before anything is published.
    with pytest.raises(OutputError, match="cannot write"):
        replay_of(archive, unreachable_address, tmp_path / "no" / "place")[0].run()

    first, publisher = replay_of(archive, scripted_nsqd.address, checkpoint)
    running = in_background(first.run)
    connection = scripted_nsqd.identified("MPUB clicks")
    connection.close()
    running.result(patience_s(10))

    assert publisher.counts == PublishCounts(unknown=3)
    assert json.loads(checkpoint.read_bytes())["done"] == {}

    assert counts_of(archive, nsqd, checkpoint) == PublishCounts(confirmed=3)
    assert nsqd.depth("clicks") == 3
    assert list(json.loads(checkpoint.read_bytes())["done"].values()) == [3]


def test_after_a_power_cut_completed_messages_are_confirmed_or_in_the_unsent_file(
    nsqd: GoNsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected message that the next run skips must be in the unsent file."""
    rejected = {number: b"%03d" % number * LIMIT for number in (2, 3, 5, 9)}
    bodies = [rejected.get(number, b"%03d" % number) for number in range(1, 11)]
    archive = write_archive(
        tmp_path / "a.gz", [WireMessage(n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr("nsqtools.replay.BATCH_RECORDS", 2)
    with PowerCut(disk) as record, UnsentFiles(disk / "unsent", b"") as unsent:
        replay_of(archive, nsqd.tcp_address, disk / "checkpoint", unsent)[0].run()

    assert nsqd.depth("clicks") == 6
    passed = set()
    for _, cut in record.cuts():
        if content := cut.files.get("checkpoint"):
            [done] = json.loads(content)["done"].values() or [0]
            passed.add(done)
            for number, body in rejected.items():
                assert number > done or body in cut.files["unsent"], (done, cut.files)
    assert passed == {0, 2, 4, 6, 8, 10}


def counts_of(archive: Path, nsqd: GoNsqd, checkpoint: Path) -> PublishCounts:
    job, publisher = replay_of(archive, nsqd.tcp_address, checkpoint)
    job.run()
    return publisher.counts


@pytest.mark.parametrize("is_known_by_path", [False, True])  # as an earlier version wrote it
def test_a_checkpoint_follows_a_moved_file_and_not_its_path(
    nsqd: GoNsqd, tmp_path: Path, is_known_by_path: bool
) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    original, moved = tmp_path / "a", tmp_path / "b"
    original.mkdir()
    writer = Writer(original)
    path = writer.write(MESSAGES[:2], name="a.log.gz")
    if is_known_by_path:
        path = writer.finish()
        checkpoint.write_text(json.dumps({"version": 1, "done": {str(path): 1}}))
    assert counts_of(original, nsqd, checkpoint) == PublishCounts(confirmed=2 - is_known_by_path)
    assert str(path) not in checkpoint.read_text()
    if not is_known_by_path:
        writer.write(MESSAGES[2:])
        writer.finish()
    original.rename(moved)

    assert counts_of(moved, nsqd, checkpoint) == PublishCounts(confirmed=1 - is_known_by_path)
    original.mkdir()
    # A machine that was cloned from an image has the lock file of the writer, too.
    clone = Writer(original, writer=writer.writer)
    clone.write(MESSAGES[1:], name="a.log.gz")
    clone.finish()
    assert counts_of(original, nsqd, checkpoint) == PublishCounts(confirmed=2)
    assert counts_of(moved, nsqd, checkpoint) == counts_of(original, nsqd, checkpoint)


def half_replayed(
    directory: Path, *, delta: bool
) -> tuple[Path, Path, tuple[ArchiveFile, ArchiveFile]]:
    """Make a table of two files, and a checkpoint that has the first one."""
    checkpoint, table = directory / "checkpoint.json", directory / "t"
    for number in (1, 3):
        archive = write_archive(directory / f"{number}.gz", numbered(number, number + 2))
        list(convert(find_archives([archive]), TablePlan(str(table), delta, "h"), directory))
    first, second = find_archives([table])
    replayed = Checkpoint(checkpoint)
    replayed.record(first, 2)
    replayed.save()
    return table, checkpoint, (first, second)


@pytest.mark.parametrize("delta", [False, True])
def test_a_table_whose_files_were_replaced_is_not_published_again(
    unreachable_address: str, tmp_path: Path, run_nsq: RunNsq, delta: bool
) -> None:
    table, checkpoint, _ = half_replayed(tmp_path, delta=delta)
    assert replay_of(table, unreachable_address, checkpoint)[0].resumes

    assert run_nsq(["archive", "compact", str(table), "--open-days"]).status == 0

    with pytest.raises(ConfigurationError, match="its table has other files with its messages"):
        replay_of(table, unreachable_address, checkpoint)


def test_a_checkpoint_serves_other_files_of_a_folder_one_after_another(
    unreachable_address: str, tmp_path: Path
) -> None:
    table, checkpoint, (first, second) = half_replayed(tmp_path, delta=False)
    assert not replay_of(second.path, unreachable_address, checkpoint)[0].resumes
    first.path.unlink()  # a deleted file has no replacement
    assert not replay_of(table, unreachable_address, checkpoint)[0].resumes
