"""The columns of a message as Spark declares them: those of `archive.columns`, and its place.

``file`` and ``pos`` locate an archived message: the file's path, and the byte position of the
member that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqtools.archive.columns import BodyKind, message_schema

if TYPE_CHECKING:
    import pyarrow

MESSAGE_DDL = (
    "topic string, nsqd string, id string, timestamp timestamp, ts_ns bigint, attempts int, "
    "body binary"
)
ARCHIVED_DDL = f"{MESSAGE_DDL}, file string, pos bigint"


def archived_schema() -> pyarrow.Schema:
    """The Arrow schema of `ARCHIVED_DDL`."""
    import pyarrow

    schema = message_schema(BodyKind.binary).append(pyarrow.field("file", pyarrow.string()))
    return schema.append(pyarrow.field("pos", pyarrow.int64()))
