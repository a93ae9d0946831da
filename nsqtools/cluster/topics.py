"""Look a topic up before subscribing to it.

A SUB creates topic and channel, so a misspelt topic would leave debris on nsqd and wait for ever.
And nsqd hands the backlog of a topic without channels to its first channel: if that is an ephemeral
one, what it does not consume is destroyed with it when its client leaves.

Who can be asked: the nsqlookupd given; the nsqd whose HTTP addresses are given; else the usual HTTP
port beside each TCP address, believed only if its /info names that TCP port.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.addresses import (
    LOOKUPD_HTTP_PORT,
    NSQD_HTTP_PORT,
    Address,
    http_url,
    parse_address,
)
from nsqtools.protocol.names import is_ephemeral

TIMEOUT_S = 2.0
HTTP_PORT_OFFSET = 1  # nsqd listens on 4150 and 4151 unless told otherwise


@dataclass(slots=True)
class TopicReport:
    """What was found out about a topic.

    ``backlog`` counts the messages queued in the topic itself where it has no channel. ``asked``
    and ``failed`` say who answered and what went wrong; ``known_topics`` are names to suggest.
    """

    topic: str
    exists: bool = False
    channels: set[str] = field(default_factory=set)
    backlog: int = 0
    asked: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    known_topics: set[str] = field(default_factory=set)


def inspect_topic(
    topic: str,
    *,
    nsqd_tcp_addresses: Sequence[str] = (),
    lookupd_http_addresses: Sequence[str] = (),
    nsqd_http_addresses: Sequence[str] = (),
    address_map: Mapping[str, str] | None = None,
) -> TopicReport:
    """Ask everybody who can be asked. Failures are noted in the report, none is raised."""
    report = TopicReport(topic)
    nsqd_urls = [http_url(address, NSQD_HTTP_PORT) for address in nsqd_http_addresses]
    for address in lookupd_http_addresses:
        url = http_url(address, LOOKUPD_HTTP_PORT)
        for node in _ask_lookupd(url, report):
            mapped = (address_map or {}).get(str(node), str(node))
            nsqd_urls.append(http_url(mapped, NSQD_HTTP_PORT))
    for url in dict.fromkeys(nsqd_urls):
        _ask_nsqd(url, report, None)
    if not nsqd_http_addresses:
        for text in nsqd_tcp_addresses:
            tcp = parse_address(text)
            beside = Address(tcp.host, min(tcp.port + HTTP_PORT_OFFSET, 65535))
            _ask_nsqd(http_url(str(beside), NSQD_HTTP_PORT), report, tcp)
    return report


def check_subscription(
    report: TopicReport, channel: str, *, create: bool = False, force: bool = False
) -> str:
    """Decide whether to subscribe. Return "" or one line of warning to tell.

    Raises `NotFoundError` for a topic that nobody asked has, unless ``create``; and
    `ConfigurationError` when an ephemeral channel would destroy the topic's backlog, unless
    ``force``.
    """
    topic = report.topic
    if not report.exists:
        if not report.asked:
            why = f" ({report.failed[0]})" if report.failed else ""
            return f"cannot check whether topic {topic} exists{why}; subscribing creates it"
        if create:
            return ""
        raise NotFoundError(f"topic {topic} does not exist", hint=_suggestion(report))
    if is_ephemeral(channel) and not report.channels and report.backlog and not force:
        raise ConfigurationError(
            f"topic {topic} has no channel and {report.backlog} messages waiting: what an "
            f"ephemeral channel does not read before you leave would be destroyed",
            hint="Name a channel that stays (--channel NAME), or go on with --force.",
        )
    return ""


def _suggestion(report: TopicReport) -> str:
    near = difflib.get_close_matches(report.topic, sorted(report.known_topics), n=3)
    go_on = "Use --create to subscribe all the same."
    return f"Did you mean {' or '.join(near)}? {go_on}" if near else go_on


def _ask_lookupd(url: str, report: TopicReport) -> Iterator[Address]:
    try:
        with NsqlookupdHTTPClient(url, timeout_s=TIMEOUT_S) as lookupd:
            found = lookupd.lookup(report.topic)
            if not found.is_known:
                report.known_topics.update(lookupd.topics())
    except NsqError as exc:
        report.failed.append(str(exc))
        return
    report.asked.append(url)
    report.exists |= found.is_known
    report.channels |= found.channels
    yield from (node.http for node in found.nodes if node.http is not None)


def _ask_nsqd(url: str, report: TopicReport, tcp: Address | None) -> None:
    try:
        with NsqdHTTPClient(url, timeout_s=TIMEOUT_S) as nsqd:
            if tcp is not None and nsqd.info().get("tcp_port") != tcp.port:
                report.failed.append(f"{url} is not the HTTP port of {tcp}")
                return
            topics = _named(nsqd.stats(report.topic).get("topics"), "topic_name")
            if not topics:
                report.known_topics.update(_named(nsqd.stats().get("topics"), "topic_name"))
    except NsqError as exc:
        report.failed.append(str(exc))
        return
    report.asked.append(url)
    if (stats := topics.get(report.topic)) is not None:
        report.exists = True
        channels = _named(stats.get("channels"), "channel_name")
        report.channels.update(channels)
        if not channels:
            report.backlog += int(stats.get("depth") or 0)


def _named(items: Iterable[Any] | None, key: str) -> dict[str, dict[str, Any]]:
    """Index a list of /stats by the name in each entry."""
    return {item[key]: item for item in items or () if isinstance(item, dict) and key in item}
