"""The columns of a message as Spark declares them: those of `archive.columns`, and its place.

``file`` and ``pos`` locate an archived message: the file's path, and the byte position of the
member that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow

from nsqtools.archive.body_columns import BodyColumns, fields_of
from nsqtools.archive.columns import BodyKind, message_schema

MESSAGE_DDL = (
    "topic string, nsqd string, id string, timestamp timestamp, ts_ns bigint, attempts int, "
    "body binary"
)


@dataclass(frozen=True, slots=True)
class Bodies:
    """What becomes of bodies; ``fields`` is the JSON Schema of those that are JSON."""

    kind: BodyKind = BodyKind.binary
    fields: Mapping[str, Any] | None = None

    def options(self) -> dict[str, str]:
        """Return them as options of a format."""
        schema = {} if self.fields is None else {"schema": json.dumps(self.fields)}
        return {"body": self.kind.value, **schema}

    def columns(self) -> BodyColumns | None:
        """Return what makes their columns, with a count of its own, if they have any."""
        if self.kind is not BodyKind.json:
            return None
        return BodyColumns(fields_of(self.fields or {"properties": {}}), evolves=False)

    def message_schema(self) -> pyarrow.Schema:
        """Return the columns of a message, those made of its body included."""
        columns = self.columns()
        return columns.schema() if columns else message_schema(self.kind)

    def archived_schema(self) -> pyarrow.Schema:
        """Return them with the place of the message."""
        schema = self.message_schema().append(pyarrow.field("file", pyarrow.string()))
        return schema.append(pyarrow.field("pos", pyarrow.int64()))


BYTES = Bodies()
