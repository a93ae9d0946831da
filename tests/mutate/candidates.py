"""Candidates for the list: every small change of a module that could matter.

comparisons     < and <=, > and >=, == and !=, is and is not, in and not in
conditions      negated; and for or
arithmetic      + and -, * and //, min and max
statements      a call whose value nobody uses is left out, except that of a logger
answers         True and False
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from mutate.mutants import Mutant

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger", "warnings"}


def candidates(file: str, source: str) -> Iterator[Mutant]:
    """The mutants of a module, from its top to its end."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for part, text in changes(node, source):
            mutant = _mutant(file, source, part, text)
            if mutant is not None:
                yield mutant


def changes(node: ast.AST, source: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """What part of the node can be replaced, and by what text."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARISONS[type(node.ops[0])]
        yield node, f"{text(node.left)} {operator} {text(node.comparators[0])}"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, word.join(f"({text(value)})" for value in node.values)
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(
        node.test, ast.Constant
    ):
        if not isinstance(node.test, ast.Compare | ast.BoolOp):
            yield node.test, f"not ({text(node.test)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not any(_is_text(side) for side in (node.left, node.right)):
            yield node, f"{text(node.left)} {ARITHMETIC[type(node.op)]} {text(node.right)}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in SWAPPED:
            yield node.func, SWAPPED[node.func.id]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if _root(node.value.func) not in LOGGERS:
            yield node, "pass"
    elif isinstance(node, ast.Return) and _is_answer(node.value):
        yield node.value, "False" if text(node.value) == "True" else "True"


def _is_answer(node: ast.expr | None) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr | ast.List | ast.Tuple):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _mutant(file: str, source: str, part: ast.expr | ast.stmt, text: str) -> Mutant | None:
    """Whole lines around the part, as many before it as make them unique."""
    lines = source.splitlines(keepends=True)
    first, last = part.lineno - 1, (part.end_lineno or part.lineno) - 1
    head = lines[first].encode()[: part.col_offset].decode()
    tail = lines[last].encode()[part.end_col_offset :].decode()
    new = head + text + tail
    while source.count("".join(lines[first : last + 1])) > 1:
        first -= 1
        if first < 0:
            return None
        new = lines[first] + new
    return Mutant(file, "".join(lines[first : last + 1]), new, ())
