"""What a partition was made from, and what came out: its manifest.

The one that counts lies in the partition's directory and changes places with it. The manifests of a
day are gathered in ``_compaction/<date>.json``, which is made anew from them and so may be removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from nsqtools.errors import OutputError
from nsqtools.files.durable import replace_file
from nsqtools.spark.jobs.compaction.inventory import Content, Slot
from nsqtools.spark.jobs.compaction.layout import (
    MANIFEST,
    SUMMARIES,
    Output,
    blaming,
    data_files,
)

VERSION = 1
UNDATED_NAME = "undated"


@dataclass(frozen=True, slots=True)
class Input:
    """An archive as it was when it was read, and what of it is in the partition.

    ``messages`` is None where only reading tells. One that ``is_damaged`` may have lost some.
    """

    file: str
    key: str
    """See `Content`."""
    size: int
    mtime_ns: int
    members: int
    messages: int | None
    is_damaged: bool = False

    def is_of(self, content: Content) -> bool:
        """Tell whether it is this file, unchanged; one with a head may have moved."""
        has_moved = self.file != str(content.path)
        return (self.key, self.size) == (content.key, content.size) and (
            has_moved or self.mtime_ns == content.mtime_ns
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """The content of a partition. ``checksum`` is the XOR of the hashes of all rows."""

    rows: int = 0
    body_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """A partition: all archives that went into it, over all runs, and what it holds."""

    topic: str | None
    date: str | None
    compacted_at: str
    inputs: tuple[Input, ...]
    rows_read: int
    duplicates_removed: int
    rows_written: int
    body_bytes: int
    checksum: str
    files: Mapping[str, int]
    """Name and size of each Parquet file."""
    version: int = VERSION

    @property
    def slot(self) -> Slot:
        return Slot(self.topic, date.fromisoformat(self.date) if self.date else None)

    @property
    def known(self) -> dict[str, Input]:
        """The inputs by their keys."""
        return {each.key: each for each in self.inputs}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into a partition's directory. Raises `OutputError`."""
    _write(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read a partition's manifest; None where there is no partition.

    Raises `OutputError` when it cannot be read, or files are there without one.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["version"] != VERSION:
            raise OutputError(f"{path} is of version {document['version']}, not {VERSION}")
        inputs = tuple(Input(**each) for each in document.pop("inputs"))
        return Manifest(inputs=inputs, **document)
    except FileNotFoundError:
        if not folder.exists():
            return None
        raise OutputError(
            f"{folder} has no {MANIFEST}: no compaction wrote it",
            hint="Move it away, or give another --output.",
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise OutputError(f"cannot read {path} ({exc})") from exc


def read_manifests(output: Output) -> dict[Slot, Manifest]:
    """Read those of all partitions. Raises `OutputError`."""
    manifests = (read_manifest(folder) for folder in output.root.glob("topic=*/date=*"))
    return {manifest.slot: manifest for manifest in manifests if manifest is not None}


def missing_files(output: Output, manifest: Manifest) -> list[str]:
    """Return the files of a partition that are gone, or are not what was verified."""
    folder = output.final(manifest.slot)
    found = {path.name: path.stat().st_size for path in data_files(folder)}
    return [str(folder / name) for name, size in manifest.files.items() if found.get(name) != size]


def summarise(output: Output, manifests: Iterable[Manifest]) -> None:
    """Write the manifest of each day that is not up to date. Raises `OutputError`."""
    days: dict[str, list[dict[str, Any]]] = {}
    for manifest in manifests:
        days.setdefault(manifest.date or UNDATED_NAME, []).append(asdict(manifest))
    for name, partitions in days.items():
        partitions.sort(key=lambda each: each["topic"] or "")
        document = {"version": VERSION, "date": name, "partitions": partitions}
        path = output.root / SUMMARIES / f"{name}.json"
        if not path.exists() or path.read_text("utf-8") != _text(document):
            _write(path, document)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    with blaming(path):
        replace_file(path, _text(document).encode(), 0o666)


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
