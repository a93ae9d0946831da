"""The processes below another one, as /proc shows them, and how to kill them."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, the one that started it, and its command line."""

    pid: int
    parent: int
    command: str


def descendants(pid: int, what: str = "") -> list[Process]:
    """The processes below ``pid`` with ``what`` in their command lines, parents first.

    Without the copy of itself that a JVM is for a moment when it starts a program.
    """
    processes = list(_processes())
    javas = {each.pid: each.command for each in processes if re.match(r"\S*java ", each.command)}
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
    found = [process for process in processes if process.parent in roots]
    if found:
        yield from found
        yield from _below({process.pid for process in found}, processes)


def kill(pid: int) -> None:
    """Kill a process; one that has ended is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return not state.startswith("Z")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
