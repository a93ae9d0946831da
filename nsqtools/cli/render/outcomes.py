"""What a run reports at its end: damaged archives, and what became of published messages.

Every command that reads archives reports damage in one form, a line each on stderr, never cut
short:

    nsq: PATH: PROBLEM

and every command that publishes ends with one line of counts. The exit status follows from both by
`status_of_work`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.ends import ExitStatus, status_of_work
from nsqtools.cli.running.runtime import Runtime

if TYPE_CHECKING:
    from nsqtools.cli.render.progress import Progress
    from nsqtools.publish.publish_job import PublishJob
    from nsqtools.replay.replay import Replay
    from nsqtools.spark.archives.damage import ArchiveDamage


class DamageReporter:
    """Reports each damage as it is found, and counts: what readers of archives call."""

    def __init__(self, runtime: Runtime, progress: Progress | None = None) -> None:
        self.count = 0
        self._runtime = runtime
        self._progress = progress

    def __call__(self, path: Path | str, problem: str) -> None:
        self.count += 1
        if self._progress is not None:
            self._progress.clear()
        self._runtime.tell(f"nsq: {path}: {problem}")

    def report_all(self, damages: Iterable[ArchiveDamage]) -> None:
        """Report what a job of Spark found, which knows where in a file it was."""
        for damage in damages:
            self(damage.file, f"at byte {damage.pos}: {damage.problem}")

    @property
    def status(self) -> ExitStatus:
        """What damage alone means: what could be read was read, and the rest was not."""
        return status_of_work(is_whole=not self.count, is_anything_done=True)


def report_damages(runtime: Runtime, damages: Iterable[ArchiveDamage]) -> ExitStatus:
    """Report what a job of Spark could not read; return the exit status."""
    reporter = DamageReporter(runtime)
    reporter.report_all(damages)
    return reporter.status


def report_counts(
    runtime: Runtime,
    job: PublishJob | Replay,
    *,
    json: bool,
    repeated: int = 0,
    damage: DamageReporter | None = None,
) -> ExitStatus:
    """Report the counts of a job, by nsqd where they differ; return the exit status."""
    counts = job.counts
    if json:
        document: dict[str, Any] = asdict(counts) | {"repeated": repeated}
        document["destinations"] = [
            {"nsqd": nsqd} | asdict(own) for nsqd, own in job.counts_by_nsqd.items()
        ]
        write_json(runtime, document, indent=2)
    if counts.unconfirmed:
        for nsqd, own in job.counts_by_nsqd.items():
            runtime.tell(f"nsq: {nsqd}: {own.summary()}")
    everywhere = ", on every nsqd" if job.counts_by_nsqd else ""
    return report_publishing(
        runtime,
        counts.summary(repeated) + everywhere,
        confirmed=counts.confirmed + sum(own.confirmed for own in job.counts_by_nsqd.values()),
        is_complete=not counts.unconfirmed,
        error=job.last_error,
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
    """Report how publishing ended, and why not all of it is confirmed; return the exit status."""
    if error is not None and not is_complete:
        runtime.report(error)
    runtime.tell(f"nsq: {summary}")
    if not is_complete:
        return status_of_work(error, is_whole=False, is_anything_done=confirmed > 0)
    return damage.status if damage is not None else ExitStatus.DONE
