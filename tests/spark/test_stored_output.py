"""An output in an object store: one run at a time, and manifests that are written once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from plugins.archives import Writer
from plugins.object_store import Bucket

from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction.compacted_output import Manifest, folder_of
from nsqtools.spark.jobs.compaction.compaction_job import delete
from nsqtools.spark.jobs.compaction.inventory import Slot, day_of, take_inventory
from nsqtools.spark.jobs.compaction.stored_output import StoredOutput
from nsqtools.spark.jobs.inputs import find_inputs, parquet_objects, refuse_nested
from nsqtools.spark.lease import Lease, leased
from nsqtools.spark.location import StoredPlace, parse_place

BEGIN = 1_790_000_000_000_000_000
DAY_NS = 86_400_000_000_000
SLOT = Slot("clicks", day_of(BEGIN))


@pytest.fixture
def place(bucket: Bucket) -> StoredPlace:
    found = parse_place(f"{bucket.url}/lake")
    assert isinstance(found, StoredPlace)
    return found


def manifest(*names: str) -> Manifest:
    files = dict.fromkeys(names, 7)
    return Manifest("clicks", str(SLOT.day), "now", (), 1, 0, 1, 1, "0", files)


def test_a_place_has_one_writer_and_is_free_at_once_after_it(place: StoredPlace) -> None:
    with leased(place, "lock") as lease:
        lease.check()
        threading.Timer(0.3, lease.renew).start()
        with pytest.raises(OutputError, match=f"another run writes to {place}/lock"):
            Lease(place / "lock").take(5)
    with leased(place, "lock"):
        pass


def test_the_place_of_a_run_that_was_killed_can_be_taken_over(place: StoredPlace) -> None:
    dead = Lease(place / "lock")
    dead.take()

    Lease(place / "lock").take(0.6)

    with pytest.raises(OutputError, match="another run writes"):
        dead.check()


def test_a_run_that_slept_while_another_had_the_place_has_lost_it(place: StoredPlace) -> None:
    asleep = Lease(place / "lock")
    asleep.take()
    other = Lease(place / "lock")
    other.take(0.6)
    for _ in range(3):  # the next number of the first one has come and gone
        other.renew()

    with pytest.raises(OutputError, match="another run writes"):
        asleep.check()

    other.check()


def test_the_last_manifest_counts_and_leftovers_are_removed(
    bucket: Bucket, place: StoredPlace
) -> None:
    output = StoredOutput(place, is_delta=False)
    folder = f"lake/{folder_of(SLOT)}"
    for name in ("a.parquet", "b.parquet", "left.parquet"):
        bucket.storage.put(f"{folder}/{name}", b"PAR1 PAR")
    with output.locked():
        output.publish(manifest("a.parquet"))
        output.publish(manifest("b.parquet", "gone.parquet"))
        output.recover()

    assert output.manifests()[SLOT].files == {"b.parquet": 7, "gone.parquet": 7}
    assert [each.name for each in parquet_objects(place)] == ["b.parquet", "gone.parquet"]
    assert [name for name in bucket.names() if name.startswith(folder)] == [f"{folder}/b.parquet"]
    assert [Path(name).name for name in output.missing(output.manifests()[SLOT])] == [
        "b.parquet",  # its size differs
        "gone.parquet",
    ]
    output.check()


def test_a_place_with_something_else_in_it_is_refused(bucket: Bucket, place: StoredPlace) -> None:
    bucket.storage.put("lake/other.txt", b"x")

    with pytest.raises(ConfigurationError, match="files that compaction did not write"):
        StoredOutput(place, is_delta=False).check()


def test_archives_and_output_must_not_contain_each_other(place: StoredPlace) -> None:
    with pytest.raises(ConfigurationError, match="must not contain each other"):
        refuse_nested("--output", place / "archive/out", place / "archive")
    refuse_nested("--output", place / "archive2", place / "archive")


def test_what_lies_at_a_place_is_recognized(bucket: Bucket, place: StoredPlace) -> None:
    bucket.storage.put("lake/topic=a/date=b/x.parquet", b"PAR1....")
    bucket.storage.put("table/_delta_log/0.json", b"{}")
    bucket.storage.put("archive/.a.gz.index", b"")
    bucket.storage.put("archive/a.gz", b"x")
    table, archive = (parse_place(f"{bucket.url}/{name}") for name in ("table", "archive"))

    found = find_inputs([place, table, archive])

    assert (found.archives, found.parquet, found.delta) == ((archive,), (place,), (table,))
    with pytest.raises(NotFoundError, match="there is nothing in"):
        find_inputs([place / "nothing"])


def test_archives_in_a_bucket_are_counted_by_day_and_deleted_unless_they_changed(
    bucket: Bucket, place: StoredPlace, tmp_path: Path
) -> None:
    writer = Writer(tmp_path, topic="clicks")
    for first in (BEGIN, BEGIN + DAY_NS - 50_000_000_000_000):  # the second crosses midnight
        times = [first + n * 10_000_000_000_000 for n in range(8)]
        writer.write([WireMessage(ts, 1, b"%016x" % n, b"x") for n, ts in enumerate(times)])
        writer.finish()
    for path in tmp_path.iterdir():
        if not path.name.endswith(".lock"):
            bucket.storage.put_file(f"lake/{path.name}", path)

    local, stored = take_inventory(tmp_path), take_inventory(place)

    assert [each.messages for each in stored] == [each.messages for each in local]
    assert [each.key for each in stored] == [each.key for each in local]
    bucket.storage.put(f"lake/{stored[0].path.name}", b"changed")
    assert delete(stored) == [str(stored[0].path)]
    assert len(bucket.names()) == 2
