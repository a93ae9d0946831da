r"""Patterns of Go's regexp package, compiled and matched as Go does, in linear time.

The library re2 has all of Go's syntax, and accepts two things that Go refuses, which
`compile_go_regexp` refuses too. Without re2, `compile_plain_regexp` has the syntax that Go shares
with Python.

Python's ``re`` backtracks, so ``(a+)+b`` could stop a server for hours. Here a pattern is a
function from the positions in a name before it to the positions after it. Positions are the bits of
an int, so a step is one operation for all of them: an atom shifts them, alternatives join them, and
a repetition ends when it reaches no new position.

The plain syntax: literals, ``.``, ``\d \D \w \W \s \S``, escaped punctuation, classes without
names, groups, ``|``, ``* + ? {n,m}`` (also lazy), and ``^ $ \A \z \b``. Everything else is refused,
because Go and Python disagree about it or only one of them has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

Matcher = Callable[[str], object]
"""Whether a pattern matches anywhere in a name, as truth."""

_MAX_RE2_GROUPS = 1000  # Go nests no more, and re2 takes the square of the depth to compile them
_QUOTED_OR_ESCAPED = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.", re.DOTALL)


def compile_go_regexp(pattern: str) -> Matcher:
    """Compile a pattern. Raises ``ValueError`` with the reason to refuse it."""
    try:
        import re2
    except ImportError:
        return compile_plain_regexp(pattern)

    options = re2.Options()
    options.log_errors = False  # they would go to stderr
    try:
        if pattern.count("(") > _MAX_RE2_GROUPS:
            raise re2.error(b"more than %d groups" % _MAX_RE2_GROUPS)
        if r"\C" in _QUOTED_OR_ESCAPED.findall(pattern):  # any byte
            raise re2.error(rb"invalid escape sequence: \C")
        compiled = re2.compile(pattern, options)
        if not all(map(str.isascii, compiled.groupindex)):
            raise re2.error(b"invalid named capture")
    except re2.error as exc:
        raise ValueError(exc.args[0].decode("utf-8", "replace")) from exc
    matches: Matcher = compiled.search
    return matches


# -- without re2 --------------------------------------------------------------------------------

# A valid name of a topic or channel is not longer, so a longer one needs no match.
_MAX_NAME = 64
# Each level of groups is a few frames of Python's stack.
_MAX_GROUPS = 100
_MAX_REPEAT = 1000  # Go's limit
_HINT = "the complete syntax of Go needs: pip install 'nsqtools[auth-regex]'"

_ESCAPE = r"\\[dDwWsS!-/:-@\[-`{-~]"
# Python reserves doubled characters in a class for set operations, and [ for nested classes.
_CLASS = rf"\[\^?\]?(?:{_ESCAPE}|(?!(?P<twice>[-&~|])(?P=twice))[^\\\[\]])*\]"
_TOKEN = re.compile(
    rf"(?P<atom>\.|{_ESCAPE}|{_CLASS}|[^\\\[\](){{}}|*+?^$.])"
    r"|(?P<assertion>[\^$]|\\[Azb])"
    r"|(?P<repeat>[*+?]|\{[0-9]{1,4}(?:,[0-9]{0,4})?\})\??"
    r"|(?P<open>\((?:\?:|(?!\?)))|(?P<close>\))|(?P<bar>\|)",
    re.DOTALL,
)


class _Name:
    """A name, with the positions of the characters that an atom matches."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self._positions: dict[re.Pattern[str], int] = {}

    def positions(self, pattern: re.Pattern[str]) -> int:
        """Return where a pattern of one character, or of none, matches."""
        positions = self._positions.get(pattern)
        if positions is None:
            positions = sum(1 << match.start() for match in pattern.finditer(self.text))
            self._positions[pattern] = positions
        return positions


_Step = Callable[[_Name, int], int]
"""From the positions before a part of the pattern to those after it."""


def compile_plain_regexp(pattern: str) -> Matcher:
    """Compile a pattern. Raises ``ValueError`` if it is invalid or outside the syntax."""
    step = _Parser(pattern).parse()

    def matches(text: str) -> bool:
        name = _Name(text)
        return len(text) <= _MAX_NAME and step(name, 2 * name.end - 1) > 0

    return matches


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0
        self._count = 1  # largest product of counts inside each other in the last part

    def parse(self) -> _Step:
        step = self._alternatives()
        if self._position < len(self._pattern):
            raise self._refused()
        return step

    def _refused(self) -> ValueError:
        rest = self._pattern[self._position :]
        return ValueError(f"{rest[:20]!r} is invalid or not supported here; {_HINT}")

    def _next(self, *kinds: str) -> re.Match[str] | None:
        """Consume the next token if it is of one of these kinds."""
        token = _TOKEN.match(self._pattern, self._position)
        if token is None or token.lastgroup not in kinds:
            return None
        self._position = token.end()
        return token

    def _alternatives(self) -> _Step:
        alternatives = [self._sequence()]
        largest = self._count
        while self._next("bar"):
            alternatives.append(self._sequence())
            largest = max(largest, self._count)
        self._count = largest
        return partial(_any_of, alternatives)

    def _sequence(self) -> _Step:
        steps: list[_Step] = []
        largest = 1
        while token := self._next("atom", "assertion", "open"):
            if token.lastgroup == "assertion":  # Python repeats no assertion
                steps.append(self._assertion(token[0]))
            else:
                self._count = 1
                step = self._atom(token) if token.lastgroup == "atom" else self._group()
                repeat = self._next("repeat")
                steps.append(self._repetition(step, repeat["repeat"]) if repeat else step)
                largest = max(largest, self._count)
        self._count = largest
        return partial(_each_of, steps)

    def _group(self) -> _Step:
        self._depth += 1
        if self._depth > _MAX_GROUPS:
            raise ValueError(f"more than {_MAX_GROUPS} groups inside each other; {_HINT}")
        step = self._alternatives()
        if not self._next("close"):
            raise self._refused()
        self._depth -= 1
        return step

    def _atom(self, token: re.Match[str]) -> _Step:
        try:
            return partial(_advance, re.compile(token[0], re.ASCII))
        except re.error:  # a range that is reversed, or of classes
            self._position = token.start()
            raise self._refused() from None

    def _assertion(self, text: str) -> _Step:
        # Python's $ matches before a line break as well, and \z is new in Python 3.14.
        names = {"^": r"\A", "$": r"\Z", r"\z": r"\Z"}
        return partial(_stay, re.compile(names.get(text, text), re.ASCII))

    def _repetition(self, step: _Step, text: str) -> _Step:
        if text in ("*", "+", "?"):
            return partial(_repeat, step, int(text == "+"), 1 if text == "?" else None)
        least, comma, most = text[1:-1].partition(",")
        minimum = int(least)
        maximum = int(most) if most else None if comma else minimum
        self._count *= max(minimum, maximum or 1)
        if self._count > _MAX_REPEAT or (maximum is not None and minimum > maximum):
            raise ValueError(f"invalid repeat count: {text}")
        return partial(_repeat, step, minimum, maximum)


def _advance(pattern: re.Pattern[str], name: _Name, positions: int) -> int:
    return (positions & name.positions(pattern)) << 1


def _stay(pattern: re.Pattern[str], name: _Name, positions: int) -> int:
    return positions & name.positions(pattern)


def _any_of(steps: list[_Step], name: _Name, positions: int) -> int:
    reached = 0
    for step in steps:
        reached |= step(name, positions)
    return reached


def _each_of(steps: list[_Step], name: _Name, positions: int) -> int:
    for step in steps:
        if not positions:
            break
        positions = step(name, positions)
    return positions


def _repeat(step: _Step, minimum: int, maximum: int | None, name: _Name, positions: int) -> int:
    for _ in range(minimum):
        previous, positions = positions, step(name, positions)
        if positions == previous:  # none are left, or a repetition of nothing stays where it is
            break
    reached = fresh = positions
    count = minimum
    while fresh and (maximum is None or count < maximum):
        fresh = step(name, fresh) & ~reached
        reached |= fresh
        count += 1
    return reached
