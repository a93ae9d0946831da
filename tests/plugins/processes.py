"""The descendants of a process, as /proc lists them, and functions to kill them."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, its parent, and its command line."""

    pid: int
    parent: int
    command: str


def descendants(pid: int, what: str = "") -> list[Process]:
    """The processes below ``pid`` with ``what`` in their command lines, parents first.

    A JVM is briefly a copy of itself when it starts a program; such copies are left out.
    """
    processes = list(_processes())
    javas = {
        process.pid: process.command
        for process in processes
        if re.match(r"\S*java ", process.command)
    }
    return [
        process
        for process in _below({pid}, processes)
        if what in process.command and javas.get(process.parent) != process.command
    ]


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            yield Process(int(entry.name), int(stat.rpartition(")")[2].split()[1]), command)


def _below(roots: set[int], processes: list[Process]) -> Iterator[Process]:
    children = [process for process in processes if process.parent in roots]
    if children:
        yield from children
        yield from _below({process.pid for process in children}, processes)


def kill(pid: int) -> None:
    """Kill a process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs, which a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return not state.startswith("Z")


def peak_bytes(pid: int) -> int:
    """The peak memory of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0
