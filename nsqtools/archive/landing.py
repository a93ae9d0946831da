"""Land finished logs in a table: what ``nsq to-file --store parquet|delta`` adds.

The file that ``to-file`` writes is the log: durable before a message is FINished, and complete in
itself. When it is finished it *lands*: it becomes one Parquet file for each partition that it has
messages of, and goes.

`table` decides what a log becomes, and where. The order is: write the files beside the log,
read them back and compare; write down what is to be done (the *intent*); put the files in their
place; commit; note beside each log that it has landed; remove it. The commit is

- for a folder of Parquet the manifest of each file: a file that has one is not put again,
- for a Delta table one commit for all logs that finished together, under a number that Delta keeps:
  after a kill the same commit is tried under the same number, once (`delta`). Each process counts
  under a name of its own, from what the table has: a copy of the directory, as machines of one
  image and snapshots have it, must not take the commits of the other for its own.

So a kill at any point loses nothing and doubles nothing. A log that is damaged does not land.

*In another process* (`Lander` is what it runs): decoding and compressing take a core, which
consuming needs. It reads paths from its standard input, answers each batch, and ends with its
input, so it never outlives the archiver by more than the batch under way. One process at a time
lands what is in a directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from nsqtools.archive.body_columns import fields_of, json_schema
from nsqtools.archive.delta import TableFile
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.table import Draft, Table, TablePlan, TableWriter, Unfit, stem_of
from nsqtools.archive.upload import (
    HURRIED_S,
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
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

DRAFTS = ".nsq-landing"
"""The directory beside the logs where files are made, and what is to be done is written down."""
STATE = "state.json"
LOGS_AT_ONCE = 64
BYTES_AT_ONCE = 2 << 30
FIELDS_SHOWN = 5


class Landed(NamedTuple):
    """The new files of the table, why some logs cannot land, and what did not fit."""

    files: list[TableFile]
    refused: dict[Path, str]
    unfit: Unfit


class Lander:
    """Lands logs of ``directory``: what the other process runs."""

    def __init__(self, plan: TablePlan, directory: Path) -> None:
        self.table = Table(plan)
        self._directory = directory
        self._drafts = directory / DRAFTS
        self._app = f"nsqtools-{uuid4().hex}"

    def land(self, paths: Sequence[Path]) -> Landed:
        """Land logs.

        Raises ``OSError`` and `NsqError` when it does not work now: try again later.
        """
        self._drafts.mkdir(0o750, exist_ok=True)
        refuse_planted(self._drafts, self._drafts.lstat())
        lock = open_to_write(self._drafts / "lock", os.O_RDWR | os.O_CREAT)
        with closing_fd(lock), locked(lock):  # the child of a killed archiver ends its batch
            return self._land(paths)

    def _land(self, paths: Sequence[Path]) -> Landed:
        self.table.plan.check()  # the place may have become that of another job
        state = self._state()
        landed = self._finish(state)
        self._clear()
        waiting = [path for path in paths if path.exists() and not uploaded_of(path).exists()]
        # 0.3.0 wrote the fields of Parquet down in the state alone, and wrong ones of Delta
        noted = None if self.table.catalog else state["fields"]
        known = fields_of(noted or self.table.plan.fields)
        while True:
            columns = self.table.columns()
            writer = TableWriter(self.table.plan, self._drafts, known, columns)
            drafts, logs, refused = self._write(writer, waiting)
            if not drafts or self.table.evolve_schema(writer.schema):
                break
            self._clear()  # another writer gave a column another type meanwhile
        if writer.columns is not None:
            state["fields"] = json_schema(writer.columns.fields)
        if logs:
            sync_folder(self._drafts)
            state |= {"app": self._app, "number": self.table.number_of(self._app) + 1}
            state["intent"] = {"drafts": list(map(asdict, drafts)), "logs": logs}
            self._save(state)
            landed += self._finish(state)
        self._clear()
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
                made = writer.write(archive, stem_of(archive, self.table.plan.host))
                if any(each.file.partition["topic"] is None for each in made):
                    what = "it has bare bodies, which name no topic"  # of a run with --format raw
                    raise NotUploadable(errno.EINVAL, what, str(path))
                drafts += made
                logs.append(str(path))
            except NotUploadable as exc:
                refused[path] = str(exc.strerror)
        return drafts, logs, refused

    def _finish(self, state: dict[str, Any]) -> list[TableFile]:
        """Do what is written down; each step can be repeated."""
        if state["intent"] is None:
            return []
        noted = state["intent"]["drafts"]
        drafts = [Draft(each["path"], TableFile(**each["file"])) for each in noted]
        self.table.commit(drafts, state["app"], state["number"])
        for path in map(Path, state["intent"]["logs"]):
            record = UploadRecord(self.table.storage.url, f"{state['app']} {state['number']}")
            replace_file(uploaded_of(path), record.encode())
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
        state["intent"] = None
        self._save(state)
        return [each.file for each in drafts]

    def _state(self) -> dict[str, Any]:
        """Return what is written down. Another table, or another form, has a state of its own."""
        new = {"url": self.table.storage.url, "intent": None, "fields": None}
        state = _written_down(self._directory) or new
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

    def _clear(self) -> None:
        for each in self._drafts.glob("*.parquet"):
            each.unlink()


# -- in another process -------------------------------------------------------------------------


def main() -> None:
    """Land what the archiver names, all of it pickled: plan and directory, then lists of paths."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the archiver says when it is over
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    plan, directory = pickle.load(asked)
    lander: Lander | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            paths = pickle.load(asked)
            try:
                lander = lander or Lander(plan, directory)
                answer: Landed | Exception = lander.land(paths)
            except (OSError, NsqError) as exc:
                answer = exc
            pickle.dump(answer, answers)
            answers.flush()


class Landings(Uploads):
    """Lands files as `Uploads` uploads them; ``on_landed`` gets the place of each new file."""

    THREADS = 1

    def __init__(
        self,
        plan: TablePlan,
        directory: Path,
        max_local_bytes: int | None,
        on_landed: Callable[[str], None] = lambda place: None,
    ) -> None:
        storage = parse_place(plan.url, plan.options)
        super().__init__(UploadPlan(directory, storage, plan.host, deletes=True), max_local_bytes)
        self._table = plan
        self._process: subprocess.Popen[bytes] | None = None  # begun when it is first asked
        self._on_landed = on_landed

    def metrics(self) -> Sequence[Metric]:
        totals = self.totals
        return [
            *super().metrics(),
            *(
                metric_of(f"nsq_to_file_{name}", help, [({}, value)])
                for name, help, value in (
                    (
                        "body_misfits_total",
                        "Bodies that did not fit their columns.",
                        totals.misfits,
                    ),
                    (
                        "fields_without_column",
                        "Fields that could not get a column.",
                        len(totals.without_column),
                    ),
                )
            ),
        ]

    def _count_unfit(self, unfit: Unfit) -> None:
        self.totals.misfits += unfit.bodies
        if new := {*unfit.fields} - self.totals.without_column:
            names = ", ".join(map(repr, sorted(new)[:FIELDS_SHOWN]))
            log.warning("%d fields get no column in %s: %s", len(new), self._table.url, names)
            self.totals.without_column |= new

    def close(self, **arguments: Any) -> int:
        """As of `Uploads`; the process ends after the batch under way, and a store may hang."""
        left = super().close(**arguments)
        if (process := self._process) and process.stdin and process.stdout:
            process.stdin.close()
            try:
                process.wait(HURRIED_S)
                process.stdout.close()
            except subprocess.TimeoutExpired:
                log.warning("what is landing now goes on in process %d", process.pid)
        return left

    def _ask(self, paths: Sequence[Path]) -> Landed:
        """Have logs landed. Raises what it raised there, and ``OSError`` if it was killed."""
        if self._process is None:
            code = "from nsqtools.archive.landing import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            _tell(self._process, (self._table, self._plan.directory))
        process = self._process
        assert process.stdout is not None
        try:
            _tell(process, paths)
            answer: Landed | Exception = pickle.load(process.stdout)
        except Exception:  # bytes that are not a pickle may raise anything
            self._process = None
            process.kill()  # one that still runs said what is no answer, and waits for more
            process.communicate()
            what = f"the landing process ended with {process.returncode}"
            raise OSError(errno.ECHILD, what, self._table.url) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            state = _written_down(self._plan.directory)
            if state and state["intent"] is not None:  # its logs may be gone already
                self._ask([])
        except Exception as exc:  # as below
            log.warning("cannot finish what an earlier run began to land (%s)", exc)
        while first := self._next():
            batch = self._batch(first)
            try:
                landed = self._ask(batch)
            except Exception as exc:  # a defect, too: the thread goes on
                with self._changed:
                    self._waiting.extendleft(reversed(batch[1:]))
                self._failed(first, exc)
                continue
            self._count_unfit(landed.unfit)
            for place in [str(self._plan.storage / file.path) for file in landed.files]:
                log.info("landed %s", place)
                self._on_landed(place)
            for path in batch:
                if reason := landed.refused.get(path):
                    log.error("%s does not land: %s; it stays where it is", path, reason)
                    self._ended(path, conflicts=1)
                else:
                    self._ended(path, uploaded=self._sizes[path])

    def _batch(self, first: Path) -> list[Path]:
        """Take more files that wait beside one: one commit is for all."""
        taken = [first]
        with self._changed:
            # one that cannot be read is found out alone, and holds up no other
            most = LOGS_AT_ONCE if self._failing_since is None else 1
            while self._waiting and len(taken) < most:
                if sum(self._sizes[each] for each in (*taken, self._waiting[0])) > BYTES_AT_ONCE:
                    break
                taken.append(self._waiting.popleft())
        return taken


def _tell(process: subprocess.Popen[bytes], what: object) -> None:
    assert process.stdin is not None
    pickle.dump(what, process.stdin)
    process.stdin.flush()


def _written_down(directory: Path) -> dict[str, Any] | None:
    """Return what is to be done, and with which columns; None at first. Raises `OutputError`."""
    path = directory / DRAFTS / STATE
    try:
        with open_own(path) as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {path} ({exc}): restore it") from exc
