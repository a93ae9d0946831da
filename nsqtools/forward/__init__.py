"""Forward topics to another cluster, to HTTP or to commands, each message delivered, then finished.

`forwarder` is the engine, `dispatcher` what follows from each
outcome, `nsq_sink`, `http_sink` and `exec_sink` where it delivers. Here are the choices of the
commands, for the command line to read at no cost.
"""

from __future__ import annotations

import enum


class ForwardMode(enum.Enum):
    """Of nsqd. ``hash``: the same for the same key."""

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    FAILOVER = "failover"


class EndpointMode(enum.Enum):
    """Of HTTP endpoints. ``round-robin``: in turn, those with the fewest requests under way first.
    ``all``: each message to every one of them."""

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    FAILOVER = "failover"
    ALL = "all"


class Redirects(enum.Enum):
    """Which redirects of an endpoint are followed; only those that keep method and body are."""

    REFUSE = "refuse"
    SAME_HOST = "same-host"
    FOLLOW = "follow"


class BatchForm(enum.Enum):
    """How several messages are one body."""

    NDJSON = "ndjson"
    JSON = "json"
