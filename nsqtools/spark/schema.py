"""The columns of a message in Spark, and the same for Arrow.

``ts_ns`` is the time of publishing as nsqd has it, nanoseconds since 1970; ``timestamp`` is the
same, cut to microseconds, as Spark's own type. Files of bare bodies know only ``body``: the other
columns are null there. ``file`` and ``pos`` say where an archived message is: the file's path, and
the byte position of the member that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

MESSAGE_DDL = (
    "topic string, nsqd string, id string, timestamp timestamp, ts_ns bigint, attempts int, "
    "body binary"
)
ARCHIVED_DDL = f"{MESSAGE_DDL}, file string, pos bigint"

IDENTITY = ("topic", "nsqd", "id")
"""The columns that identify a message: ids alone repeat between nsqd."""


def message_schema() -> pyarrow.Schema:
    """The Arrow schema of `MESSAGE_DDL`."""
    import pyarrow

    return pyarrow.schema(
        [
            ("topic", pyarrow.string()),
            ("nsqd", pyarrow.string()),
            ("id", pyarrow.string()),
            ("timestamp", pyarrow.timestamp("us", tz="UTC")),
            ("ts_ns", pyarrow.int64()),
            ("attempts", pyarrow.int32()),
            ("body", pyarrow.binary()),
        ]
    )


def archived_schema() -> pyarrow.Schema:
    """The Arrow schema of `ARCHIVED_DDL`."""
    import pyarrow

    return pyarrow.schema([*message_schema(), ("file", pyarrow.string()), ("pos", pyarrow.int64())])
