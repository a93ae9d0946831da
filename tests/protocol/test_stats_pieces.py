"""/stats is encoded in small pieces, which together are the document."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nsqtools.protocol.go_text import go_json
from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, TopicStats


def client(number: int) -> ClientStats:
    values: dict[str, object] = {field.name: number for field in fields(ClientStats)}
    return ClientStats(**values | {"pub_counts": (("t", 1),)})  # type: ignore[arg-type]


def channel(clients: tuple[ClientStats, ...] | None) -> ChannelStats:
    values: dict[str, object] = {field.name: 7 for field in fields(ChannelStats)}
    other = {"clients": clients, "e2e_processing_latency": LatencyStats()}
    return ChannelStats(**values | other)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_the_pieces_are_the_document_and_small(count: int) -> None:
    clients = [None, (), tuple(map(client, range(50)))]
    channels = tuple(channel(clients[number % 3]) for number in range(count))
    values: dict[str, object] = {field.name: 1 for field in fields(TopicStats)}
    other = {"channels": channels, "e2e_processing_latency": LatencyStats()}
    topic = TopicStats(**values | other)  # type: ignore[arg-type]
    pieces = list(topic.encoded())

    assert b"".join(pieces) == go_json(topic.document())
    assert max(map(len, pieces)) < 1000
