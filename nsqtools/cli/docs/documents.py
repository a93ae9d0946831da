"""Every rendered document, by its path in the checkout, and whether what is there is the same."""

from __future__ import annotations

from pathlib import Path

from nsqtools.cli.docs.archive_page import render_archive_page
from nsqtools.cli.docs.bash import render_bash
from nsqtools.cli.docs.config_page import render_config_page
from nsqtools.cli.docs.fish import render_fish
from nsqtools.cli.docs.man import name_of, render_man
from nsqtools.cli.docs.tables import replace_tables
from nsqtools.cli.docs.tree import read_tree
from nsqtools.cli.docs.zsh import render_zsh

README = "README.md"
DIRECTORIES = ("completions", "man/man1", "man/man5")
"""They hold rendered files and nothing else."""


def documents(top: Path) -> dict[str, str]:
    """Render everything for the checkout ``top``, whose README.md is read for its other text."""
    root = read_tree()
    rendered = {
        "completions/nsq.bash": render_bash(root),
        "completions/_nsq": render_zsh(root),
        "completions/nsq.fish": render_fish(root),
    }
    for page in root.walk():
        rendered[f"man/man1/{name_of(page)}.1"] = render_man(page, root)
    rendered["man/man5/nsq-archive.5"] = render_archive_page()
    rendered["man/man5/nsq-config.5"] = render_config_page(root)
    rendered[README] = replace_tables((top / README).read_text("utf-8"), root)
    return rendered


def stale_documents(top: Path, rendered: dict[str, str]) -> dict[str, str | None]:
    """Those whose file differs, with their text; None for a file of a document that is no more."""
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
