"""Manual pages as text: the man(7) macros, and the small markup that the pages of section 5 use.

    # SECTION                a heading, in capitals; ## Heading below it
    words and `literal` words, *placeholders*
    term::                   a term, and indented below it what it means
      The meaning.
        indented by four     an example, as it is
    {name}                   what the caller renders

An empty line ends a block; terms may follow each other without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

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


def prose(text: str, rendered: Mapping[str, Sequence[str]]) -> list[str]:
    """A page written in the markup; ``rendered`` are the blocks behind the names in braces."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("## "):
            lines.append(f".SS {_inline(block[3:])}")
        elif block.startswith("# "):
            lines.append(f".SH {_inline(block[2:])}")
        elif block.startswith("    "):
            lines += example(_dedented(block))
        elif re.fullmatch(r"\{\w+\}", block):
            lines += rendered[block[1:-1]]
        elif "::\n" in block:
            lines += _entries(block)
        else:
            begins = lines and lines[-1].startswith((".SH", ".SS"))
            lines += [*([] if begins else [".PP"]), _inline(" ".join(block.split()))]
    return lines


def _entries(block: str) -> list[str]:
    lines = []
    for term, meaning in re.findall(r"^(\S.*)::\n((?:  .*(?:\n|$))+)", block, re.MULTILINE):
        lines += entry(_inline(term), _inline(" ".join(meaning.split())))
    return lines


def _inline(text: str) -> str:
    pieces = re.split(r"(`[^`]+`|\*[^*\s][^*]*\*)", text)
    styled = {"`": bold, "*": italic}
    return "".join(
        styled[piece[0]](piece[1:-1])
        if len(piece) > 2 and piece[0] in styled and piece[0] == piece[-1]
        else escape(piece)
        for piece in pieces
    )


def _dedented(block: str) -> list[str]:
    lines = block.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return [line[margin:].rstrip() for line in lines]
