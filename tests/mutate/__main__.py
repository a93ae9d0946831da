"""Break the package on purpose and see whether the tests notice.

    python tests/mutate run [TEXT ...]
        the mutants of the list, or those with a text in their title
    python tests/mutate propose MODULE TEST [TEST ...]
        every small change of a module on tests: entries for the list from those that are killed,
        then the survivors

Exits with 1 when a mutant of the list survives. What survives a proposal is a missing test, or a
change that makes no difference: read it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutate import trial
from mutate.candidates import candidates
from mutate.mutants import PACKAGE, REPOSITORY, Mutant, as_toml, read_mutants
from mutate.trial import Verdict

Try = Callable[[Path, Mutant], tuple[Verdict, str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/mutate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--workers", type=int, default=2)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="the mutants of the list")
    command.add_argument("text", nargs="*")
    command = commands.add_parser("propose", help="try every small change of a module")
    command.add_argument("--limit", type=int, help="try this many, spread over the module")
    command.add_argument("module", type=Path)
    command.add_argument("tests", nargs="+")
    arguments = parser.parse_args()
    trial.load_shared()
    if arguments.command == "run":
        return run(arguments.text, arguments.workers)
    return propose(arguments.module, tuple(arguments.tests), arguments.workers, arguments.limit)


def run(texts: list[str], workers: int) -> int:
    """Try the list; return the exit status."""
    mutants = [
        mutant
        for mutant in read_mutants()
        if not texts or any(text in mutant.title for text in texts)
    ]
    began = time.monotonic()
    counts = dict.fromkeys(Verdict, 0)
    for mutant, verdict, printed in try_all(mutants, trial.try_mutant, workers):
        counts[verdict] += 1
        if verdict is not Verdict.KILLED:
            print(f"{verdict.value}: {mutant.title}\n    {' '.join(mutant.killed_by)}")
        if verdict is Verdict.ERROR:
            print(printed)
    shown = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    print(f"{len(mutants)} mutants: {shown}; {time.monotonic() - began:.0f} s")
    return 0 if counts[Verdict.KILLED] == len(mutants) else 1


def propose(module: Path, tests: tuple[str, ...], workers: int, limit: int | None) -> int:
    """Print entries for the list, then as comments what survived."""
    path = module.resolve().relative_to(REPOSITORY / PACKAGE)
    proposed = list(candidates(path.as_posix(), module.read_text("utf-8")))
    if limit is not None and limit < len(proposed):
        proposed = [proposed[n * len(proposed) // limit] for n in range(limit)]
    survivors = []
    results = try_all(proposed, lambda copy, it: trial.try_mutant(copy, it, tests), workers)
    for mutant, verdict, printed in results:
        if verdict is Verdict.SURVIVED:
            survivors.append(mutant)
        elif killer := failed_test(printed):
            print(as_toml([replace(mutant, killed_by=(killer,))]), flush=True)
    print(f"# {len(proposed)} tried, {len(survivors)} survived")
    for mutant in survivors:
        print(f"# survived: {mutant.title}")
    return 0


def failed_test(printed: str) -> str | None:
    """The first failed test that pytest names, without its parameters."""
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", printed, re.MULTILINE)
    return found and found[1]


def try_all(
    mutants: Iterable[Mutant], attempt: Try, workers: int
) -> Iterator[tuple[Mutant, Verdict, str]]:
    """Try mutants, several at a time; in the order of the list."""
    with TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            copies.put(trial.copy_repository(Path(scratch) / f"copy-{number}"))

        def one(mutant: Mutant) -> tuple[Mutant, Verdict, str]:
            copy = copies.get()
            try:
                return (mutant, *attempt(copy, mutant))
            finally:
                copies.put(copy)

        yield from pool.map(one, mutants)


if __name__ == "__main__":
    sys.exit(main())
