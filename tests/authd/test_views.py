"""Documents of nsqlookupd and nsqd, reduced to the part that a user may see."""

from nsqtools.authd.users import parse_users
from nsqtools.authd.views import (
    Document,
    visible_lookup,
    visible_names,
    visible_nodes,
    visible_stats,
)

BOB = parse_users("[users.bob]\njwt = true\nsubscribe.orders = ['audit']", "").by_name["bob"]
WRONG: list[Document] = [
    {},
    {"producers": None, "topics": None, "channels": None},
    {"producers": [1, {}, {"topics": [1], "tombstones": 3}], "channels": [3], "topics": [None]},
    {"topics": [{}, {"topic_name": 3}, {"topic_name": "orders", "channels": [{}, 4]}]},
    {"producers": [{"pub_counts": [3, {"topic": []}]}]},
]


def nsqd(port: int, topics: list[str], tombstones: list[bool]) -> Document:
    node = {"broadcast_address": "a", "tcp_port": port, "http_port": port + 1}
    return {**node, "topics": topics, "tombstones": tombstones}


def channel(name: str, depth: int) -> Document:
    return {"channel_name": name, "depth": depth, "paused": False, "clients": [{"n": depth}]}


def topic(name: str, depth: int, *channels: Document) -> Document:
    return {"topic_name": name, "depth": depth, "paused": depth > 1, "channels": list(channels)}


def test_only_names_that_the_user_may_see_are_listed() -> None:
    assert visible_names(BOB, ["orders", "hr", 3]) == ["orders"]
    assert visible_names(BOB, ["audit", "billing"], "orders") == ["audit"]


def test_names_that_nsq_does_not_allow_are_left_out() -> None:
    """One of them must not end the answer for all topics of a user who may see everything."""
    ann = parse_users("[users.ann]\njwt = true\npublish = ['.*']", "").by_name["ann"]
    assert visible_names(ann, ["orders", "\ud800", "a b"]) == ["orders"]
    assert visible_names(ann, ["audit", "\ud800"], "orders") == ["audit"]


def test_nodes_have_only_topics_of_the_user_and_no_http_port() -> None:
    one = {"producers": [nsqd(1, ["hr", "orders"], [True, False]), nsqd(5, ["hr"], [False])]}
    other = {"producers": [nsqd(1, ["orders", "hr"], [True, False])]}

    nodes = visible_nodes(BOB, [one, other])["producers"]

    assert nodes == [
        {**nsqd(1, ["orders"], [False]), "http_port": 0},
        {**nsqd(5, [], []), "http_port": 0},
    ]


def test_a_lookup_has_each_node_once_and_only_channels_of_the_user() -> None:
    answer = {"channels": ["audit", "billing"], "producers": [nsqd(1, [], [])]}

    document = visible_lookup(BOB, "orders", [answer, answer])

    assert document["channels"] == ["audit"]
    assert [node["http_port"] for node in document["producers"]] == [0]


def test_statistics_are_summed_over_visible_topics_and_channels() -> None:
    latency = {"e2e_processing_latency": {"count": 1, "percentiles": []}}
    one = {
        "version": "1.3.0",
        "topics": [
            topic("orders", 1, channel("audit", 3), channel("billing", 9)) | latency,
            topic("hr", 5),
        ],
        "producers": [
            {"client_id": "a", "pub_counts": [{"topic": "hr"}, {"topic": "orders"}]},
            {"client_id": "b", "pub_counts": [{"topic": "hr"}]},
        ],
        "memory": {"heap_objects": 3},
    }
    other = {"topics": [topic("orders", 2, channel("audit", 4)) | latency]}

    document = visible_stats(BOB, [one, other])

    [orders] = document["topics"]
    [audit] = orders["channels"]
    assert (orders["depth"], orders["paused"], audit["depth"]) == (3, True, 7)
    assert audit["clients"] == [{"n": 3}, {"n": 4}]
    assert orders["e2e_processing_latency"] is None
    assert document["producers"] == [{"client_id": "a", "pub_counts": [{"topic": "orders"}]}]
    assert "hr" not in str(document)
    assert "memory" not in document


def test_malformed_documents_are_left_out() -> None:
    assert visible_lookup(BOB, "orders", WRONG)["channels"] == []
    assert all(node["topics"] == [] for node in visible_nodes(BOB, WRONG)["producers"])
    [orders] = visible_stats(BOB, WRONG)["topics"]
    assert orders["channels"] == []
