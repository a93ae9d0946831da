"""``nsq spark compact``: every message once, whatever happens, and archives go only after that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from plugins.archives import Writer, finished_files, write_archive
from plugins.cli import RunNsq, TerminalNsq
from plugins.clusters import ValidJson
from plugins.daemons import GoNsqd
from plugins.raw_client import RawClient, sized
from plugins.spark import RunSpark

from nsqtools.archive.layout import Member, encode_members, index_of, read_index
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction import partition_job
from nsqtools.spark.jobs.compaction.compacted_output import PartitionTotals

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21T14:13:20Z
DAY = "2026-09-21"
BODIES = [b"a\nb", b"\0", b"\xff\xfe\x80", b"", "\u2028 ü".encode(), bytes(range(256)) * 40]


def messages(
    first: int, last: int, *, attempts: int = 1, begin: int = BEGIN, step: int = SECOND
) -> list[WireMessage]:
    return [
        WireMessage(begin + number * step, attempts, b"%016x" % number, body(number))
        for number in range(first, last)
    ]


def body(number: int) -> bytes:
    return b"%d " % number + BODIES[number % len(BODIES)]


def rows_of(output: Path, topic: str = "clicks", day: str = DAY) -> list[dict[str, Any]]:
    """The rows of a partition, without Spark, in the order of its files."""
    rows = []
    for path in sorted((output / f"topic={topic}" / f"date={day}").glob("part-*.parquet")):
        rows += pq.ParquetFile(path).read().to_pylist()
    return rows


def bodies_of(rows: list[dict[str, Any]]) -> list[bytes]:
    return sorted(row["body"] for row in rows)


def numbers(text: bytes) -> list[list[str]]:
    """The lines of a listing behind its head."""
    return [line.split("\t") for line in text.decode().splitlines()[1:]]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def test_each_message_is_there_once_by_topic_and_day_and_archives_stay_unless_one_says_yes(
    run_spark: RunSpark, nsq_on_a_terminal: TerminalNsq, archive: Path, output: Path
) -> None:
    first = Writer(archive)
    first.write(messages(0, 100), messages(100, 150))
    first.finish()
    first.write(messages(140, 200, attempts=2), messages(35_000, 35_500))
    first.finish()
    for number, host in enumerate(("a", "b")):  # files of one name
        (archive / host).mkdir()
        some = messages(10 * number, 10 * number + 10)
        write_archive(archive / host / "views.gz", some, topic="views")

    result = run_spark("compact", archive, "-o", output)

    assert result.status == 0, result.err
    midnight = 35_200  # the message that is of the next day
    assert [line[:-1] for line in numbers(result.out)] == [
        ["clicks", DAY, "compacted", "2", "410", "10", "400"],
        ["views", DAY, "compacted", "2", "20", "0", "20"],
        ["clicks", "2026-09-22", "compacted", "1", "300", "0", "300"],
    ]
    rows = rows_of(output)
    expected = [*range(200), *range(35_000, midnight)]
    assert sorted(int(row["id"], 16) for row in rows) == expected
    assert bodies_of(rows) == sorted(body(number) for number in expected)
    assert [row["ts_ns"] for row in rows] == sorted(row["ts_ns"] for row in rows)
    assert {row["attempts"] for row in rows} == {1, 2}
    assert [row["attempts"] for row in rows if int(row["id"], 16) == 145] == [1]
    assert "10 duplicates removed, 3 partitions written and verified" in result.err
    a_manifest_says_what_was_read_and_written(archive, output, expected)

    command = ["spark", "compact", str(archive), "-o", str(output), "--delete-archives"]
    child = nsq_on_a_terminal(command)
    child.expect("4 archives with 730 messages")
    child.expect("Delete them")
    child.sendline("n")
    child.expect("nothing was deleted")
    child.wait()

    assert len(finished_files(archive)) == 4


def a_manifest_says_what_was_read_and_written(
    archive: Path, output: Path, expected: list[int]
) -> None:
    made, _ = json.loads((output / "_compaction" / f"{DAY}.json").read_text())["partitions"]
    counts = (made["rows_read"], made["duplicates_removed"], made["rows_written"])
    assert counts == (410, 10, 400)
    assert made["body_bytes"] == sum(len(body(number)) for number in expected)
    taken, _ = made["inputs"]
    path = archive / "clicks-000001.log.gz"
    assert taken["file"] == str(path)
    assert taken["size"] == path.stat().st_size
    assert (taken["members"], taken["messages"]) == (2, 150)
    partition_folder = output / "topic=clicks" / f"date={DAY}"
    assert json.loads((partition_folder / "_manifest.json").read_text()) == made
    assert set(made["files"]) == {path.name for path in partition_folder.glob("part-*")}


def test_late_messages_are_merged_even_when_the_archives_are_gone(
    run_spark: RunSpark, archive: Path, output: Path
) -> None:
    write_archive(archive / "a.gz", messages(0, 100))
    run_spark("compact", archive, "-o", output)
    idle = run_spark("compact", archive, "-o", output)
    (archive / "a.gz").unlink()
    index_of(archive / "a.gz").unlink()
    write_archive(archive / "b.gz", messages(90, 120, attempts=2))

    result = run_spark("compact", archive, "-o", output)

    assert (idle.status, idle.out) == (0, b"")
    assert "0 partitions" in idle.err
    assert [line[2:7] for line in numbers(result.out)] == [["merged", "1", "30", "10", "120"]]
    assert bodies_of(rows_of(output)) == sorted(body(number) for number in range(120))
    [made] = json.loads((output / "_compaction" / f"{DAY}.json").read_text())["partitions"]
    assert [len(made["inputs"]), made["rows_read"], made["duplicates_removed"]] == [2, 130, 10]
    assert not (output / "_staging").exists()


def test_two_nsqd_with_one_node_id_lose_nothing(
    run_spark: RunSpark,
    go_nsqd: Callable[..., GoNsqd],
    run_nsq: RunNsq,
    archive: Path,
    output: Path,
) -> None:
    """Both make ids from the same clock and node id: many are alike."""
    first, second = go_nsqd("-node-id=7"), go_nsqd("-node-id=7")
    count = 4000

    def batch(nsqd: GoNsqd, begin: int) -> bytes:
        place = nsqd.tcp_address.encode()
        bodies = [sized(b"%d of %s" % (number, place)) for number in range(begin, begin + 100)]
        return b"MPUB clicks\n" + sized(len(bodies).to_bytes(4, "big") + b"".join(bodies))

    with RawClient(first.tcp_address) as one, RawClient(second.tcp_address) as other:
        for begin in range(
            0, count, 100
        ):  # each counts from 0 every millisecond: send to both in one
            batches = batch(first, begin), batch(second, begin)
            one.send(batches[0])
            other.send(batches[1])
            assert (one.read_response(), other.read_response()) == (b"OK", b"OK")
    place = ["--nsqd-tcp-address", first.tcp_address, "--nsqd-tcp-address", second.tcp_address]
    limits = ["-n", str(2 * count)]
    target = ["--output-dir", str(archive), "--gzip"]
    run_nsq(["to-file", "-t", "clicks", "-c", "archive", *place, *limits, *target])

    result = run_spark("compact", archive, "-o", output, "--open-days")

    assert result.status == 0, result.err
    rows = [
        row
        for folder in (output / "topic=clicks").iterdir()
        for row in rows_of(output, day=folder.name.removeprefix("date="))
    ]
    expected = {
        b"%d of %s" % (number, nsqd.tcp_address.encode())
        for nsqd in (first, second)
        for number in range(count)
    }
    assert len(rows) == 2 * count
    assert {row["body"] for row in rows} == expected
    assert len({row["id"] for row in rows}) < 2 * count, "no ids were alike: nothing was tried"


def test_a_damaged_archive_changes_nothing_unless_it_is_told_to(
    run_spark: RunSpark, archive: Path, output: Path
) -> None:
    path = write_archive(archive / "a.gz", messages(0, 10), messages(10, 20), messages(20, 30))
    first, second, _ = read_index(index_of(path)) or []
    data = bytearray(path.read_bytes())
    data[second.offset + 30 : second.end - 10] = b"\0" * (second.length - 40)
    path.write_bytes(data)

    refused = run_spark("compact", archive, "-o", output)
    before = list(output.glob("topic=*"))
    taken = run_spark("compact", archive, "-o", output, "--skip-damaged")
    deletion = run_spark("compact", archive, "-o", output, "--delete-archives", "--yes")

    assert refused.status == 1
    assert str(path) in refused.err
    assert "leave it out with --skip-damaged" in refused.err
    assert before == []
    assert taken.status == 6
    assert f"{path}: at byte {first.end}" in taken.err
    assert len(rows_of(output)) == 20
    assert "it was read with damage" in deletion.err
    assert path.exists()


HOSTILE = ("../../etc/x", "a b", "esc\x1b]0;pwned\x07", "new\nline", "x" * 65)


def test_a_record_of_an_invalid_topic_blocks_no_other_and_is_never_dropped_silently(
    run_spark: RunSpark, archive: Path, output: Path
) -> None:
    lines = [
        {
            "topic": topic,
            "nsqd": "n:1",
            "id": f"{n:016x}",
            "ts": BEGIN + n,
            "attempts": 1,
            "body": "x",
        }
        for n, topic in enumerate([*HOSTILE, "clicks", "clicks"])
    ]
    path = archive / "hostile.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ("compact", archive, "--output", output, "--open-days")

    refused = run_spark(*common)
    assert refused.status == 1
    assert f"cannot read {path}: 5 messages of invalid topics: '../../etc/x', 'a b'" in refused.err
    assert "--skip-damaged" in refused.err
    assert rows_of(output) == []

    done = run_spark(*common, "--skip-damaged", "--delete-archives", "--yes")
    assert done.status == 6
    assert "5 messages of invalid topics" in done.err
    assert "\x1b" not in done.err
    assert bodies_of(rows_of(output)) == [b"x", b"x"]
    assert path.exists()
    assert {each.name for each in output.iterdir() if each.name[0] != "_"} == {"topic=clicks"}


def test_archives_go_when_all_of_them_is_in_parquet_and_not_before(
    run_spark: RunSpark, valid_json: ValidJson, archive: Path, output: Path
) -> None:
    done = write_archive(archive / "a.gz", messages(0, 100))
    both_days = write_archive(archive / "b.gz", messages(0, 10), messages(40_000, 40_010))
    command = ["compact", archive, "-o", output, "--delete-archives"]

    unasked = run_spark(*command)
    planned = run_spark(*command, "--until-day", DAY, "--dry-run", "--json")
    nothing_yet = (done.exists(), output.exists())
    result = run_spark(*command, "--until-day", DAY, "--yes")

    assert unasked.status == 2
    assert "Give --yes" in unasked.err
    document = valid_json("spark-compact-plan", planned.out)
    assert document["delete"] == [str(done)]
    assert nothing_yet == (True, False)
    assert result.status == 0, result.err
    assert not done.exists()
    assert not index_of(done).exists()
    assert both_days.exists()
    assert len(rows_of(output)) == 100
    assert run_spark(*command, "--yes", "--json").status == 0
    assert not both_days.exists()
    assert len(rows_of(output, day="2026-09-22")) == 10


def test_bare_bodies_are_all_kept_and_taken_once(
    run_spark: RunSpark, valid_json: ValidJson, archive: Path, output: Path
) -> None:
    (archive / "a.log").write_bytes(b"same\nsame\n\xff\n")
    first = run_spark("compact", archive, "-o", output)
    again = run_spark("compact", archive, "-o", output)
    (archive / "b.log").write_bytes(b"same\n")
    (archive / "a.log").write_bytes(b"same\nsame\n\xff\nmore\n")

    result = run_spark("compact", archive, "-o", output, "--json")

    null = "__HIVE_DEFAULT_PARTITION__"
    rows = rows_of(output, topic=null, day=null)
    assert "3 bare bodies have no id and no time: all were kept" in first.err
    assert again.out == b""
    assert result.status == 6
    assert "a.log changed after its bodies were taken" in result.err
    assert bodies_of(rows) == [b"same", b"same", b"same", b"\xff"]
    document = valid_json("spark-compact", result.out)
    assert document["partitions"][0]["rows"] == 4


def test_what_is_not_as_it_was_written_takes_no_place_and_is_not_merged(
    run_spark: RunSpark, archive: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(archive / "a.gz", messages(0, 100))
    run_spark("compact", archive, "-o", output)
    write_archive(archive / "b.gz", messages(100, 120))
    with monkeypatch.context() as patch:
        patch.setattr(partition_job, "read_back", lambda *_: (PartitionTotals(120, 1, 1), 120))

        refused = run_spark("compact", archive, "-o", output)

    assert refused.status == 1
    assert "the partition stays as it was" in refused.err
    assert len(rows_of(output)) == 100
    assert run_spark("compact", archive, "-o", output).status == 0
    assert len(rows_of(output)) == 120

    [file] = (output / "topic=clicks" / f"date={DAY}").glob("part-*.parquet")
    file.unlink()
    write_archive(archive / "c.gz", messages(120, 130))

    changed = run_spark("compact", archive, "-o", output)

    assert changed.status == 1
    assert "the partition held 120 rows, 0 were found" in changed.err


def test_a_count_that_is_too_high_because_tasks_ran_again_is_taken_again(
    run_spark: RunSpark, archive: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of an executor: `test_executors_killed` has real ones."""
    counted = partition_job.totals

    def twice(observation: Any) -> PartitionTotals:
        found = counted(observation)
        is_of_written = found.checksum != 0
        return found if is_of_written else PartitionTotals(2 * found.rows, 2 * found.body_bytes)

    monkeypatch.setattr(partition_job, "totals", twice)
    write_archive(archive / "a.gz", messages(0, 100))
    first = run_spark("compact", archive, "-o", output)
    write_archive(archive / "b.gz", messages(90, 120, attempts=2))

    second = run_spark("compact", archive, "-o", output)

    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert [line[2:7] for line in numbers(second.out)] == [["merged", "1", "30", "10", "120"]]


def test_an_archive_that_holds_less_than_its_index_says_is_an_error(
    run_spark: RunSpark, archive: Path, output: Path
) -> None:
    path = write_archive(archive / "a.gz", messages(0, 100))
    [member] = read_index(index_of(path)) or []
    more = Member(member.offset, member.length, 101, member.min_ts, member.max_ts)
    index_of(path).write_bytes(encode_members([more]))

    result = run_spark("compact", archive, "-o", output)

    assert result.status == 1
    assert not list(output.glob("topic=*"))


def test_a_plan_needs_no_spark(run_nsq: RunNsq, archive: Path, output: Path) -> None:
    Writer(archive).write(messages(40_000, 40_010))
    write_archive(archive / "a.gz", messages(0, 10), messages(40_000, 40_005))

    result = run_nsq(["spark", "compact", str(archive), "-o", str(output), "--dry-run"])

    assert result.status == 0
    assert numbers(result.out)[0] == ["clicks", DAY, "new", "1", "10", "-"]
    assert numbers(result.out)[1][:5] == ["clicks", "2026-09-22", "open", "1", "5"]
    assert "clicks-000001.log.gz.part is in progress" in numbers(result.out)[1][5]
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--day", "2026-09-22"], 1, "2026-09-22 is not closed: "),
        (["--day", DAY, "--until-day", DAY], 2, "exclude each other"),
        (["--day", "yesterday"], 2, "is not a day; write 2026-11-21"),
        (["-t", "click"], 3, "has messages of click"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run_nsq: RunNsq, archive: Path, output: Path, arguments: list[str], status: int, line: str
) -> None:
    Writer(archive).write(messages(40_000, 40_010))
    write_archive(archive / "a.gz", messages(0, 10), messages(40_000, 40_005))

    result = run_nsq(["spark", "compact", str(archive), "-o", str(output), *arguments])

    assert (result.status, result.out) == (status, b"")
    assert line in result.err
    assert not output.exists()


def test_a_place_that_is_not_there_or_not_ours_is_refused(
    run_nsq: RunNsq, tmp_path: Path, archive: Path, output: Path
) -> None:
    output.mkdir()
    (output / "data.csv").touch()

    foreign = run_nsq(["spark", "compact", str(archive), "-o", str(output)])
    nested = run_nsq(["spark", "compact", str(archive), "-o", str(archive / "out")])
    missing = run_nsq(["spark", "compact", str(tmp_path / "no"), "-o", str(tmp_path / "new")])

    (output / "_compaction").mkdir()
    (output / "_delta_log").mkdir()
    table = run_nsq(["spark", "compact", str(archive), "-o", str(output)])

    assert (foreign.status, nested.status, missing.status) == (2, 2, 3)
    assert (table.status, "is a Delta table" in table.err) == (2, True), table.err
    assert "must not contain each other" in nested.err
    assert "holds files that compaction did not write" in foreign.err
    assert "there is no" in missing.err
