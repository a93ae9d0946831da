"""The files of a session: its log, and the directory of everything temporary.

The log receives what the JVM, the Python workers and pyspark itself say. A stream may run for
months, so log4j bounds its size (`log4j2.properties`). Each session begins with a line of its own,
so that what an error quotes is never from an earlier one.

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
from typing import TextIO

from nsqtools.errors import OutputError
from nsqtools.files.locks import lock_file, try_lock
from nsqtools.files.opening import open_to_write
from nsqtools.spark.pyspark_internals import QUERY_LOGGERS

TAIL_BYTES = 256 << 10
SESSION = "---- nsqtools starts Spark"


@contextmanager
def session_log(path: Path) -> Iterator[TextIO]:
    """The log, open to be added to; inside, pyspark and py4j log there and not to stderr.

    Raises `OutputError`.
    """
    from pyspark.logger import PySparkLogger

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.fdopen(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
    except OSError as error:
        raise OutputError(
            f"cannot write Spark's log {path} ({error.strerror})",
            hint="Name another file with --spark-log.",
        ) from error
    log.write(f"{SESSION} at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n")
    log.flush()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger("py4j"), *map(PySparkLogger.getLogger, QUERY_LOGGERS)]

    def not_py4js(record: logging.LogRecord) -> bool:
        return "py4j" not in record.pathname or not handler.handle(record)

    logging.getLogger().addFilter(not_py4js)  # py4j logs a lost connection to the root logger
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield log
    finally:
        logging.getLogger().removeFilter(not_py4js)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        log.close()


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
