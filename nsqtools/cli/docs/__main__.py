"""``python -m nsqtools.cli.docs``: write the rendered documents into the checkout, or check."""

from __future__ import annotations

import sys

from nsqtools.cli.docs.documents import README, documents, stale_documents, top_directory, write


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` only compare; returns the exit status."""
    top = top_directory()
    if not (top / README).exists():
        sys.stderr.write(f"{top} is not a checkout of nsqtools: it has no {README}\n")
        return 1
    stale = stale_documents(top, documents(top))
    for path, text in stale.items():
        sys.stdout.write(f"{path}\n")
        if arguments != ["--check"]:
            write(top / path, text)
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
