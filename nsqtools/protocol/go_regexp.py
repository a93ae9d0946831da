"""Patterns of Go's regexp package, compiled and matched as Go does, in linear time.

The library re2 has all of Go's syntax, and accepts two things that Go refuses, which
`compile_go_regexp` refuses too. Without re2, `plain_regexp` has the syntax that Go shares with
Python.
"""

from __future__ import annotations

import re

from nsqtools.protocol.plain_regexp import Matches, compile_plain_regexp

_MAX_GROUPS = 1000  # Go nests no more, and re2 takes the square of the depth to compile them
_QUOTED_OR_ESCAPED = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.", re.DOTALL)


def compile_go_regexp(pattern: str) -> Matches:
    """Compile a pattern. Raises ``ValueError`` with the reason to refuse it."""
    try:
        import re2
    except ImportError:
        return compile_plain_regexp(pattern)

    options = re2.Options()
    options.log_errors = False  # they would go to stderr
    try:
        if pattern.count("(") > _MAX_GROUPS:
            raise re2.error(b"more than %d groups" % _MAX_GROUPS)
        if r"\C" in _QUOTED_OR_ESCAPED.findall(pattern):  # any byte
            raise re2.error(rb"invalid escape sequence: \C")
        compiled = re2.compile(pattern, options)
        if not all(map(str.isascii, compiled.groupindex)):
            raise re2.error(b"invalid named capture")
    except re2.error as exc:
        raise ValueError(exc.args[0].decode("utf-8", "replace")) from exc
    matches: Matches = compiled.search
    return matches
