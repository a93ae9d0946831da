"""What nsqlookupd remembers for how long: with a clock that the test turns.

Everything else is compared with Go in tests/conformance (test_exchanges); its log is in
test_nsqlookupd.
"""

from __future__ import annotations

import pytest

from nsqtools.protocol.requests import PeerInfo
from nsqtools.server.registrations import Node, RegisteredNsqd, Registrations

TIMEOUT_NS = 300
LIFETIME_NS = 45


def make_peer(name: str = "one", last_update_ns: int = 0) -> RegisteredNsqd:
    info = PeerInfo(
        broadcast_address=name, hostname=name, http_port=4151, tcp_port=4150, version="1.3.0"
    )
    return RegisteredNsqd(f"{name}:50000", info, last_update_ns)


@pytest.fixture
def registrations() -> Registrations:
    return Registrations(TIMEOUT_NS, LIFETIME_NS)


@pytest.fixture
def peer(registrations: Registrations) -> RegisteredNsqd:
    peer = make_peer()
    registrations.identify(peer)
    return peer


def test_a_silent_peer_is_hidden_until_it_pings(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "")
    assert registrations.producers("clicks", TIMEOUT_NS) == [peer]

    late_ns = TIMEOUT_NS + 1
    assert registrations.producers("clicks", late_ns) == []
    assert registrations.nodes(late_ns) == []
    peer.last_update_ns = late_ns
    assert registrations.producers("clicks", late_ns) == [peer]
    assert registrations.nodes(late_ns) == [Node(peer, ["clicks"], [False])]


def test_a_tombstone_hides_one_topic_of_one_peer_for_its_lifetime(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    other = make_peer("two")
    for each in (peer, other):
        registrations.register(each, "clicks", "")
        registrations.register(each, "errors", "")
    registrations.tombstone("clicks", "one:4151", now_ns=100)

    during_ns, after_ns = 100 + LIFETIME_NS - 1, 100 + LIFETIME_NS
    assert registrations.producers("clicks", during_ns) == [other]
    assert registrations.producers("errors", during_ns) == [peer, other]
    assert registrations.nodes(during_ns) == [Node(peer, ["clicks", "errors"], [True, False])]
    assert registrations.producers("clicks", after_ns) == [peer, other]
    assert registrations.nodes(after_ns) == [Node(peer, ["clicks", "errors"], [False, False])]


def test_a_star_tombstones_all_topics(registrations: Registrations, peer: RegisteredNsqd) -> None:
    """Go marks one of them, by chance."""
    registrations.register(peer, "clicks", "archive")
    registrations.register(peer, "errors", "alert")

    registrations.tombstone("*", "one:4151", now_ns=0)

    assert registrations.producers("errors", 0) == registrations.producers("clicks", 0) == []
