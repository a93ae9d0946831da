"""Land finished logs in a table: ``nsq to-file --store parquet|delta``.

With a table, the files of ``to-file`` are logs: each is complete, and durable before its messages
are FINished. A finished log *lands*: its messages become one Parquet file for each of their
partitions, and the log is removed.

`table` determines the files of a log and their names. The steps are: write the files to a directory
next to the logs, read them back and compare; record the *intent*; move the files to the table;
commit; record next to each log that it has landed; remove it. The commit is

- for a folder of Parquet, the manifest of each file: a file with a manifest is not put again,
- for a Delta table, one commit for all logs of a batch, under an application and number that Delta
  records. If each topic has a table, the batch is one commit in each of them, under its own number.
  After a kill, the same commit is retried under the same number, and Delta accepts it only once
  (`delta`). Each process has its own application name and continues from the number of the table. A
  copy of the directory, in an image or a snapshot of a machine, therefore never takes the commits
  of the original for its own.

So a kill at any point neither loses nor duplicates a message. A damaged log does not land.

`Lander` runs in a process of its own, because decoding and compressing occupy a core that consuming
needs. The process reads paths from its standard input, answers each batch, and ends with its input,
so it outlives the archiver by one batch at most. Only one process lands the logs of a directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from nsqtools.archive.body_schema import fields_of
from nsqtools.archive.delta import TableFile
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.table import Tables
from nsqtools.archive.table_writer import (
    Draft,
    TablePlan,
    TableWriter,
    Unfit,
    append_dead_letters,
    parquet_stem,
)
from nsqtools.archive.upload import (
    CLOSE_SIGNALED_S,
    NotUploadable,
    UploadPlan,
    UploadRecord,
    Uploads,
    index_to_upload,
    uploaded_of,
)
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import closing_fd, locked, open_own, open_to_write, refuse_planted
from nsqtools.protocol.text import NS, load_json
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

DRAFTS = ".nsq-landing"
"""The directory next to the logs with the new files and the state."""
STATE = "state.json"
# A batch is one commit. Its limits bound the number of files of the commit and the local disk space
# of the new files.
MAX_BATCH_LOGS = 64
MAX_BATCH_BYTES = 2 << 30
# The new files of a log are written to its disk before the log is removed, so a full disk would
# stay full. They may be twice as large as a compressed log. The minimum is more than what arrives
# until consumption has paused.
ROOM_PER_BYTE = 2
MIN_ROOM = 128 << 20
# Names of fields in a warning about fields without a column.
MAX_FIELDS_LOGGED = 5


class Landed(NamedTuple):
    """The result of a batch.

    ``files`` are the new files, with paths or URLs, ``refused`` has the logs that cannot land with
    their reasons, and ``unfit`` counts the bodies and fields that did not fit the columns.
    """

    files: list[TableFile]
    refused: dict[Path, str]
    unfit: Unfit


class Lander:
    """Lands the logs of a ``directory``. Runs in the landing process."""

    def __init__(self, plan: TablePlan, directory: Path) -> None:
        self._plan = plan
        self._tables: Tables | None = None
        self._directory = directory
        self._drafts = directory / DRAFTS
        self._app = f"nsqtools-{uuid4().hex}"

    def land(self, paths: Sequence[Path]) -> Landed:
        """Land logs. Raises ``OSError`` and `NsqError` for failures that a retry may overcome."""
        self._drafts.mkdir(0o750, exist_ok=True)
        refuse_planted(self._drafts, self._drafts.lstat())
        lock = open_to_write(self._drafts / "lock", os.O_RDWR | os.O_CREAT)
        # Waits for the landing process of a killed archiver to end its batch.
        with closing_fd(lock), locked(lock):
            return self._land(paths)

    def _land(self, paths: Sequence[Path]) -> Landed:
        state = self._load_state()
        if self._tables is None:
            # 0.3.0 recorded the fields of a folder of Parquet only in the state, and recorded wrong
            # fields for a Delta table.
            fields = None if self._plan.is_delta else state["fields"]
            self._tables = Tables(self._plan, fields_of(fields))
        tables = self._tables
        landed = self._finish(state, tables)
        self._delete_drafts()
        waiting = [path for path in paths if path.exists() and not uploaded_of(path).exists()]
        while True:
            writer = TableWriter(self._plan, self._drafts, tables.columns_of)
            drafts, logs, refused = self._write(writer, waiting)
            if not drafts or tables.evolve_schemas(writer.schemas):
                break
            # Another writer gave a column a different type in the meantime.
            self._delete_drafts()
        if logs:
            sync_folder(self._drafts)
            append_dead_letters(self._plan, drafts)
            numbers = {
                table.plan.url: table.number_of(self._app) + 1 for table in tables.by_table(drafts)
            }
            documents = list(map(asdict, drafts))
            state["app"] = self._app
            state["intent"] = {"drafts": documents, "logs": logs, "numbers": numbers}
            self._save(state)
            landed += self._finish(state, tables)
        self._delete_drafts()
        return Landed(landed, refused, writer.unfit)

    def _write(
        self, writer: TableWriter, paths: Iterable[Path]
    ) -> tuple[list[Draft], list[str], dict[Path, str]]:
        drafts: list[Draft] = []
        logs: list[str] = []
        refused: dict[Path, str] = {}
        for path in paths:
            try:
                archive = ArchiveFile.at(path, index_to_upload(path))
                new_drafts = writer.write(archive, parquet_stem(archive, self._plan.host))
                # An earlier run with --format raw may have left the log.
                if any(draft.file.partition["topic"] is None for draft in new_drafts):
                    reason = "it has bare bodies, which have no topic"
                    raise NotUploadable(errno.EINVAL, reason, str(path))
                drafts += new_drafts
                logs.append(str(path))
            except NotUploadable as exc:
                refused[path] = str(exc.strerror)
        return drafts, logs, refused

    def _finish(self, state: dict[str, Any], tables: Tables) -> list[TableFile]:
        """Carry out the recorded intent. Each step can be repeated."""
        intent = state["intent"]
        if intent is None:
            return []
        drafts = [Draft(draft["path"], TableFile(**draft["file"])) for draft in intent["drafts"]]
        landed = []
        for table, of_table in tables.by_table(drafts).items():
            # 0.3.0 had one table, and one number.
            table.plan.check_table()
            number = intent["numbers"][table.plan.url] if "numbers" in intent else state["number"]
            table.commit(of_table, state["app"], number)
            files = (draft.file for draft in of_table)
            landed += [replace(file, path=str(table.storage / file.path)) for file in files]
        for path in map(Path, intent["logs"]):
            replace_file(uploaded_of(path), UploadRecord(self._plan.url, state["app"]).encode())
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
        state["intent"] = None
        self._save(state)
        return landed

    def _load_state(self) -> dict[str, Any]:
        """Return the recorded state, or a new one for another table.

        Raises `ConfigurationError` if logs are on their way to another table.
        """
        url = parse_place(self._plan.url, self._plan.options).url
        new = {"url": url, "intent": None, "fields": None}
        state = _read_state(self._directory) or new
        if state["url"] == new["url"]:
            return state
        if state["intent"] is not None:
            raise ConfigurationError(
                f"logs in {self._directory} are on their way to {state['url']}",
                hint="Let nsq to-file finish there first, or give another --output-dir.",
            )
        return new

    def _save(self, state: Mapping[str, Any]) -> None:
        replace_file(self._drafts / STATE, json.dumps(state).encode())

    def _delete_drafts(self) -> None:
        for path in self._drafts.glob("*.parquet"):
            path.unlink()


# -- the landing process ------------------------------------------------------------------------


def main() -> None:
    """Run the landing process.

    The requests on standard input are pickled: the plan and the directory, then a list of paths for
    each batch. The responses on standard output are pickled `Landed` objects or exceptions.
    """
    # The archiver ends the process by closing its input, after the last batch.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    plan, directory = pickle.load(requests)
    lander: Lander | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            paths = pickle.load(requests)
            try:
                lander = lander or Lander(plan, directory)
                response: Landed | Exception = lander.land(paths)
            except (OSError, NsqError) as exc:
                response = exc
            pickle.dump(response, responses)
            responses.flush()


class Landings(Uploads):
    """Lands files instead of uploading them.

    ``on_landed`` is called with the path or URL of each new file of the table.
    """

    THREADS = 1
    REPLACES_FILES = True

    def __init__(
        self,
        plan: TablePlan,
        directory: Path,
        max_local_bytes: int | None,
        on_landed: Callable[[str], None] = lambda place: None,
    ) -> None:
        place = parse_place(plan.base, plan.options)
        super().__init__(UploadPlan(directory, place, plan.host, deletes=True), max_local_bytes)
        self._table = plan
        # Started for the first batch.
        self._process: subprocess.Popen[bytes] | None = None
        self._on_landed = on_landed
        self._landed: dict[str, tuple[int, int]] = {}

    def metrics(self) -> Sequence[Metric]:
        misfits, fields = self.totals.misfits, len(self.totals.without_column)
        landed = dict(self._landed)
        times = [({"topic": topic}, time_ns / NS) for topic, (_, time_ns) in landed.items()]
        return [
            *super().metrics(),
            metric_of(
                "nsq_table_rows_total",
                "Rows that this process has landed.",
                [({"topic": topic}, rows) for topic, (rows, _) in landed.items()],
            ),
            metric_of(
                "nsq_table_newest_timestamp_seconds",
                "Time of the newest message that this process has landed, by nsqd's clock.",
                times,
            ),
            metric_of(
                "nsq_to_file_body_misfits_total",
                "Bodies that did not fit their columns.",
                [({}, misfits)],
            ),
            metric_of(
                "nsq_to_file_fields_without_column",
                "Fields that could not get a column.",
                [({}, fields)],
            ),
        ]

    def _shortage(self) -> str:
        with self._changed:
            largest = max(self._sizes.values(), default=0)
        free = shutil.disk_usage(self._plan.directory).free if largest else 0
        if largest and free < max(ROOM_PER_BYTE * largest, MIN_ROOM):
            return f"{free} bytes are free on the disk"
        return super()._shortage()

    def _count_landed(self, file: TableFile) -> None:
        topic = str(file.partition["topic"])
        rows, newest_ns = self._landed.get(topic, (0, 0))
        newest_ns = max(newest_ns, file.max_ts_ns or 0)
        self._landed[topic] = rows + (file.rows or 0), newest_ns

    def _count_unfit(self, unfit: Unfit) -> None:
        self.totals.misfits += unfit.bodies
        if new := {*unfit.fields} - self.totals.without_column:
            names = ", ".join(map(repr, sorted(new)[:MAX_FIELDS_LOGGED]))
            log.warning("%d fields get no column in %s: %s", len(new), self._table.url, names)
            self.totals.without_column |= new

    def close(self, **arguments: Any) -> int:
        """Close as `Uploads` does, and end the process after its present batch."""
        remaining = super().close(**arguments)
        if (process := self._process) and process.stdin and process.stdout:
            process.stdin.close()
            try:
                process.wait(CLOSE_SIGNALED_S)
                process.stdout.close()
            except subprocess.TimeoutExpired:
                # The store may not respond.
                log.warning("process %d continues to land its last batch", process.pid)
        return remaining

    def _land(self, paths: Sequence[Path]) -> Landed:
        """Land logs in the landing process.

        Raises its exception, and ``OSError`` if the process was killed.
        """
        if self._process is None:
            code = "from nsqtools.archive.landing import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            _send(self._process, (self._table, self._plan.directory))
        process = self._process
        assert process.stdout is not None
        try:
            _send(process, paths)
            response: Landed | Exception = pickle.load(process.stdout)
        except Exception:
            # Bytes that are not a pickle may raise any exception. The process may still run, and
            # wait for its next request.
            self._process = None
            process.kill()
            process.communicate()
            reason = f"the landing process ended with {process.returncode}"
            raise OSError(errno.ECHILD, reason, self._table.url) from None
        if isinstance(response, Exception):
            raise response
        return response

    def _run(self) -> None:
        # Any exception is caught in this method, because even a defect must not end the thread.
        try:
            state = _read_state(self._plan.directory)
            # The logs of the intent may have been removed, so `put` does not find them.
            if state and state["intent"] is not None:
                for file in self._land([]).files:
                    self._count_landed(file)
        except Exception as exc:
            log.warning("cannot finish the landing of an earlier run (%s)", exc)
        while first := self._next():
            batch = self._batch(first)
            try:
                landed = self._land(batch)
            except Exception as exc:
                with self._changed:
                    self._waiting.extendleft(reversed(batch[1:]))
                self._retry_later(first, exc)
                continue
            self._count_unfit(landed.unfit)
            for file in landed.files:
                self._count_landed(file)
                log.info("landed %s", file.path)
                self._on_landed(file.path)
            for path in batch:
                if reason := landed.refused.get(path):
                    log.error("%s does not land: %s; it stays where it is", path, reason)
                    self._complete(path, conflicts=1)
                else:
                    self._complete(path, uploaded=self._sizes[path])

    def _batch(self, first: Path) -> list[Path]:
        """Return a file and more waiting files, for one commit."""
        batch, size = [first], self._sizes[first]
        with self._changed:
            # During a failure a batch is one file, which finds the file that causes it.
            max_logs = MAX_BATCH_LOGS if self._failing_since is None else 1
            while self._waiting and len(batch) < max_logs:
                size += self._sizes[self._waiting[0]]
                if size > MAX_BATCH_BYTES:
                    break
                batch.append(self._waiting.popleft())
        return batch


def _send(process: subprocess.Popen[bytes], request: object) -> None:
    assert process.stdin is not None
    pickle.dump(request, process.stdin)
    process.stdin.flush()


def _read_state(directory: Path) -> dict[str, Any] | None:
    """Return the state of landing, None before the first batch. Raises `OutputError`."""
    path = directory / DRAFTS / STATE
    try:
        with open_own(path) as file:
            return dict(load_json(file.read()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {path} ({exc}): restore it") from exc
