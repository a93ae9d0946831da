"""The files of a session: its log, and the directory of everything temporary.

The log receives the output of the JVM, the Python workers and pyspark itself. Its size is bounded,
because a stream may run for months. Each session begins with a line of its own, so that what an
error quotes is never from an earlier one.

Spark removes its temporary files only when it ends in good order. So each session has a scratch
directory that is locked while the session lives, and the next session removes those that are not
locked any more: what ``kill -9`` left.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import IO

from nsqtools.errors import OutputError
from nsqtools.files.locks import lock_file, try_lock
from nsqtools.files.opening import open_to_write
from nsqtools.spark.pyspark_internals import QUERY_LOGGERS

LOG_BYTES = 32 << 20
"""A log that exceeds this is renamed to ``.1``, and a new one begins."""
TAIL_BYTES = 256 << 10
SESSION = "---- nsqtools starts Spark"


class SparkLog:
    """The open file. Once open, nothing that happens to it stops Spark: a full disk loses lines."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, to add to it. Raises `OutputError`."""
        self.path = path
        self._lock = Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path)
        except OSError as error:
            raise OutputError(
                f"cannot write Spark's log {path} ({error.strerror})",
                hint="Name another file with --spark-log.",
            ) from error
        self.write(f"{SESSION} at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n")

    def copy(self, source: IO[bytes]) -> None:
        """Copy ``source``, line by line, to its end."""
        with source:
            for line in source:
                self._append(line)

    def write(self, text: str) -> None:
        """Add text, as the stream of a logging handler."""
        self._append(text.encode(errors="replace"))

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, data: bytes) -> None:
        with self._lock:
            try:
                if self._file.tell() > LOG_BYTES:
                    self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                    self._file.close()
                    self._file = _open(self.path)
                self._file.write(data)
            except (OSError, ValueError):
                pass


def _open(path: Path) -> IO[bytes]:
    descriptor = open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(descriptor, "ab", buffering=0)


def last_lines(path: Path) -> list[str]:
    """What the last session wrote, or the end of it; nothing if the file is missing."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rpartition(SESSION)[2].splitlines()[1:]


@contextmanager
def diverted(log: SparkLog) -> Iterator[None]:
    """Inside, what pyspark logs in this process goes to ``log`` and not to stderr."""
    from pyspark.logger import PySparkLogger

    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger("py4j"), *map(PySparkLogger.getLogger, QUERY_LOGGERS)]

    def not_py4js(record: logging.LogRecord) -> bool:
        if "py4j" not in record.pathname:
            return True
        handler.handle(record)
        return False

    logging.getLogger().addFilter(not_py4js)  # py4j logs a lost connection to the root logger
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logging.getLogger().removeFilter(not_py4js)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


PREFIX = "nsq-spark-"
LOCK = "lock"
YOUNG_S = 60.0
"""A directory this young may be about to be locked."""


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A new directory below ``parent``; abandoned ones are removed first.

    Raises `OutputError` where none can be made.
    """
    remove_abandoned(parent)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise OutputError(
            f"cannot make a directory for Spark in {parent} ({error.strerror})",
            hint="Set TMPDIR, or SPARK_LOCAL_DIRS, to a directory that can be written.",
        ) from error
    lock = lock_file(directory / LOCK)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of sessions of this user that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            state = directory.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < YOUNG_S:
                continue
            lock = open_to_write(directory / LOCK, os.O_RDWR)
        except OSError:  # not a session's directory, or it was removed just now
            continue
        try:
            if try_lock(lock):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # where files cannot be locked, it is unknown which sessions live
            continue
        finally:
            os.close(lock)
