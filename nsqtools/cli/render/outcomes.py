"""Reports of a run: its progress, and at its end the damaged, published and excluded messages.

`Progress` is one line on the stderr of a terminal, and nothing elsewhere. Its text is a function,
so a fast loop pays for it only when it is shown, ten times a second. A log line wipes it first.

    with Progress(runtime) as progress:
        progress.show(lambda: f"{count:,} messages published")

Every command that reads archives reports each damage in one line on stderr, which is never cut:

    nsq: PATH: PROBLEM

Every command that publishes ends with one line of counts. `status_of_work` derives the exit status
from both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.parsing.help import terminal_width
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.runtime import LOGGER, ExitStatus, Runtime, status_of_work, write_stderr
from nsqtools.protocol.text import counted, escape_line

if TYPE_CHECKING:
    import logging

    from nsqtools.cli.render.documents import DamagedFile, Verified
    from nsqtools.cluster.directory import DaemonFailure
    from nsqtools.publish.publisher import Publisher
    from nsqtools.records.envelope import MessageLike
    from nsqtools.records.filters import Filter
    from nsqtools.spark.archives.damage import ArchiveDamage

INTERVAL_S = 0.1
FIELDS_SHOWN = 5
# Problems of a file in the ``--json`` document; each line of a file may be damaged.
PROBLEMS_KEPT = 1000
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """The progress line of one run. The context manager wipes it at the end."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.enabled = runtime.shows_progress
        self._next_s = 0.0
        self._shown = False

    def show(self, text: Callable[[], str]) -> None:
        """Show ``text()``, unless the last update is less than 0.1 s ago."""
        if not self.enabled or (now_s := self._runtime.monotonic()) < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        # A text that wraps would scroll the screen each time, because one line of it is erased.
        line = escape_line(text())[: terminal_width(self._runtime.stderr) - 1]
        write_stderr(self._runtime.stderr, CLEAR_LINE + line)
        self._shown = True

    def clear(self) -> None:
        """Wipe the line, before other output to the terminal."""
        if self._shown:
            write_stderr(self._runtime.stderr, CLEAR_LINE)
            self._shown = False

    def tell(self, line: str) -> None:
        """Write a line to stderr in the middle of the run."""
        self.clear()
        self._runtime.info(f"nsq: {line}")

    def __enter__(self) -> Progress:
        self._handlers = LOGGER.handlers if self.enabled else []
        for handler in self._handlers:
            handler.addFilter(self._make_room)
        return self

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._make_room)
        self.clear()

    def _make_room(self, _record: logging.LogRecord) -> bool:
        """A log filter that lets every record pass."""
        self.clear()
        return True


def report_unfit(
    runtime: Runtime, bodies: int, fields: Collection[str], *, fails: bool
) -> ExitStatus:
    """Report bodies and fields without a column in a table; return the exit status.

    With ``fails`` they change the status, though their text is in the table.
    """
    if bodies:
        words = "1 body" if bodies == 1 else f"{bodies} bodies"
        runtime.info(f"nsq: {words} did not fit the columns: _error lists the fields")
    if fields:
        names = ", ".join(map(repr, sorted(fields)[:FIELDS_SHOWN]))
        runtime.info(f"nsq: {counted(len(fields), 'field')} got no column: {names}")
    return ExitStatus.PARTLY_DONE if fails and (bodies or fields) else ExitStatus.DONE


class DamageReporter:
    """Reports and counts each damage. Readers of archives call it.

    ``say`` gets the lines in place of stderr.
    """

    def __init__(
        self,
        runtime: Runtime,
        progress: Progress | None = None,
        *,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.count = 0
        self.files: dict[str, list[str]] = {}
        self._runtime = runtime
        self._more: Counter[str] = Counter()
        self._say = say or (lambda line: runtime.info(f"nsq: {line}"))
        self._progress = progress

    def __call__(self, path: Path | str, problem: str) -> None:
        self.count += 1
        problems = self.files.setdefault(str(path), [])
        if len(problems) < PROBLEMS_KEPT:
            problems.append(problem)
        else:
            self._more[str(path)] += 1
        if self._progress is not None:
            self._progress.clear()
        self._say(f"{path}: {problem}")

    def report(self, files: int, messages: int, *, json: bool) -> None:
        """Report the numbers of files and messages, and the damaged files."""
        if json:
            document: Verified = {"files": files, "messages": messages, "damaged": self.documents}
            write_json(self._runtime, document)
        totals = f"{counted(files, 'file')}, {counted(messages, 'message')}"
        self._runtime.info(f"nsq: {totals}, {len(self.files)} damaged")

    @property
    def documents(self) -> list[DamagedFile]:
        """The damaged files as JSON."""
        omitted = {path: [f"and {count} more"] for path, count in self._more.items()}
        return [
            {"file": path, "problems": problems + omitted.get(path, [])}
            for path, problems in self.files.items()
        ]

    @property
    def status(self) -> ExitStatus:
        """The exit status after damage alone, when all readable messages were read."""
        return status_of_work(is_whole=not self.count, is_anything_done=True)


class UnjudgedReporter:
    """Reports the first message to which --where or --pick cannot be applied, and counts all.

    ``keep`` is the filter, which excludes such messages. ``requeue`` is called with each of them
    where it would otherwise be lost.
    """

    def __init__(
        self,
        runtime: Runtime,
        keep: Filter | None,
        requeue: Callable[[Any], object] | None = None,
    ) -> None:
        self.count = 0
        self.keep = keep
        if keep is not None:
            from nsqtools.records.filters import reporting

            self.keep = reporting(keep, self)
        self._runtime = runtime
        self._requeue = requeue

    def __call__(self, message: MessageLike, error: ValueError) -> None:
        self.count += 1
        if self._requeue is not None:
            self._requeue(message)
        if self.count == 1:
            name = f"message {message.id.decode('latin-1')}".rstrip()
            self._runtime.info(f"nsq: {name} is not printed, its body cannot be judged: {error}")

    def sum_up(self) -> ExitStatus:
        """Report their number; return the exit status after them alone."""
        if self.count:
            suffix = "" if self._requeue is None else " and requeued"
            messages = counted(self.count, "message")
            self._runtime.info(f"nsq: {messages} not printed{suffix}: --where or --pick failed")
        return status_of_work(is_whole=not self.count, is_anything_done=True)


def report_damages(runtime: Runtime, damages: Iterable[ArchiveDamage]) -> DamageReporter:
    """Report the unreadable places of a Spark job, with their position in the file."""
    reporter = DamageReporter(runtime)
    for damage in damages:
        reporter(damage.file, f"at byte {damage.pos}: {damage.problem}")
    return reporter


def report_timeless(runtime: Runtime, count: int) -> None:
    """Report the messages that a range of times excludes because they have no time."""
    if count:
        runtime.info(f"nsq: {counted(count, 'message')} without a time left out of the range")


def suggest_limit(runtime: Runtime, largest_rejected: int) -> None:
    """Suggest the option for the largest body above the limit of the client, if there was one."""
    if largest_rejected:
        option = f"-X publish_max_msg_size={largest_rejected}"
        runtime.info(f"hint: If nsqd accepts larger messages: {option}")


def report_counts(
    runtime: Runtime,
    publisher: Publisher,
    *,
    json: bool,
    repeated: int = 0,
    damage: DamageReporter | None = None,
) -> ExitStatus:
    """Report the counts, by nsqd if some are unconfirmed; return the exit status."""
    counts, by_nsqd = publisher.counts, publisher.counts_by_nsqd
    if json:
        destinations = [{"nsqd": nsqd} | asdict(part) for nsqd, part in by_nsqd.items()]
        write_json(runtime, asdict(counts) | {"repeated": repeated, "destinations": destinations})
    if counts.unconfirmed:
        for nsqd, part in by_nsqd.items():
            runtime.info(f"nsq: {nsqd}: {part.summary()}")
    everywhere = ", on every nsqd" if by_nsqd else ""
    return report_publishing(
        runtime,
        counts.summary(repeated) + everywhere,
        confirmed=counts.confirmed + sum(part.confirmed for part in by_nsqd.values()),
        is_complete=not counts.unconfirmed,
        error=publisher.last_error,
        damage=damage,
    )


def report_publishing(
    runtime: Runtime,
    summary: str,
    *,
    confirmed: int,
    is_complete: bool,
    error: Exception | None = None,
    damage: DamageReporter | None = None,
) -> ExitStatus:
    """Report the result of publishing, and its error if any; return the exit status."""
    if error is not None and not is_complete:
        runtime.report(error)
    runtime.info(f"nsq: {summary}")
    if not is_complete:
        return status_of_work(error, is_whole=False, is_anything_done=confirmed > 0)
    return damage.status if damage is not None else ExitStatus.DONE


def report_unreachable(failures: Iterable[DaemonFailure], runtime: Runtime) -> ExitStatus:
    """Name the daemons that did not answer; return the exit status."""
    status = ExitStatus.DONE
    for failure in failures:
        runtime.report_failure(failure.error, f"left out: {failure.error}")
        status = ExitStatus.PARTLY_DONE
    return status
