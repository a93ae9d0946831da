"""Patterns of auth servers: they match what Python's match, and no name makes them slow."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.server.tcp.name_pattern import NamePattern

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "-",
        r"\.",
        ".",
        "[ab]",
        "[^a]",
        "[a-c.]",
        r"\d",
        r"\w",
        r"\W",
        "[0-9_-]",
        "^",
        "$",
        r"\b",
    ]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda pattern: f"({pattern})"),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("ab.c-_1#", max_size=8))
def test_a_pattern_matches_what_pythons_matches(pattern: str, name: str) -> None:
    assert NamePattern(pattern).search(name) == bool(re.search(pattern, name))


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("", "anything", True),
        ("(?i)ORDERS", "my.orders", True),
        ("(?i:O)rders", "orders", True),
        ("^[[:alpha:]]+$", "abc", True),
        ("^[[:alpha:]]+$", "ab1", False),
        ("^(?P<team>a|b)\\.", "b.x", True),
        ("orders$", "orders#ephemeral", False),
    ],
)
def test_the_syntax_of_go(pattern: str, name: str, matches: bool) -> None:
    assert NamePattern(pattern).search(name) is matches


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[",
        "[a",
        "*",
        "a{3,1}",
        "\\",
        "(?=a)",
        "[z-a]",
        "((a{99}){99}){9}",
        "(" * 99,
    ],
)
def test_a_faulty_or_oversized_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        NamePattern(pattern)


@pytest.mark.parametrize("pattern", ["^(([a-z])+.)+[A-Z]([a-z])+$", "(a*)*b", "(.*.*.*.*.*)*="])
def test_no_name_takes_long(pattern: str) -> None:
    started_s = time.process_time()
    assert not NamePattern(pattern).search("a" * 64)
    assert time.process_time() - started_s < 0.5
