"""The options of ``nsq to-file`` about uploading finished files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.parsing.binding import From, opt
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.archive.archive_settings import ArchiveSettings
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
        from nsqtools.archive.archive_settings import RecordFormat
        from nsqtools.archive.storage_objects import open_storage
        from nsqtools.archive.upload import Uploads
        from nsqtools.archive.upload_job import UploadPlan

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
    upload: str | None = opt(
        "URL", "Upload finished files there: s3://, gs://, az://, abfss:// or a path.", UPLOAD
    ),
    upload_hive: bool = opt(
        "", "Store files below topic=TOPIC/date=DATE/, by their first message.", UPLOAD
    ),
    upload_option: list[str] | None = opt(
        "KEY=VALUE",
        "A setting of the object store, such as server_side_encryption=aws:kms.",
        UPLOAD,
    ),
    delete_uploaded: bool = opt(
        "", "Remove each local file once it is stored and verified.", UPLOAD
    ),
    max_local_bytes: int | None = opt(
        "SIZE", "Stop consuming while finished files of this size wait for their upload.", UPLOAD
    ),
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
