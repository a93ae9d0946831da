"""Options of tables: their format, and the columns of bodies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

if TYPE_CHECKING:
    from nsqtools.archive.table_writer import TablePlan

TABLE = "Table"
FailOnMisfit = Annotated[
    bool, opt("--fail-on-misfit", "Exit with status 6 if values did not fit their columns.", TABLE)
]
DeadLetterPath = Annotated[
    Path | None,
    opt(
        "--dead-letter-file FILE",
        "Append messages that did not fit to this file too, for nsq redrive.",
        TABLE,
    ),
]


def check_dead_letters(path: Path | None, body: BodyKind) -> str:
    """Return the absolute path of a file of dead letters, "" without one. Raises `NsqError`."""
    from nsqtools.files.durable import LineFile

    if path is None:
        return ""
    if body is not BodyKind.json:
        raise ConfigurationError(
            "--dead-letter-file is for JSON bodies: other bodies always fit",
            hint="Give --body json.",
        )
    return str(LineFile(path).path)


class TableFormat(Enum):
    """The format of a table."""

    parquet = "parquet"
    delta = "delta"


class ColumnsChoice(OptionSet):
    """Columns of bodies in a table."""

    panel = TABLE
    body: BodyKind = opt(
        "",
        "Bodies in tables: text, with other bytes in body_bytes (string); bytes (binary); text, "
        "and a column for each field (json).",
        default=BodyKind.string,
    )
    schema: Path | None = opt(
        "FILE", "Columns of JSON bodies, as JSON Schema: see nsq archive schema."
    )

    def fields(self, *, needed: bool) -> dict[str, Any] | None:
        """Return the JSON Schema of bodies. Raises `NsqError`, also without a ``needed`` one."""
        from nsqtools.archive.body_schema import load_schema

        if self.schema is not None and self.body is not BodyKind.json:
            raise ConfigurationError("a schema is for JSON bodies", hint="Give --body json.")
        if self.schema is None and needed and self.body is BodyKind.json:
            raise ConfigurationError(
                "--body json needs --schema here",
                hint="nsq archive schema ARCHIVE > FILE infers one from a sample.",
            )
        return None if self.schema is None else load_schema(self.schema)

    def choose_url(
        self,
        url: str,
        settings: Mapping[str, str],
        *,
        has_many_topics: Callable[[], bool],
        info: Callable[[str], None],
    ) -> str:
        """Return the URL of the table, or of the tables of topics, which ``info`` reports.

        Raises `NsqError`.
        """
        from nsqtools.archive.place import translating_errors
        from nsqtools.archive.table_places import choose_url

        has_columns = self.body is BodyKind.json
        with translating_errors("use", url):
            chosen = choose_url(
                url, settings, has_columns=has_columns, has_many_topics=has_many_topics
            )
        if chosen != url:
            info(f"nsq: each topic has its own table and columns: {chosen}")
        return chosen


class ColumnsOfArchives(ColumnsChoice):
    """Columns of bodies in archives that are not converted."""

    body: BodyKind = opt(
        "",
        "Bodies of archives: bytes (binary); text, with other bytes in body_bytes (string); text, "
        "and a column for each field of --schema (json).",
        default=BodyKind.binary,
    )


class BodyOptions(ColumnsChoice):
    """Columns of bodies in a table, and its partitions."""

    partition_by: list[str] | None = opt(
        "BY",
        "Partitions of tables below topic and date: hour, or a field of JSON bodies (.country). "
        "Of file names of to-file: whose time the partition is, arrival (default) or message.",
    )
    fail_on_misfit: FailOnMisfit = False
    dead_letter_file: DeadLetterPath = None

    def plan(
        self,
        url: str,
        host: str,
        settings: Mapping[str, str],
        *,
        is_delta: bool,
        has_many_topics: Callable[[], bool],
        info: Callable[[str], None],
        option: str = "--store",
        of_names: Collection[str] = (),
    ) -> TablePlan:
        """Return the plan of the table, or of the tables of topics, which ``info`` reports.

        ``option`` chooses between Parquet and Delta. ``of_names`` are partitions of file names,
        which a table does not have. Raises `NsqError` for contradicting options.
        """
        from nsqtools.archive.table_writer import TablePlan

        names = [name for name in self.partition_by or () if name not in of_names]
        for name in names:
            if name != "hour" and not name.startswith("."):
                raise ConfigurationError(
                    f"unknown --partition-by {name}",
                    hint="Write hour, or a field of the body: .country.",
                )
        columns = tuple(name.removeprefix(".") for name in names)
        fields = self.fields(needed=False)
        chosen = self.choose_url(url, settings, has_many_topics=has_many_topics, info=info)
        letters = check_dead_letters(self.dead_letter_file, self.body)
        plan = TablePlan(
            chosen, is_delta, host, self.body, fields, columns, dict(settings), letters
        )
        plan.check(option)
        return plan


WHOSE = ("arrival", "message")
