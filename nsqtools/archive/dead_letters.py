"""Copy messages whose bodies did not fit the columns of a table to a file of dead letters.

The table has these messages too, with the reasons in ``_error``. The file is for ``nsq redrive``,
after the schema or the publisher was corrected. The copies are written before the messages are
committed to the table, so a kill may repeat them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
            if ERROR not in batch.schema.names:
                continue
            rows = batch.filter(compute.is_valid(batch[ERROR])).to_pylist()
            if lines := b"".join(dead_letter(row, topic) for row in rows):
                with adding_path_to_errors(path):
                    file.append(lines)


def dead_letter(row: Mapping[str, Any], topic: str) -> bytes:
    """Return the line of a row of a table with an error."""
    now_ns, text = time.time_ns(), row["body"]
    body: bytes = row["body_bytes"] if text is None else text.encode()
    # A bare body has no id, and each dead letter needs one.
    id = row["id"] or hashlib.blake2s(body, digest_size=8).hexdigest()
    nsqd, attempts = row["nsqd"] or "", row["attempts"] or 1
    message = Envelope(topic, nsqd, id.encode(), row["ts_ns"] or now_ns, attempts, body)
    return encode_dead_letter(topic, nsqd, message, error=row[ERROR], failed_at_ns=now_ns)
