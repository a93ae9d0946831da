"""Disks under test: one that is small, so that it can be filled, and what others refuse."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 KiB, or of the size that is the parameter."""
    size = getattr(request, "param", "64k")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def full(*_: object) -> NoReturn:
    """Refuse as a full disk refuses a write or an fsync."""
    raise OSError(errno.ENOSPC, "No space left on device")


def fill(file: Path) -> None:
    """Write a file that takes all that is free."""
    with suppress(OSError), file.open("wb", buffering=0) as filling:
        while True:
            filling.write(bytes(4096))


def link_within(source: Path, target: Path, link: Callable[..., None] = os.link) -> None:
    """`os.link` where each folder is a file system of its own."""
    if source.parent != target.parent:
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    link(source, target)
