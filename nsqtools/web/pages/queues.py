"""The pages of a topic and of a channel."""

from __future__ import annotations

import time

from starlette.requests import Request

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.errors import NotFoundError
from nsqtools.protocol.names import is_valid_name
from nsqtools.web.pages.charts import OF_CHANNELS, OF_TOPICS, trend
from nsqtools.web.pages.consumers import Connections, connections_of
from nsqtools.web.pages.recent import Recent
from nsqtools.web.pages.rendering import as_asked
from nsqtools.web.pages.site import Site, Values
from nsqtools.web.pages.snapshot import Snapshot

MAX_CONSUMERS = 200


class QueuePages:
    """Makes the values of both pages."""

    def __init__(self, site: Site, recent: Recent[Connections]) -> None:
        self._site = site
        self._recent = recent

    def topic(self, request: Request) -> Values:
        """Return the values of a topic's page. Raises `NotFoundError`."""
        snapshot, row = self._row(request)
        topic = row.topic
        history = self._site.context.history
        return self._site.frame(
            request,
            "topic.html",
            "Queues",
            topic,
            topic=topic,
            row=row,
            point_key=row.key,
            problems=snapshot.problems_of_queue(topic),
            charts=self._site.charts(request, row.key, OF_TOPICS),
            channels=[
                (each, trend(history, each.key, "depth")) for each in snapshot.channels(topic)
            ],
            nodes=snapshot.on_nodes(topic),
            can_tombstone=bool(self._site.context.cluster.lookupds),
        )

    def channel(self, request: Request) -> Values:
        """Return the values of a channel's page. Raises `NotFoundError`."""
        snapshot, row = self._row(request)
        topic, channel = row.topic, row.channel
        found = self.connections(topic, channel)
        mine = [each for each in found.each if (each.topic, each.channel) == (topic, channel)]
        mine.sort(key=lambda each: (each.client.hostname, each.client.client_id, each.id))
        return self._site.frame(
            request,
            "channel.html",
            "Queues",
            f"{topic}/{channel}",
            topic=topic,
            channel=channel,
            row=row,
            point_key=row.key,
            problems=snapshot.problems_of_queue(topic, channel),
            charts=self._site.charts(request, row.key, OF_CHANNELS),
            nodes=snapshot.on_nodes(topic, channel),
            consumers=mine[:MAX_CONSUMERS],
            consumer_count=len(mine),
            now_s=time.time(),
        )

    def queue(self, request: Request) -> Values:
        """Return the values of a topic's or channel's page whose names stand in the query."""
        return self.channel(request) if _named(request, "channel") else self.topic(request)

    def connections(self, topic: str = "", channel: str = "") -> Connections:
        """Return who is connected to a channel, or to any: answers are shared for a moment."""

        # a name that is none cannot be asked for
        asked = (topic, channel) if is_valid_name(topic) and is_valid_name(channel) else ("", "")

        def ask(before: Connections | None) -> Connections:
            return connections_of(self._site.context.watcher.consumers(*asked), before)

        return self._recent.get(asked, ask)

    def _row(self, request: Request) -> tuple[Snapshot, QueueRow]:
        """Return the queue that a request names. Raises `NotFoundError`."""
        topic, channel = _named(request, "topic"), _named(request, "channel")
        snapshot = self._site.snapshot()
        row = snapshot.queue(topic, channel) if snapshot else None
        if snapshot is not None and row is None:
            asked = topic, channel
            row = next(
                (
                    each
                    for each in snapshot.totals
                    if (as_asked(each.topic), as_asked(each.channel)) == asked
                ),
                None,
            )
        if snapshot is None or row is None:
            what = f"channel {topic}/{channel}" if channel else f"topic {topic}"
            raise NotFoundError(
                f"no nsqd that answers has the {what}",
                hint="It may have been deleted, or the next sample shows it.",
            )
        return snapshot, row


def _named(request: Request, name: str) -> str:
    found: str = request.path_params.get(name) or request.query_params.get(name, "")
    return found
