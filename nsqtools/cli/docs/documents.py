"""Every rendered document, by its path in the checkout, and whether what is there is the same."""

from __future__ import annotations

from pathlib import Path

from nsqtools.cli.docs.bash import render_bash
from nsqtools.cli.docs.fish import render_fish
from nsqtools.cli.docs.man import name_of, render_man
from nsqtools.cli.docs.markdown import render_guide
from nsqtools.cli.docs.tables import fill_lists
from nsqtools.cli.docs.tree import read_tree
from nsqtools.cli.docs.zsh import render_zsh

GUIDES = "man/*.[57].md"
DIRECTORIES = ("completions", "man/man1", "man/man5", "man/man7")
"""They hold rendered files and nothing else."""


def documents(top: Path) -> dict[str, str]:
    """Render everything for the checkout ``top``, whose guides are read for what we do not know."""
    root = read_tree()
    rendered = {
        "completions/nsq.bash": render_bash(root),
        "completions/_nsq": render_zsh(root),
        "completions/nsq.fish": render_fish(root),
    }
    for page in root.walk():
        rendered[f"man/man1/{name_of(page)}.1"] = render_man(page, root)
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
