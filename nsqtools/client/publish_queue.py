"""What waits to be published, and what of it may go out in one MPUB. Pure.

With a linger, single messages are gathered by topic and joined; everything else waits in order.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

from nsqtools.client.publication import Publication
from nsqtools.protocol.commands import SIZE_BYTES, mpub_size

MAX_JOINED = 1000


class PublishQueue:
    """The publications of a producer that no connection has taken yet.

    ``single`` go out one by one; ``gathered``, by topic, as the groups of `take_groups`.
    """

    def __init__(self, *, linger_s: float, max_body_size: int) -> None:
        self.single: collections.deque[Publication] = collections.deque()
        self.gathered: dict[str, list[Publication]] = {}
        self._linger_s = linger_s
        self._max_size = max_body_size - mpub_size(())

    def __bool__(self) -> bool:
        return bool(self.single or self.gathered)

    def __iter__(self) -> Iterator[Publication]:
        return itertools.chain(self.single, *self.gathered.values())

    def add(self, publication: Publication) -> None:
        """Queue a publication, unless it has settled: its time may be over."""
        if publication.is_settled:
            return
        if (
            self._linger_s > 0
            and len(publication.bodies) == 1
            and publication.defer_s is None
            and not publication.is_alone
        ):
            self.gathered.setdefault(publication.topic, []).append(publication)
        else:
            self.single.append(publication)

    def take_all(self) -> list[Publication]:
        """Return what waits, and forget it."""
        waiting = list(self)
        self.single.clear()
        self.gathered.clear()
        return waiting

    def take_single(self) -> Publication | None:
        """Return the next that goes out alone, without those that have settled."""
        while self.single:
            publication = self.single.popleft()
            if not publication.is_settled:
                return publication
        return None

    def lingers_for_s(self, topic: str, now: float) -> float:
        """Return for how many seconds what was gathered for a topic may wait for more."""
        gathered = self.gathered[topic]
        if len(gathered) >= MAX_JOINED:
            return 0.0
        return max(0.0, gathered[0].submitted_at + self._linger_s - now)

    def take_groups(self, topic: str) -> Iterable[list[Publication]]:
        """Take what was gathered for a topic, in groups that nsqd's limits allow as one MPUB."""
        group: list[Publication] = []
        size = 0
        for publication in self.gathered.pop(topic):
            if publication.is_settled:
                continue
            added = SIZE_BYTES + publication.size
            if group and (size + added > self._max_size or len(group) == MAX_JOINED):
                yield group
                group, size = [], 0
            group.append(publication)
            size += added
        if group:
            yield group
