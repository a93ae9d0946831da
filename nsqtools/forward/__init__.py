"""Forward topics to another cluster, to HTTP or to commands; finish messages after delivery.

`forwarder` consumes, `dispatcher` processes the outcomes, and `nsq_sink`, `http_sink` and
`exec_sink` deliver; `http_sink` chooses between `curl_pool` and `httpcore_pool`. This module has
only the enumerations of the options, so that the command line can import them at no cost.
"""

from __future__ import annotations

import enum


class ForwardMode(enum.Enum):
    """How to choose an nsqd. ``hash`` chooses the same one for the same key."""

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    FAILOVER = "failover"


class EndpointMode(enum.Enum):
    """How to choose an HTTP endpoint.

    ``round-robin`` rotates, and prefers the fewest requests under way. ``all`` sends each message
    to every endpoint.
    """

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    FAILOVER = "failover"
    ALL = "all"


class Redirects(enum.Enum):
    """Which redirects to follow, among those that keep the method and the body (307, 308)."""

    REFUSE = "refuse"
    SAME_HOST = "same-host"
    FOLLOW = "follow"


class BatchForm(enum.Enum):
    """Format of a body with several messages."""

    NDJSON = "ndjson"
    JSON = "json"
