"""Without re2, patterns of auth servers match as in Go, or are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.go_regexp import compile_go_regexp, compile_plain_regexp

ATOMS = ["a", "b", ".", r"\.", "-", "[ab]", "[^a]", "[a-c.]", "[]a]", r"\w", r"\D", r"[\d-]"]
MARKS = ["(", "(?:", ")", "|", "*", "+", "?", "*?", "{2}", "{1,3}", "{0,}", "{3,2}", "^", "$"]
MARKS += [r"\b", r"\z", r"\A", "(a|ab)", "(b*)+"]
REFUSED = ["{,2}", "{", "]", "[[:alpha:]]", "(?i)", r"\pL", "[a--b]", "[a&&b]", r"\1", "a++"]
REFUSED += [
    "(?P<x>a)",
    "(?=a)",
    r"\Z",
    r"\x41",
    "[b-a]",
    r"[a-\d]",
    "a**",
    "a{1001}",
    "(",
    ")",
]

patterns = st.lists(st.sampled_from(ATOMS + MARKS), max_size=12).map("".join)
names = st.text("ab.-_1", max_size=12)


@given(patterns, st.lists(names, max_size=5))
def test_a_pattern_that_is_accepted_matches_as_in_go(pattern: str, names: list[str]) -> None:
    try:
        matches = compile_plain_regexp(pattern)
    except ValueError:
        return
    matches_in_go = compile_go_regexp(pattern)
    for name in names:
        assert bool(matches(name)) == bool(matches_in_go(name))


@given(patterns)
def test_a_common_pattern_without_a_repeated_assertion_is_accepted(pattern: str) -> None:
    try:
        re.compile(pattern.replace(r"\z", r"\Z"))
        compile_go_regexp(pattern)
    except (re.error, ValueError):
        return
    compile_plain_regexp(pattern)


@pytest.mark.parametrize("part", REFUSED)
def test_other_syntax_is_refused_and_names_the_extra(part: str) -> None:
    with pytest.raises(ValueError, match=r"nsqtools\[auth-regex\]'|invalid repeat count"):
        compile_plain_regexp(f"^a.{part}")
