"""Producer: publish to one nsqd and know what became of every message.

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("clicks", b"...")                # waits for nsqd's confirmation
        producer.publish_many("clicks", [b"...", b"..."])  # MPUB: far faster
        publication = producer.submit("clicks", [b"..."])  # does not wait
        publication.wait()

Every publish ends in one of four ways: confirmed, rejected, certainly not sent (safe to publish
again), or unknown (the connection broke before the answer: publishing again may double it).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from nsqtools.client.handshake import tls_context
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_io import ProducerIO
from nsqtools.client.publication import Publication
from nsqtools.errors import ConfigurationError, DeadlineExceeded, PublishNotSent
from nsqtools.protocol import commands
from nsqtools.protocol.addresses import parse_address
from nsqtools.protocol.names import check_topic

WINDOW_BYTES = 4 << 20  # outstanding besides the publication that is being added

_check_topic = functools.lru_cache(maxsize=1024)(check_topic)


class Producer:
    """A connection to one nsqd for publishing, made when needed and made again when lost.

    Thread-safe. Raises `ConfigurationError` for a bad address or bad options.
    """

    def __init__(
        self, nsqd_tcp_address: str = "127.0.0.1:4150", options: ClientOptions | None = None
    ) -> None:
        self.options = options or ClientOptions()
        address = parse_address(nsqd_tcp_address)
        self.nsqd = str(address)
        self._io = ProducerIO(address, self.options, tls_context(self.options), self._on_settled)
        self._room = threading.Condition()
        self._outstanding = 0
        self._outstanding_bytes = 0
        self._is_started = False
        self._is_stopped = False

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread; publishing does it, too. The connection is made when needed."""
        with self._room:
            if not self._is_started and not self._is_stopped:
                self._is_started = True
                self._io.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for what is outstanding, then close; return whether that was done in time.

        When ``timeout_s`` passed, what is left settles as not sent or unknown.
        """
        with self._room:
            self._is_stopped = True
            self._room.notify_all()
        if not self._is_started:
            return True
        self._io.loop.call_soon(self._io.begin_stop)
        if self._io.loop.join(timeout_s):
            return True
        self._io.loop.call_soon(self._io.abort)
        self._io.loop.join()
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(self.options.publish_timeout_s)

    # -- publishing -----------------------------------------------------------------------------

    def publish(self, topic: str, body: bytes) -> None:
        """Publish one message and wait for the confirmation. Raises `PublishError`."""
        self.submit(topic, [body]).wait()

    def publish_deferred(self, topic: str, body: bytes, defer_s: float) -> None:
        """Publish one message that channels deliver after ``defer_s`` seconds, and wait.

        Raises `PublishError`, and `ConfigurationError` when the delay is not 0 to 3600 seconds.
        """
        self.submit(topic, [body], defer_s=defer_s).wait()

    def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish messages in as few MPUB as nsqd's limits allow, and wait. Raises `PublishError`.

        Each MPUB is taken whole or not at all; several of them are not one transaction.
        """
        publications = [self.submit(topic, part) for part in self.split(bodies)]
        for publication in publications:
            publication.wait()

    def submit(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        defer_s: float | None = None,
        on_settled: Callable[[Publication], None] | None = None,
    ) -> Publication:
        """Send a publish without waiting for its outcome.

        One body goes as PUB, several as one MPUB; with ``defer_s`` it must be one. Blocks while
        the window of outstanding publishes is full, for publish_timeout at most, and raises
        `PublishNotSent` then. ``on_settled`` is called on the I/O thread and must not block, so it
        must not publish.
        Raises `ConfigurationError` for what nsqd would refuse: it closes the connection over a bad
        publish, and the neighbours' publishes would suffer.
        """
        command = self._encode(_check_topic(topic), bodies, defer_s)
        self.start()
        self._wait_for_room(len(command))
        publication = Publication(topic, bodies, command, time.monotonic(), on_settled)
        self._io.loop.call_soon(functools.partial(self._io.submit, publication))
        return publication

    def split(self, bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Group bodies into MPUBs that stay within publish_max_body_size."""
        group: list[bytes] = []
        empty = size = commands.mpub_size(())
        for body in bodies:
            added = commands.SIZE_BYTES + len(body)
            if group and size + added > self.options.publish_max_body_size:
                yield group
                group, size = [], empty
            group.append(body)
            size += added
        if group:
            yield group

    def _encode(self, topic: str, bodies: Sequence[bytes], defer_s: float | None) -> bytes:
        if not bodies:
            raise ConfigurationError("a publish needs a message")
        limit = self.options.publish_max_msg_size
        lengths = list(map(len, bodies))
        if min(lengths) == 0:
            raise ConfigurationError("nsqd refuses empty messages")
        if max(lengths) > limit:
            raise ConfigurationError(
                f"a message of {max(lengths)} bytes is above the limit of {limit}",
                hint="nsqd's limit is its --max-msg-size; ours is publish_max_msg_size.",
            )
        if defer_s is not None:
            if len(bodies) > 1:
                raise ConfigurationError("only single messages can be deferred")
            if not 0 <= defer_s <= commands.MAX_DELAY_S:
                raise ConfigurationError(
                    f"cannot defer for {defer_s} s", hint="0 to 1h is allowed."
                )
            return commands.DeferredPublish(topic, round(defer_s * 1000), bodies[0]).encode()
        if len(bodies) == 1:
            return commands.Publish(topic, bodies[0]).encode()
        if commands.mpub_size(lengths) > self.options.publish_max_body_size:
            raise ConfigurationError(
                f"a batch of {sum(lengths)} bytes is above publish_max_body_size",
                hint="Split it: Producer.split does.",
            )
        return commands.MultiPublish(topic, bodies).encode()

    # -- the window -----------------------------------------------------------------------------

    def _wait_for_room(self, size: int) -> None:
        with self._room:
            has_room = self._room.wait_for(self._has_room, self.options.publish_timeout_s)
            if self._is_stopped:
                raise PublishNotSent(f"{self.nsqd}: the producer has stopped")
            if not has_room:
                raise PublishNotSent(
                    f"{self.nsqd}: no room for another publish in "
                    f"{self.options.publish_timeout_s:.0f} s",
                ) from DeadlineExceeded(f"{self.nsqd} confirms nothing")
            self._outstanding += 1
            self._outstanding_bytes += size

    def _has_room(self) -> bool:
        return self._is_stopped or (
            self._outstanding < self.options.max_outstanding
            and self._outstanding_bytes < WINDOW_BYTES
        )

    def _on_settled(self, settled: list[Publication]) -> None:
        with self._room:
            self._outstanding -= len(settled)
            self._outstanding_bytes -= sum(len(p.command) for p in settled)
            self._room.notify_all()
