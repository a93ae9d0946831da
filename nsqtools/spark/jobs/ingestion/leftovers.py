"""Remove what batches wrote that were cut off: files that the log of the sink does not name.

Spark itself does not read them. Whoever reads the directory without knowing the log would count
their messages twice, for the batch was written again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nsqtools.errors import OutputError

LOG = "_spark_metadata"
VERSION = "v1"

_BATCH = re.compile(r"\d+(\.compact)?")


def remove_leftovers(output: Path) -> int:
    """Remove them, and return how many there were. Nobody may be writing.

    Raises `OutputError`, also for a log that cannot be read: nothing is removed then.
    """
    try:
        known = committed(output)
        if known is None:
            return 0
        left = [path for path in output.glob("topic=*/date=*/*.parquet") if path.name not in known]
        for path in left:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        return len(left)
    except OSError as exc:
        raise OutputError(f"cannot tidy {exc.filename or output} ({exc.strerror})") from exc


def committed(output: Path) -> set[str] | None:
    """Return the names of the files that count; None before the first batch.

    A name is made up by Spark for one file, so that it is enough without its directory. Raises
    ``OSError``, and `OutputError`.
    """
    if not (output / LOG).is_dir():
        return None
    names: set[str] = set()
    for path in (output / LOG).iterdir():
        if _BATCH.fullmatch(path.name):
            version, *lines = path.read_text("utf-8").splitlines()
            try:
                if version != VERSION:
                    raise ValueError(f"it is of version {version}")
                names |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
            except (ValueError, KeyError, TypeError) as exc:
                raise OutputError(f"cannot read {path} ({exc})") from exc
    return names
