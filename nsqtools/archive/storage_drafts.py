"""Remove what writers of a store left that were killed.

A store shows only objects that are whole, so what a killed writer left is seen by nobody, and paid
for: parts of an upload to S3, a hidden file in HDFS or in a directory. Two rules make it safe to
remove it. Whoever alone may write an object removes its drafts at once (`remove_drafts`). Else a
draft must be a day old (`remove_stale_drafts`), which no writer takes; if one does, it fails and
has to write again, and nothing is lost.
"""

from __future__ import annotations

import logging
import time

from nsqtools.archive.storage import Storage

log = logging.getLogger("nsqtools")

STALE_NS = 24 * 3600 * 10**9


def remove_drafts(storage: Storage, name: str) -> int:
    """Remove all drafts of an object that nobody is writing; return how many there were.

    A failure is logged: the object itself does not need it.
    """
    count = 0
    try:
        for draft in list(storage.drafts(name)):
            storage.remove_draft(draft)
            count += 1
    except OSError as exc:
        log.warning("parts of an earlier upload of %s may be left (%s)", storage.where(name), exc)
    return count


def remove_stale_drafts(storage: Storage, prefix: str = "") -> list[str]:
    """Remove drafts below a folder that are a day old; return of which objects they were.

    Raises ``OSError``.
    """
    before_ns = time.time_ns() - STALE_NS
    stale = [draft for draft in storage.drafts_below(prefix) if draft.modified_ns < before_ns]
    for draft in stale:
        storage.remove_draft(draft)
    return [storage.where(draft.name) for draft in stale]
