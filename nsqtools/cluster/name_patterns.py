"""Names of topics and channels: list them, and select by pattern.

A pattern is a glob as in a shell (``clicks``, ``web*``), or a regular expression between slashes
that is searched for (``/^(web|app)_/``). It is one language in every command. No name of NSQ has
``*``, ``?``, ``[`` or ``/``, so a text with one of them is always a pattern.

Names are asked for as cheaply as possible. nsqlookupd keeps them ready; nsqd is asked only where
there is no nsqlookupd, or none that answers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.stats import read_stats


def topic_names(cluster: Cluster) -> list[str]:
    """Return all topics. Raises the first failure when nobody answers."""
    answers, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    if answers:
        return sorted({name for names in answers.values() for name in names})
    stats = cluster.stats()
    return sorted({each.topic_name for node in stats.nodes for each in node.stats.topics or ()})


def named_topics(cluster: Cluster) -> tuple[set[str], list[DaemonFailure]]:
    """Return the topics of every nsqlookupd and of every nsqd given by address, and who failed.

    Raises the first failure when nobody answers.
    """
    answers, failures = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    nsqds, impostors = cluster.nsqds_among()
    stats, failed = cluster.ask(
        {nsqd.address: nsqd.client for nsqd in nsqds},
        lambda nsqd: read_stats(nsqd.stats()).topics or (),
    )
    failures += [*impostors, *failed]
    if failures and not answers and not stats:
        raise failures[0].error
    names = {name for names in answers.values() for name in names}
    return names | {each.topic_name for topics in stats.values() for each in topics}, failures


def channel_names(cluster: Cluster, topic: str) -> list[str]:
    """Return the channels of a topic, or of all with ``""``. Raises as above."""
    if topic:
        answers, _ = cluster.ask(cluster.lookupds, lambda client: client.channels(topic))
        if answers:
            return sorted({name for names in answers.values() for name in names})
    stats = cluster.stats(topic)
    return sorted(
        {
            channel.channel_name
            for node in stats.nodes
            for each in node.stats.topics or ()
            for channel in each.channels
        }
    )


def is_pattern(text: str) -> bool:
    """Tell whether the text can match several names."""
    return any(mark in text for mark in "*?[/")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Tell whether one of the patterns matches the name; without patterns every name matches.

    Raises `ConfigurationError` for a regular expression that is none.
    """
    return not patterns or any(_matcher(pattern)(name) for pattern in patterns)


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[str], bool]:
    if not (len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")):
        return lambda name: fnmatchcase(name, pattern)
    try:
        expression = re.compile(pattern[1:-1])
    except re.error as error:
        raise ConfigurationError(f"invalid regular expression {pattern} ({error})") from error
    return lambda name: expression.search(name) is not None


def select(what: str, patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the names that the patterns match, in order.

    Raises `NotFoundError`, with similar names, for a pattern that matches none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = set(filter(_matcher(pattern), names))
        if not found:
            raise missing(what, pattern, names)
        chosen |= found
    return sorted(chosen)


def missing(what: str, pattern: str, names: Collection[str]) -> NotFoundError:
    """Return the error for a name that does not exist or a pattern that matches nothing."""
    if is_pattern(pattern):
        return NotFoundError(f"no {what} matches {pattern}", hint=_glob_hint(pattern, names))
    near = difflib.get_close_matches(pattern, sorted(names), n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else ""
    return NotFoundError(f"{what} {pattern} does not exist", hint=hint)


def _glob_hint(pattern: str, names: Collection[str]) -> str:
    """What to write for a pattern that is a regular expression without its slashes."""
    try:
        meant = any(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return ""
    return f"This is a glob; write '/{pattern}/' for a regular expression." if meant else ""


def on_no_nsqd(topic: str) -> str:
    """Return the message about a topic that only nsqlookupd knows."""
    return f"topic {topic} is registered with nsqlookupd, but no nsqd has it"
