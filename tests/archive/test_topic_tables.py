"""A table for each topic: columns, places, landing, conversion of old tables, reading."""

import json
from collections.abc import Sequence
from pathlib import Path

import deltalake
import pyarrow
import pyarrow.parquet
import pytest
from plugins.archives import write_archive
from plugins.cli import RunNsq
from plugins.object_store import Bucket

from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.finding import find_archives
from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import Head
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.table import Table, convert
from nsqtools.archive.table_places import choose_url, split_at_topic, tables_below
from nsqtools.archive.table_writer import TablePlan
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind, encode_many

BASE_NS = 1_700_000_000_000_000_123
ORDERS = [b'{"id": %d, "status": 1}' % number for number in range(3)]
USERS = [b'{"id": "%d", "status": "new"}' % number for number in range(4)]


def messages(bodies: Sequence[bytes]) -> list[WireMessage]:
    return [WireMessage(BASE_NS + n, 1, b"%016d" % n, body) for n, body in enumerate(bodies)]


def log(path: Path, topic: str, bodies: Sequence[bytes], number: int = 1) -> Path:
    return write_archive(path, messages(bodies), topic=topic, head=Head("a" * 32, number))


def values(table: Path, column: str) -> list[object]:
    """The sorted values of a column of a Delta table or of a folder of Parquet."""
    if (table / "_delta_log").exists():
        names = DeltaCatalog(str(table)).files()
        files = [table / file.path for file in names]
    else:
        files = sorted(table.glob("topic=*/**/*.parquet"))
    tables = [pyarrow.parquet.read_table(file, partitioning=None) for file in files]
    return sorted(value for rows in tables for value in rows[column].drop_null().to_pylist())


@pytest.mark.parametrize("is_delta", [False, True])
def test_columns_belong_to_one_topic(tmp_path: Path, is_delta: bool) -> None:
    mixed = tmp_path / "a" / "mixed.log"
    mixed.parent.mkdir()
    texts = [encode_many("orders", "n:1", messages(ORDERS)[:1])]
    texts += [encode_many("users", "n:1", messages(USERS)[:1])]
    mixed.write_bytes(b"".join(texts))
    log(tmp_path / "a" / "o.log", "orders", ORDERS[1:])
    log(tmp_path / "a" / "u.log", "users", USERS[1:], 2)
    plan = TablePlan(str(tmp_path / "lake" / "{topic}"), is_delta, "h", BodyKind.json)
    archives = find_archives([tmp_path / "a"])

    for expected in (7, 0):  # The second run finds everything converted.
        results = list(convert(archives, plan, tmp_path))
        assert [problem for _, _, problem, _ in results] == [""] * 3
        assert sum(file.rows or 0 for _, files, _, _ in results for file in files) == expected
        assert not any(unfit.bodies for *_, unfit in results)
    assert values(tmp_path / "lake" / "orders", "body_id") == [0, 1, 2]
    assert values(tmp_path / "lake" / "users", "body_id") == ["0", "1", "2", "3"]


def test_a_batch_of_logs_is_committed_once_to_each_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [log(tmp_path / "logs" / "o.log", "orders", ORDERS)]
    logs += [log(tmp_path / "logs" / "u.log", "users", USERS, 2)]
    plan = TablePlan(str(tmp_path / "lake" / "{topic}"), True, "h", BodyKind.json)
    commit, commits = Table.commit, []

    def fail_after_the_first(table: Table, *args: object) -> object:
        if commits:
            raise OSError("killed")
        commits.append(table.plan.url)
        return commit(table, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Table, "commit", fail_after_the_first)
    with pytest.raises(OSError, match="killed"):
        Lander(plan, tmp_path / "logs").land(logs)
    monkeypatch.undo()
    assert all(path.exists() for path in logs)
    Lander(plan, tmp_path / "logs").land(logs)

    assert not any(path.exists() for path in logs)
    assert values(tmp_path / "lake" / "orders", "body_id") == [0, 1, 2]
    assert len(values(tmp_path / "lake" / "users", "body_id")) == 4


def test_a_topic_that_cannot_name_a_folder_is_renamed_or_kept_in_its_log(
    tmp_path: Path,
) -> None:
    logs = [log(tmp_path / "logs" / "a.log", "..", ORDERS)]
    logs += [log(tmp_path / "logs" / "b.log", "a#ephemeral", ORDERS, 2)]
    logs += [log(tmp_path / "logs" / "c.log", "a/b", ORDERS, 3)]
    plan = TablePlan(str(tmp_path / "lake" / "{topic}"), True, "h", BodyKind.json)
    landed = Lander(plan, tmp_path / "logs").land(logs)
    assert landed.refused == {logs[2]: "its topic 'a/b' cannot be the name of a table"}
    assert logs[2].exists()
    assert not (tmp_path / "_delta_log").exists()
    names = {place.name for place in tables_below(LocalPlace(tmp_path / "lake"))}
    assert names == {"a#ephemeral", "~.."}


def test_the_place_determines_whether_each_topic_has_a_table(tmp_path: Path) -> None:
    def choose(place: str, *, has_columns: bool = True, has_many_topics: bool = True) -> str:
        url = choose_url(
            str(tmp_path / place),
            {},
            has_columns=has_columns,
            has_many_topics=lambda: has_many_topics,
        )
        return url.removeprefix(f"{tmp_path}/")

    columns = pyarrow.schema([("topic", pyarrow.string())])
    DeltaCatalog(str(tmp_path / "one")).create(columns, ["topic"])
    DeltaCatalog(str(tmp_path / "many" / "clicks")).create(columns, ["topic"])
    (tmp_path / "folder" / "topic=a").mkdir(parents=True)

    assert choose("new") == "new/{topic}"
    assert choose("new", has_columns=False) == choose("new", has_many_topics=False) == "new"
    assert (choose("one"), choose("folder")) == ("one", "folder")
    assert choose("many", has_columns=False, has_many_topics=False) == "many/{topic}"
    assert choose("new/{topic}", has_columns=False) == "new/{topic}"
    for inside in ("one/{topic}", "one/new", "folder/x", "many/clicks/{topic}"):
        with pytest.raises(ConfigurationError, match="is inside the table"):
            TablePlan(str(tmp_path / inside), True, "h").check()
    for url in ("{topic}", "s3://{topic}/lake"):
        with pytest.raises(ConfigurationError, match="no folder above"):
            split_at_topic(url)


def test_an_old_table_is_converted_once_to_a_table_per_topic(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new" / "{topic}")
    plan = TablePlan(old, True, "h", BodyKind.json)
    for number, (topic, bodies) in enumerate((("orders", ORDERS), ("users", USERS)), 1):
        log(tmp_path / "a" / f"{topic}.log", topic, bodies, number)
        log(tmp_path / "a" / f"{topic}2.log", topic, [b"\xff"], number + 10)
    assert sum(
        len(files) for _, files, *_ in convert(find_archives([tmp_path / "a"]), plan, tmp_path)
    )
    command = ["archive", "convert", old, "-o", new, "--store", "delta", "--body", "json"]

    first, second = run_nsq(command), run_nsq(command)

    assert (first.status, second.status) == (0, 0), first.err
    assert "4 archives of 4, 9 messages, 2 did not fit" in first.err
    assert "0 archives of 4, 0 messages" in second.err
    assert values(tmp_path / "new" / "orders", "body_id") == [0, 1, 2]
    bodies = [
        run_nsq(["archive", "cat", place, "--bodies"]).out for place in (old, str(tmp_path / "new"))
    ]
    assert sorted(bodies[0].splitlines()) == sorted(bodies[1].splitlines())
    assert run_nsq(["archive", "compact", old, "--open-days", "--processes", "1"]).status == 0
    compacted = run_nsq(command)
    assert "was compacted since it was converted" in compacted.err
    assert (compacted.status, len(values(tmp_path / "new" / "users", "id"))) == (6, 5)


def test_tables_of_topics_are_read_and_compacted_together(tmp_path: Path, run_nsq: RunNsq) -> None:
    for number in range(2):
        for topic in ("orders", "users"):
            bodies = [b'{"n": %d}' % (10 * number)]
            write_archive(
                tmp_path / "a" / f"{topic}{number}.log",
                [WireMessage(BASE_NS + number, 1, b"%016d" % number, bodies[0])],
                topic=topic,
                head=Head("a" * 32, 2 * number + (topic == "users")),
            )
    lake = str(tmp_path / "lake")
    schema = tmp_path / "s.json"
    schema.write_text(json.dumps({"properties": {"n": {"type": "integer"}}}))
    into = ["-o", f"{lake}/{{topic}}", "--store", "delta", "--body", "json"]
    assert run_nsq(["archive", "convert", str(tmp_path / "a"), *into]).status == 0
    typed = ["--body", "json", "--schema", str(schema)]

    compacted = run_nsq(["archive", "compact", lake, "--open-days", "--processes", "1"])
    into = ["-o", str(tmp_path / "copy"), "--processes", "1"]
    copied = run_nsq(["archive", "compact", str(tmp_path / "a"), *into, *typed])

    assert (compacted.status, copied.status) == (0, 0), compacted.err + copied.err
    assert "2 files written" in compacted.err
    assert "each topic has its own table and columns" in copied.err
    for place in (lake, str(tmp_path / "copy")):
        result = run_nsq(["archive", "cat", place, "--bodies"])
        assert sorted(result.out.splitlines()) == [b'{"n": 0}'] * 2 + [b'{"n": 10}'] * 2
    assert deltalake.DeltaTable(f"{lake}/users").to_pyarrow_table()["n"].to_pylist() == [0, 10]
    delete = ["--delete-archives", "--yes"]
    deleted = run_nsq(["archive", "compact", str(tmp_path / "a"), *into, *typed, *delete])
    assert "4 archives deleted" in deleted.err
    (tmp_path / "lake" / "notes.log").write_text("x\n")
    mixed = run_nsq(["archive", "compact", lake, "-o", str(tmp_path / "out")])
    assert "has both tables (orders) and other files (notes.log)" in mixed.err


def test_topics_of_raw_files_are_taken_from_their_names(tmp_path: Path, run_nsq: RunNsq) -> None:
    (tmp_path / "a").mkdir()
    for number, name in enumerate(("clicks.h.2026.log", "orders.h.2026.log", "README")):
        (tmp_path / "a" / name).write_bytes(b'{"n": %d}\n' % number)
    command = ["archive", "convert", str(tmp_path / "a"), "-o", str(tmp_path / "lake")]
    result = run_nsq([*command, "--body", "json", "--topic-from", "<TOPIC>."])
    assert result.status == 6
    assert "README: skipped: its name has no topic by <TOPIC>." in result.err
    assert values(tmp_path / "lake" / "clicks", "n") == [0]
    assert values(tmp_path / "lake" / "orders", "n") == [1]


def test_a_bucket_can_have_a_table_per_topic(
    tmp_path: Path, bucket: Bucket, run_nsq: RunNsq
) -> None:
    for number, topic in enumerate(("orders", "a#ephemeral")):
        log(tmp_path / "a" / f"{number}.log", topic, ORDERS, number)
    lake = f"{bucket.url}/lake"
    command = ["archive", "convert", str(tmp_path / "a"), "-o", lake, "--store", "delta"]
    first, second = (run_nsq([*command, "--body", "json"]) for _ in range(2))
    assert "2 archives of 2, 6 messages" in first.err
    assert "0 archives of 2, 0 messages" in second.err
    assert run_nsq(["archive", "cat", lake, "--bodies"]).out.splitlines() == ORDERS * 2
    compacted = run_nsq(
        ["archive", "compact", lake, "-o", f"{bucket.url}/x/{{topic}}", "--dry-run"]
    )
    assert compacted.out.count(b"\n") == 3
