"""The exit statuses of ``nsq``, the same for every command."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """What a script can tell from ``$?``; ``meaning`` is its line in the manual and README.md."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitStatus:
        status = int.__new__(cls, value)
        status._value_ = value
        status.meaning = meaning
        return status

    DONE = 0, "done"
    FAILED = 1, "failed, or a threshold of `nsq stat` was passed"
    USAGE = 2, "the command line cannot work"
    NOT_FOUND = 3, "topic, channel or node not found"
    UNREACHABLE = 4, "cannot connect, or no answer in time"
    REFUSED = 5, "refused: TLS, authorization or permission"
    PARTLY_DONE = 6, "partly done"
    LIMIT_NOT_REACHED = (
        7,
        "a limit was not reached, such as `-n 10 --for 1m` that saw four messages",
    )
    INTERRUPTED = 130, "interrupted (SIGINT), after draining; a second signal leaves at once"
    READER_GONE = 141, "the reader of the output went away"
    TERMINATED = 143, "terminated (SIGTERM), after draining; a second signal leaves at once"
