"""The options of ``nsq spark`` commands, and a session for one command.

    def report(..., *, spark: SparkChoice, runtime: Session) -> int:
        with open_spark(runtime, spark.settings()) as session, job_progress(runtime, session):
            ...

A command with its own text for the progress line does not use `job_progress`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import SELECTION
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import INTERVAL_S, Progress, report_damages
from nsqtools.cli.running.runtime import (
    CommandSignals,
    ExitStatus,
    Runtime,
    background_thread,
    exit_on_signals,
    stop_on_signals,
)
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.archive.place import Place
    from nsqtools.spark.session import SparkSession
    from nsqtools.spark.spark_settings import SparkSettings

ARCHIVES = "Archives"


def location(text: str) -> Path:
    """Parse a path or a ``file:`` URL. Raises ``ValueError`` for any other place."""
    parsed = place(text)
    if not parsed.is_remote:
        return parsed.path
    raise ValueError(f"{text}: only a directory is supported here, local or mounted")


def place(text: str) -> Place:
    """Parse a path, or a place in an object store. Raises ``ValueError`` for any other text."""
    from nsqtools.archive.place_url import parse_place

    try:
        return parse_place(text)
    except ConfigurationError as exc:
        raise ValueError(f"{exc}. {exc.hint}".rstrip(". ")) from None


def places(texts: Iterable[str]) -> list[Place]:
    """Parse several places. Raises ``ValueError``."""
    return [place(text) for text in texts]


OnlyTopics = Annotated[list[str] | None, opt("--topic -t TOPIC", "Only these topics.", SELECTION)]
SkipDamaged = Annotated[
    bool,
    opt("--skip-damaged", "Read what is readable of damaged archives; report the rest.", ARCHIVES),
]


def places_argument(help: str) -> Any:
    """The argument that takes several places; its type is a list of `Place`."""
    return Argument(parser=places, metavar="PATH", help=help)


def place_opt(form: str, help: str, panel: str | None = None) -> Any:
    """The option that takes one place; its type is a `Place`, or None."""
    return opt(form, help, panel, parser=place)


class ArchiveReading(OptionSet):
    """The handling of damaged archives in a query."""

    panel = ARCHIVES
    skip_damaged: SkipDamaged = False
    damage_dir: Any = place_opt(
        "DIR",
        "Where executors of a cluster report damage: a shared directory, or s3://BUCKET/PREFIX.",
    )

    def check(self) -> None:
        if self.damage_dir is not None and not self.skip_damaged:
            raise ConfigurationError("--damage-dir is for --skip-damaged")

    @contextmanager
    def session(self, runtime: Runtime, settings: SparkSettings) -> Iterator[ArchiveSession]:
        """Open a session for reading archives, and report the skipped damage at its end.

        Raises `ConfigurationError` if the reports would stay on the machines of executors.
        """
        from nsqtools.files.scratch import scratch_directory
        from nsqtools.spark.archives.damage import read_damage

        with scratch_directory("nsq-damage-") as scratch:
            damage = self._place(scratch, is_local=settings.is_local)
            with naming_flags(), open_spark(runtime, settings) as spark:
                opened = ArchiveSession(spark, damage)
                yield opened
            damages = () if damage is None else read_damage(damage)
        opened.status = report_damages(runtime, damages).status

    def _place(self, scratch: Path, *, is_local: bool) -> Place | None:
        from nsqtools.archive.place import LocalPlace

        if not self.skip_damaged:
            return None
        if self.damage_dir is not None:
            place: Place = self.damage_dir.absolute()
            return place / f"damage-{uuid.uuid4().hex[:12]}"
        if is_local:
            return LocalPlace(scratch)
        raise ConfigurationError(
            "--skip-damaged on a cluster needs --damage-dir, which lists what is missing",
            hint="Give a directory that all share, or a place in an object store.",
        )


@dataclass
class ArchiveSession:
    """A session, the place where its tasks report damage, and at its end the exit status."""

    spark: SparkSession
    damage: Place | None
    status: ExitStatus = ExitStatus.DONE


def name_flags(error: NsqError, instead: str) -> None:
    """Replace options of the format by flags of the command in the hint of an error."""
    if "onDamage" in error.hint:
        error.hint = f"Repair it with nsq archive repair, or {instead}."
    error.hint = error.hint.replace("failOnDataLoss=false", "--no-fail-on-data-loss")


@contextmanager
def naming_flags(instead: str = "leave it out with --skip-damaged") -> Iterator[None]:
    """Replace options by flags (`name_flags`) in errors that are raised inside."""
    try:
        yield
    except NsqError as error:
        name_flags(error, instead)
        raise


class SparkChoice(OptionSet):
    """Where and how Spark runs."""

    panel = "Spark"
    master: str = opt(
        "URL",
        "Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.",
        default="local[*,4]",
        envvar="NSQ_SPARK_MASTER",
    )
    driver_memory: str = opt(
        "MEMORY", "Heap of Spark's driver; in local mode all of Spark is in it.", default="2g"
    )
    conf: list[str] | None = opt("KEY=VALUE", "Any setting of Spark: spark.executor.memory=4g.")
    spark_log: Path | None = opt(
        "FILE", "Spark's log; default: below ~/.local/state/nsqtools.", parser=location
    )

    def check(self) -> None:
        parse_conf(self.conf or ())

    def settings(
        self,
        app_name: str = "nsqtools",
        places: Iterable[Place] = (),
        *,
        python_places: Iterable[Place] = (),
    ) -> SparkSettings:
        """Return the settings of a session that uses these places. Raises `ConfigurationError`."""
        from nsqtools.spark.spark_settings import SparkSettings

        conf = parse_conf(self.conf or ())
        return SparkSettings(
            conf.get("spark.master", self.master),
            conf.get("spark.app.name", app_name),
            conf.get("spark.driver.memory", self.driver_memory),
            conf,
            self.spark_log,
            places=tuple(places),
            python_places=tuple(python_places),
        )


def parse_conf(texts: Iterable[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` texts. Raises `ConfigurationError`."""
    conf = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.startswith("spark."):
            raise ConfigurationError(
                f"--conf {text!r} is not a setting of Spark",
                hint="Write spark.KEY=VALUE, for example spark.executor.memory=4g.",
            )
        conf[key] = value
    return conf


@contextmanager
def open_spark(runtime: Runtime, settings: SparkSettings) -> Iterator[SparkSession]:
    """Open the session of a command, with a progress line while Spark starts.

    INT and TERM end the program: immediately while Spark starts, and later by cancelling its jobs,
    unless the command handles signals itself.
    """
    from nsqtools.spark.session import cancel_jobs, spark_session

    with exit_on_signals(), Progress(runtime) as progress:
        progress.show(lambda: f"starting Spark ({settings.master})")
        with spark_session(settings) as session:
            progress.clear()
            has_ended = Event()
            signals: CommandSignals | None = None
            try:
                with stop_on_signals(
                    partial(cancel_jobs, session.sparkContext, has_ended)
                ) as signals:
                    yield session
            finally:
                has_ended.set()
                if signals is not None and signals.received is not None:
                    raise SystemExit(signals.status())


@contextmanager
def job_progress(runtime: Runtime, session: SparkSession) -> Iterator[None]:
    """Show the progress of Spark's jobs on a terminal, in a line that is removed at the end."""

    def watch(done: Event) -> None:
        tracker = session.sparkContext.statusTracker()
        while not done.wait(INTERVAL_S):
            if (text := stage_progress(tracker)) and not done.is_set():
                progress.show(partial(str, text))

    with (
        Progress(runtime) as progress,
        background_thread("spark-progress", watch, 1.0) if progress.enabled else nullcontext(),
    ):
        yield


def stage_progress(tracker: Any) -> str:
    """Return the progress of the active stages of pyspark's ``StatusTracker``."""
    try:
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
    except Exception:  # The session is ending.
        return ""
    running = [stage for stage in stages if stage is not None]
    if not running:
        return ""
    tasks = sum(stage.numTasks for stage in running)
    finished = sum(stage.numCompletedTasks for stage in running)
    failed = sum(stage.numFailedTasks for stage in running)
    text = f"Spark: {finished} of {tasks} tasks of stage {running[0].stageId}"
    return f"{text}, {failed} failed and tried again" if failed else text
