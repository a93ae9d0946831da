"""The options about tables: into what archives are made, and what becomes of bodies."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.parsing.binding import From, OptionSet, opt
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.archive.table import TablePlan

TABLE = "Table"


class Body(Enum):
    """What becomes of bodies in a table."""

    string = "string"
    binary = "binary"
    json = "json"


class BodyOptions(OptionSet):
    """Columns made of bodies, and partitions."""

    body: Body = opt(
        "",
        "Bodies in tables: text, with other bytes in body_bytes (string); bytes (binary); text, "
        "and a column for each field (json).",
        TABLE,
        Body.string,
    )
    schema: Path | None = opt(
        "FILE", "Columns of JSON bodies, as JSON Schema: see nsq archive schema.", TABLE
    )
    partition_by: list[str] | None = opt(
        "BY",
        "Partitions of tables beside topic and date: hour, or a field of JSON bodies (.country). "
        "Of file names: whose time <PARTITION> is, arrival (default) or message.",
        TABLE,
    )

    def plan(
        self, url: str, host: str, settings: Mapping[str, str], *, is_delta: bool
    ) -> TablePlan:
        """Return what is made of archives. Raises `NsqError` for what does not fit together."""
        from nsqtools.archive.body_columns import json_schema, load_fields
        from nsqtools.archive.columns import BodyKind
        from nsqtools.archive.table import TablePlan

        fields: dict[str, Any] | None = None
        if self.schema is not None:
            fields = json_schema(load_fields(self.schema))
        names = [name for name in self.partition_by or () if name not in WHOSE]
        for name in names:
            if name != "hour" and not name.startswith("."):
                raise ConfigurationError(
                    f"--partition-by {name} is not known",
                    hint="Write hour, or a field of the body: .country.",
                )
        columns = tuple(name.removeprefix(".") for name in names)
        kind = BodyKind(self.body.value)
        plan = TablePlan(url, is_delta, host, kind, fields, columns, dict(settings))
        plan.check()
        return plan


WHOSE = ("arrival", "message")
BodyChoice = Annotated[BodyOptions, From(BodyOptions)]
