"""Where ingestion writes: output and checkpoint, which belong together and to one run at a time.

Spark provides exactly once: the source repeats a batch unchanged, and the log of Spark's file sink
(``_spark_metadata``) lists the files of the output that count. Both hold only while output and
checkpoint stay together, which Spark does not check: it numbers batches in the checkpoint and
believes the output's log about which of them are written. A new checkpoint with an old output would
skip its first batches, and an old checkpoint with a new output would begin in the middle; messages
would be missing without a word. So both are marked with one identity (`mark_directories`), and
anything else is refused.

Files that an interrupted batch wrote are not in the sink's log, and Spark ignores them. Other
readers of the directory would count their messages twice, so they are removed.

Trap: when this process is killed, its JVM lives on for a moment and may still commit its batch. The
files of that batch are no leftovers yet, so the JVM inherits the lock of the checkpoint, which is
free only when both have ended.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from nsqtools.archive.storage import Storage, failure_of
from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.locks import lock_file
from nsqtools.spark.jobs.lease import leased
from nsqtools.spark.location import Location, StoredPlace, absolute, contains
from nsqtools.spark.packages import DELTA_LOG

OUTPUT_MARK = "_ingest.json"
CHECKPOINT_MARK = "nsq-ingest.json"
LOCK = "nsq-ingest.lock"
BEGUN = "offsets"  # Spark makes it with the first batch


@dataclass(frozen=True, slots=True)
class IngestMark:
    """What is ingested, and where to. ``id`` is made up once."""

    id: str
    source: str
    output: str
    checkpoint: str


@contextmanager
def held_directories(
    source: str, output: Location, checkpoint: Location, *, is_delta: bool = False
) -> Iterator[tuple[int, ...]]:
    """Mark two places, lock them, and remove what interrupted batches left before and after.

    Yields the descriptors that the JVM must inherit (`SparkSettings.inherited`). Raises
    `ConfigurationError`, and `OutputError`.
    """
    mark_directories(source, output, checkpoint)
    with _locked(checkpoint) as held:
        _refuse_other_format(output, is_delta=is_delta)
        if is_delta:  # its log says what counts, to every reader
            yield held
            return
        remove_leftovers(output)
        yield held
        remove_leftovers(output)


@contextmanager
def _locked(checkpoint: Location) -> Iterator[tuple[int, ...]]:
    if isinstance(checkpoint, StoredPlace):
        with leased(checkpoint, LOCK):
            yield ()
        return
    try:
        descriptor = lock_file(checkpoint / LOCK)
    except OSError as exc:
        raise OutputError(f"cannot write {exc.filename} ({exc.strerror})") from exc
    if descriptor is None:
        raise OutputError(
            f"another nsq spark ingest uses {checkpoint}",
            hint="If it was killed, its Spark still ends: try again in a few seconds.",
        )
    try:
        yield (descriptor,)
    finally:
        os.close(descriptor)


def mark_directories(source: str, output: Location, checkpoint: Location) -> None:
    """Mark two places, which are made, as those of ``source``; or see that they are.

    Raises `ConfigurationError` when they are somebody else's, and `OutputError`.
    """
    output, checkpoint = absolute(output), absolute(checkpoint)
    if contains(output, checkpoint) or contains(checkpoint, output):
        raise ConfigurationError("--output and --checkpoint must not contain each other")
    at_output, at_checkpoint = open_storage(str(output)), open_storage(str(checkpoint))
    try:
        of_checkpoint = _read_mark(at_checkpoint, CHECKPOINT_MARK)
        of_output = _read_mark(at_output, OUTPUT_MARK)
        if of_checkpoint is None:
            _refuse_foreign(at_output, at_checkpoint, of_output)
            mark = IngestMark(uuid.uuid4().hex, source, str(output), str(checkpoint))
            _write_mark(at_checkpoint, CHECKPOINT_MARK, mark)
            _write_mark(at_output, OUTPUT_MARK, mark)
            return
        if of_checkpoint.source != source:
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {of_checkpoint.source}, not to {source}",
                hint="Each source needs a checkpoint and an output of its own.",
            )
        if of_checkpoint.output != str(output):
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {of_checkpoint.output}, not to {output}",
                hint="Spark's log of an output has its path: leave it there, or start both over.",
            )
        if of_output is None and not _is_used(at_output) and not _is_used(at_checkpoint, BEGUN):
            _write_mark(at_output, OUTPUT_MARK, of_checkpoint)
        elif of_output is None or of_output.id != of_checkpoint.id:
            raise ConfigurationError(
                f"{output} is not the output that was written with the checkpoint {checkpoint}",
                hint="Restore it, or start with a new checkpoint and a new output.",
            )
    except OSError as exc:
        raise failure_of(exc, "use", output) from exc


def _refuse_foreign(output: Storage, checkpoint: Storage, of_output: IngestMark | None) -> None:
    if _is_used(checkpoint):
        raise ConfigurationError(
            f"{checkpoint.url} is not a checkpoint of nsq spark ingest",
            hint="Give a new directory.",
        )
    if of_output is not None:
        raise ConfigurationError(
            f"{output.url} was written with the checkpoint {of_output.checkpoint}, not with "
            f"{checkpoint.url}",
            hint="Give that one, or a new output: with another one messages would be missing.",
        )
    if _is_used(output):
        raise ConfigurationError(
            f"{output.url} holds files that nsq spark ingest did not write",
            hint="Give a new directory.",
        )


def _is_used(place: Storage, folder: str = "") -> bool:
    return next(iter(place.list(folder)), None) is not None


def _read_mark(place: Storage, name: str) -> IngestMark | None:
    try:
        return IngestMark(**json.loads(place.read(name)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {place.where(name)} ({exc})") from None


def _write_mark(place: Storage, name: str, mark: IngestMark) -> None:
    try:
        place.put_if_absent(name, (json.dumps(asdict(mark), indent=2) + "\n").encode())
    except FileExistsError:
        raise OutputError(f"another nsq spark ingest has begun to use {place.url}") from None


SINK_LOG = "_spark_metadata"
SINK_LOG_VERSION = "v1"


def _refuse_other_format(output: Location, *, is_delta: bool) -> None:
    """Refuse to go on in another format: what was written before would be missing there."""
    place = open_storage(str(absolute(output)))
    try:
        if is_delta and _is_used(place, SINK_LOG):
            raise ConfigurationError(
                f"{output} holds Parquet that is not a Delta table",
                hint="Go on without --format delta, or give a new output and a new checkpoint.",
            )
        if not is_delta and _is_used(place, DELTA_LOG):
            raise ConfigurationError(f"{output} is a Delta table", hint="Add --format delta.")
    except OSError as exc:
        raise failure_of(exc, "use", output) from exc


_BATCH = re.compile(r"\d+(\.compact)?")
_DATA = re.compile(r"topic=[^/]*/date=[^/]*/([^/]*\.parquet)")


def remove_leftovers(output: Location) -> int:
    """Remove them, and return how many there were. Nobody may be writing.

    Raises `OutputError`, also for a log that cannot be read: nothing is removed then.
    """
    place = open_storage(str(absolute(output)))
    try:
        names = [entry.name for entry in place.list()]
        known = committed(place, names)
        if known is None:
            return 0
        found = filter(None, map(_DATA.fullmatch, names))
        left = [match for match in found if match[1] not in known]
        for match in left:
            folder = match[0].removesuffix(match[1])
            place.delete(match[0])
            place.delete(f"{folder}.{match[1]}.crc")
        return len(left)
    except OSError as exc:
        raise failure_of(exc, "clean up", output) from exc


def committed(output: Storage, names: Iterable[str]) -> set[str] | None:
    """Return the names of the files that count; None before the first batch.

    ``names`` are all names in the output. That of a file is made up by Spark, so that it is enough
    without its directory. Raises ``OSError``, and `OutputError`.
    """
    logs = [name for name in names if name.startswith(f"{SINK_LOG}/")]
    if not logs:
        return None
    known: set[str] = set()
    for name in logs:
        if _BATCH.fullmatch(name.removeprefix(f"{SINK_LOG}/")):
            version, *lines = output.read(name).decode().splitlines()
            try:
                if version != SINK_LOG_VERSION:
                    raise ValueError(f"it is of version {version}")
                known |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
            except (ValueError, KeyError, TypeError) as exc:
                raise OutputError(f"cannot read {output.where(name)} ({exc})") from exc
    return known
