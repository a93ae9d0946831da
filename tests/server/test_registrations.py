"""What nsqlookupd remembers, decided without sockets and with a clock in the test's hand."""

from __future__ import annotations

import pytest

from nsqtools.protocol.lookup_v1 import PeerInfo
from nsqtools.server.registrations import Node, RegisteredNsqd, Registration, Registrations

TIMEOUT_NS = 300
LIFETIME_NS = 45

CLIENT = Registration("client", "", "")
TOPIC = Registration("topic", "clicks", "")
CHANNEL = Registration("channel", "clicks", "archive")


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


def test_a_channel_brings_its_topic(registrations: Registrations, peer: RegisteredNsqd) -> None:
    assert registrations.register(peer, "clicks", "archive") == [CHANNEL, TOPIC]

    assert registrations.topics() == ["clicks"]
    assert registrations.channels("clicks") == ["archive"]
    assert registrations.producers("clicks", 0) == [peer]


def test_registering_twice_changes_nothing(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "archive")

    assert registrations.register(peer, "clicks", "archive") == []
    assert registrations.producers("clicks", 0) == [peer]


def test_only_what_a_peer_had_is_taken_back(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "archive")
    other = make_peer("two")

    assert registrations.unregister(other, "clicks", "archive") == []
    assert registrations.unregister(other, "clicks", "") == []
    assert registrations.unregister(other, "never", "seen") == []
    assert registrations.producers("clicks", 0) == [peer]


def test_a_channel_is_left_alone(registrations: Registrations, peer: RegisteredNsqd) -> None:
    registrations.register(peer, "clicks", "archive")

    assert registrations.unregister(peer, "clicks", "archive") == [CHANNEL]
    assert registrations.producers("clicks", 0) == [peer]
    assert registrations.channels("clicks") == ["archive"]


def test_a_topic_is_left_with_its_channels(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "archive")

    assert registrations.unregister(peer, "clicks", "") == [CHANNEL, TOPIC]
    assert registrations.producers("clicks", 0) == []
    assert registrations.topics() == ["clicks"]


@pytest.mark.parametrize("topic", ["clicks", "clicks#ephemeral"])
@pytest.mark.parametrize("channel", ["archive", "archive#ephemeral"])
def test_names_outlive_a_connection(
    registrations: Registrations, peer: RegisteredNsqd, topic: str, channel: str
) -> None:
    registrations.register(peer, topic, channel)

    assert registrations.disconnect(peer) == [
        CLIENT,
        Registration("topic", topic, ""),
        Registration("channel", topic, channel),
    ]
    assert (registrations.topics(), registrations.channels(topic)) == ([topic], [channel])
    assert (registrations.producers(topic, 0), registrations.nodes(0)) == ([], [])


def test_an_ephemeral_channel_goes_with_the_last_that_takes_it_back(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    other = make_peer("two")
    for each in (peer, other):
        registrations.register(each, "clicks", "tail#ephemeral")

    registrations.unregister(peer, "clicks", "tail#ephemeral")
    assert registrations.channels("clicks") == ["tail#ephemeral"]
    registrations.unregister(other, "clicks", "tail#ephemeral")
    assert registrations.channels("clicks") == []


def test_an_ephemeral_topic_goes_with_the_last_that_takes_it_back(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    other = make_peer("two")
    for each in (peer, other):
        registrations.register(each, "clicks#ephemeral", "")

    registrations.unregister(peer, "clicks#ephemeral", "")
    assert registrations.topics() == ["clicks#ephemeral"]
    registrations.unregister(other, "clicks#ephemeral", "")
    assert registrations.topics() == []


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


def test_a_tombstone_survives_registering_again_and_not_taking_back(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "")
    registrations.tombstone("clicks", "one:4151", now_ns=0)

    registrations.register(peer, "clicks", "archive")
    assert registrations.producers("clicks", 0) == []
    registrations.unregister(peer, "clicks", "")
    registrations.register(peer, "clicks", "")
    assert registrations.producers("clicks", 0) == [peer]


def test_an_unknown_topic_differs_from_one_without_producers(registrations: Registrations) -> None:
    registrations.create_topic("clicks")

    assert registrations.producers("clicks", 0) == []
    with pytest.raises(KeyError):
        registrations.producers("errors", 0)


def test_a_star_finds_nothing_where_nothing_is(registrations: Registrations) -> None:
    assert registrations.channels("*") == []
    with pytest.raises(KeyError):
        registrations.producers("*", 0)


def test_a_star_stands_for_all_topics(registrations: Registrations, peer: RegisteredNsqd) -> None:
    registrations.register(peer, "clicks", "archive")
    registrations.register(peer, "errors", "alert")

    assert registrations.channels("*") == ["archive", "alert"]
    assert registrations.producers("*", 0) == [peer]
    registrations.tombstone("*", "one:4151", now_ns=0)
    assert registrations.producers("errors", 0) == registrations.producers("clicks", 0) == []
    assert len(registrations.delete_topic("*")) == 4
    assert (registrations.topics(), registrations.channels("*")) == ([], [])


def test_deleting_a_topic_takes_its_channels_and_leaves_the_peer(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "archive")
    registrations.create_channel("errors", "alert")

    assert registrations.delete_topic("clicks") == [CHANNEL, TOPIC]
    assert registrations.delete_topic("never_seen") == []

    assert (registrations.topics(), registrations.channels("*")) == (["errors"], ["alert"])
    assert registrations.nodes(0) == [Node(peer, [], [])]
    assert registrations.register(peer, "clicks", "") == [TOPIC]


def test_only_a_known_channel_can_be_deleted(registrations: Registrations) -> None:
    registrations.create_channel("clicks", "archive")

    registrations.delete_channel("clicks", "archive")

    assert (registrations.topics(), registrations.channels("clicks")) == (["clicks"], [])
    for topic in ("clicks", "never_seen"):
        with pytest.raises(KeyError):
            registrations.delete_channel(topic, "archive")


def test_everything_is_shown_with_its_producers(
    registrations: Registrations, peer: RegisteredNsqd
) -> None:
    registrations.register(peer, "clicks", "archive")
    registrations.tombstone("clicks", "one:4151", now_ns=7)

    assert list(registrations.entries()) == [
        (CLIENT, {peer: None}),
        (TOPIC, {peer: 7}),
        (CHANNEL, {peer: None}),
    ]
