"""Record in which order files are written, synced and named, and what else happens between.

    def test_...(disk_calls):
        write_something()
        assert disk_calls.seen == [("write", ".log.part"), ("fdatasync", ".log.part")]

A test that kills a process cannot see a missing fsync, because the kernel keeps what was written; a
power failure would. So the order of the calls is what is asserted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ON_DESCRIPTORS = ("write", "pwrite", "fsync", "fdatasync", "ftruncate")
ON_NAMES = ("link", "rename", "replace", "unlink")


class DiskCalls:
    """``seen`` are the calls, by name and file; the same call twice in a row stands once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        for name in ON_DESCRIPTORS:
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name), self._opened))
        for name in ON_NAMES:
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name), self._named))

    def note(self, name: str, what: str = "") -> None:
        """Record what is not a call to the system, such as a FIN."""
        if self.seen[-1:] != [(name, what)]:
            self.seen.append((name, what))

    def order(self, *wanted: tuple[str, str]) -> list[tuple[str, str]]:
        """The calls that are among the wanted, in the order of the first of each."""
        return [call for call in dict.fromkeys(self.seen) if call in wanted]

    def _recording(
        self, name: str, call: Callable[..., Any], what: Callable[..., str]
    ) -> Callable[..., Any]:
        def record(*arguments: Any, **keywords: Any) -> Any:
            self.note(name, what(*arguments))
            return call(*arguments, **keywords)

        return record

    @staticmethod
    def _opened(descriptor: int, *rest: object) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    @staticmethod
    def _named(path: str | Path, *rest: object) -> str:
        target = [each for each in rest if isinstance(each, str | Path)]
        return Path(target[0] if target else path).name


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> DiskCalls:
    return DiskCalls(monkeypatch)
