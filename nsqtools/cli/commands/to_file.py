"""``nsq to-file``: topics into files, which can be trusted through any crash."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import BODIES_END, LIMITS, ChannelName
from nsqtools.cli.options.tables import WHOSE, BodyOptions
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import report_unfit
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.cli.running.consuming import Consuming, RunStatus
from nsqtools.cli.running.runtime import ExitStatus, Session, signal_handlers
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted
from nsqtools.records.envelope import BodyKind
from nsqtools.records.naming import (
    DEFAULT_DATETIME_FORMAT,
    DEFAULT_FORMAT,
    DEFAULT_PARTITION_FORMAT,
    EXTENSIONS,
    Codec,
    Compression,
    FileFormat,
)
from nsqtools.records.units import unescape

if TYPE_CHECKING:
    from nsqtools.archive.archive_run import ArchiveResult, ArchiveRun
    from nsqtools.archive.members import CompressorFactory
    from nsqtools.archive.topic_writer import ArchiveSettings, ArchiveTotals
    from nsqtools.archive.upload import Uploads

# Rotation of logs that are landed in a table. Measured with click events, this much text, or this
# much of columns, becomes about 128 MiB of Parquet.
TABLE_TEXT = 1280 << 20
TABLE_COLUMNS = 928 << 20
TABLE_INTERVAL_S = 900.0
# Directory of the logs below a table on the local disk.
LOGS = ".nsq-log"
UPLOAD = "Upload"
FILES = "Files"
FORM = "Format"
ROTATION = "Rotation"
FLUSHING = "Flushing"


class StoreKind(Enum):
    """The form in which finished files are stored."""

    file = "file"
    parquet = "parquet"
    delta = "delta"


def parse_mode(text: str) -> int:
    """Parse the permissions of a file, in octal. Raises ``ValueError``."""
    if re.fullmatch("(0o?)?[0-7]{1,3}", text) is None:
        raise ValueError(f"{text!r} is not a file mode; write 640")
    return int(text, 8)


def parse_folder_mode(text: str) -> int:
    """Parse the permissions of a directory, in octal, such as 2775 for a group.

    Raises ``ValueError``.
    """
    special = {"0": 0, "1": 0o1000, "2": 0o2000, "3": 0o3000}
    is_long = len(text) == 4 and text[0] in special
    return special[text[0]] | parse_mode(text[1:]) if is_long else parse_mode(text)


class ArchiveOptions(OptionSet):
    """Names, format, rotation and destination of files."""

    panel = FILES
    output_dir: Annotated[Path, opt("--output-dir DIR", "Where finished files go.", FILES)]
    store: StoreKind = opt(
        "",
        "Store finished files unchanged, or convert them to a table: parquet or delta.",
        default=StoreKind.file,
    )
    work_dir: Path | None = opt("DIR", "Directory of files in progress, on any file system.")
    filename_format: str = opt(
        "NAME",
        "File name: <TOPIC> <HOST> <PID> <DATETIME> <PARTITION> <REV>; / for folders.",
        default=DEFAULT_FORMAT,
    )
    datetime_format: str = opt(
        "STRFTIME", "<DATETIME>: the time of arrival.", default=DEFAULT_DATETIME_FORMAT
    )
    partition_format: str = opt(
        "STRFTIME", "<PARTITION>: a time, see --partition-by.", default=DEFAULT_PARTITION_FORMAT
    )
    utc: bool = opt("", "Times in names are UTC, not local.")
    host_identifier: str = opt("NAME", "<HOST>, if not the short host name.", default="")
    file_mode: int | None = opt(
        "MODE",
        "Permissions of files, whatever the umask; not of tables and uploads.",
        parser=parse_mode,
        show_default="640 less the umask",
    )
    dir_mode: int | None = opt(
        "MODE",
        "Permissions of directories, whatever the umask; not of tables and uploads.",
        parser=parse_folder_mode,
        show_default="750 less the umask",
    )
    format: FileFormat | None = opt(
        "",
        "JSON with id, time and body, or bodies alone as nsq_to_file; arrow for logs of a table.",
        FORM,
        show_default="jsonl, arrow with --store parquet and delta",
    )
    delimiter: bytes = opt("-d TEXT", BODIES_END, FORM, "\\n", parser=unescape)
    gzip: bool = opt("", "Short for --compression gzip.", FORM)
    compression: Compression | None = opt(
        "", "Compress files; zstd makes smaller ones.", FORM, show_default=False
    )
    gzip_level: int | None = opt(
        "N", "Level of gzip; by default fast with python-isal, else 6.", FORM, min=1, max=9
    )
    zstd_level: int | None = opt("N", "Level of zstd; 3 without it.", FORM, min=1, max=19)
    rotate_size: int | None = opt("SIZE", "Rotate at this size on disk.", ROTATION)
    rotate_text_size: int | None = opt("SIZE", "Rotate at this size before compression.", ROTATION)
    rotate_interval: float | None = opt("DURATION", "Rotate at multiples of DURATION.", ROTATION)
    rotate_age: float | None = opt("DURATION", "Rotate DURATION after a file was opened.", ROTATION)
    skip_empty_files: bool = opt(
        "--skip-empty-files/--no-skip-empty-files",
        "Skip files for intervals without messages (default).",
        ROTATION,
        True,
        show_default=False,
    )
    sync_interval: float = opt("DURATION", "Flush and finish every DURATION.", FLUSHING, "1s")
    sync_bytes: int = opt("SIZE", "Flush when this much text is held.", FLUSHING, "8MiB")
    sync_count: int = opt("N", "Flush when N messages are held.", FLUSHING, 10_000, min=1)
    upload: str | None = opt(
        "URL", "Upload finished files there: s3://, gs://, az://, abfss:// or a path.", UPLOAD
    )
    upload_hive: bool = opt(
        "", "Store files below topic=TOPIC/date=DATE/, by their first message.", UPLOAD
    )
    upload_option: list[str] | None = opt(
        "KEY=VALUE", "Setting of the object store: server_side_encryption=aws:kms.", UPLOAD
    )
    delete_uploaded: bool = opt("", "Remove each file once it is stored and verified.", UPLOAD)
    max_local_bytes: int | None = opt(
        "SIZE", "Pause consumption while this much waits for upload.", UPLOAD
    )
    bodies: BodyOptions

    def settings(self) -> ArchiveSettings:
        """Return the settings of the options. Raises `ConfigurationError`."""
        from datetime import UTC

        from nsqtools.archive import topic_writer as settings
        from nsqtools.archive.members import arrow_members
        from nsqtools.archive.part_file import Directories
        from nsqtools.archive.table_places import TOPIC, split_at_topic
        from nsqtools.records.naming import FileNaming, Rotation

        codec, compressor = self._compressor()
        form = self._file_format(codec)
        if form is FileFormat.arrow:
            codec, compressor = Codec.ARROW, arrow_members
        output = _absolute(self.output_dir)
        work = _absolute(self.work_dir) if self.work_dir else output
        by = set(self.bodies.partition_by or ())
        rotation = Rotation(  # 0 is without, as that of nsq_to_file
            self.rotate_size or None,
            self.rotate_text_size or None,
            self.rotate_interval or None,
            self.rotate_age or None,
        )
        if self.store is not StoreKind.file:
            if self.format is FileFormat.raw:
                raise ConfigurationError("a table takes no --format raw: raw files have no topics")
            if rotation == Rotation():
                size = TABLE_COLUMNS if form is FileFormat.arrow else TABLE_TEXT
                rotation = Rotation(uncompressed_size=size, interval_s=TABLE_INTERVAL_S)
            # --output-dir is the table, and its logs are in a directory below it or in --work-dir.
            if self.upload is None:
                base = Path(split_at_topic(str(output))[0])
                output = work = work if self.work_dir else base / LOGS
        elif TOPIC in f"{self.output_dir} {self.upload}":
            raise ConfigurationError(
                f"{TOPIC} is for tables",
                hint="Give --store parquet or delta, or --filename-format '<TOPIC>/...'.",
            )
        elif (
            by - set(WHOSE)
            or self.bodies.schema is not None
            or self.bodies.dead_letter_file is not None
            or self.bodies.body is not BodyKind.string
        ):
            raise ConfigurationError(
                "--body, --schema, --dead-letter-file and partitions of bodies are for tables",
                hint="Give --store parquet or --store delta.",
            )
        is_chosen = "message" in by or self.partition_format != DEFAULT_PARTITION_FORMAT
        if is_chosen and "<PARTITION>" not in self.filename_format:
            raise ConfigurationError(
                f"{self.filename_format!r} has no <PARTITION>, which --partition-format and "
                "--partition-by message are for",
                hint="Put <PARTITION> in --filename-format.",
            )
        naming = FileNaming(
            self.filename_format,
            self.datetime_format,
            self.partition_format,
            host=_host(self.host_identifier),
            pid=os.getpid(),
            extension=EXTENSIONS.get(codec, ""),
        )
        return settings.ArchiveSettings(
            Directories(output, work, self.file_mode, self.dir_mode),
            naming,
            rotation,
            settings.Flush(self.sync_interval, self.sync_bytes, self.sync_count),
            form,
            self.delimiter,
            compressor,
            "message" in by,
            UTC if self.utc else None,
            self.skip_empty_files,
        )

    def _file_format(self, codec: Codec) -> FileFormat:
        """Return the format of the options. Raises `ConfigurationError`."""
        is_table = self.store is not StoreKind.file
        if self.format is FileFormat.arrow and not is_table:
            raise ConfigurationError(
                "--format arrow is for the logs of a table",
                hint="Give --store parquet or --store delta.",
            )
        if self.format is FileFormat.arrow and codec.is_compressed:
            raise ConfigurationError(
                "--format arrow cannot be compressed",
                hint="The logs are removed once they are in the table; or give --format jsonl.",
            )
        # Compressed logs are for small disks, and logs in Arrow take more room than those.
        is_arrow = is_table and not codec.is_compressed
        return self.format or (FileFormat.arrow if is_arrow else FileFormat.jsonl)

    def _compressor(self) -> tuple[Codec, CompressorFactory]:
        """Return the compression of the options. Raises `ConfigurationError`."""
        from nsqtools.archive.members import members_of

        codecs = {Codec.GZIP} if self.gzip or self.gzip_level is not None else set()
        codecs |= {Codec.ZSTD} if self.zstd_level is not None else set()
        codecs |= {Codec(self.compression.value)} if self.compression is not None else set()
        if len(codecs) > 1:
            raise ConfigurationError(
                "the options request different compressions", hint="Give --compression alone."
            )
        codec = codecs.pop() if codecs else Codec.NONE
        return codec, members_of(codec, self.zstd_level if codec is Codec.ZSTD else self.gzip_level)

    def open(
        self,
        archive: ArchiveSettings,
        on_landed: Callable[[str], None],
        *,
        has_many_topics: Callable[[], bool],
        info: Callable[[str], None],
    ) -> Uploads | None:
        """Return the uploads of finished files, or their landings in a table; None without both.

        ``on_landed`` is called with the place of each file of a table. ``info`` reports where the
        tables of topics are. Raises `NsqError` for options that contradict each other, and for
        missing packages.
        """
        from nsqtools.archive.place import LocalPlace, refuse_nested
        from nsqtools.archive.place_url import parse_place
        from nsqtools.archive.table_places import split_at_topic

        settings = dict(map(_setting, self.upload_option or ()))
        base = None if self.upload is None else split_at_topic(self.upload)[0]
        place = None if base is None else parse_place(base, settings)
        # Files below the output directory would be uploaded again.
        if place is not None:
            refuse_nested("--upload", place, LocalPlace(archive.directories.output))
        is_landing = self.store is not StoreKind.file
        of_files = not is_landing and (self.upload_hive or self.max_local_bytes is not None)
        if place is None and (self.delete_uploaded or settings or of_files):
            raise ConfigurationError("there is no upload", hint="Give --upload URL.")
        if is_landing:
            from nsqtools.archive.landing import Landings

            if self.upload_hive:
                raise ConfigurationError("a table is by topic and date: omit --upload-hive")
            plan = self.bodies.plan(
                self.upload or str(_absolute(self.output_dir)),
                archive.naming.host,
                settings,
                is_delta=self.store is StoreKind.delta,
                has_many_topics=has_many_topics,
                info=info,
                of_names=WHOSE,
            )
            logs = archive.directories.output
            if place is not None:
                place.require()
            return Landings(plan, logs, self.max_local_bytes, on_landed)
        if place is None:
            return None
        from nsqtools.archive.upload import UploadPlan, Uploads

        if self.upload_hive and archive.format is FileFormat.raw:
            raise ConfigurationError(
                "--upload-hive needs --format jsonl: raw files have no topics",
                hint="Put the topic in --filename-format instead.",
            )
        place.require()
        files = UploadPlan(
            archive.directories.output,
            place,
            archive.naming.host,
            by_topic_and_date=self.upload_hive,
            deletes=self.delete_uploaded,
        )
        return Uploads(files, self.max_local_bytes)


def _absolute(path: Path) -> Path:
    """Return the absolute path, so that ``./w`` and ``w/`` are equal."""
    return Path(os.path.abspath(path))


def _host(identifier: str) -> str:
    import socket

    name = socket.gethostname()
    short = name.partition(".")[0]
    return (identifier or short).replace("<SHORT_HOST>", short).replace("<HOSTNAME>", name)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigurationError(
            f"invalid --upload-option {text!r}", hint="Write KEY=VALUE, by obstore's names."
        )
    return key.strip().lower(), value


def to_file(
    channel: ChannelName = "nsq_to_file",
    on_file: str | None = opt("COMMAND", "Run for each finished file; {path} is its path.", FILES),
    exit_when_deleted: bool = opt(
        "", "Exit with status 3 when every --topic was deleted, instead of waiting.", LIMITS
    ),
    *,
    consuming: Consuming,
    archiving: ArchiveOptions,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Archive topics to files, each message finished after it is on disk.

    Runs until it is stopped or a limit is reached. Files in progress are hidden (.NAME.part);
    finished ones appear whole. After a crash, the next run repairs and finishes what was left, and
    writes no message twice. When a disk is full the messages stay in the queue, and writing
    continues when there is room. Archiving resumes if a deleted topic is recreated.
    SIGHUP finishes the files in progress.

    systemd is notified when it is ready, alive and stopping (Type=notify, WatchdogSec=).

    Examples:
        nsq to-file -t clicks --output-dir /var/nsq --gzip
        nsq to-file -t clicks --output-dir /var/nsq --gzip --rotate-interval 1h --utc
        nsq to-file --topic-pattern '^orders' --lookupd-http-address lookup:4161 --output-dir d
        nsq to-file -t clicks --output-dir d --gzip --rotate-interval 1h --upload s3://bucket/nsq
        nsq to-file -t clicks --output-dir d --store delta --body json --upload s3://bucket/lake
        nsq to-file --topic-pattern . --output-dir 'lake/{topic}' --store delta --body json
    """
    from nsqtools.archive.archive_run import ArchiveRun, FileHook
    from nsqtools.archive.topic_writer import THROUGHPUT
    from nsqtools.files.opening import raise_open_file_limit

    settings = archiving.settings()
    topics = consuming.find_topics(connection, forgets_deleted=exit_when_deleted)
    raise_open_file_limit()
    hook = FileHook(on_file) if on_file is not None else None
    uploads = archiving.open(
        settings,
        hook.put if hook is not None else lambda place: None,
        has_many_topics=lambda: topics.pattern is not None or len(topics.given) > 1,
        info=runtime.info,
    )
    options = connection.client_options(**THROUGHPUT)
    watch = ChannelWatch(topics.given, channel, connection, runtime, force=True)
    notes: list[str] = []
    watch.check_topics(create=consuming.create, notify=notes.append)
    settings.directories.prepare()
    for note in notes:  # A new channel would not be created without the folders.
        runtime.info(note)
    limits = consuming.limits.run_limits()
    run = ArchiveRun(topics, channel, options, settings, limits=limits, uploads=uploads, hook=hook)
    archiver = run.archiver
    with (
        consuming.supervise(
            runtime,
            archiver.stop,
            metrics=run.metrics,
            health=lambda: run.health,
            channel=watch,
            count_done=run.taken_count,
        ) as watched,
        signal_handlers([signal.SIGHUP], lambda number, frame: archiver.rotate()),
    ):
        try:
            run.run(
                lambda: watched.tick(
                    lambda: f"{counted(archiver.totals.messages, 'message', ',')} archived"
                )
            )
        finally:
            result = finish_uploads(run, watched)
            if consuming.json:
                write_json(runtime, result_document(result))
            runtime.info(archive_summary(result.totals))
    status = ExitStatus.LIMIT_NOT_REACHED if archiver.falls_short else ExitStatus.DONE
    failed = report_failures(runtime, result, fail_on_misfit=archiving.bodies.fail_on_misfit)
    return watched.signals.status(otherwise=failed or status)


def finish_uploads(run: ArchiveRun, watched: RunStatus) -> ArchiveResult:
    """Finish the uploads of a run, and show how many are left."""

    def show() -> None:
        watched.service.alive()
        waiting = run.uploads.totals.waiting_files if run.uploads is not None else 0
        watched.progress.show(lambda: f"{counted(waiting, 'file')} to upload")

    signals = watched.signals
    result = run.finish(is_signaled=lambda: signals.received is not None, on_wait=show)
    watched.progress.clear()
    return result


def result_document(result: ArchiveResult) -> dict[str, object]:
    """Return the ``--json`` document of a run."""
    return asdict(result.totals) | {
        "on_file_failures": result.hook_failures,
        "uploaded": result.uploads.files,
        "not_uploaded": result.not_uploaded,
        "misfits": result.uploads.misfits,
        "fields_without_column": len(result.uploads.without_column),
    }


def archive_summary(totals: ArchiveTotals) -> str:
    """Return the counts in a line."""
    again = f", {totals.already_written} were written already" if totals.already_written else ""
    counts = f"{counted(totals.messages, 'message')}, {counted(totals.bytes, 'byte')}"
    return f"nsq: {counts}, {counted(totals.files, 'file')} finished{again}"


def report_failures(runtime: Session, result: ArchiveResult, *, fail_on_misfit: bool) -> ExitStatus:
    """Report what failed after the archiving; return the exit status."""
    status = ExitStatus.DONE
    if result.hook_failures:
        times = counted(result.hook_failures, "time")
        runtime.info(f"nsq: the command for finished files failed {times}")
        status = ExitStatus.PARTLY_DONE
    if result.not_uploaded:
        files = counted(result.not_uploaded, "file")
        runtime.info(f"nsq: {files} not uploaded; the next run continues")
        status = ExitStatus.PARTLY_DONE
    uploads = result.uploads
    unfit = report_unfit(runtime, uploads.misfits, uploads.without_column, fails=fail_on_misfit)
    return unfit or status
