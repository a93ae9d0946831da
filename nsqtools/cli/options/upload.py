"""The options of ``nsq to-file`` about uploading finished files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.opt import opt
from nsqtools.cli.parsing.binding import From
from nsqtools.errors import ConfigurationError
from nsqtools.records.units import parse_size

if TYPE_CHECKING:
    from nsqtools.archive.topic_writer import ArchiveSettings
    from nsqtools.archive.upload import Uploads

UPLOAD = "Upload"


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """What was given."""

    url: str | None
    hive: bool
    delete: bool
    max_local_bytes: int | None
    settings: dict[str, str]

    def open(self, archive: ArchiveSettings) -> Uploads | None:
        """Return what uploads the files of an archiver, if that is wanted.

        Raises `ConfigurationError` for options that do not fit together.
        """
        if self.url is None:
            if self.delete or self.hive or self.settings or self.max_local_bytes is not None:
                raise ConfigurationError("there is no upload", hint="Give --upload URL.")
            return None
        from nsqtools.archive.storage_objects import open_storage
        from nsqtools.archive.topic_writer import RecordFormat
        from nsqtools.archive.upload import UploadPlan, Uploads

        if self.hive and archive.format is RecordFormat.raw:
            raise ConfigurationError(
                "--upload-hive needs --format jsonl: raw files name no topic",
                hint="Put the topic in --filename-format instead.",
            )
        plan = UploadPlan(
            archive.directories.output,
            open_storage(self.url, self.settings),
            archive.naming.host,
            by_topic_and_date=self.hive,
            deletes=self.delete,
        )
        return Uploads(plan, self.max_local_bytes)


def upload_options(
    upload: Annotated[
        str | None,
        opt(
            "--upload URL",
            "Upload finished files there: s3://, gs://, az://, abfss:// or a path.",
            UPLOAD,
        ),
    ] = None,
    upload_hive: Annotated[
        bool,
        opt(
            "--upload-hive",
            "Store files below topic=TOPIC/date=DATE/, by their first message.",
            UPLOAD,
        ),
    ] = False,
    upload_option: Annotated[
        list[str] | None,
        opt(
            "--upload-option KEY=VALUE",
            "A setting of the object store, such as server_side_encryption=aws:kms.",
            UPLOAD,
        ),
    ] = None,
    delete_uploaded: Annotated[
        bool,
        opt("--delete-uploaded", "Remove each local file once it is stored and verified.", UPLOAD),
    ] = False,
    max_local_bytes: Annotated[
        int | None,
        opt(
            "--max-local-bytes SIZE",
            "Stop consuming while finished files of this size wait for their upload.",
            UPLOAD,
            parser=parse_size,
        ),
    ] = None,
) -> UploadOptions:
    """The settings that the options make. Raises `ConfigurationError`."""
    settings = {}
    for text in upload_option or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigurationError(
                f"invalid --upload-option {text!r}", hint="Write KEY=VALUE, by obstore's names."
            )
        settings[key.strip().lower()] = value
    return UploadOptions(upload, upload_hive, delete_uploaded, max_local_bytes, settings)


Upload = Annotated["UploadOptions", From(upload_options)]
