"""What can stand for a value on the command line: what shells offer after ``--topic``.

Parameters are told apart by what users see, their names and the word for their value, so that a
new option completes as its like do without being listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nsqtools.cluster.stats_columns import COLUMNS
from nsqtools.server.daemon_log import LEVELS


class Kind(Enum):
    """Where the candidates for a value come from."""

    ANYTHING = ""
    """From nowhere."""
    CHOICE = "choice"
    FILE = "file"
    DIRECTORY = "dir"
    TOPIC = "topics"
    CHANNEL = "channels"
    PROFILE = "profiles"
    CLIENT_OPTION = "options"
    """One of `ClientOptions`, and ``=``."""


@dataclass(frozen=True)
class Value:
    """A value: the word for it in help, and what can be offered for it."""

    metavar: str
    kind: Kind = Kind.ANYTHING
    choices: tuple[str, ...] = ()


BY_NAME = {
    "topic": Kind.TOPIC,
    "channel": Kind.CHANNEL,
    "profile": Kind.PROFILE,
    "consumer-opt": Kind.CLIENT_OPTION,
    "producer-opt": Kind.CLIENT_OPTION,
    # of the daemons
    "config": Kind.FILE,
    "data-path": Kind.DIRECTORY,
    "tls-cert": Kind.FILE,
    "tls-key": Kind.FILE,
    "tls-root-ca-file": Kind.FILE,
}

BY_METAVAR = {"FILE": Kind.FILE, "PATH": Kind.FILE, "DIR": Kind.DIRECTORY}

CHOICES = {
    "COLUMN": tuple(COLUMNS),
    "tls-min-version": ("tls1.2", "tls1.3"),
    # of the daemons
    "log-level": LEVELS,
    "tls-client-auth-policy": ("require", "require-verify"),
    "tls-required": ("true", "false", "tcp-https"),
}
"""What options take whose type does not tell, by name or by the word for the value."""


def value_of(name: str, metavar: str, choices: tuple[str, ...] = ()) -> Value:
    """The value of the option or argument ``name`` (``data-path``, without dashes in front)."""
    choices = choices or CHOICES.get(name) or CHOICES.get(metavar) or ()
    if not choices and "|" in metavar:  # hour|day|DURATION: what is typed as it stands
        choices = tuple(word for word in metavar.split("|") if not word.isupper())
    if choices:
        return Value(metavar, Kind.CHOICE, choices)
    kind = BY_METAVAR.get(metavar.rpartition("_")[2])  # ARCHIVE_DIR is a DIR
    return Value(metavar, kind or BY_NAME.get(name, Kind.ANYTHING))
