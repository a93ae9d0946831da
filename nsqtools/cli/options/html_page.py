"""``--html FILE``: the option, and the page written where it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from nsqtools.cli.options.params import OUTPUT
from nsqtools.cli.parsing.binding import opt
from nsqtools.errors import NotFoundError, OutputError

Html = Annotated[
    Path | None, opt("--html FILE", "Write a page with charts, which needs no network.", OUTPUT)
]


def check_page(path: Path) -> None:
    """Refuse a page that cannot be written, before the work. Raises `OutputError`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise NotFoundError(f"directory {folder} for {path.name} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"cannot write {path}")


def save_page(path: Path, page: str) -> None:
    """Write the page. Raises `OutputError`."""
    try:
        path.write_text(page, "utf-8")
    except OSError as exc:
        raise OutputError(f"cannot write {path} ({exc.strerror})") from exc
