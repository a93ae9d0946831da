"""The tables of README.md: text between two markers is replaced by what the code says.

    <!-- options:begin -->
    <!-- options:end -->

There may be any table that `replace_tables` knows, wherever README.md wants it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from nsqtools.cli.docs.tree import Option, Page
from nsqtools.cli.options.client_options import COLUMNS, describe_option
from nsqtools.cli.running.exit_status import ExitStatus
from nsqtools.client.options import ClientOptions

SHARED_BY = 3
"""An option is in the table when so many families of commands have it with the same meaning."""

_BLOCK = re.compile(r"(<!-- (\S+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def replace_tables(readme: str, root: Page) -> str:
    """Return the text with every block between markers rendered anew.

    Raises ``ValueError`` for a marker without its other half, or of no known table.
    """
    tables = {
        "options": option_table(root),
        "exit-status": exit_status_table(),
        "client-options": client_option_table(),
    }

    def render(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        if name not in tables:
            raise ValueError(f"README.md: no table is called {name!r}, only {', '.join(tables)}")
        return f"{begin}{tables[name]}{end}"

    markers = re.findall(r"<!-- (\S+):(?:begin|end) -->", readme)
    paired = [name for _, name, _ in _BLOCK.findall(readme) for _ in ("begin", "end")]
    if Counter(markers) != Counter(paired):
        raise ValueError("README.md: a marker :begin has no :end behind it, or the reverse")
    return _BLOCK.sub(render, readme)


def option_table(root: Page) -> str:
    """The options that many commands have, in the order in which they first appear."""
    found: dict[tuple[str, str], list[tuple[str, Option]]] = {}
    for page in root.walk():
        if not (page.is_raw or page is root):
            for option in page.options:
                found.setdefault((option.names[-1], option.help), []).append(
                    (page.words[1], option)
                )
    rows = (
        _option_row([option for _, option in uses])
        for uses in found.values()
        if len({family for family, _ in uses}) >= SHARED_BY
    )
    return _table(("option", "environment", "meaning"), rows)


def exit_status_table() -> str:
    """Every exit status and its meaning."""
    return _table(
        ("status", "meaning"), ((str(int(status)), status.meaning) for status in ExitStatus)
    )


def client_option_table() -> str:
    """What --consumer-opt and --producer-opt take."""
    rows = (describe_option(field) for field in fields(ClientOptions))
    return _table(COLUMNS, ((f"`{name}`", *rest) for name, *rest in rows))


def _option_row(uses: Sequence[Option]) -> tuple[str, str, str]:
    """An option as most spellings have it, with the notes that it has in every command."""
    option = max(uses, key=lambda each: len(each.spellings))
    value = f" {option.value.metavar}" if option.value else ""
    names = ", ".join(f"`{name}`" for name in (*option.names[:-1], option.names[-1] + value))
    names += "".join(f", `{name}`" for name in option.off_names)
    notes = [
        note
        for note in option.notes
        if all(note in each.notes for each in uses) and not note.startswith("env: ")
    ]
    text = option.help + (f" ({'; '.join(notes)})" if notes else "")
    return names, f"`{option.environment}`" if option.environment else "", text


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"|{'|'.join(map(_cell, line))}|\n" for line in lines)


def _cell(text: str) -> str:
    return f" {text.replace('|', chr(92) + '|')} " if text != "---" else text
