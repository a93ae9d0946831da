"""Disks under test: a small one, failing system calls, and damaged files."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import strategies as st


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 KiB, or of the size in the parameter."""
    size = getattr(request, "param", "64k")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def full(*_: object) -> NoReturn:
    """Fail like a write or an fsync on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def fill(file: Path) -> None:
    """Write a file that takes all free space."""
    with suppress(OSError), file.open("wb", buffering=0) as filling:
        while True:
            filling.write(bytes(4096))


def link_within(source: Path, target: Path, link: Callable[..., None] = os.link) -> None:
    """`os.link`, as if each folder was its own file system."""
    if source.parent != target.parent:
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    link(source, target)


Change = tuple[str, float, bytes]
"""The kind of damage, its position as a share of the length, and the bytes."""

CHANGE = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "zero"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(min_size=1, max_size=40),
)


def damaged(data: bytes, what: Sequence[Change]) -> bytes:
    for kind, place, some in what:
        at = int(place * len(data))
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (some[0] or 1)]) + data[at + 1 :] if data else data
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + some + data[at:]
        else:
            data = data[:at] + bytes(len(some)) + data[at + len(some) :]
    return data


def state_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file of a directory."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def damage_body(path: Path, bodies: Sequence[bytes]) -> None:
    """Change a byte in a file, in the first body that it has."""
    content = path.read_bytes()
    body = next(body for body in bodies if body in content)
    path.write_bytes(content.replace(body, bytes([body[0] ^ 1]) + body[1:]))
