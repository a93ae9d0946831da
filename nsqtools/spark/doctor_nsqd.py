"""Whether any two nsqd give their messages the same identity.

A message id holds the node id of its nsqd, a number below 1024, which nsqd derives from the host's
name unless ``-node-id`` says otherwise: ids of two nsqd with one node id repeat. That costs nothing
here, for a message is identified by (topic, nsqd, id). But two nsqd that also announce the same
address cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from typing import NamedTuple
from zlib import crc32

from nsqtools.cluster.directory import Cluster
from nsqtools.errors import HTTPError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.spark.doctor import FAILED, OK, WARNING, Finding


class Identity(NamedTuple):
    """What an nsqd is known by: its node id, and the address that archives have of it."""

    node_id: int
    announced: str
    is_derived: bool
    """The node id is what the host's name gives: nsqd did not say it."""


def check_nsqds(cluster: Cluster) -> Iterator[Finding]:
    """Ask every nsqd, and compare."""
    identities, failures = cluster.ask_nsqds(identity)
    for failure in failures:
        yield Finding("nsqd", FAILED, str(failure.error), "It was not compared with the others.")
    yield from compare_identities(identities)


def identity(client: NsqdHTTPClient) -> Identity:
    """Ask one nsqd. Raises what `HTTPAPI.get` raises."""
    info = client.info()
    announced = f"{info.get('broadcast_address', '')}:{info['tcp_port']}"
    try:
        return Identity(int(client.config("id")), announced, False)
    except (HTTPError, TypeError, ValueError):  # an nsqd before 1.0, or a proxy that forbids it
        return Identity(derived_node_id(str(info.get("hostname", ""))), announced, True)


def derived_node_id(hostname: str) -> int:
    """The node id of an nsqd that is not told one (nsqd/options.go)."""
    return crc32(md5(hostname.encode(), usedforsecurity=False).digest()) % 1024


def compare_identities(identities: dict[str, Identity]) -> Iterator[Finding]:
    """One finding for each group of nsqd that collide, or one that says that none do."""
    by_address: dict[str, list[str]] = {}
    by_node_id: dict[int, list[str]] = {}
    for address, each in identities.items():
        by_address.setdefault(each.announced, []).append(address)
        by_node_id.setdefault(each.node_id, []).append(address)
    shared = {name: who for name, who in by_address.items() if len(who) > 1}
    for announced, who in shared.items():
        yield Finding(
            "nsqd addresses",
            FAILED,
            f"{', '.join(who)} all announce {announced}",
            "Their messages cannot be told apart: give each its own -broadcast-address.",
        )
    repeated = {number: who for number, who in by_node_id.items() if len(who) > 1}
    for number, who in repeated.items():
        guessed = ", as their host names give" if identities[who[0]].is_derived else ""
        yield Finding(
            "nsqd node ids",
            WARNING,
            f"{', '.join(who)} have the node id {number}{guessed}: their message ids repeat",
            "Nothing here is by id alone; for other programs give each its own -node-id.",
        )
    if identities and not shared and not repeated:
        ids = ", ".join(str(each.node_id) for each in identities.values())
        yield Finding("nsqd node ids", OK, f"all different: {ids}")
