"""Output and checkpoint must belong together, and no other directory is written to."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plugins.object_store import Bucket

from nsqtools.archive.delta import INGESTED, DeltaCatalog
from nsqtools.archive.lease import NumberedObjects
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.table_writer import TablePlan
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.spark.archives.read_settings import BYTES
from nsqtools.spark.jobs import ingestion
from nsqtools.spark.jobs.ingestion import (
    BEGUN,
    CHECKPOINT_MARK,
    COMMITS,
    LOCK,
    IngestPlaces,
    IngestRun,
    IngestSource,
    lock_directories,
    mark_directories,
)
from nsqtools.spark.jobs.table_sink import BEGUN_NOTE, encode_note

SOURCE = "the topic clicks, channel spark"
NESTED = (("a", "a"), ("a", "a/b"), ("a/b", "a"))


def places_at(
    output: Path | Place, checkpoint: Path | Place, *, is_delta: bool = False
) -> IngestPlaces:
    both = (parse_place(str(place)) for place in (output, checkpoint))
    return IngestPlaces(*both, TablePlan(str(output), is_delta, host=""))


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """An output and a checkpoint of a query that has started."""
    output, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    mark_directories(SOURCE, places_at(output, checkpoint))
    (checkpoint / BEGUN).mkdir()
    for number in range(3):
        (checkpoint / BEGUN / str(number)).touch()
    (output / "_spark_metadata").mkdir()
    (output / "_spark_metadata" / ".0.crc").touch()
    return output, checkpoint


def refused(source: str, output: Path, checkpoint: Path, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        mark_directories(source, places_at(output, checkpoint))


def test_only_an_output_and_a_checkpoint_that_belong_together_are_accepted(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    output, checkpoint = places
    new, of_others = tmp_path / "new", tmp_path / "of-others"
    of_others.mkdir()
    (of_others / "file").touch()
    other_source = "the archive /var/nsq"
    for source, at, with_checkpoint, complaint in (
        (other_source, output, checkpoint, f"belongs to {SOURCE}, not to {other_source}"),
        (SOURCE, output, new, f"was written with the checkpoint {checkpoint}"),
        (SOURCE, of_others, new, "holds files that nsq spark ingest did not write"),
        (SOURCE, new, of_others, "is not a checkpoint of nsq spark ingest"),
        *((SOURCE, *pair, "must not contain each other") for pair in NESTED),
    ):
        refused(source, tmp_path / at, tmp_path / with_checkpoint, complaint)
    assert not new.exists()

    output.rename(tmp_path / "moved")  # Spark's log of the output has its path in every line.
    refused(SOURCE, tmp_path / "moved", checkpoint, f"belongs to {output}")
    refused(SOURCE, *places, "is not the output that was written")
    mark_directories(SOURCE, places_at(output, tmp_path / "new"))  # now of another checkpoint
    refused(SOURCE, *places, "is not the output that was written")
    (checkpoint / CHECKPOINT_MARK).write_text("{")
    with pytest.raises(OutputError, match="cannot read"):
        mark_directories(SOURCE, places_at(*places))


def test_one_ingestion_at_a_time_removes_uncommitted_files(places: tuple[Path, Path]) -> None:
    with lock_directories(SOURCE, places_at(*places)):
        with pytest.raises(OutputError, match="another run writes to"):
            lock_directories(SOURCE, places_at(*places)).__enter__()
        staged = places[0] / "_ingest" / "0123"
        staged.parent.mkdir()
        staged.touch()
    assert not staged.exists()


def test_an_output_of_sparks_own_sink_is_adopted_without_uncommitted_files(
    places: tuple[Path, Path],
) -> None:
    """0.3 left such an output; its log is removed when the query starts."""
    output = places[0]
    folder = output / "topic=a" / "date=2026-09-21"
    folder.mkdir(parents=True)
    names = [f"part-0000{number}-c000.zstd.parquet" for number in range(4)]
    for name in names:
        (folder / name).touch()
        (folder / f".{name}.crc").touch()
    (folder / "web1-0123.parquet").touch()  # It landed before the first batch.
    log = output / "_spark_metadata"
    (log / "1.compact").write_text("\n".join(["v1", *(log_entry(output, n) for n in names[:2])]))
    (log / "2").write_text("\n".join(["v1", log_entry(output, names[2])]))

    with lock_directories(SOURCE, places_at(*places)):
        kept = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    assert kept == sorted([*names[:3], "web1-0123.parquet"])
    assert len(list(folder.iterdir())) == 7
    assert json.loads((output / BEGUN_NOTE).read_text())["number"] == 3
    (folder / "part-1.parquet").touch()
    with lock_directories(SOURCE, places_at(*places)):  # Adoption happens only once.
        assert (folder / "part-1.parquet").exists()
    (output / BEGUN_NOTE).unlink()
    for unreadable in ("", "v2\n{}"):  # After a power cut, for example, nothing is removed.
        (log / "0").write_text(unreadable)
        with pytest.raises(OutputError, match="cannot read"):
            lock_directories(SOURCE, places_at(*places)).__enter__()
    assert (folder / "part-1.parquet").exists()


def test_a_run_that_lost_its_bucket_to_another_removes_nothing(
    bucket: Bucket,
) -> None:
    output, checkpoint = (parse_place(f"{bucket.url}/{name}") for name in ("out", "checkpoint"))
    put, folder = bucket.storage.put, "out/topic=a/date=2026-09-21"
    with lock_directories(SOURCE, places_at(output, checkpoint)):
        put("checkpoint/offsets/0", b"{}")
        put(f"{folder}/part-kept.parquet", b"x")
        put(f"{folder}/part-left.parquet", b"x")
        line = json.dumps({"path": f"s3a://{bucket.name}/{folder}/part-kept.parquet"})
        put("out/_spark_metadata/0", f"v1\n{line}\n".encode())
        output.delete(BEGUN_NOTE)

    mark_directories(SOURCE, places_at(output, checkpoint))
    assert f"{folder}/part-kept.parquet" in bucket.names()
    assert f"{folder}/part-left.parquet" not in bucket.names()
    with pytest.raises(ConfigurationError, match="must not contain each other"):
        mark_directories(SOURCE, places_at(output, parse_place(f"{output}/checkpoint")))
    with pytest.raises(ConfigurationError, match="belongs to the topic clicks"):
        mark_directories("the topic views, channel spark", places_at(output, checkpoint))
    # Files of another run look like leftovers until it commits them.
    holding = lock_directories(SOURCE, places_at(output, checkpoint))
    place, _ = holding.__enter__()
    place.raise_if_lost()
    numbers = NumberedObjects(checkpoint / LOCK)
    numbers.number = numbers.latest()
    numbers.append(b"{}")  # as a run does that waited for the end of the lease
    put("out/_ingest/0123", b"x")
    with pytest.raises(OutputError, match="another run writes to"):
        holding.__exit__(None, None, None)
    with pytest.raises(OutputError, match="another run writes to"):
        place.raise_if_lost()

    assert "out/_ingest/0123" in bucket.names()


def log_entry(output: Path, name: str) -> str:
    return json.dumps({"path": f"file://{output}/topic=a/date=2026-09-21/{name}"})


def test_files_of_an_uncommitted_first_batch_are_removed(
    places: tuple[Path, Path],
) -> None:
    leftover = places[0] / "topic=a" / "date=2026-09-21" / "part-1.parquet"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    shutil.rmtree(places[0] / "_spark_metadata")  # It does not exist before the first commit.
    committed = places[1] / COMMITS / "0"
    committed.parent.mkdir()
    committed.touch()
    with pytest.raises(ConfigurationError, match=f"{places[0]} is older than {places[1]}"):
        lock_directories(SOURCE, places_at(*places)).__enter__()
    assert leftover.exists()  # The log is lost, so the committed files are unknown.
    committed.unlink()
    begun = places[1] / BEGUN / ".0.85f8-487f.tmp"  # Spark refuses to start next to this file.
    shutil.rmtree(begun.parent)
    begun.parent.mkdir()
    begun.touch()
    with lock_directories(SOURCE, places_at(*places)):
        assert not leftover.exists()
        assert not begun.exists()


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_checkpoint_or_an_output_older_than_the_other_is_refused(
    places: tuple[Path, Path], *, is_delta: bool
) -> None:
    """Spark would skip new batches whose numbers the output already has."""
    output, checkpoint = places
    (checkpoint / "metadata").write_text('{"id": "query"}')

    def end_batch(number: int) -> None:
        if is_delta:
            table.commit([], app_id="query", number=number + 1)
        else:
            (output / BEGUN_NOTE).write_bytes(encode_note(number + 1))

    if is_delta:
        shutil.rmtree(output / "_spark_metadata")
        table = DeltaCatalog(str(output))
        table.create(BYTES.message_schema(), [])
    held = partial(lock_directories, SOURCE, places_at(*places, is_delta=is_delta))
    for number in (0, 2):  # A table lacks batches without new rows.
        end_batch(number)
        with held():
            pass
    (checkpoint / BEGUN / "2").unlink()
    with pytest.raises(ConfigurationError, match=f"{checkpoint} is older than {output}"):
        held().__enter__()


def test_one_of_two_concurrent_runs_gets_the_output_and_a_kill_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs found the output unused. Two writers of one Delta table would lose commits."""
    output = tmp_path / "out"
    mark_directories(SOURCE, places_at(output, tmp_path / "first"))
    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "_refuse_foreign", lambda *_: None)  # It has already checked.

        with pytest.raises(OutputError, match="another nsq spark ingest has begun to use"):
            mark_directories(SOURCE, places_at(output, tmp_path / "second"))
    mark_directories(SOURCE, places_at(output, tmp_path / "first"))

    (output / INGESTED).unlink()  # by a kill between the two marks
    mark_directories(SOURCE, places_at(output, tmp_path / "first"))

    assert (output / INGESTED).read_text() == (tmp_path / "first" / CHECKPOINT_MARK).read_text()


def test_an_output_keeps_its_format(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Rows in the other format would be missing, as the checkpoint has passed them."""
    with pytest.raises(ConfigurationError, match="holds Parquet that is not a Delta table"):
        lock_directories(SOURCE, places_at(*places, is_delta=True)).__enter__()
    table, checkpoint = tmp_path / "table", tmp_path / "of-table"
    with lock_directories(SOURCE, places_at(table, checkpoint, is_delta=True)):
        DeltaCatalog(str(table)).create(BYTES.message_schema(), [])

    with pytest.raises(ConfigurationError, match="is a Delta table"):
        lock_directories(SOURCE, places_at(table, checkpoint)).__enter__()


def test_counts_and_problems_are_reported_at_the_start_and_with_each_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {"rows": 3, "body_bytes": 9, "misfits": 0, "newest_ns": 1}
    batch: dict[str, Any] = {"batchId": 0, "observedMetrics": {"ingest": metrics}}
    batch["sources"] = [{"latestOffset": None}]
    idle = batch | {"observedMetrics": {}, "sources": [{"latestOffset": '{"problem": "full"}'}]}
    progress = [[idle, batch], [batch, idle], [batch, idle], [batch]]  # the last one is taken first
    batch["durationMs"] = {"addBatch": 1, "triggerExecution": 1000}
    active = [False, True, True, True]

    class Query:
        isActive = property(lambda self: active.pop())
        recentProgress = property(lambda self: progress.pop())
        awaitTermination = staticmethod(lambda: None)

    monkeypatch.setattr(ingestion, "POLL_S", 0.0)
    query: Any = Query()
    batch_rows: list[int] = []
    poll_rows: list[int] = []
    on_batch, on_poll = (
        lambda counts, rows=rows: rows.append(counts.rows) for rows in (batch_rows, poll_rows)
    )
    source, places = IngestSource(SOURCE, "nsq", {}), places_at(Path("out"), Path("checkpoint"))
    IngestRun(source, places, on_batch=on_batch, on_poll=on_poll).follow(query)

    assert (batch_rows, poll_rows) == ([0, 3], [3, 3, 3, 3])
    assert caplog.messages == ["full: messages stay in NSQ", "messages are taken again"]
