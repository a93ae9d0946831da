"""The output in an object store, or as a Delta table: what is published, and by what.

    topic=clicks/date=2026-11-21/part-....parquet   the data, or the files of the table
    _compaction/manifests/topic=.../date=.../000003.json   what it holds: the last one counts
    _compaction/lock/000000000042.json              see `lease`
    _delta_log/                                     of a Delta table

A store has no rename of a directory. A partition's new files get names of their own, are read back
where they are, and are published by one new manifest, which is written once and never changed; the
files of the manifest before are removed after that. `nsq spark` reads what manifests name. Another
program that reads all files below the place sees old and new ones for that moment: with Delta it
never does, because there the table's log decides.

Delta refuses a commit when another one came between its own beginning and its end, but not when
that came between our reading and that beginning, a moment before. So the version that was read is
kept, and the table's log is looked at afterwards (`changed_by_others`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nsqtools.archive.storage import Storage, failure_of
from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.spark.jobs.compaction.compacted_output import (
    SUMMARIES,
    CompactionOutput,
    Manifest,
    decode_manifest,
    encode_manifest,
    folder_of,
)
from nsqtools.spark.jobs.compaction.inventory import Slot
from nsqtools.spark.lease import Lease, leased
from nsqtools.spark.location import Location, StoredPlace, absolute
from nsqtools.spark.packages import DELTA_LOG

MANIFESTS = f"{SUMMARIES}/manifests"
LOCK = f"{SUMMARIES}/lock"


class StoredOutput:
    """A place that compaction writes. Methods raise `OutputError`."""

    def __init__(self, root: Location, *, is_delta: bool) -> None:
        self.root = absolute(root)
        self.is_delta = is_delta
        self._lease: Lease | None = None

    @property
    def _storage(self) -> Storage:
        return open_storage(str(self.root))

    def check(self) -> None:
        """Refuse a place that holds something else. Raises `ConfigurationError`."""
        with naming(self.root):
            names = [entry.name for entry in self._storage.list()]
        is_table = any(name.startswith(f"{DELTA_LOG}/") for name in names)
        is_ours = any(name.startswith(f"{SUMMARIES}/") for name in names)
        if names and not is_ours:
            raise ConfigurationError(
                f"{self.root} holds files that compaction did not write",
                hint="Give a place of its own, or one that nsq spark compact has written.",
            )
        if is_ours and any(name.startswith("topic=") for name in names):
            if is_table and not self.is_delta:
                raise ConfigurationError(
                    f"{self.root} is a Delta table", hint="Add --format delta."
                )
            if self.is_delta and not is_table:
                raise ConfigurationError(
                    f"{self.root} holds Parquet that is not a Delta table",
                    hint="Give another --output.",
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other compactions out."""
        if isinstance(self.root, StoredPlace):
            with leased(self.root, LOCK) as self._lease:
                yield
            return
        with CompactionOutput(self.root).locked():
            yield

    def still_ours(self) -> None:
        """Raise `OutputError` when another run has taken the place over."""
        if self._lease is not None:
            self._lease.check()

    def recover(self) -> None:
        """Remove the files that an interrupted run wrote and did not publish."""
        if self.is_delta:
            return
        known = {
            f"{folder_of(slot)}/{name}"
            for slot, manifest in self.manifests().items()
            for name in manifest.files
        }
        with naming(self.root):
            for entry in list(self._storage.list()):
                if not entry.name.startswith(f"{SUMMARIES}/") and entry.name not in known:
                    self._storage.delete(entry.name)

    def tidy(self) -> None:
        """Nothing is left that is not published."""

    def table_version(self) -> int | None:
        """The version of a Delta table; None where there is none yet."""
        with naming(self.root):
            return table_version(self._storage) if self.is_delta else None

    def refuse_changed(self, slot: Slot, version: int, ours: str) -> None:
        """Raise `OutputError` when others changed a partition between our reading and writing."""
        with naming(self.root):
            before = changed_by_others(self._storage, version, slot, ours)
        if before is not None:
            raise OutputError(
                f"another writer changed {slot.topic} on {slot.day} in {self.root} while it was "
                "compacted, and its change is overwritten",
                hint=f"Restore version {before} of the table, which has it (RESTORE TABLE ... TO "
                f"VERSION AS OF {before}), and run again.",
            )

    def files(self, slot: Slot) -> dict[str, int]:
        """Return names and sizes of the Parquet files in a partition's folder."""
        folder = str(folder_of(slot))
        with naming(self.root):
            return {
                entry.name.removeprefix(f"{folder}/"): entry.size
                for entry in self._storage.list(folder)
                if entry.name.endswith(".parquet")
            }

    def rows_in_place(self, slot: Slot, names: Iterable[str]) -> int:
        """Count the rows of some files as this process sees them, without Spark."""
        from pyarrow import ArrowException, parquet

        folder = folder_of(slot)
        try:
            rows = 0
            for name in names:
                file = self._storage.open(f"{folder}/{name}")
                try:
                    rows += parquet.read_metadata(file).num_rows
                finally:
                    file.close()
            return rows
        except (OSError, ArrowException) as exc:
            place = f"{self.root}/{folder}"
            raise OutputError(f"cannot read back what was written into {place} ({exc})") from exc

    def remove(self, slot: Slot, names: Iterable[str]) -> None:
        """Remove files of a partition."""
        with naming(self.root):
            for name in names:
                self._storage.delete(f"{folder_of(slot)}/{name}")

    def publish(self, manifest: Manifest) -> None:
        """Make a manifest the one that counts. Another run that did so in between fails this."""
        folder = f"{MANIFESTS}/{folder_of(manifest.slot)}"
        self.still_ours()
        with naming(self.root):
            number = max((_number(entry.name) for entry in self._storage.list(folder)), default=0)
            name = f"{folder}/{number + 1:06d}.json"
            self._storage.put_if_absent(name, encode_manifest(manifest).encode())

    def manifests(self) -> dict[Slot, Manifest]:
        """Read those of all partitions."""
        latest: dict[str, str] = {}
        with naming(self.root):
            for entry in self._storage.list(MANIFESTS):
                folder = entry.name.rpartition("/")[0]
                latest[folder] = max(latest.get(folder, ""), entry.name)
            found = (self._manifest(name) for name in latest.values())
            return {manifest.slot: manifest for manifest in found}

    def _manifest(self, name: str) -> Manifest:
        try:
            return decode_manifest(json.loads(self._storage.read(name)))
        except (ValueError, TypeError, KeyError) as exc:
            raise OutputError(f"cannot read {self.root}/{name} ({exc})") from exc

    def published(self) -> list[str] | None:
        """Return the names of the files that count; None in what compaction did not write."""
        manifests = self.manifests()
        if not manifests:
            return None
        return [
            f"{folder_of(slot)}/{name}"
            for slot, manifest in manifests.items()
            for name in manifest.files
        ]

    def missing(self, manifest: Manifest) -> list[str]:
        """Return the files of a partition that are gone, or are not what was verified."""
        found = self.files(manifest.slot)
        folder = f"{self.root}/{folder_of(manifest.slot)}"
        return [
            f"{folder}/{name}" for name, size in manifest.files.items() if found.get(name) != size
        ]

    def summarise(self, manifests: Iterable[Manifest]) -> None:
        """The manifests themselves lie together."""


def _number(name: str) -> int:
    return int(name.rpartition("/")[2].removesuffix(".json"))


def open_output(root: Location, *, is_delta: bool = False) -> CompactionOutput | StoredOutput:
    """Return what writes to a place: a directory takes Parquet in its own, atomic way."""
    if isinstance(root, Path) and not is_delta:
        return CompactionOutput(root)
    return StoredOutput(root, is_delta=is_delta)


@contextmanager
def naming(root: Location) -> Iterator[None]:
    """Turn an ``OSError`` into the error of a command (`failure_of`)."""
    try:
        yield
    except OSError as exc:
        raise failure_of(exc, "use", root) from exc


_COMMIT = re.compile(rf"{DELTA_LOG}/(\d{{20}})\.json")


def table_version(table: Storage) -> int | None:
    """Return the version of a table; None where there is none. Raises ``OSError``."""
    found = (_COMMIT.fullmatch(entry.name) for entry in table.list(DELTA_LOG))
    return max((int(commit[1]) for commit in found if commit), default=None)


def changed_by_others(table: Storage, version: int, slot: Slot, ours: str) -> int | None:
    """Return the version before our commit, if others changed a partition after ``version``.

    ``ours`` is what our commit has as ``userMetadata``. What only lies in other files now, as after
    OPTIMIZE, is not changed. Raises ``OSError``.
    """
    is_changed = False
    while True:
        version += 1
        actions = list(_actions(table, version))
        if any(each.get("commitInfo", {}).get("userMetadata") == ours for each in actions):
            return version - 1 if is_changed else None
        is_changed |= any(_changes(action, slot) for action in actions)


def _actions(table: Storage, version: int) -> Iterator[dict[str, Any]]:
    for line in table.read(f"{DELTA_LOG}/{version:020d}.json").splitlines():
        yield json.loads(line)


def _changes(action: dict[str, Any], slot: Slot) -> bool:
    file = action.get("add") or action.get("remove") or {}
    values = file.get("partitionValues")
    is_here = values is None or values == {"topic": slot.topic, "date": str(slot.day)}
    return bool(file.get("dataChange")) and is_here
