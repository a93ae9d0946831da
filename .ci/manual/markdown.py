"""Manual pages from Markdown: the guides in man/*.md, which a forge shows as they are.

    # nsq-archive(5): the files    the first line: name, section and what the page is about
    ## Heading, ### Heading below  .SH (in capitals) and .SS
    - `term`: meaning              a list whose items all begin so is a list of definitions
    | a | b |                      a table, for tbl(1)
    nsq-tail(1)                    a reference, in bold; links to other guides read like that too
    <!-- ... -->                   left out

Trap: a table is only a table for man(1) when the first line of the page says so (``'\\" t``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from manual import roff

TITLE = re.compile(r"# (?P<name>[a-z-]+)\((?P<section>\d)\): (?P<summary>.*)\n")
TABLES = "'\\\" t"
WIDEST_CELL = 24
"""A column with a wider cell shares the width of the line and breaks its lines."""

_REFERENCE = re.compile(r"\b(nsq(?:-[a-z]+)*)\((\d)\)")
_STYLES = {"strong": "B", "em": "I", "code_inline": "B"}


def render_guide(text: str) -> str:
    """Return the page of a guide. Raises ``ValueError`` for a guide without its first line."""
    if not (title := TITLE.match(text)):
        raise ValueError(f"a guide begins with '# NAME(SECTION): SUMMARY', not {text[:40]!r}")
    lines = roff.title(title["name"], int(title["section"]))
    lines += [".SH NAME", f"{roff.escape(title['name'])} \\- {roff.escape(title['summary'])}"]
    body = to_roff(text[title.end() :])
    return roff.page([*([TABLES] if ".TS" in body else []), *lines, *body])


def to_roff(text: str) -> list[str]:
    """Return the lines of a Markdown text."""
    parsed = MarkdownIt("commonmark").enable("table").parse(text)
    return [line for node in SyntaxTreeNode(parsed).children for line in _block(node)]


def _block(node: SyntaxTreeNode) -> Iterator[str]:
    if node.type == "heading":
        is_section = node.tag == "h2"
        yield f".SH {roff.escape(_plain(node).upper())}" if is_section else f".SS {_text(node)}"
    elif node.type == "paragraph":
        yield from (".PP", _text(node))
    elif node.type in ("fence", "code_block"):
        yield from roff.example(node.content.rstrip("\n").split("\n"))
    elif node.type in ("bullet_list", "ordered_list"):
        yield from _list(node)
    elif node.type == "table":
        yield from _table(node)
    elif node.type != "html_block":
        raise ValueError(f"a guide has no {node.type}: {node.map}")


def _list(node: SyntaxTreeNode) -> Iterator[str]:
    items = [_inline_nodes(item.children[0]) for item in node.children]
    is_definitions = all(_colon(item) is not None for item in items)
    for number, (item, inline) in enumerate(zip(node.children, items, strict=True), 1):
        if is_definitions:
            term, meaning = _split(inline)
            yield from (".TP", term, meaning)
        else:
            bullet = r"\(bu 2" if node.type == "bullet_list" else f"{number}. 4"
            yield from (f".IP {bullet}", _join(inline))
        for block in item.children[1:]:
            yield from (".IP" if line == ".PP" else line for line in _block(block))


def _colon(inline: Sequence[SyntaxTreeNode]) -> int | None:
    """Where the term ends in an item that begins with one, marked as code or emphasis."""
    if not inline or inline[0].type not in _STYLES:
        return None
    for index, node in enumerate(inline):
        if node.type == "text" and ": " in f"{node.content} ":
            return index
    return None


def _split(inline: Sequence[SyntaxTreeNode]) -> tuple[str, str]:
    index = _colon(inline)
    assert index is not None
    before, _, after = inline[index].content.partition(":")
    term = _join(inline[:index]) + roff.escape(before)
    return term, roff.escape(after.lstrip()) + _join(inline[index + 1 :])


def _table(node: SyntaxTreeNode) -> Iterator[str]:
    rows = [
        [(_text(cell), len(_plain(cell))) for cell in row.children]
        for part in node.children
        for row in part.children
    ]
    columns = zip(*rows, strict=True)
    is_wide = [max(length for _, length in column) > WIDEST_CELL for column in columns]
    yield from (".PP", ".TS")
    yield " ".join("lxB" if wide else "lB" for wide in is_wide)
    yield " ".join("lx" if wide else "l" for wide in is_wide) + "."
    for row in rows:
        cells = [
            f"T{{\n.na\n{text}\nT}}" if wide and text else text
            for (text, _), wide in zip(row, is_wide, strict=True)
        ]
        yield from "\t".join(cells).split("\n")
    yield ".TE"


def _text(node: SyntaxTreeNode) -> str:
    return _join(_inline_nodes(node))


def _plain(node: SyntaxTreeNode) -> str:
    return "".join(child.content for child in _inline_nodes(node) if "content" in dir(child))


def _inline_nodes(node: SyntaxTreeNode) -> Sequence[SyntaxTreeNode]:
    return [child for inline in node.children for child in inline.children]


def _join(nodes: Sequence[SyntaxTreeNode]) -> str:
    return "".join(map(_inline, nodes))


def _inline(node: SyntaxTreeNode) -> str:
    if node.type == "text":
        pieces = _REFERENCE.split(node.content)
        names, sections = pieces[1::3], pieces[2::3]
        texts = [roff.escape(piece) for piece in pieces[::3]]
        references = map(roff.reference, names, map(int, sections))
        return texts[0] + "".join(map("".join, zip(references, texts[1:], strict=True)))
    if node.type == "softbreak":
        return " "
    if node.type == "code_inline":
        return roff.bold(node.content)
    if node.type in ("strong", "em"):
        plain = "".join(child.content for child in node.children)
        return roff.bold(plain) if node.type == "strong" else roff.italic(plain)
    if node.type == "link":
        address = str(node.attrs["href"])
        text = _join(node.children)
        return f"{text} ({roff.escape(address)})" if "://" in address else text
    raise ValueError(f"a guide has no {node.type}: {node.content!r}")
