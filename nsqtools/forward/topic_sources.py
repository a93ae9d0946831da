"""What is forwarded: a consumer for each topic, those given and those that a pattern finds.

All of them share one backlog. The consumer of a topic that is deleted ends; when the topic is there
again, so is its consumer. See `cluster.topics` for how deletion is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from nsqtools.client.backlog import Backlog
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import CommonConsumer, Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import Deletions, KnownTopics, TopicDiscovery, Troubles, UnlistedTopics
from nsqtools.errors import ConfigurationError, NsqError

log = logging.getLogger("nsqtools")

RETRY_S = 5.0  # how often it is asked whether a topic is there again


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Which topics, from where.

    ``pattern`` is searched for in the names of topics; ``refresh_s`` is how often, in seconds.
    ``check`` raises `ConfigurationError` for a topic that must not be forwarded; ``user_agent`` is
    what the consumer of a topic says that it is.
    """

    topics: tuple[str, ...]
    channel: str
    connection: ConnectionSettings
    options: ClientOptions
    pattern: str | None = None
    refresh_s: float = 60.0
    check: Callable[[str], None] = lambda topic: None
    user_agent: Callable[[str], str] | None = None


class TopicSources:
    """The consumers. Its methods are called on one thread, `begin_stop` on any.

    Raises `ConfigurationError` for a wrong pattern.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self.backlog = Backlog()
        self._settings = settings
        self._consumers: dict[str, Consumer] = {}
        self._discovery: TopicDiscovery | None = None
        if settings.pattern is not None:
            self._discovery = TopicDiscovery(settings.pattern, settings.connection)
        self._deletions = Deletions(settings.connection)
        self._absent: set[str] = set()  # topics given that are deleted now
        self._refused: set[str] = set()  # topics found that must not be forwarded
        self._unlisted = UnlistedTopics(settings.connection)
        self._troubles = Troubles()
        self._refresh_at = self._retry_at = 0.0
        self._is_paused = False
        self._is_stopping = False

    def start(self, now: float) -> None:
        """Subscribe.

        Raises the connection error when a topic given cannot be reached, and when no daemon answers
        which topics a pattern matches; `ConfigurationError` for a topic given that must not be
        forwarded.
        """
        for topic in self._settings.topics:
            self._begin(topic).start(fail_fast=True)
        self._refresh_at = now + self._settings.refresh_s
        if self._discovery is not None:
            self._begin_found(self._discovery.ask())

    def begin_stop(self) -> None:
        """Take no more: what was not handed out goes back."""
        self._is_stopping = True
        for consumer in list(self._consumers.values()):
            consumer.begin_stop()

    def stop(self) -> None:
        """Wait until everything is answered."""
        self.begin_stop()
        for consumer in self._consumers.values():
            consumer.stop()

    def pause(self, is_paused: bool) -> None:
        """Take no more for now, or again."""
        self._is_paused = is_paused
        for consumer in self._consumers.values():
            consumer.set_max_in_flight(0 if is_paused else self._settings.options.max_in_flight)

    def ended(self, consumer: CommonConsumer) -> None:
        """A consumer has delivered its last message."""
        [topic] = consumer.topics
        if self._consumers.get(topic) is consumer and not self._is_stopping:
            del self._consumers[topic]

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def is_connected(self) -> bool:
        """Tell whether every topic has a connection, but for those that no nsqd has."""
        cut_off = {topic for topic, each in self._consumers.items() if not each.connections}
        return cut_off <= self._unlisted.among(cut_off)

    def refuse_unlisted(self) -> None:
        """Raise `NotFoundError` for a topic given that no nsqd had when it was asked last."""
        self._unlisted.refuse(self._settings.topics)

    def look(self, now: float) -> None:
        """Look for new topics of the pattern and for deleted ones, where it is time to."""
        if now >= self._refresh_at:
            self._refresh_at = now + self._settings.refresh_s
            for topic in self._consumers:
                self._settings.check(topic)
            if self._discovery is not None:
                self._refresh(self._discovery)
        self._let_deleted_go()
        if self._absent and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            for topic in self._deletions.found_again(self._absent):
                self._absent.discard(topic)
                self._begin(topic).start()

    def _begin(self, topic: str) -> Consumer:
        settings, options = self._settings, self._settings.options
        settings.check(topic)
        if settings.user_agent is not None:
            options = replace(options, user_agent=settings.user_agent(topic))
        consumer = self._consumers[topic] = Consumer(
            topic,
            settings.channel,
            nsqd_tcp_addresses=settings.connection.nsqd_tcp_addresses,
            lookupd_http_addresses=settings.connection.lookupd_http_addresses,
            options=options,
            address_map=settings.connection.address_map,
            on_error=lambda error: self._deletions.suspect(topic),
            _backlog=self.backlog,
        )
        if self._is_paused:
            consumer.set_max_in_flight(0)
        log.info("forwarding topic %s, channel %s", topic, settings.channel)
        return consumer

    def _refresh(self, discovery: TopicDiscovery) -> None:
        try:
            known = discovery.ask()
        except (NsqError, OSError) as exc:
            self._troubles.has("", f"no topics were found: {exc}; trying again")
            return
        self._troubles.over("")
        self._begin_found(known)

    def _begin_found(self, known: KnownTopics) -> None:
        for topic in sorted(
            known.names - {*self._consumers, *self._settings.topics, *self._refused}
        ):
            try:
                self._begin(topic).start()
            except ConfigurationError as exc:
                log.error("%s", exc)
                self._refused.add(topic)

    def _let_deleted_go(self) -> None:
        def is_cut_off(topic: str) -> bool:
            return topic in self._consumers and not self._consumers[topic].connections

        for topic in self._deletions.confirmed(is_cut_off):
            log.warning("topic %s was deleted; waiting until it is there again", topic)
            self._consumers.pop(topic).begin_stop()
            if topic in self._settings.topics:
                self._absent.add(topic)
