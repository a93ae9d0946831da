"""The lists in the guides that the code knows best: text between two markers is rendered.

    <!-- options:begin -->
    <!-- options:end -->

`fill_lists` knows options, client-options, exit-status and profile-keys. An item is ``- `term`:
meaning``, which `markdown` shows as a definition.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from manual.tree import Option, Page
from nsqtools.cli.options.connection import REPEATABLE, describe_option
from nsqtools.cli.running.runtime import ExitStatus
from nsqtools.client.options import CLIENT_OPTIONS

SHARED_BY = 3
"""An option is listed when this many families of commands have it with the same meaning."""

_BLOCK = re.compile(r"(<!-- (\S+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def fill_lists(guide: str, root: Page) -> str:
    """Return the text with every block between markers rendered again.

    Raises ``ValueError`` for a marker without its other half, or for an unknown name.
    """
    lists = {
        "options": shared_options,
        "client-options": lambda _: client_options(),
        "exit-status": lambda _: exit_statuses(),
        "profile-keys": profile_key_list,
    }

    def render(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        if name not in lists:
            raise ValueError(f"no list is called {name!r}, only {', '.join(lists)}")
        return begin + "".join(f"- {item}\n" for item in lists[name](root)) + end

    markers = re.findall(r"<!-- (\S+):(?:begin|end) -->", guide)
    paired = [name for _, name, _ in _BLOCK.findall(guide) for _ in ("begin", "end")]
    if Counter(markers) != Counter(paired):
        raise ValueError("a marker :begin has no :end after it, or the reverse")
    return _BLOCK.sub(render, guide)


def shared_options(root: Page) -> Iterator[str]:
    """The options that many commands have, in the order in which they first appear."""
    found: dict[tuple[str, str], list[tuple[str, Option]]] = {}
    for page in root.walk():
        if not (page.is_raw or page is root):
            for option in page.options:
                name = option.names[-1]
                key = (name, "" if name == "--help" else option.help)
                found.setdefault(key, []).append((page.words[1], option))
    for uses in found.values():
        if len({family for family, _ in uses}) >= SHARED_BY:
            yield _option([option for _, option in uses])


def client_options() -> Iterator[str]:
    """What --consumer-opt and --producer-opt take."""
    for field in CLIENT_OPTIONS.values():
        name, default, bounds, help = describe_option(field)
        facts = [f"Default: {default}." if default else "", f"Bounds: {bounds}." if bounds else ""]
        sentence = help[0].upper() + help[1:] + "."
        yield f"`{name}`: " + " ".join([sentence, *filter(None, facts)])


def exit_statuses() -> Iterator[str]:
    """Every exit status and its meaning."""
    for status in ExitStatus:
        yield f"`{int(status)}`: {status.meaning[0].upper()}{status.meaning[1:]}."


def profile_key_list(root: Page) -> Iterator[str]:
    """The keys of the configuration file, each with the form of its value."""
    options = {
        option.names[-1].removeprefix("--"): option
        for page in root.walk()
        for option in page.options
    }
    for key, is_repeatable in REPEATABLE.items():
        name = key.replace("_", "-")
        option = options[name]
        yield f"`{name} = {_form(option, is_repeatable)}`: {option.help}"


def _form(option: Option, is_repeatable: bool) -> str:
    if option.metavar is None:
        return "true|false"
    if option.names[-1].endswith("-opt"):
        return "{ KEY = VALUE, ... }"
    value = option.metavar
    if is_repeatable:
        return f'["{value}", ...]'
    return value if value == "N" else f'"{value}"'


def _option(uses: Sequence[Option]) -> str:
    """An option as most spellings have it, with the notes that it has in every command."""
    option = max(uses, key=lambda each: len(each.spellings))
    value = f" {option.metavar}" if option.metavar else ""
    names = ", ".join(f"`{name}`" for name in (*option.names[:-1], option.names[-1] + value))
    names += "".join(f", `{name}`" for name in option.off_names)
    common = [note for note in option.notes if all(note in each.notes for each in uses)]
    sentences = [option.help, *(f"{note[0].upper()}{note[1:]}." for note in common)]
    return f"{names}: " + " ".join(sentences).replace("Env: ", "Environment: ")
