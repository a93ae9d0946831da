"""Regular expressions for names of topics and channels, matched in linear time. Pure.

The patterns come from an auth server and the names from any client. Python's `re` tries every way
to match, and for some patterns a name of 40 letters has more ways than there are seconds; Go's does
not. So all ways are followed at the same time, a character at a time (Thompson's construction).

Go's syntax, as far as it makes a difference for names: what a match contains is not asked for, so
groups only group and laziness means nothing. What is not supported is refused as a faulty pattern.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

_ALPHABET = frozenset(string.ascii_letters + string.digits + "._-#")  # of a valid name
_CLASSES = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
}
_POSIX = {
    "alpha": frozenset(string.ascii_letters),
    "digit": frozenset(string.digits),
    "alnum": frozenset(string.ascii_letters + string.digits),
    "lower": frozenset(string.ascii_lowercase),
    "upper": frozenset(string.ascii_uppercase),
    "word": _CLASSES["w"],
    "punct": frozenset("._-#"),
    "xdigit": frozenset(string.hexdigits),
}
_MAX_STATES = 2000
_MAX_DEPTH = 50
_REPEAT = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(i?s?):))?")

Part = Callable[["NamePattern", int], int]
"""Adds its states, which lead on to the given one, and returns the first of them."""


class NamePattern:
    """``search`` matches anywhere in a name. Raises ``ValueError`` for a faulty pattern."""

    def __init__(self, pattern: str) -> None:
        # a state is (characters, next), or (None, both nexts), or (an anchor, next)
        self._characters: list[frozenset[str] | str | None] = [None]
        self._next: list[tuple[int, ...]] = [()]
        self._start = _Parser(pattern).parse()(self, 0)

    def add(self, characters: frozenset[str] | str | None, *following: int) -> int:
        """Add a state. Raises ``ValueError`` when there are too many."""
        if len(self._next) >= _MAX_STATES:
            raise ValueError("the pattern is too large")
        self._characters.append(characters)
        self._next.append(following)
        return len(self._next) - 1

    def lead(self, state: int, *following: int) -> None:
        """Say where a state leads that was added before what follows it."""
        self._next[state] = following

    def search(self, name: str) -> bool:
        """Return whether it matches anywhere in the name."""
        states: set[int] = set()
        for at in range(len(name) + 1):
            states = self._closure({*states, self._start}, name, at)
            if 0 in states:
                return True
            character = name[at : at + 1]
            states = {
                self._next[state][0]
                for state in states
                if character and isinstance(found := self._characters[state], frozenset)
                if character in found
            }
        return False

    def _closure(self, states: set[int], name: str, at: int) -> set[int]:
        """Follow what needs no character."""
        todo, seen = [*states], set(states)
        while todo:
            state = todo.pop()
            characters = self._characters[state]
            if isinstance(characters, frozenset):
                continue
            if isinstance(characters, str) and not _holds(characters, name, at):
                continue
            fresh = [each for each in self._next[state] if each not in seen]
            seen.update(fresh)
            todo += fresh
        return seen


def _holds(anchor: str, name: str, at: int) -> bool:
    if anchor == "^":
        return at == 0
    if anchor == "$":
        return at == len(name)
    is_edge = (name[at - 1 : at] in _WORD) != (name[at : at + 1] in _WORD)
    return is_edge == (anchor == "b")


_WORD = {*_CLASSES["w"]}


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._ignores_case = False

    def parse(self) -> Part:
        if flags := re.match(r"\(\?[ims]+\)", self._text):
            self._ignores_case = "i" in flags[0]
            self._at = flags.end()
        part = self._alternatives()
        if self._at < len(self._text):
            raise ValueError("unexpected )")
        return part

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (character := self._peek()):
            raise ValueError("unexpected end of the pattern")
        self._at += 1
        return character

    def _alternatives(self) -> Part:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        return lambda nfa, then: nfa.add(None, *[part(nfa, then) for part in parts])

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))

        def sequence(nfa: NamePattern, then: int) -> int:
            for part in reversed(parts):
                then = part(nfa, then)
            return then

        return sequence

    def _repeated(self, part: Part) -> Part:
        while True:
            if (sign := self._peek()) and sign in "*+?":
                self._at += 1
                low, high = (1 if sign == "+" else 0), (1 if sign == "?" else None)
            elif found := _REPEAT.match(self._text, self._at):
                self._at = found.end()
                low = int(found[1])
                high = low if found[2] is None else int(found[3]) if found[3] else None
            else:
                return part
            if self._peek() == "?":  # lazy
                self._at += 1
            part = _times(part, low, high)

    def _atom(self) -> Part:
        if group := _GROUP.match(self._text, self._at):
            return self._group(group)
        character = self._take()
        if character == "[":
            return _one_of(self._class())
        if character == ".":
            return _one_of(_ALPHABET)
        if character in "^$":
            return lambda nfa, then: nfa.add(character, then)
        if character in "*+?":
            raise ValueError("missing argument to repetition operator")
        if character == "\\":
            return self._escaped(self._take())
        return _one_of(self._cased(frozenset(character)))

    def _group(self, group: re.Match[str]) -> Part:
        self._at, self._depth = group.end(), self._depth + 1
        if self._depth > _MAX_DEPTH or self._text.startswith("?", self._at):
            raise ValueError("unsupported group")
        before, self._ignores_case = (
            self._ignores_case,
            self._ignores_case or "i" in (group[1] or ""),
        )
        part = self._alternatives()
        if self._take() != ")":
            raise ValueError("missing )")
        self._ignores_case, self._depth = before, self._depth - 1
        return part

    def _escaped(self, character: str) -> Part:
        anchor = {"A": "^", "z": "$", "b": "b", "B": "B"}.get(character)
        if anchor is not None:
            return lambda nfa, then: nfa.add(anchor, then)
        return _one_of(self._cased(_escape(character)))

    def _class(self) -> frozenset[str]:
        is_negated = self._peek() == "^"
        self._at += is_negated
        found: set[str] = set()
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            if posix := re.compile(r"\[:(\w+):\]").match(self._text, self._at):
                self._at = posix.end()
                found |= _POSIX.get(posix[1], frozenset())
                continue
            character = self._take()
            some = _escape(self._take()) if character == "\\" else frozenset(character)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._take()
                last = self._take() if last == "\\" else last
                (first,) = some if len(some) == 1 else ("",)
                if not first or first > last:
                    raise ValueError("invalid character class range")
                some = frozenset(each for each in _ALPHABET if first <= each <= last)
            found |= some
        self._at += 1
        some = self._cased(frozenset(found))
        return _ALPHABET - some if is_negated else some

    def _cased(self, characters: frozenset[str]) -> frozenset[str]:
        if not self._ignores_case:
            return characters
        return frozenset(each for c in characters for each in (c.lower(), c.upper()))


def _escape(character: str) -> frozenset[str]:
    if character in _CLASSES:
        return _CLASSES[character]
    if character.lower() in _CLASSES:
        return _ALPHABET - _CLASSES[character.lower()]
    if character == "s":
        return frozenset()
    if character == "S":
        return _ALPHABET
    if character.isalnum():
        raise ValueError(f"unsupported escape \\{character}")
    return frozenset(character)


def _one_of(characters: frozenset[str]) -> Part:
    return lambda nfa, then: nfa.add(characters, then)


def _times(part: Part, low: int, high: int | None) -> Part:
    if high is not None and high < low:
        raise ValueError("invalid repeat count")

    def times(nfa: NamePattern, then: int) -> int:
        if high is None:
            loop = nfa.add(None)
            nfa.lead(loop, part(nfa, loop), then)
            then = loop
        else:
            end = then
            for _ in range(high - low):
                then = nfa.add(None, part(nfa, then), end)
        for _ in range(low):
            then = part(nfa, then)
        return then

    return times
