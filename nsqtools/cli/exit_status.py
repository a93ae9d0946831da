"""The exit statuses of ``nsq``, the same for every command."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """What a script can tell from ``$?``; the docstring of each is its line in the manual."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    """The topic, channel or node does not exist."""
    UNREACHABLE = 4
    """No connection, or no answer in time."""
    REFUSED = 5
    """TLS, authorisation or permission."""
    PARTLY_DONE = 6
    LIMIT_NOT_REACHED = 7
    """For example ``--count 10 --for 1m`` that saw four messages."""
    INTERRUPTED = 130
    """SIGINT, after draining."""
    READER_GONE = 141
    """The program that read our output closed it."""
    TERMINATED = 143
    """SIGTERM, after draining."""
