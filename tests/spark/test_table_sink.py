"""The sink of ``nsq spark ingest``, with its tasks run here instead of by Spark."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from nsqtools.archive.columns import message_schema
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.finding import find_archives
from nsqtools.archive.parquet import read
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.replacements import REPLACED
from nsqtools.archive.table import Tables
from nsqtools.archive.table_writer import TablePlan
from nsqtools.records.envelope import BodyKind, decode_dead_letter
from nsqtools.spark.jobs.table_sink import BEGUN_NOTE, TableSink, encode_note, last_number
from nsqtools.spark.table_format import TableFiles, decode_plan, staged_name

TS_NS = 1_790_000_000_000_000_000


class Batch:
    """A batch of a stream that runs one task for each topic, as Spark would."""

    def __init__(self, **topics: dict[int, str]) -> None:
        self.tasks = [rows_of(topic, bodies) for topic, bodies in topics.items()]
        self.sparkSession = self.sparkContext = self.write = self
        self.defaultParallelism = 2

    def repartition(self, number: int, column: str) -> Batch:
        assert (number, column) == (2, "topic")
        return self

    format = mode = lambda self, name: self

    def options(self, plan: str, result: str) -> Batch:
        self.writer = TableFiles(decode_plan(plan), result)
        return self

    def save(self) -> None:
        self.writer.commit([self.writer.write(iter([task])) for task in self.tasks])


def rows_of(topic: str, bodies: dict[int, str]) -> pyarrow.RecordBatch:
    """Messages by number; negative numbers have no id."""
    rows = [
        {"topic": topic, "nsqd": "n:1", "id": f"{number:016x}", "ts_ns": TS_NS + number}
        | {"attempts": 1, "body": body}
        | ({"nsqd": None, "id": None, "ts_ns": None} if number < 0 else {})
        for number, body in bodies.items()
    ]
    return pyarrow.RecordBatch.from_pylist(rows, message_schema())


def content(table: Path) -> list[tuple[Any, ...]]:
    """The bodies in a table, with the values of its column ``v``."""
    rows = [
        row
        for file in find_archives([str(table)])
        for batch in read(Path(file.shown), ["body", "v", "_error"])
        for row in batch.to_pylist()
    ]
    values = [(row["body"], row.get("v"), row.get("_error")) for row in rows]
    return sorted(values, key=lambda value: value[0])


def checkpoint_at(path: Path) -> Path:
    path.mkdir()
    (path / "metadata").write_text(json.dumps({"id": path.name}))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoint_at(tmp_path / "query")


def sink_for(url: object, checkpoint: Path, *, is_delta: bool = True, **options: Any) -> TableSink:
    plan = TablePlan(str(url), is_delta, "", BodyKind.json, **options)
    return TableSink(plan, parse_place(str(checkpoint)))


def test_a_batch_is_in_each_table_once_after_a_kill_between_two_commits(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    url = lake / "{topic}"
    batches: list[Any] = [
        Batch(a={0: '{"v": 1}', -1: "bare"}, b={0: '{"v": "x"}'}),
        Batch(a={1: '{"v": 2}', 0: '{"v": 1}', -1: "bare"}, b={1: '{"v": "y"}'}),
    ]
    sink_for(url, checkpoint)(batches[0], 0)
    commit = DeltaCatalog.commit

    def killed(self: DeltaCatalog, *arguments: Any, **options: Any) -> bool:
        if str(self.storage).endswith("/b"):
            raise KeyboardInterrupt
        return commit(self, *arguments, **options)

    monkeypatch.setattr(DeltaCatalog, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        sink_for(url, checkpoint)(batches[1], 1)
    monkeypatch.undo()
    sink = sink_for(url, checkpoint)
    assert last_number(sink.plan, "query") == 2
    for _ in range(2):
        sink(batches[1], 1)

    bare = ("bare", None, "it is not JSON")
    numbers = [('{"v": 1}', 1, None), ('{"v": 2}', 2, None)]
    assert content(lake / "a") == [bare, bare, *numbers]
    assert content(lake / "b") == [('{"v": "x"}', "x", None), ('{"v": "y"}', "y", None)]


def test_a_batch_of_parquet_is_stored_once_if_killed_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch adds a column, so a repetition that wrote it again would also differ."""
    batches: list[Any] = [
        Batch(a={0: '{"v": 1}'}),
        Batch(a={1: '{"v": 2, "w": 3}', -1: "bare"}, b={1: '{"v": "y"}'}),
    ]
    for step in count():
        lake, checkpoint = tmp_path / f"lake{step}", checkpoint_at(tmp_path / f"cp{step}")
        sink_for(lake / "{topic}", checkpoint, is_delta=False)(batches[0], 0)
        with monkeypatch.context() as patch:
            was_killed = kill_after(step, patch)
            with suppress(KeyboardInterrupt):
                sink_for(lake / "{topic}", checkpoint, is_delta=False)(batches[1], 1)
        again = sink_for(lake / "{topic}", checkpoint, is_delta=False)
        again(batches[1], 1)

        bodies = [("bare", None, "it is not JSON"), ('{"v": 1}', 1, None)]
        assert content(lake / "a") == [*bodies, ('{"v": 2, "w": 3}', 2, None)], step
        assert content(lake / "b") == [('{"v": "y"}', "y", None)], step
        assert not [path for path in (lake / "_ingest").iterdir() if path.is_file()], step
        assert last_number(again.plan, "query") == 2
        if not was_killed:
            break
    assert step > 10


def kill_after(steps: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Interrupt the change of a place after this many changes; return the interrupted change."""
    numbers, killed = count(), list[str]()

    def wrap(name: str) -> Any:
        change = getattr(LocalPlace, name)

        def interrupted(*arguments: Any) -> Any:
            if next(numbers) == steps:
                killed.append(name)
                raise KeyboardInterrupt
            return change(*arguments)

        return interrupted

    for name in ("put", "put_file", "put_if_absent", "move", "delete"):
        patch.setattr(LocalPlace, name, wrap(name))
    return killed


def test_a_file_that_was_compacted_after_a_kill_does_not_return(
    tmp_path: Path, checkpoint: Path
) -> None:
    """In a bucket, a kill between the copy and the deletion of a move leaves both."""
    lake = tmp_path / "lake"
    batch: Any = Batch(a={0: '{"v": 1}'})
    sink = sink_for(lake, checkpoint, is_delta=False)
    sink(batch, 0)
    [file] = lake.rglob("*.parquet")
    path = file.relative_to(lake).as_posix()
    (lake / staged_name(path)).write_bytes(file.read_bytes())
    (lake / BEGUN_NOTE).write_bytes(encode_note(1, [("", path)]))
    file.rename(file.with_name("compacted.parquet"))
    record = lake / REPLACED / f"{file.parent.relative_to(lake)}.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"version": 1, "rows": {path: 1}}))

    sink(batch, 0)
    assert content(lake) == [('{"v": 1}', 1, None)]


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_batch_is_written_again_if_another_writer_gave_a_column_another_type(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, is_delta: bool
) -> None:
    table, letters = tmp_path / "table", tmp_path / "dead.jsonl"
    other_batch, batch = Batch(a={5: '{"v": "text"}'}), Batch(a={0: '{"v": 1}', 1: '{"v": "x"}'})
    others: list[Any] = [other_batch]
    sink = sink_for(table, checkpoint, is_delta=is_delta, dead_letters=str(letters))
    evolve = Tables.evolve_schemas

    def overtaken(self: Tables, schemas: Any) -> bool:
        if others:
            sink_for(table, other_checkpoint, is_delta=is_delta)(others.pop(), 0)
        return evolve(self, schemas)

    other_checkpoint = checkpoint_at(tmp_path / "other")
    monkeypatch.setattr(Tables, "evolve_schemas", overtaken)
    sink(batch, 0)

    assert content(table) == [
        ('{"v": "text"}', "text", None),
        ('{"v": "x"}', "x", None),
        ('{"v": 1}', None, "v is not string"),
    ]
    assert len(list(table.rglob("*.parquet"))) == 2
    [(message, error)] = [decode_dead_letter(line) for line in letters.read_bytes().splitlines()]
    assert (message.body, error, sink.misfits) == (b'{"v": 1}', "v is not string", 1)
