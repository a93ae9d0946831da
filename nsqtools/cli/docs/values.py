"""The candidates for a value on the command line: what shells offer after ``--topic``.

Parameters are recognized by what users see, their names and the word for their value, so that a new
option completes like similar ones without being listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nsqtools.cluster.stats_columns import COLUMNS
from nsqtools.server.daemon_log import LEVELS


class Candidates(Enum):
    """Where the candidates for a value come from."""

    ANYTHING = ""
    """None."""
    CHOICE = "choice"
    FILE = "file"
    DIRECTORY = "dir"
    TOPIC = "topics"
    CHANNEL = "channels"
    NODE = "nodes"
    PROFILE = "profiles"
    CLIENT_OPTION = "options"
    """One of `ClientOptions`, and ``=``."""


@dataclass(frozen=True)
class Value:
    """A value: the word for it in help, and what can be offered for it."""

    metavar: str
    kind: Candidates = Candidates.ANYTHING
    choices: tuple[str, ...] = ()


BY_NAME = {
    "topic": Candidates.TOPIC,
    "channel": Candidates.CHANNEL,
    "profile": Candidates.PROFILE,
    "consumer-opt": Candidates.CLIENT_OPTION,
    "producer-opt": Candidates.CLIENT_OPTION,
    # of the daemons
    "config": Candidates.FILE,
    "data-path": Candidates.DIRECTORY,
    "tls-cert": Candidates.FILE,
    "tls-key": Candidates.FILE,
    "tls-root-ca-file": Candidates.FILE,
}

BY_METAVAR = {
    "FILE": Candidates.FILE,
    "PATH": Candidates.FILE,
    "DIR": Candidates.DIRECTORY,
    "NODE": Candidates.NODE,
}

CHOICES = {
    "COLUMN": tuple(COLUMNS),
    "tls-min-version": ("tls1.2", "tls1.3"),
    # of the daemons
    "log-level": LEVELS,
    "tls-client-auth-policy": ("require", "require-verify"),
    "tls-required": ("true", "false", "tcp-https"),
}
"""Values of options whose type does not list them, by name or by the word for the value."""


def value_of(name: str, metavar: str, choices: tuple[str, ...] = ()) -> Value:
    """The value of the option or argument ``name`` (``data-path``, without leading dashes)."""
    choices = choices or CHOICES.get(name) or CHOICES.get(metavar) or ()
    if not choices and "|" in metavar:  # hour|day|DURATION: lower-case words are typed literally
        choices = tuple(word for word in metavar.split("|") if not word.isupper())
    if choices:
        return Value(metavar, Candidates.CHOICE, choices)
    kind = BY_METAVAR.get(metavar.rpartition("_")[2])  # ARCHIVE_DIR is a DIR
    return Value(metavar, kind or BY_NAME.get(name, Candidates.ANYTHING))
