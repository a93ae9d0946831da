"""The list of mutants fits the package of today, and the tests kill every one of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from mutate.candidates import candidates
from mutate.mutants import PACKAGE, REPOSITORY, Mutant, as_toml, read_mutants
from plugins.waiting import patience_s

MUTANTS = read_mutants()
LEAST = 150
TRIED_EACH_TIME = "protocol/frames.py"  # the short form: killed within seconds


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@cache
def source_of(path: Path) -> tuple[str, str]:
    """Text and syntax tree of a module: many mutants are of the same."""
    text = path.read_text("utf-8")
    return text, ast.dump(ast.parse(text))


def test_there_are_enough_and_none_twice() -> None:
    assert len(MUTANTS) >= LEAST
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title[:80])
def test_a_mutant_fits_its_file_and_its_tests_exist(mutant: Mutant) -> None:
    path = REPOSITORY / PACKAGE / mutant.file
    source, tree = source_of(path)
    assert ast.dump(ast.parse(mutant.apply(source))) != tree
    assert mutant.killed_by
    for each in mutant.killed_by:
        file, _, name = each.partition("::")
        assert not name or name in names_in(REPOSITORY / file), each


def try_list(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).parent), "run", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_mutants_of_one_module_are_killed() -> None:
    done = try_list(TRIED_EACH_TIME, timeout_s=patience_s(300))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 survived, 0 error" in done.stdout
    assert not done.stdout.startswith("0 mutants")


@pytest.mark.slow
def test_all_mutants_are_killed() -> None:
    done = try_list(timeout_s=patience_s(7200))
    assert done.returncode == 0, done.stdout + done.stderr


# -- the tool itself ------------------------------------------------------------------------------

SOURCE = '''\
def first(items, limit):
    """One or none."""
    log.info("asked")
    items.sort()
    if items and len(items) < limit:
        return items[0] + 1
    return False
'''


def test_candidates_are_the_changes_that_could_matter() -> None:
    changed = {mutant.apply(SOURCE) for mutant in candidates("module.py", SOURCE)}
    assert changed == {
        SOURCE.replace("items.sort()", "pass"),
        SOURCE.replace("items and len(items) < limit", "(items) or (len(items) < limit)"),
        SOURCE.replace("< limit", "<= limit"),
        SOURCE.replace("+ 1", "- 1"),
        SOURCE.replace("False", "True"),
    }


def test_a_line_that_occurs_twice_is_found_by_the_lines_before_it() -> None:
    source = "a = 1\nif b < c:\n    d()\nelse:\n    d()\n"
    found = [mutant.apply(source) for mutant in candidates("module.py", source)]
    assert source.replace("    d()\nelse", "    pass\nelse") in found
    assert source[:-4] + "pass\n" in found
    assert len(set(found)) == len(found) == 3


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    mutants = [
        Mutant("a.py", "x < 1", "x <= 1", ("tests/test_a.py::test_x",)),
        Mutant("b.py", '    """\'"\\n\n    y\n', "\n\tz\n", ("tests/b", "tests/c"), why="ü"),
    ]
    (tmp_path / "list.toml").write_text(as_toml(mutants), "utf-8")
    assert read_mutants(tmp_path) == mutants


def test_text_that_is_not_there_exactly_once_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 2 times"):
        Mutant("a.py", "x", "y", ()).apply("x x")
