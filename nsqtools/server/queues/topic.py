"""A topic: gives messages their identity and copies them to its channels.

While messages flow, publishing puts them straight into the channels and the topic's own backlog
stays empty. It fills when there is no channel, the topic is paused, or the topic has not started
(nsqd asks nsqlookupd for the channels of a new topic before its first message may flow).
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, Event
from collections import deque
from collections.abc import Callable, Sequence

from nsqtools.protocol.names import is_ephemeral
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.backlog import BackendError, Backlog
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.queued_message import MessageIds, new_messages

_STEP_COUNT = 1000  # messages of a backlog to copy before other work of the loop gets its turn
_STEP_BYTES = 1 << 22


class Topic:
    """One topic. ``make_channel`` builds a channel from the names of topic and channel."""

    def __init__(
        self,
        name: str,
        backlog: Backlog,
        ids: MessageIds,
        loop: AbstractEventLoop,
        log: DaemonLog,
        make_channel: Callable[[str, str], Channel],
    ) -> None:
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.backlog = backlog
        self.channels: dict[str, Channel] = {}
        self.is_paused = False
        self.message_count = self.message_bytes = 0
        self.on_channel_created: Callable[[Channel], None] = lambda _: None
        self.on_channel_deleted: Callable[[Channel], None] = lambda _: None
        self._ids = ids
        self._loop = loop
        self._log = log
        self._make_channel = make_channel
        self._deferred: deque[tuple[bytes, float]] = deque()  # waiting for a channel, with delay
        self._mem_queue_size = backlog.mem_queue_size
        self.started = Event()  # once its channels elsewhere in the cluster are known
        self._is_closed = False
        self._step_scheduled = False

    @property
    def depth(self) -> int:
        """How many messages wait in the topic itself."""
        return len(self.backlog) + len(self._deferred)

    @property
    def _flows(self) -> bool:
        return self.started.is_set() and not self.is_paused and bool(self.channels)

    def start(self) -> None:
        """Let messages flow, after the channels that are known elsewhere have been created."""
        self.started.set()
        self._wake()

    # publishing

    def publish(self, bodies: Sequence[bytes]) -> None:
        """Queue new messages. Raises `BackendError`."""
        now_ns = time.time_ns()
        messages = new_messages(bodies, self._ids.take(len(bodies), now_ns), now_ns)
        if self._flows and not self.backlog.has_messages:
            self._copy(messages)
        else:
            self.backlog.put(messages)
            if self.backlog.is_over:
                self.backlog.overflow(len(messages))
        self.message_count += len(bodies)
        self.message_bytes += sum(map(len, bodies))

    def publish_deferred(self, body: bytes, delay_s: float) -> None:
        """Queue a new message whose delay starts when a channel gets it. Raises `BackendError`.

        A message that has to wait on disk for a channel loses its delay, as in nsqd.
        """
        if not self._flows and self.depth >= self._mem_queue_size:
            self.publish([body])
            return
        now_ns = time.time_ns()
        (message,) = new_messages([body], self._ids.take(1, now_ns), now_ns)
        self._deferred.append((message, delay_s))
        self._copy_deferred()
        self.message_count += 1
        self.message_bytes += len(body)

    def _copy(self, messages: list[bytes]) -> None:
        failure: BackendError | None = None
        for channel in self.channels.values():
            try:
                channel.put(messages)
            except BackendError as exc:
                self._log.error(f"TOPIC({self.name}) ERROR: failed to put - {exc}")
                failure = exc
        if failure is not None:
            raise failure

    def _copy_deferred(self) -> None:
        while self._deferred and self._flows:
            message, delay_s = self._deferred.popleft()
            for channel in self.channels.values():
                channel.put_deferred(message, delay_s)

    def _wake(self) -> None:
        if not self._step_scheduled:
            self._step_scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._step_scheduled = False
        if self._is_closed or not self._flows:
            return
        self._copy_deferred()
        try:
            self._copy(self.backlog.get(_STEP_COUNT, _STEP_BYTES))
        except BackendError:
            # said by _copy; those channels without the messages have lost them, as in nsqd
            pass
        if self.backlog.has_messages:
            self._wake()

    # channels

    def get_channel(self, name: str) -> Channel:
        """Return the channel, created if there was none."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self._make_channel(self.name, name)
            channel.on_left = self._consumers_left
            self.channels[name] = channel
            self._log.info(f"TOPIC({self.name}): new channel({name})")
            self.on_channel_created(channel)
            self._wake()
        return channel

    def delete_channel(self, name: str) -> None:
        """Delete a channel with its messages. Raises ``KeyError``, ``OSError``."""
        channel = self.channels.pop(name)
        self._log.info(f"TOPIC({self.name}): deleting channel {name}")
        try:
            channel.delete()
        finally:
            self.on_channel_deleted(channel)

    def _consumers_left(self, channel: Channel) -> None:
        if channel.is_ephemeral and self.channels.get(channel.name) is channel:
            self.delete_channel(channel.name)

    def empty(self) -> None:
        """Drop the topic's own messages, not those of its channels. Raises ``OSError``."""
        self._deferred.clear()
        self.backlog.empty()

    def pause(self) -> None:
        """Keep messages in the topic until `unpause`."""
        self.is_paused = True

    def unpause(self) -> None:
        """Copy messages to channels again."""
        self.is_paused = False
        self._wake()

    # the end

    def delete(self) -> None:
        """Delete the topic and its channels, and leave no file. Raises ``OSError``."""
        self._is_closed = True
        for name in list(self.channels):
            self.delete_channel(name)
        self._deferred.clear()
        self.backlog.delete()

    def close(self) -> None:
        """Write everything to disk; what fails is logged and does not stop the rest."""
        self._is_closed = True
        self.backlog.put_in_memory(message for message, _ in self._deferred)
        closings = [(f"CHANNEL({each.name})", each.close) for each in self.channels.values()]
        for what, close in [*closings, (f"TOPIC({self.name})", self.backlog.close)]:
            try:
                close()
            except Exception as exc:  # of any kind: the others have messages, too
                self._log.error(f"{what}: failed to close - {str(exc) or repr(exc)}")
