"""Which endpoints have a message that others lack, for when it comes again (mode ``all``). Pure.

It is kept by message, not by request: what comes again comes in other batches, and a batch that was
refused is split. Trap: the messages of one request must lack it at the same endpoints, or some
endpoint is sent what it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from nsqtools.forward.parcel import Parcel

MAX_KNOWN = 10_000  # messages; the oldest are forgotten, and may be doubled

_Key = tuple[str, str, bytes]


class PartialDeliveries:
    """`holders` and `alike` may be called on any thread."""

    def __init__(self) -> None:
        self._holders: OrderedDict[_Key, frozenset[Hashable]] = OrderedDict()

    def holders(self, parcels: Sequence[Parcel]) -> frozenset[Hashable]:
        """Return the endpoints that have every one of the messages."""
        if not self._holders:
            return frozenset()
        return frozenset.intersection(
            *(self._holders.get(key, frozenset()) for parcel in parcels for key in _keys(parcel))
        )

    def note(self, parcels: Sequence[Parcel], endpoint: Hashable) -> None:
        """An endpoint has the messages."""
        for parcel in parcels:
            for key in _keys(parcel):
                self._holders[key] = self._holders.get(key, frozenset()) | {endpoint}
        while len(self._holders) > MAX_KNOWN:
            self._holders.popitem(last=False)

    def forget(self, parcels: Sequence[Parcel]) -> None:
        """The messages are settled at every endpoint."""
        if self._holders:
            for parcel in parcels:
                for key in _keys(parcel):
                    self._holders.pop(key, None)

    def alike(self, parcel: Parcel) -> list[Parcel]:
        """Return a parcel in parts, each of messages that the same endpoints have."""
        if not self._holders:
            return [parcel]
        places: dict[frozenset[Hashable], list[int]] = {}
        for at, key in enumerate(_keys(parcel)):
            places.setdefault(self._holders.get(key, frozenset()), []).append(at)
        return (
            [parcel.chosen(chosen) for chosen in places.values()] if len(places) > 1 else [parcel]
        )


def _keys(parcel: Parcel) -> Iterator[_Key]:
    messages = parcel.messages
    return ((messages.topic, messages.nsqd, message.id) for message in messages)
