"""Manual pages as text: the man(7) macros, and what has to be escaped in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsqtools import __version__

DATE = "2026-11-21"
"""Of the manual, not of its rendering: man(7) wants one. Set it when a version is released."""

LONGEST_LINE = 80

_ASCII = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
_TRANSLATION = str.maketrans(_ASCII)


def page(lines: Iterable[str]) -> str:
    """The text of a page. Long lines of text are broken; where they break does not matter."""
    done: list[str] = []
    is_example = False
    for line in lines:
        is_example = line == ".EX" or (is_example and line != ".EE")
        if line == ".PP" and done[-1].startswith((".SH", ".SS")):
            continue
        is_text = not is_example and not line.startswith(".")
        done += _broken(line) if is_text else [line]
    return "\n".join(done) + "\n"


def _broken(text: str) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > LONGEST_LINE:
            lines.append(r"\&" + word if word.startswith(".") else word)
        else:
            lines[-1] += " " + word if lines[-1] else word
    return lines


def escape(text: str) -> str:
    """Text of which every character is shown as it is, at the beginning of a line too."""
    escaped = text.translate(_TRANSLATION)
    return r"\&" + escaped if escaped.startswith(".") else escaped


def bold(text: str) -> str:
    return rf"\fB{escape(text)}\fR"


def italic(text: str) -> str:
    return rf"\fI{escape(text)}\fR"


def title(name: str, section: int) -> list[str]:
    """The first lines of a page. Words are not hyphenated: many are typed as they stand there."""
    head = f".TH {escape(name.upper())} {section} {DATE}"
    return [f'{head} "nsqtools {__version__}" "nsqtools manual"', ".nh"]


def reference(name: str, section: int) -> str:
    """The name of a page, as pages name each other."""
    return f"{bold(name)}({section})"


def references(pages: Sequence[tuple[str, int]]) -> list[str]:
    """Names of pages, with commas between, in the order of the sections."""
    ordered = sorted(set(pages), key=lambda page: (page[1], page[0]))
    lines = [reference(*page) + "," for page in ordered]
    return [*lines[:-1], lines[-1].rstrip(",")]


def entry(tag: str, *paragraphs: str) -> list[str]:
    """A term and what it means; all in roff already."""
    lines = [".TP", tag, paragraphs[0]]
    for paragraph in paragraphs[1:]:
        lines += [".IP", paragraph]
    return lines


def example(lines: Sequence[str]) -> list[str]:
    """Lines that are shown as they are."""
    return [".PP", ".RS 4", ".EX", *(escape(line) or r"\&" for line in lines), ".EE", ".RE"]


def paragraphs(text: str) -> list[str]:
    """The description of a help page: paragraphs, and indented lines as they are."""
    lines: list[str] = []
    for block in text.strip().split("\n\n"):
        if block.startswith("  "):
            lines += example(_dedented(block))
        else:
            lines += [*([".PP"] if lines else []), escape(" ".join(block.split()))]
    return lines


def _dedented(block: str) -> list[str]:
    lines = block.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return [line[margin:].rstrip() for line in lines]
