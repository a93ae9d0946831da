"""``python .ci/manual``, run in a checkout: write the rendered documents, or check."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the modules are those of the package manual

from manual.documents import documents, stale_documents, write  # noqa: E402


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` only compare; returns the exit status."""
    top = Path.cwd()
    if not (top / "nsqtools").is_dir() or not (top / "man").is_dir():
        sys.stderr.write(f"{top} is not a checkout of nsqtools: run this in its top directory\n")
        return 1
    stale = stale_documents(top, documents(top))
    for path, text in stale.items():
        sys.stdout.write(f"{path}\n")
        if arguments != ["--check"]:
            write(top / path, text)
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
