"""Which topics there are to archive: those that match a pattern, known to any nsqlookupd or nsqd.

All are asked, at once and again and again, and the answers are united: one that is down hides
nothing that another knows. Only when all have answered is a topic that nobody named taken for gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.addresses import LOOKUPD_HTTP_PORT, NSQD_HTTP_PORT, http_url

log = logging.getLogger("nsqtools")

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class KnownTopics:
    """The topics somebody named; ``is_complete`` when everybody answered."""

    names: frozenset[str]
    is_complete: bool


class TopicDiscovery:
    """Asks for the topics whose name contains ``pattern``, a regular expression (as nsq_to_file).

    Raises `ConfigurationError` for a pattern that is none, and when there is nobody to ask.
    """

    def __init__(
        self,
        pattern: str,
        lookupd_http_addresses: Sequence[str],
        nsqd_http_addresses: Sequence[str] = (),
    ) -> None:
        try:
            self._matches = re.compile(pattern).search
        except re.error as exc:
            raise ConfigurationError(
                f"{pattern!r} is not a regular expression: {exc}",
                hint="For example '^orders[.]': topics whose name begins so.",
            ) from None
        self._lookupd_urls = [http_url(text, LOOKUPD_HTTP_PORT) for text in lookupd_http_addresses]
        self._nsqd_urls = [http_url(text, NSQD_HTTP_PORT) for text in nsqd_http_addresses]
        if not self._lookupd_urls and not self._nsqd_urls:
            raise ConfigurationError(
                "a topic pattern needs somebody to ask for topics",
                hint="Give --lookupd-http-address (or --nsqd-http-address).",
            )

    def ask(self) -> KnownTopics:
        """Ask everybody. Failures are logged; raises the last one when nobody answered."""
        names: set[str] = set()
        failures: list[NsqError] = []
        for url in (*self._lookupd_urls, *self._nsqd_urls):
            try:
                names.update(self._topics_of(url))
            except NsqError as exc:
                failures.append(exc)
                log.warning("cannot list the topics of %s: %s", url, exc)
        if len(failures) == len(self._lookupd_urls) + len(self._nsqd_urls):
            raise failures[-1]
        return KnownTopics(frozenset(filter(self._matches, names)), is_complete=not failures)

    def _topics_of(self, url: str) -> list[str]:
        if url in self._lookupd_urls:
            with NsqlookupdHTTPClient(url, timeout_s=TIMEOUT_S) as lookupd:
                return lookupd.topics()
        with NsqdHTTPClient(url, timeout_s=TIMEOUT_S) as nsqd:
            return [str(topic.get("topic_name")) for topic in nsqd.stats().get("topics") or ()]
