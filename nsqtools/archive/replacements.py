"""Replace files of a folder of Parquet, which has no log.

    _compaction/staging/NAME            a new file, which readers do not list
    _compaction/replacing/HASH.json     a replacement that is being carried out
    _compaction/replaced/FOLDER.json    the replaced files of a partition, with their rows

A replacement is committed when its record is in ``replacing``. Then the new files get their names,
the old ones are recorded in ``replaced`` and deleted, and the record goes. Each step can be
repeated, so after a kill the next run carries out what is committed and deletes what is not.

Readers of this package take either the new files or the old ones, by the record. Other programs may
see both between two steps. An archiver that was killed after it stored a file stores it again,
unless the file is in ``replaced``. The caller locks the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from nsqtools.archive.layout import MANIFEST, hidden_name
from nsqtools.archive.place import Place, PlaceLock, translating_errors
from nsqtools.errors import OutputError

NOTES = "_compaction"
STAGING = f"{NOTES}/staging"
REPLACING = f"{NOTES}/replacing"
REPLACED = f"{NOTES}/replaced"
LOCK = f"{NOTES}/lock"
"""Held by whoever replaces or removes files of a table."""
COMPACTED, ERASED = "compacted-", "erased-"
"""The beginnings of the names of files that only a holder of the lock adds to a table."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A new file: its name in ``staging``, its size, and its manifest."""

    name: str
    size: int
    manifest: str


@contextmanager
def locked_table(place: Place) -> Iterator[PlaceLock]:
    """Lock a table, carry out what a killed run has committed, and delete its other new files.

    Raises `NsqError`.
    """
    with place.lock(LOCK) as lock:
        with translating_errors("use", place):
            for entry in place.children(REPLACING)[0]:
                if (record := place.read_json(entry.name)) is not None:
                    _carry_out(place, entry.name, record)
            for entry in place.children(STAGING)[0]:
                place.delete(entry.name)
        yield lock


def replace_files(
    place: Place, files: Mapping[str, Staged], replaced_rows: Mapping[str, int]
) -> None:
    """Replace files by new ones, and record how many rows the old ones had.

    Raises ``OSError`` and `OutputError`.
    """
    record = {
        "version": 1,
        "files": {name: asdict(file) for name, file in files.items()},
        "replaces": dict(replaced_rows),
    }
    data = json.dumps(record).encode()
    name = f"{REPLACING}/{sha256(data).hexdigest()[:32]}.json"
    place.put(name, data)
    _carry_out(place, name, record)


def _carry_out(place: Place, record_name: str, record: Mapping[str, Any]) -> None:
    for name, file in record["files"].items():
        place.put(hidden_name(name, MANIFEST), file["manifest"].encode())
        with suppress(FileNotFoundError):  # It was moved before a kill.
            place.move(file["name"], name)
    if not all(_exists(place, name, file["size"]) for name, file in record["files"].items()):
        # Before all new files are in place, no old one is deleted.
        if not all(_exists(place, name) for name in record["replaces"]):
            raise OutputError(f"{place} lacks files that replaced others", hint="Restore it.")
        for name in record["files"]:
            place.delete(name)
            place.delete(hidden_name(name, MANIFEST))
        place.delete(record_name)
        return
    by_folder: dict[str, dict[str, int]] = {}
    for name, rows in record["replaces"].items():
        by_folder.setdefault(str(PurePosixPath(name).parent), {})[name] = rows
    for folder, rows_of in by_folder.items():
        document = {"version": 1, "rows": _replaced_in(place, folder) | rows_of}
        place.put(f"{REPLACED}/{folder}.json", json.dumps(document).encode())
    for name in record["replaces"]:
        place.delete(name)
        place.delete(hidden_name(name, MANIFEST))
    place.delete(record_name)


def _exists(place: Place, name: str, size: int | None = None) -> bool:
    with suppress(FileNotFoundError):
        return place.stat(name).size == size or size is None
    return False


def _replaced_in(place: Place, folder: str) -> dict[str, int]:
    return dict((place.read_json(f"{REPLACED}/{folder}.json") or {"rows": {}})["rows"])


def replaced_rows(place: Place, name: str) -> int:
    """Return the rows that a file had before it was replaced, 0 for any other file."""
    return _replaced_in(place, str(PurePosixPath(name).parent)).get(name, 0)


def replaced_names(place: Place) -> list[str]:
    """Return the names of all replaced files."""
    records = (place.read_json(entry.name) for entry in place.list(REPLACED))
    return [name for record in records if record for name in record["rows"]]


def superseded_names(
    root: Place, listed: Collection[str], is_selected: Callable[[str], bool]
) -> set[str]:
    """Return the names in a listing that replacements make invalid at this moment.

    ``listed`` are names below ``root``, and ``is_selected`` returns whether a name would be listed.
    Raises ``OSError``, and `OutputError` if the listing has neither all of the new files nor all of
    the old ones, because it was made while these were deleted.
    """
    names, superseded = {*listed}, set[str]()
    for entry in root.children(REPLACING)[0]:
        if (record := root.read_json(entry.name)) is None:
            continue
        new, old = ({*filter(is_selected, record[key])} for key in ("files", "replaces"))
        if new <= names:
            superseded |= old
        elif old <= names:
            superseded |= new
        else:
            raise OutputError(
                f"files of {root} were replaced while they were listed", hint="Run it again."
            )
    return superseded
