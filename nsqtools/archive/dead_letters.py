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
from typing import Any, BinaryIO

from pyarrow import compute

from nsqtools.archive.body_columns import ERROR
from nsqtools.archive.delta import TableFile
from nsqtools.archive.parquet import read
from nsqtools.archive.table_writer import Draft, TablePlan
from nsqtools.files.durable import adding_path_to_errors
from nsqtools.files.line_file import LineFile
from nsqtools.records.envelope import Envelope, encode_dead_letter

_COLUMNS = ("nsqd", "id", "ts_ns", "attempts", "body", "body_bytes", ERROR)


def append_dead_letters(plan: TablePlan, drafts: Iterable[Draft]) -> None:
    """Append the messages of new files with an error. Raises ``OSError`` and `OutputError`."""
    for draft in drafts if plan.dead_letters else ():
        append_dead_letters_of(plan, draft.file, Path(draft.path))


def append_dead_letters_of(plan: TablePlan, file: TableFile, source: Path | BinaryIO) -> None:
    """Append the messages of one file of a table. Raises as `append_dead_letters`."""
    path, topic = Path(plan.dead_letters), file.partition["topic"] or ""
    letters = LineFile(path)
    for batch in read(source, _COLUMNS):
        if ERROR not in batch.schema.names:
            continue
        rows = batch.filter(compute.is_valid(batch[ERROR])).to_pylist()
        if lines := b"".join(_dead_letter(row, topic) for row in rows):
            with adding_path_to_errors(path):
                letters.append(lines)


def _dead_letter(row: Mapping[str, Any], topic: str) -> bytes:
    """Return the line of a row of a table with an error."""
    now_ns, text = time.time_ns(), row["body"]
    body: bytes = row["body_bytes"] if text is None else text.encode()
    # A bare body has no id, and each dead letter needs one.
    id = row["id"] or hashlib.blake2s(body, digest_size=8).hexdigest()
    nsqd, attempts = row["nsqd"] or "", row["attempts"] or 1
    message = Envelope(topic, nsqd, id.encode(), row["ts_ns"] or now_ns, attempts, body)
    return encode_dead_letter(topic, nsqd, message, error=row[ERROR], failed_at_ns=now_ns)
