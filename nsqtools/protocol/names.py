"""Topic and channel names.

A name is 1 to 64 characters of ``[.a-zA-Z0-9_-]``, the optional suffix ``#ephemeral`` included in
the count (nsqd, internal/protocol/names.go; the protocol page prints ``1 <`` where nsqd accepts 1).
Names go into command lines unquoted, so the check is also what keeps a newline in a name from
becoming a second command: it must match the whole text, and ``$`` would let a newline pass.
"""

from __future__ import annotations

import re

from nsqtools.errors import ConfigurationError

MAX_NAME_LENGTH = 64
EPHEMERAL = "#ephemeral"

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")


def is_valid_name(name: str) -> bool:
    """Tell whether nsqd would accept the name for a topic or a channel."""
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    """Tell whether the topic or channel lives in memory only and goes with its last user."""
    return name.endswith(EPHEMERAL)


def check_topic(name: str) -> str:
    """Return the topic name unchanged. Raises `ConfigurationError` when nsqd would refuse it."""
    return _check("topic", name)


def check_channel(name: str) -> str:
    """Return the channel name unchanged. Raises `ConfigurationError` when nsqd would refuse it."""
    return _check("channel", name)


def _check(kind: str, name: str) -> str:
    if is_valid_name(name):
        return name
    raise ConfigurationError(
        f"invalid {kind} name {name!r}",
        hint=f"A {kind} name is 1 to {MAX_NAME_LENGTH} characters of a-z A-Z 0-9 . _ -, "
        f"optionally ending in {EPHEMERAL}.",
    )
