"""Which output and which checkpoint belong together: each has the other's mark.

Spark numbers batches in the checkpoint and believes the output's log about which of them are
written. A new checkpoint beside an old output would therefore skip its first batches, and an old
checkpoint beside a new output would begin in the middle: messages would be missing, and nobody
would say so. So both are marked with one identity, and anything else is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file
from nsqtools.files.locks import try_lock
from nsqtools.spark.jobs.ingestion.leftovers import remove_leftovers

OUTPUT_MARK = "_ingest.json"
CHECKPOINT_MARK = "nsq-ingest.json"
LOCK = "nsq-ingest.lock"
BEGUN = "offsets"  # Spark makes it with the first batch


@dataclass(frozen=True, slots=True)
class Mark:
    """What is ingested, and where to. ``id`` is made up once."""

    id: str
    source: str
    output: str
    checkpoint: str


@contextmanager
def taken_places(source: str, output: Path, checkpoint: Path) -> Iterator[None]:
    """Have two directories for oneself, see `take_places`; what broken batches left is removed.

    Raises `ConfigurationError`, and `OutputError`.
    """
    take_places(source, output, checkpoint)
    try:
        file = (checkpoint / LOCK).open("a")
    except OSError as exc:
        raise OutputError(f"cannot write {exc.filename} ({exc.strerror})") from exc
    with file:
        if not try_lock(file.fileno()):
            raise OutputError(f"another nsq spark ingest uses {checkpoint}")
        remove_leftovers(output)
        yield
        remove_leftovers(output)


def take_places(source: str, output: Path, checkpoint: Path) -> None:
    """Mark two directories, which are made, as those of ``source``; or see that they are.

    Raises `ConfigurationError` when they are somebody else's, and `OutputError`.
    """
    output, checkpoint = output.absolute(), checkpoint.absolute()
    if output == checkpoint or output in checkpoint.parents or checkpoint in output.parents:
        raise ConfigurationError("--output and --checkpoint must not lie in each other")
    try:
        of_checkpoint, of_output = _read(checkpoint / CHECKPOINT_MARK), _read(output / OUTPUT_MARK)
        if of_checkpoint is None:
            _refuse_foreign(output, checkpoint, of_output)
            mark = Mark(uuid.uuid4().hex, source, str(output), str(checkpoint))
            _write(checkpoint / CHECKPOINT_MARK, mark)
            _write(output / OUTPUT_MARK, mark)
            return
        if of_checkpoint.source != source:
            raise ConfigurationError(
                f"the checkpoint {checkpoint} is of {of_checkpoint.source}, not of {source}",
                hint="Each source needs a checkpoint and an output of its own.",
            )
        if of_checkpoint.output != str(output):
            raise ConfigurationError(
                f"the checkpoint {checkpoint} is not of {output}, but of {of_checkpoint.output}",
                hint="Spark's log of an output has its path: leave it there, or begin both anew.",
            )
        if of_output is None and not _is_used(output) and not (checkpoint / BEGUN).exists():
            _write(output / OUTPUT_MARK, of_checkpoint)
        elif of_output is None or of_output.id != of_checkpoint.id:
            raise ConfigurationError(
                f"{output} is not any more what was written with the checkpoint {checkpoint}",
                hint="Bring it back, or begin with a new checkpoint and a new output.",
            )
    except OSError as exc:
        raise OutputError(f"cannot use {exc.filename or output} ({exc.strerror})") from exc


def _refuse_foreign(output: Path, checkpoint: Path, of_output: Mark | None) -> None:
    if _is_used(checkpoint):
        raise ConfigurationError(
            f"{checkpoint} holds something else than a checkpoint of nsq spark ingest",
            hint="Give a new directory.",
        )
    if of_output is not None:
        raise ConfigurationError(
            f"{output} was written with the checkpoint {of_output.checkpoint}, not with "
            f"{checkpoint}",
            hint="With another one messages would be missing: give that one, or a new output.",
        )
    if _is_used(output):
        raise ConfigurationError(
            f"{output} holds files that nsq spark ingest did not write",
            hint="Give a new directory.",
        )


def _is_used(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _read(path: Path) -> Mark | None:
    try:
        return Mark(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {path} ({exc})") from None


def _write(path: Path, mark: Mark) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(asdict(mark), indent=2) + "\n").encode(), 0o666)
