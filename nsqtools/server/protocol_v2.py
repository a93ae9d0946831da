"""Protocol V2 as nsqd executes it: one handler for each command, with nsqd's order of checks.

A handler gets the command line and returns the position after the command's body. It must have no
effect before the last point where it can raise `Incomplete` or `Pause`, because the command is
executed again after these.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import Future
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import ClassVar, Final

from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec
from nsqtools.protocol.commands import decode_identify
from nsqtools.protocol.frames import (
    CLOSE_WAIT,
    ERROR,
    HEARTBEAT,
    OK_FRAME,
    RESPONSE,
    RequestError,
    encode_frame,
)
from nsqtools.protocol.requests import (
    BodiesReader,
    CommandLine,
    Incomplete,
    as_int64,
    channel_name,
    check_multi_publish,
    message_id,
    parse_uint64,
    read_answers,
    read_message,
    read_multi_publish_size,
    read_publishes,
    read_request,
    read_sized_body,
    topic_name,
)
from nsqtools.server.auth import AuthServers, ClientAuthorization
from nsqtools.server.client_connection import ClientConnection, ConnectionProtocol, Pause
from nsqtools.server.negotiation import Negotiated, TLSLayer, identify_reply, negotiate
from nsqtools.server.queues.channel import ChannelSubscription
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.topic import Topic

# -- publishing ------------------------------------------------------------------------------------

# Publishes of one client that wait for the database. A client that sends more has to wait: two
# transactions of `durable_store` have this size.
_MAX_UNCONFIRMED_BYTES = 8 << 20
# Bytes that a publish counts in addition to its messages: its objects in memory.
_COMMAND_BYTES = 1000
_MAX_PUBLISH_LINE = 71  # MPUB, the longest name, CR and LF


def topic_to_use(nsqd: NsqdQueues, name: str, start: int) -> Topic:
    """Return the topic, and create it if necessary.

    Raises `Pause` for the command that began at ``start`` while nsqlookupd is asked for the
    channels of the topic.
    """
    topic = nsqd.get_topic(name)
    if not topic.started.is_set():
        raise Pause(start, topic.started.wait)
    return topic


def _require_words(command: str, request: CommandLine, words: int) -> None:
    if len(request.words) < words:
        raise RequestError("E_INVALID", f"{command} insufficient number of parameters")


class PublishCommands:
    """The publishes of one client.

    ``counts`` has the published messages by topic. ``arriving`` is an MPUB whose body has not
    arrived completely: `read_bodies` continues it.
    """

    def __init__(
        self, connection: ClientConnection, nsqd: NsqdQueues, authorization: ClientAuthorization
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._connection = connection
        self._nsqd = nsqd
        self._options = nsqd.options
        self._authorization = authorization
        self.arriving: tuple[Topic, BodiesReader] | None = None
        # `NsqdQueues.publish_lines` after the first publish, which has passed the checks of the
        # client, such as --tls-required.
        self._lines: dict[bytes, Topic] = {}
        self.unconfirmed_bytes = 0
        self._confirmation: asyncio.Event | None = None

    def publish_run(self, data: bytes, position: int) -> int:
        """Execute PUBs to one topic, or one MPUB, if that needs no checks and no pause.

        Return the position after them. Commands that are incomplete or are refused remain.
        """
        line = data[position : data.find(b"\n", position, position + _MAX_PUBLISH_LINE) + 1]
        topic = self._lines.get(line)
        if topic is None or topic.is_closed or self.arriving is not None:
            return position
        if self.unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES or self._nsqd.health.low:
            return position
        options = self._options
        is_multi = line.startswith(b"M")
        bodies: list[bytes] = []
        if is_multi:
            body_at = position + len(line)
            count, end = check_multi_publish(
                data, body_at, options.max_body_size, options.max_msg_size
            )
        else:
            bodies, end = read_publishes(data, position, line, options.max_msg_size)
            count = len(bodies)
        if not count:
            return position
        try:
            if is_multi:
                stored = topic.publish_batch(data[body_at + 8 : end], count)
            else:
                stored = topic.publish(bodies)
        except BackendError:
            return position  # nothing was stored: the command is tried again, and refused
        command, answers = ("MPUB", 1) if is_multi else ("PUB", count)
        self._answer(stored, command, topic, count, end - position, answers)
        return end

    def publish(self, request: CommandLine) -> int:
        """Execute PUB."""
        _require_words("PUB", request, 2)
        topic, position = self._publish_one("PUB", topic_name("PUB", request.words[1]), request)
        self._remember(request, topic)
        return position

    def _remember(self, request: CommandLine, topic: Topic) -> None:
        if self._authorization.servers is None and len(request.words) == 2:
            self._lines = self._nsqd.publish_lines
            self._lines[request.data[request.start : request.position]] = topic

    def _publish_one(
        self, command: str, name: str, request: CommandLine, delay_s: float = 0.0
    ) -> tuple[Topic, int]:
        # nsqd reads the body before it checks the permission.
        body, position = read_message(request, command, self._options.max_msg_size)
        self._authorization.check(command, name, "", request.start)
        topic = self._topic(command, name, request.start)
        self._put(command, topic, topic.new_messages([body]), delay_s)
        return topic, position

    def deferred_publish(self, request: CommandLine) -> int:
        """Execute DPUB."""
        _require_words("DPUB", request, 3)
        name = topic_name("DPUB", request.words[1])
        delay_ms = parse_uint64(request.words[2], b"DPUB could not parse timeout")
        delay_s = as_int64(delay_ms * 1_000_000) / 1_000_000_000
        if not 0 <= delay_s <= self._options.max_req_timeout:
            limit_ms = round(self._options.max_req_timeout * 1000)
            text = f"DPUB timeout {delay_ms} out of range 0-{limit_ms}"
            raise RequestError("E_INVALID", text)
        return self._publish_one("DPUB", name, request, delay_s)[1]

    def multi_publish(self, request: CommandLine) -> int:
        """Execute MPUB."""
        _require_words("MPUB", request, 2)
        try:
            name = topic_name("MPUB", request.words[1])
        except RequestError as error:
            # nsqd sends the code twice.
            raise RequestError("E_BAD_TOPIC", error.data) from None
        # Other than PUB, MPUB is checked before its body is read.
        self._authorization.check("MPUB", name, "", request.start)
        topic = self._topic("MPUB", name, request.start)
        position = read_multi_publish_size(request, self._options.max_body_size)
        self._remember(request, topic)
        reader = BodiesReader(self._options.max_msg_size, self._options.max_body_size)
        return self.read_bodies(topic, reader, request.data, position)

    def _topic(self, command: str, name: str, start: int) -> Topic:
        if self._nsqd.refusal:
            raise RequestError(f"E_{command}_FAILED", f"{command} failed {self._nsqd.refusal}")
        # The client sends faster than the disk writes.
        if self.unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES:
            raise Pause(start, partial(self.wait_until_confirmed, _MAX_UNCONFIRMED_BYTES // 2))
        return topic_to_use(self._nsqd, name, start)

    def read_bodies(self, topic: Topic, reader: BodiesReader, data: bytes, position: int) -> int:
        """Read the messages of an MPUB, and publish them when all have arrived."""
        try:
            position = reader.read(data, position)
        except Incomplete:
            self.arriving = topic, reader
            raise
        self.arriving = None
        if reader.is_large:
            # A separate task, because the end of the client cancels the pause: as in nsqd, a
            # publish that was received completely is stored.
            put_task = self._nsqd.loop.create_task(self._put_in_steps(topic, reader))
            # Retrieve the exception: asyncio logs an exception that was never retrieved.
            put_task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise Pause(position, partial(asyncio.shield, put_task))
        self._put("MPUB", topic, topic.new_messages(reader.bodies))
        return position

    async def _put_in_steps(self, topic: Topic, reader: BodiesReader) -> None:
        """Publish many messages, and let other clients be served in between."""
        count, size = reader.count, reader.size
        try:
            stored = await topic.put_in_steps(count, size, reader.batches)
        except BackendError as exc:
            raise RequestError("E_MPUB_FAILED", f"MPUB failed {exc}") from exc
        self._answer(stored, "MPUB", topic, count, size)

    def _put(self, command: str, topic: Topic, messages: list[bytes], delay_s: float = 0.0) -> None:
        try:
            stored = topic.put(messages, delay_s)
        except BackendError as exc:
            raise RequestError(f"E_{command}_FAILED", f"{command} failed {exc}") from exc
        size = sum(map(len, messages)) if stored is not None else 0
        self._answer(stored, command, topic, len(messages), size)

    def _answer(
        self,
        stored: Future[None] | None,
        command: str,
        topic: Topic,
        count: int,
        size: int,
        answers: int = 1,
    ) -> None:
        if stored is None:
            self.counts[topic.name] += count
            self._connection.send(OK_FRAME * answers)
            return
        self.unconfirmed_bytes += size + _COMMAND_BYTES
        stored.add_done_callback(
            partial(self._on_stored, command, topic.name, count, size, answers)
        )

    def _on_stored(
        self, command: str, topic: str, count: int, size: int, answers: int, stored: Future[None]
    ) -> None:
        self.unconfirmed_bytes -= size + _COMMAND_BYTES
        error = stored.exception()
        if error is None:
            self.counts[topic] += count
            self._connection.answer(OK_FRAME * answers)
        else:
            self._connection.refuse(
                RequestError(f"E_{command}_FAILED", f"{command} failed {error}")
            )
        if self._confirmation is not None:
            self._confirmation.set()

    async def wait_until_confirmed(self, limit: int) -> None:
        """Wait until at most ``limit`` bytes of publishes are unconfirmed."""
        while self.unconfirmed_bytes > limit:
            self._confirmation = asyncio.Event()
            await self._confirmation.wait()

    def pause_until_confirmed(self, position: int) -> None:
        """Delay the command at a position until all publishes are answered: raise `Pause`."""
        if self.unconfirmed_bytes:
            raise Pause(position, partial(self.wait_until_confirmed, 0))


# -- commands --------------------------------------------------------------------------------------


STATE_INIT: Final = 0
STATE_SUBSCRIBED: Final = 3
STATE_CLOSING: Final = 4

_CLOSE_WAIT_FRAME = encode_frame(RESPONSE, CLOSE_WAIT)
_HEARTBEAT_FRAME = encode_frame(RESPONSE, HEARTBEAT)


@dataclass(slots=True)
class ClientContext:
    """The objects that all TCP clients of a daemon share.

    ``clients`` are the connections that have selected protocol V2.
    """

    nsqd: NsqdQueues
    tls_context: SSLContext | None
    auth_servers: AuthServers | None
    connections: set[ClientConnection] = field(default_factory=set)
    clients: set[ProtocolV2] = field(default_factory=set)


class ProtocolV2(ConnectionProtocol):
    """The state of one client and its commands."""

    def __init__(self, connection: ClientConnection, context: ClientContext) -> None:
        self.connection = connection
        self.state = STATE_INIT
        self.terms = Negotiated(
            client_id=connection.remote_ip,
            hostname=connection.remote_ip,
            output_buffer_timeout_s=context.nsqd.options.output_buffer_timeout,
            msg_timeout_s=context.nsqd.options.msg_timeout,
        )
        self.subscription: ChannelSubscription | None = None
        self.authorization = ClientAuthorization(connection, context.nsqd, context.auth_servers)
        self.publishing = PublishCommands(connection, context.nsqd, self.authorization)
        self.connected_s = time.time()
        self._context = context
        self._nsqd = context.nsqd
        self._options = context.nsqd.options
        connection.beat(self.terms.heartbeat_s, _HEARTBEAT_FRAME)
        context.clients.add(self)

    # ConnectionProtocol

    def execute(self, data: bytes, position: int) -> int:
        """Execute the command at a position, or consecutive FIN, TOUCH or REQ commands."""
        if (arriving := self.publishing.arriving) is not None:
            return self.publishing.read_bodies(*arriving, data, position)
        after = self.execute_run(data, position)
        if after > position:
            return after
        request = read_request(data, position)
        command = request.words[0]
        if self._options.tls_required and self.connection.tls is None and command != b"IDENTIFY":
            text = b"cannot %b in current state (TLS required)" % command
            raise RequestError("E_INVALID", text)
        handler = self._handlers.get(command)
        if handler is None:
            raise RequestError("E_INVALID", b"invalid command " + command)
        return handler(self, request)

    def execute_run(self, data: bytes, position: int) -> int:
        """Execute consecutive FIN, TOUCH, REQ or publishes; return the position after them."""
        if self.subscription is not None:
            answers = read_answers(data, position)
            if answers is not None:
                self._apply_answers(self.subscription, *answers[:3])
                return answers.position
        return self.publishing.publish_run(data, position)

    @property
    def is_waiting(self) -> bool:
        """Whether publishes have not been answered yet."""
        return self.publishing.unconfirmed_bytes > 0

    def encode_error(self, error: RequestError) -> bytes:
        """Return the error frame."""
        return encode_frame(ERROR, error.data)

    def on_writable(self) -> None:
        """Deliver messages again."""
        if self.subscription is not None:
            self.subscription.channel.wake()

    def closed(self) -> None:
        """Leave the channel. Messages in flight time out."""
        self._context.clients.discard(self)
        if self.subscription is not None:
            self.subscription.leave()

    # negotiation

    def _check_state(self, command: str, *allowed: int) -> None:
        if self.state not in allowed:
            raise RequestError("E_INVALID", f"cannot {command} in current state")

    def _identify(self, request: CommandLine) -> int:
        self._check_state("IDENTIFY", STATE_INIT)
        self.publishing.pause_until_confirmed(request.start)
        body, position = read_sized_body(request, "IDENTIFY", self._options.max_body_size)
        identify = decode_identify(body)
        has_tls = self._context.tls_context is not None
        self.terms = negotiate(self.terms, identify, self._options, has_tls=has_tls)
        self.connection.beat(self.terms.heartbeat_s, _HEARTBEAT_FRAME)
        if not identify.feature_negotiation:
            self.connection.send(OK_FRAME)
            return position
        reply = identify_reply(self.terms, self._options).encode()
        self.connection.send(encode_frame(RESPONSE, reply))
        if self.terms.tls_v1 and self._context.tls_context is not None:
            self.connection.start_tls(TLSLayer(self._context.tls_context))
            return len(request.data)  # discard bytes that were sent before the handshake
        return len(request.data) if self._start_compression() else position

    def tls_is_up(self) -> None:
        """Confirm TLS with an OK inside it, and start compression."""
        self.connection.send(OK_FRAME)
        self._start_compression()

    def _start_compression(self) -> bool:
        if self.terms.snappy:
            self.connection.start_compression(SnappyCodec())
        elif self.terms.deflate:
            self.connection.start_compression(DeflateCodec(self.terms.deflate_level))
        else:
            return False
        self.connection.send(OK_FRAME)
        return True

    def _auth(self, request: CommandLine) -> int:
        self._check_state("AUTH", STATE_INIT)
        self.publishing.pause_until_confirmed(request.start)
        return self.authorization.authenticate(request)

    # consuming

    def _subscribe(self, request: CommandLine) -> int:
        self._check_state("SUB", STATE_INIT)
        self.publishing.pause_until_confirmed(request.start)
        if not self.terms.heartbeat_s:
            raise RequestError("E_INVALID", "cannot SUB with heartbeats disabled")
        _require_words("SUB", request, 3)
        topic = topic_name("SUB", request.words[1])
        channel = channel_name("SUB", request.words[2])
        self.authorization.check("SUB", topic, channel, request.start)
        target = topic_to_use(self._nsqd, topic, request.start).get_channel(channel)
        # The channel exists from now on, even if the limit refuses this consumer, as in nsqd.
        limit = self._options.max_channel_consumers
        if 0 < limit <= len(target.consumers):
            text = f"SUB failed consumers for {topic}:{channel} exceeds limit of {limit}"
            raise RequestError("E_SUB_FAILED", text)
        subscription = ChannelSubscription(self.connection, target, self.terms, self._nsqd.loop)
        target.add_consumer(subscription)
        self.subscription = subscription
        self.state = STATE_SUBSCRIBED
        self.connection.send(OK_FRAME)
        return request.position

    def _require_subscription(self, command: str, *allowed: int) -> ChannelSubscription:
        self._check_state(command, *allowed)
        assert self.subscription is not None
        return self.subscription

    def _ready(self, request: CommandLine) -> int:
        # nsqd ignores RDY after CLS.
        if self.state == STATE_CLOSING:
            return request.position
        subscription = self._require_subscription("RDY", STATE_SUBSCRIBED)
        count = 1
        if len(request.words) > 1:
            count = as_int64(parse_uint64(request.words[1], b"RDY could not parse count"))
        limit = self._options.max_rdy_count
        if not 0 <= count <= limit:
            raise RequestError("E_INVALID", f"RDY count {count} out of range 0-{limit}")
        subscription.set_ready_count(count)
        return request.position

    def _answer(self, request: CommandLine) -> int:
        """Execute a FIN, TOUCH or REQ that `read_answers` does not accept."""
        command = request.words[0]
        subscription = self._require_subscription(command.decode(), STATE_SUBSCRIBED, STATE_CLOSING)
        delays = request.words[2:3] if command == b"REQ" else []
        id_ = message_id(request.words, 3 if command == b"REQ" else 2)
        self._apply_answers(subscription, command, [id_], delays)
        return request.position

    def _apply_answers(
        self,
        subscription: ChannelSubscription,
        command: bytes,
        ids: list[bytes],
        delays: list[bytes],
    ) -> None:
        """Execute one command for many messages; send errors, which leave the connection open."""
        if command == b"FIN":
            failed = subscription.finish(ids)
        elif command == b"TOUCH":
            failed = subscription.touch(ids, self._options.max_msg_timeout)
        elif len(set(delays)) == 1:
            failed = subscription.requeue(ids, self._delay_s(delays[0]))
        else:
            failed = []
            for id_, delay in zip(ids, delays, strict=True):
                failed += subscription.requeue([id_], self._delay_s(delay))
        if not failed:
            return
        in_flight = subscription.channel.in_flight_anywhere(failed)
        for id_ in failed:
            reason = b"client does not own message" if id_ in in_flight else b"ID not in flight"
            data = b"E_%b_FAILED %b %b failed %b" % (command, command, id_, reason)
            self.connection.send(encode_frame(ERROR, data))

    def _delay_s(self, word: bytes) -> float:
        delay_ms = parse_uint64(word, b"REQ could not parse timeout")
        delay_ns = as_int64(delay_ms * 1_000_000)
        return min(max(0.0, delay_ns / 1_000_000_000), self._options.max_req_timeout)

    def _close(self, request: CommandLine) -> int:
        subscription = self._require_subscription("CLS", STATE_SUBSCRIBED)
        self.publishing.pause_until_confirmed(request.start)
        subscription.set_ready_count(0)
        self.state = STATE_CLOSING
        self.connection.send(_CLOSE_WAIT_FRAME)
        return request.position

    # An attribute of the class: with 10,000 clients a garbage collection would visit 10,000 dicts.
    _handlers: ClassVar[dict[bytes, Callable[[ProtocolV2, CommandLine], int]]] = {
        b"IDENTIFY": _identify,
        b"AUTH": _auth,
        b"SUB": _subscribe,
        b"RDY": _ready,
        b"FIN": _answer,
        b"REQ": _answer,
        b"TOUCH": _answer,
        b"CLS": _close,
        b"NOP": lambda _, request: request.position,
        b"PUB": lambda self, request: self.publishing.publish(request),
        b"DPUB": lambda self, request: self.publishing.deferred_publish(request),
        b"MPUB": lambda self, request: self.publishing.multi_publish(request),
    }
