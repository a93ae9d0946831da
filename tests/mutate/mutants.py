"""The list of mutants: small changes of the package that a named test must notice.

``mutants/*.toml`` has them, a file for each package. ``file`` is relative to ``nsqtools``; ``old``
is text that the file has exactly once, ``new`` what the mutant has in its place; ``killed_by`` the
tests of which one must fail.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent / "mutants"
REPOSITORY = Path(__file__).parents[2]
PACKAGE = "nsqtools"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change, and the tests (pytest's node ids, from the repository's root) that notice it."""

    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]
    why: str = ""

    @property
    def title(self) -> str:
        """One line: what changes where."""
        before, after = changed_part(self.old, self.new)
        return f"{self.file}: {before!r} -> {after!r}"

    def apply(self, source: str) -> str:
        """Raises ValueError unless ``old`` occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {count} times in place of once")
        return source.replace(self.old, self.new)


def changed_part(old: str, new: str) -> tuple[str, str]:
    """The lines of both texts that differ."""
    before, after = old.splitlines(), new.splitlines()
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    return " ".join(map(str.strip, before)), " ".join(map(str.strip, after))


def read_mutants(lists: Path = LISTS) -> list[Mutant]:
    """All mutants, in the order of the lists."""
    found = []
    for path in sorted(lists.glob("*.toml")):
        for entry in tomllib.loads(path.read_text("utf-8"))["mutant"]:
            found.append(Mutant(**{**entry, "killed_by": tuple(entry["killed_by"])}))
    return found


def as_toml(mutants: Iterable[Mutant]) -> str:
    """What `read_mutants` reads."""
    return "\n".join(_entry(mutant) for mutant in mutants)


def _entry(mutant: Mutant) -> str:
    lines = ["[[mutant]]", f"file = {json.dumps(mutant.file)}"]
    if mutant.why:
        lines.append(f"why = {json.dumps(mutant.why, ensure_ascii=False)}")
    lines += [f"old = {_text(mutant.old)}", f"new = {_text(mutant.new)}"]
    if len(mutant.killed_by) == 1:
        lines.append(f"killed_by = [{json.dumps(mutant.killed_by[0])}]")
    else:
        lines += ["killed_by = [", *(f"    {json.dumps(each)}," for each in mutant.killed_by), "]"]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """As it is between ''' where that can be, which keeps code readable."""
    if "\n" in text and "'''" not in text and not text.endswith("'"):
        return f"'''\n{text}'''"
    return json.dumps(text, ensure_ascii=False)
