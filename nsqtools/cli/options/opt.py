"""``opt``: an option in a line, as the help page shows it."""

from __future__ import annotations

from typing import Any

from typer import Option


def opt(form: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """The option ``--count -n N``: its names, then the word for its value; a switch has none."""
    names = [word for word in form.split() if word.startswith("-")]
    metavar = form.removeprefix(" ".join(names)).strip() or None
    return Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)
