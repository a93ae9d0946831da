"""Every rendered document, by its path in the checkout, and whether what is there is the same."""

from __future__ import annotations

from pathlib import Path

from manual.man import name_of, render_man
from manual.markdown import render_guide
from manual.tables import fill_lists
from manual.tree import read_tree

GUIDES = "man/*.[57].md"
DIRECTORIES = ("man/man1", "man/man5", "man/man7")
"""They hold rendered files and nothing else."""


def documents(top: Path) -> dict[str, str]:
    """Render everything for the checkout ``top``, whose guides are read for what we do not know."""
    root = read_tree()
    rendered = {f"man/man1/{name_of(page)}.1": render_man(page, root) for page in root.walk()}
    for guide in sorted(top.glob(GUIDES)):
        text = fill_lists(guide.read_text("utf-8"), root)
        rendered[guide.relative_to(top).as_posix()] = text
        rendered[f"man/man{guide.stem[-1]}/{guide.stem}"] = render_guide(text)
    return rendered


def stale_documents(top: Path, rendered: dict[str, str]) -> dict[str, str | None]:
    """Those whose file differs, with their text; None for a file that belongs to none."""
    stale: dict[str, str | None] = {
        path: text
        for path, text in rendered.items()
        if not (top / path).exists() or (top / path).read_text("utf-8") != text
    }
    for directory in DIRECTORIES:
        for file in sorted((top / directory).glob("*")):
            path = str(file.relative_to(top))
            if path not in rendered:
                stale[path] = None
    return stale


def write(path: Path, text: str | None) -> None:
    """Write a document, or remove it."""
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
