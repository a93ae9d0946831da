"""PUB, DPUB and MPUB on one connection.

A handler gets the command line and returns the position after the command's body.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from nsqtools.protocol.frames import OK, RESPONSE, RequestError, encode_frame
from nsqtools.protocol.requests import (
    BodiesReader,
    Incomplete,
    Request,
    as_int64,
    parse_uint64,
    read_message,
    read_multi_publish_size,
    topic_name,
)
from nsqtools.server.queues.backlog import BackendError
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.queue_files import Block
from nsqtools.server.queues.topic import Topic
from nsqtools.server.tcp.auth import ClientAuthorization
from nsqtools.server.tcp.client_connection import ClientConnection, Pause

_OK_FRAME = encode_frame(RESPONSE, OK)
_MAX_UNCONFIRMED_BYTES = 8 << 20  # of one client, on their way to the database
_COMMAND_BYTES = 1000  # that a publish counts besides its messages
_STEP_COUNT = 1000  # messages of an MPUB that are published at once


def topic_to_use(nsqd: NsqdQueues, name: str, start: int) -> Topic:
    """Return the topic, created if there was none.

    Raises `Pause` for the command that began at ``start`` while its channels are being asked for.
    """
    topic = nsqd.get_topic(name)
    if not topic.started.is_set():
        raise Pause(start, topic.started.wait)
    return topic


class PublishCommands:
    """``counts`` are the messages published by topic."""

    def __init__(
        self, connection: ClientConnection, nsqd: NsqdQueues, authorization: ClientAuthorization
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._connection = connection
        self._nsqd = nsqd
        self._options = nsqd.options
        self._authorization = authorization
        self._arriving: tuple[Topic, BodiesReader] | None = None  # an MPUB
        # the last PUB's line and topic, when nothing is to be checked
        self._quick: tuple[bytes, Topic] | None = None
        self.unconfirmed_bytes = 0
        self._enough_bytes = 0
        self._waiting: asyncio.Event | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the messages of an MPUB are arriving: `read_on` takes what comes next."""
        return self._arriving is not None

    def read_on(self, data: bytes, position: int) -> int:
        """Go on with the MPUB."""
        assert self._arriving is not None
        return self._read_bodies(*self._arriving, data, position)

    def quick_publish(self, data: bytes) -> bytes | None:
        """Run a PUB that is all of a read, and return the answer; None if that is not so.

        Most publishers wait for each answer, so this is what most reads are.
        """
        if self._quick is None or self._arriving is not None:
            return None
        line, topic = self._quick
        if not data.startswith(line):
            return None
        size_at = len(line)
        body_at = size_at + 4
        size = len(data) - body_at
        if size != int.from_bytes(data[size_at:body_at], "big"):
            return None
        if not 0 < size <= self._options.max_msg_size or topic.is_closed:
            return None
        if topic.store is not None:
            if self.unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES:
                return None  # the client has to wait
            self._put_durably("PUB", topic, topic.new_messages([data[body_at:]]))
            return b""
        try:
            topic.publish_one(data[body_at:])
        except BackendError:
            return None  # nothing was stored: the general way says why
        self.counts[topic.name] += 1
        return _OK_FRAME

    def publish(self, request: Request) -> int:
        """Run PUB."""
        if len(request.words) < 2:
            raise RequestError("E_INVALID", "PUB insufficient number of parameters")
        name = topic_name("PUB", request.words[1])
        _, data, position, start = request
        body, position = read_message(data, position, start, "PUB", self._options.max_msg_size)
        self._authorization.check("PUB", name, "", start)
        topic = self._topic("PUB", name, start)
        self._put("PUB", topic, topic.new_messages([body]))
        if not self._authorization.is_needed and len(request.words) == 2:
            self._quick = b"PUB %b\n" % request.words[1], topic
        self.wait_for_room(position)
        return position

    def deferred_publish(self, request: Request) -> int:
        """Run DPUB."""
        if len(request.words) < 3:
            raise RequestError("E_INVALID", "DPUB insufficient number of parameters")
        name = topic_name("DPUB", request.words[1])
        try:
            delay_ms = parse_uint64(request.words[2])
        except ValueError:
            text = b"DPUB could not parse timeout " + request.words[2]
            raise RequestError("E_INVALID", text) from None
        delay_s = as_int64(delay_ms * 1_000_000) / 1_000_000_000
        if not 0 <= delay_s <= self._options.max_req_timeout:
            limit_ms = round(self._options.max_req_timeout * 1000)
            text = f"DPUB timeout {delay_ms} out of range 0-{limit_ms}".encode()
            raise RequestError("E_INVALID", text)
        _, data, position, start = request
        body, position = read_message(data, position, start, "DPUB", self._options.max_msg_size)
        self._authorization.check("DPUB", name, "", start)
        topic = self._topic("DPUB", name, start)
        self._put("DPUB", topic, topic.new_messages([body]), delay_s)
        self.wait_for_room(position)
        return position

    def multi_publish(self, request: Request) -> int:
        """Run MPUB."""
        if len(request.words) < 2:
            raise RequestError("E_INVALID", "MPUB insufficient number of parameters")
        try:
            name = topic_name("MPUB", request.words[1])
        except RequestError as error:
            # nsqd really says the code twice
            raise RequestError("E_BAD_TOPIC", error.data) from None
        _, data, position, start = request
        self._authorization.check("MPUB", name, "", start)
        topic = self._topic("MPUB", name, start)
        position = read_multi_publish_size(data, position, start, self._options.max_body_size)
        reader = BodiesReader(self._options.max_msg_size, self._options.max_body_size)
        return self._read_bodies(topic, reader, data, position)

    def _topic(self, command: str, name: str, start: int) -> Topic:
        if self._nsqd.refusal:
            raise RequestError(f"E_{command}_FAILED", f"{command} failed {self._nsqd.refusal}")
        return topic_to_use(self._nsqd, name, start)

    def _read_bodies(self, topic: Topic, reader: BodiesReader, data: bytes, position: int) -> int:
        try:
            position = reader.read(data, position)
        except Incomplete:
            self._arriving = topic, reader
            raise
        self._arriving = None
        if len(reader.bodies) > _STEP_COUNT:
            # not given up with the client: what was sent whole is published whole, as in nsqd
            putting = self._nsqd.loop.create_task(self._put_in_steps(topic, reader.bodies))
            putting.add_done_callback(_retrieve)
            raise Pause(position, partial(asyncio.shield, putting))
        self._check_exists(topic)
        self._put("MPUB", topic, topic.new_messages(reader.bodies))
        self.wait_for_room(position)
        return position

    def _check_exists(self, topic: Topic) -> None:
        if self._nsqd.topics.get(topic.name) is not topic:  # deleted while the body arrived
            raise RequestError("E_MPUB_FAILED", "MPUB failed exiting")

    async def _put_in_steps(self, topic: Topic, bodies: list[bytes]) -> None:
        """Publish many messages, all or none; other clients get their turns in between."""
        messages, blocks = await topic.prepare_in_steps(bodies)
        self._check_exists(topic)
        self._put("MPUB", topic, messages, blocks=blocks)

    def _put(
        self,
        command: str,
        topic: Topic,
        messages: list[bytes],
        delay_s: float = 0.0,
        blocks: Sequence[Block] = (),
    ) -> None:
        if topic.store is not None:
            self._put_durably(command, topic, messages, delay_s)
            return
        try:
            topic.put(messages, blocks, delay_s)
        except BackendError as exc:
            raise RequestError(f"E_{command}_FAILED", f"{command} failed {exc}") from exc
        self.counts[topic.name] += len(messages)
        self._connection.send(_OK_FRAME)

    def _put_durably(
        self, command: str, topic: Topic, messages: list[bytes], delay_s: float = 0.0
    ) -> None:
        size = sum(map(len, messages))
        self.unconfirmed_bytes += size + _COMMAND_BYTES
        done = partial(self._confirmed, command, topic.name, len(messages), size)
        topic.put_durably(messages, delay_s, done)

    def _confirmed(
        self, command: str, topic: str, count: int, size: int, error: BackendError | None
    ) -> None:
        self.unconfirmed_bytes -= size + _COMMAND_BYTES
        if error is None:
            self.counts[topic] += count
            self._connection.answer(_OK_FRAME)
        else:
            self._connection.refuse(
                RequestError(f"E_{command}_FAILED", f"{command} failed {error}")
            )
        if self._waiting is not None and self.unconfirmed_bytes <= self._enough_bytes:
            self._waiting.set()

    async def fewer_unconfirmed(self, limit: int) -> None:
        """Wait until the publishes that are written to the database are down to a size."""
        if self.unconfirmed_bytes > limit:
            self._waiting, self._enough_bytes = asyncio.Event(), limit
            await self._waiting.wait()
            self._waiting = None

    def wait_for_all(self, position: int) -> None:
        """Have a command wait whose answer must come after those of all publishes.

        Raises `Pause`.
        """
        if self.unconfirmed_bytes:
            raise Pause(position, partial(self.fewer_unconfirmed, 0))

    def wait_for_room(self, position: int) -> None:
        """Have the client wait that sends faster than the disk. Raises `Pause`."""
        if self.unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES:
            half = _MAX_UNCONFIRMED_BYTES // 2
            raise Pause(position, partial(self.fewer_unconfirmed, half))


def _retrieve(task: asyncio.Task[None]) -> None:
    """Look at an error that no caller waits for any more, or asyncio would log it."""
    if not task.cancelled():
        task.exception()
