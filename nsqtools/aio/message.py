"""Messages as coroutines see them."""

from __future__ import annotations

from nsqtools.client import message as client


class Message:
    """One delivery of a message: `nsqtools.Message` with answers to await.

    An answer is queued for the I/O thread, so that awaiting it takes no time. Answering twice is
    no error: the second answer returns False.
    """

    __slots__ = ("_message", "body")

    def __init__(self, message: client.Message) -> None:
        self._message = message
        self.body = message.body

    @property
    def id(self) -> bytes:
        """16 bytes of hexadecimal text; a message is identified by topic, nsqd and id."""
        return self._message.id

    @property
    def attempts(self) -> int:
        """The deliveries including this one."""
        return self._message.attempts

    @property
    def timestamp_ns(self) -> int:
        """The time of publishing in nanoseconds since 1970."""
        return self._message.timestamp_ns

    @property
    def topic(self) -> str:
        return self._message.topic

    @property
    def nsqd(self) -> str:
        """The address of the nsqd that delivered it, ``host:port``."""
        return self._message.nsqd

    @property
    def deadline(self) -> float:
        """When nsqd will deliver it again, by `time.monotonic`, unless answered or touched."""
        return self._message.deadline

    @property
    def is_answered(self) -> bool:
        """Tell whether it was finished or requeued, or its connection is gone."""
        return self._message.is_answered

    async def finish(self) -> bool:
        """Report the message as handled. Returns False when it was answered before."""
        return self._message.finish()

    async def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> bool:
        """Deliver the message again: see `nsqtools.Message.requeue`. Raises
        `ConfigurationError` for a negative delay."""
        return self._message.requeue(delay_s, backoff=backoff)

    async def touch(self) -> bool:
        """Restart the message's timeout. Returns False when it was answered before."""
        return self._message.touch()

    def __repr__(self) -> str:
        return repr(self._message)


class Batch(list[Message]):
    """Messages of one topic, of any nsqd. Answering them together costs one write for each nsqd."""

    __slots__ = ("_gathered",)

    def __init__(self, messages: client.Gathered) -> None:
        super().__init__(map(Message, messages))
        self._gathered = messages

    @property
    def topic(self) -> str:
        return self._gathered.topic

    async def finish(self) -> int:
        """Finish every message not answered yet; return how many those were."""
        return self._gathered.finish()

    async def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> int:
        """Requeue every message not answered yet; return how many those were."""
        return self._gathered.requeue(delay_s, backoff=backoff)
