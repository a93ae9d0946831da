"""Which topics there are to archive: those that match a pattern, known to any nsqlookupd or nsqd.

All are asked, at once and again and again, and the answers are united: one that is down hides
nothing that another knows. Only when all have answered is a topic that nobody named taken for gone.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import open_cluster
from nsqtools.cluster.name_patterns import named_topics
from nsqtools.errors import ConfigurationError

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class KnownTopics:
    """The topics somebody named; ``is_complete`` when everybody answered."""

    names: frozenset[str]
    is_complete: bool


class TopicDiscovery:
    """Asks for the topics whose name contains ``pattern``, a regular expression (as nsq_to_file).

    Raises `ConfigurationError` for a pattern that is not one.
    """

    def __init__(self, pattern: str, connection: ConnectionSettings) -> None:
        try:
            self._matches = re.compile(pattern).search
        except re.error as exc:
            raise ConfigurationError(
                f"{pattern!r} is not a regular expression: {exc}",
                hint="For example '^orders[.]': topics whose name begins so.",
            ) from None
        self._connection = connection

    def ask(self) -> KnownTopics:
        """Ask everybody. Failures are logged; raises the first one when nobody answered."""
        with open_cluster(self._connection) as cluster:
            names, failures = named_topics(cluster)
        for failure in failures:
            log.warning("cannot list the topics of %s: %s", failure.address, failure.error)
        return KnownTopics(frozenset(filter(self._matches, names)), is_complete=not failures)
