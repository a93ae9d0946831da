"""The log of a Delta table, as far as it says who changed a partition meanwhile.

Compaction reads what a partition of the table holds, and replaces it by one commit. Delta refuses a
commit when another one came between its own beginning and its end, but not when that came between
our reading and that beginning, a moment before. So the version that was read is kept, and the log
is looked at afterwards: the specification of Delta's transaction log describes ``commitInfo``,
``add`` and ``remove``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from nsqtools.archive.storage import Storage
from nsqtools.spark.jobs.compaction.inventory import Slot
from nsqtools.spark.packages import DELTA_LOG

_COMMIT = re.compile(rf"{DELTA_LOG}/(\d{{20}})\.json")


def table_version(table: Storage) -> int | None:
    """Return the version of a table; None where there is none. Raises ``OSError``."""
    found = (_COMMIT.fullmatch(entry.name) for entry in table.list(DELTA_LOG))
    return max((int(commit[1]) for commit in found if commit), default=None)


def changed_by_others(table: Storage, version: int, slot: Slot, ours: str) -> int | None:
    """Return the version before our commit, if others changed a partition after ``version``.

    ``ours`` is what our commit has as ``userMetadata``. What only lies in other files now, as after
    OPTIMIZE, is not changed. Raises ``OSError``.
    """
    is_changed = False
    while True:
        version += 1
        actions = list(_actions(table, version))
        if any(each.get("commitInfo", {}).get("userMetadata") == ours for each in actions):
            return version - 1 if is_changed else None
        is_changed |= any(_changes(action, slot) for action in actions)


def _actions(table: Storage, version: int) -> Iterator[dict[str, Any]]:
    for line in table.read(f"{DELTA_LOG}/{version:020d}.json").splitlines():
        yield json.loads(line)


def _changes(action: dict[str, Any], slot: Slot) -> bool:
    file = action.get("add") or action.get("remove") or {}
    values = file.get("partitionValues")
    is_here = values is None or values == {"topic": slot.topic, "date": str(slot.day)}
    return bool(file.get("dataChange")) and is_here
