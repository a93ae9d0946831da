"""Copy messages whose bodies did not fit the columns of a table to a file of dead letters.

The table has these messages too, with the reasons in ``_error``. The file is for ``nsq redrive``,
after the schema or the publisher was corrected. The copies are written before the messages are
committed to the table, so a kill may repeat them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute

from nsqtools.archive.body_columns import ERROR
from nsqtools.archive.parquet import read
from nsqtools.archive.table_writer import Draft, TablePlan
from nsqtools.files.durable import adding_path_to_errors
from nsqtools.files.line_file import LineFile
from nsqtools.records.envelope import Envelope, encode_dead_letter

_COLUMNS = ("nsqd", "id", "ts_ns", "attempts", "body", "body_bytes", ERROR)


def append_dead_letters(plan: TablePlan, drafts: Iterable[Draft]) -> None:
    """Append the messages of new files with an error. Raises ``OSError`` and `OutputError`."""
    if not plan.dead_letters:
        return
    file, path = LineFile(Path(plan.dead_letters)), Path(plan.dead_letters)
    for draft in drafts:
        topic = draft.file.partition["topic"] or ""
        for batch in read(Path(draft.path), _COLUMNS):
            if ERROR in batch.schema.names and (lines := b"".join(dead_letters(batch, topic))):
                with adding_path_to_errors(path):
                    file.append(lines)


def dead_letters(batch: pyarrow.RecordBatch, topic: str) -> Iterator[bytes]:
    """Iterate over the lines of the messages of a topic with an error."""
    now_ns = time.time_ns()
    for row in batch.filter(compute.is_valid(batch[ERROR])).to_pylist():
        message = _message(row, topic, now_ns)
        yield encode_dead_letter(
            topic, message.nsqd, message, error=row[ERROR], failed_at_ns=now_ns
        )


def _message(row: dict[str, Any], topic: str, now_ns: int) -> Envelope:
    text = row["body"]
    body: bytes = row["body_bytes"] if text is None else text.encode()
    # A bare body has no id, and each dead letter needs one.
    id = row["id"] or hashlib.blake2s(body, digest_size=8).hexdigest()
    return Envelope(
        topic, row["nsqd"] or "", id.encode(), row["ts_ns"] or now_ns, row["attempts"] or 1, body
    )
