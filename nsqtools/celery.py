"""A broker of Celery: the kombu transports ``nsq://`` and ``nsqlookupd://``.

    import nsqtools.celery                                # registers both schemes
    app = Celery("shop", broker="nsq://127.0.0.1:4150")

A queue is a topic, and all workers share its channel ``celery``. Celery's acknowledgment finishes
the message. Until then it is touched, so that nsqd does not redeliver it, and the prefetch count is
max_in_flight. A task with an eta is published deferred.

The I/O thread wakes a worker's event loop (``Hub``); other programs wait in `drain_events`.

Traps: Celery's prefork pool forks while connections are open. A child may close its copies of the
objects here, but not consume with them; producers start again by themselves. The depth of a queue
costs an HTTP request, so only passive declarations ask for it.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from celery import current_app
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.utils.json import dumps, loads

from nsqtools import __version__
from nsqtools.client.backlog import Backlog
from nsqtools.client.connection import open_connection
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import Consumer, Stopped
from nsqtools.client.message import Message
from nsqtools.client.options import CLIENT_OPTIONS, ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.client.task_pool import (
    DRAIN_TIMEOUT_S,
    MIN_DEFER_S,
    TaskPool,
    refuse_delay,
)
from nsqtools.cluster.directory import nsqd_addresses, open_cluster
from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    NotFoundError,
    ProtocolError,
    PublishNotSent,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
    RefusedError,
    ServerError,
)
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.names import LOOKUPD_HTTP_PORT, NSQD_TCP_PORT, check_topic, parse_address
from nsqtools.protocol.text import plain_text

CHANNEL = "celery"
# kombu adds the retry policy of each publish to the options of the transport, and reads it there.
_RETRY_POLICY = """callback connect_retries_timeout errback interval_max interval_start
interval_step max_retries retry_errors"""
_EXTRA_OPTIONS = ("channel", "nsqd_http_addresses")
_NO_BROADCAST = (
    "NSQ has no queue for one process: remote control (inspect, control, revoke), events and the"
    " result backend rpc:// are not available"
)


# -- settings -------------------------------------------------------------------------------------


def read_settings(scheme: str, client: Any) -> ConnectionSettings:
    """Return the settings of a ``kombu.Connection``. Raises `ConfigurationError`.

    Client options are in the query of the URL and in ``transport_options``, under the names of
    nsq-options(7). The password of the URL is the auth secret.
    """
    options = {} if not client.ssl else {"tls_v1": "true"}
    if isinstance(client.ssl, dict) and client.ssl:
        raise ConfigurationError(
            "broker_use_ssl is True or False with NSQ",
            hint='Set the files with broker_transport_options={"tls_root_ca_file": ...}.',
        )
    extra: dict[str, Any] = {}
    for name in client.transport_options.keys() - _RETRY_POLICY.split():
        value = client.transport_options[name]
        if name in _EXTRA_OPTIONS:
            extra[name] = value
        else:
            options[name] = plain_text(value)
    addresses: list[str] = []
    for text in client.alt or [client.hostname or ""]:
        url = text if "://" in text else f"{scheme}://{text}"
        address, url_options = _read_url(url, scheme, client.port)
        addresses.append(address)
        options |= url_options
    http_addresses = extra.get("nsqd_http_addresses", ())
    return ConnectionSettings(
        nsqd_tcp_addresses=tuple(addresses) if scheme == "nsq" else (),
        lookupd_http_addresses=tuple(addresses) if scheme == "nsqlookupd" else (),
        nsqd_http_addresses=(
            tuple(http_addresses.split()) if isinstance(http_addresses, str) else (*http_addresses,)
        ),
        options=options,
    )


def _read_url(url: str, scheme: str, port: int | None) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    if parts.scheme != scheme:
        raise ConfigurationError(f"{parts.scheme}:// and {scheme}:// cannot be one broker")
    login, _, place = parts.netloc.rpartition("@")
    if parts.path.strip("/"):
        raise ConfigurationError(f"{scheme}://{place}{parts.path}: NSQ has no virtual hosts")
    default_port = port or (NSQD_TCP_PORT if scheme == "nsq" else LOOKUPD_HTTP_PORT)
    address = str(parse_address(place or "127.0.0.1", default_port))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if (option := CLIENT_OPTIONS.get(name)) and option.metadata["secret"]:
            raise ConfigurationError(
                f"{name} in a URL would be printed",
                hint=f"Write {scheme}://:SECRET@HOST, or set auth_secret_file.",
            )
    user, _, secret = login.partition(":")
    if user:
        raise ConfigurationError(
            f"{scheme}://{place}: NSQ has no users",
            hint=f"Write {scheme}://:SECRET@{place} for an auth secret.",
        )
    return address, options | ({"auth_secret": unquote(secret)} if secret else {})


def seconds_until_eta(headers: Mapping[str, Any]) -> float:
    """Return the seconds until a task may run: 0 or less for a task that may run now."""
    if not isinstance(eta := headers.get("eta"), str):
        return 0.0
    # A worker also reads a time without a zone in the zone of the app.
    try:
        due = maybe_make_aware(maybe_iso8601(eta), current_app.timezone)
    except ValueError:  # the worker reports it
        return 0.0
    return float((due - datetime.now(UTC)).total_seconds())


# -- consuming ------------------------------------------------------------------------------------


class TaskMessages:
    """The messages of the consumed topics, and by delivery tag the messages in Celery's hands.

    ``on_entry`` is called on the I/O thread when messages have arrived.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        channel: str,
        options: ClientOptions,
        on_entry: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._options = options
        self._backlog = Backlog(on_entry)
        self._pool = TaskPool()
        self._backlog.pools.append(self._pool)
        self._consumer: Consumer | None = None
        self._stopping: list[Consumer] = []
        self._topics: frozenset[str] = frozenset()
        self._prefetch = options.max_in_flight
        self._in_hand: dict[int, Message] = {}
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Return whether this is the copy of a child process, whose messages are the parent's."""
        return os.getpid() != self._process

    def set_prefetch(self, count: int) -> None:
        """Allow ``count`` messages in Celery's hands; 0 means max_in_flight."""
        self._prefetch = count or self._options.max_in_flight
        if self._consumer is not None:
            self._consumer.set_max_in_flight(self._prefetch)
            self._announce(self._consumer)

    def _announce(self, consumer: Consumer) -> None:
        # Tasks are slow and answered in any order. All of the prefetch count must be in flight, or
        # processes of the pool would wait.
        consumer._gather(self, self._prefetch)

    def subscribe(self, topics: Iterable[str]) -> None:
        """Consume these topics from now on, and no others.

        The messages that Celery has of an earlier subscription are still answered there.
        """
        if self.is_forked or self._topics == frozenset(topics):
            return
        if self._consumer is not None:
            self._consumer.begin_stop()
            self._stopping.append(self._consumer)
            self._consumer = None
        self._topics = frozenset(topics)
        if self._topics:
            self._consumer = consumer = Consumer(
                sorted(self._topics),
                self._channel,
                nsqd_tcp_addresses=self._settings.nsqd_tcp_addresses,
                lookupd_http_addresses=self._settings.lookupd_http_addresses,
                options=replace(self._options, max_in_flight=self._prefetch),
                _backlog=self._backlog,
                _nsqd_http_addresses=self._settings.nsqd_http_addresses,
                _auto_touch=True,
            )
            consumer.start()
            self._announce(consumer)

    def stop(self) -> None:
        """Requeue all messages without an answer, and disconnect."""
        self.subscribe(())
        if not self.is_forked:
            for consumer in self._stopping:
                consumer.abort()
                consumer.wait_for_end()
        self._stopping.clear()

    def take(self, timeout_s: float | None) -> Message | None:
        """Return the next message, or None if none arrived within ``timeout_s``."""
        if self.is_forked:
            raise ConfigurationError("a connection cannot consume after a fork; make another one")
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (entry := self._backlog.get_batches(until, 1, several=False)) is not None:
            if isinstance(entry, Stopped):
                entry.consumer._raise_failure()
                continue
            assert isinstance(entry, list)
            message: Message = entry[0][0]
            return message
        return None

    def hold(self, tag: int, message: Message) -> None:
        """Record that Celery has the message until it answers the delivery ``tag``."""
        self._in_hand[tag] = message
        self._pool.add(message)

    def release(self, tag: int) -> Message | None:
        """Return the message for its answer; None if it was answered before."""
        message = None if self.is_forked else self._in_hand.pop(tag, None)
        if message is not None:
            self._pool.discard(message)
        return message


# -- the transport --------------------------------------------------------------------------------


class NsqChannel(virtual.Channel):
    """Publishes to the topics of queues, and answers messages."""

    def exchange_declare(
        self, exchange: str | None = None, type: str = "direct", **kwargs: Any
    ) -> None:
        if type == "fanout":
            raise ConfigurationError(_NO_BROADCAST)
        super().exchange_declare(exchange, type, **kwargs)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        if not queue or kwargs.get("auto_delete") or kwargs.get("exclusive"):
            raise ConfigurationError(_NO_BROADCAST)
        check_topic(queue)
        declared = super().queue_declare(queue, passive, **kwargs)
        return declared._replace(message_count=self._depth(queue)) if passive else declared

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        if no_ack:
            raise ConfigurationError(f"queue {queue}: no_ack would lose messages; acknowledge them")
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        self.connection.queues_changed()

    def basic_cancel(self, consumer_tag: str) -> None:
        super().basic_cancel(consumer_tag)
        self.connection.queues_changed()

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.connection.messages.set_prefetch(prefetch_count)

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        super().basic_ack(delivery_tag, multiple)
        if message := self.connection.messages.release(delivery_tag):
            message.finish()

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        self.qos.ack(delivery_tag)
        if message := self.connection.messages.release(delivery_tag):
            if requeue:
                # Immediately once, then later each time: a task that kills its process would
                # otherwise kill one after another.
                message.requeue(0 if message.attempts < 2 else None, backoff=False)
            else:
                message.finish()

    def _restore(self, message: Any) -> None:
        """Give a message back that no process has started on, at the end."""
        if unstarted := self.connection.messages.release(message.delivery_tag):
            unstarted.requeue(0, backoff=False)

    def encode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Leave text readable for `nsq tail`; only bytes become base64."""
        return (body, None) if isinstance(body, str) else super().encode_body(body, encoding)

    def _put(self, queue: str, message: Mapping[str, Any], **_: Any) -> None:
        if message["properties"].get("priority"):
            raise ConfigurationError("NSQ has no priorities", hint="Use a queue for each priority.")
        defer_s = seconds_until_eta(message["headers"])
        self.connection.publish(queue, dumps(message).encode(), defer_s)

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        raise ConfigurationError(f"queue {queue}: NSQ has no basic.get; consume the queue")

    def _depth(self, queue: str) -> int:
        return sum(self.connection.ask_nsqds(partial(_queue_depth, queue)))

    def _purge(self, queue: str) -> int:
        return sum(self.connection.ask_nsqds(partial(_empty_queue, queue)))


class Transport(virtual.Transport):
    """``nsq://HOST:4150``: publish to nsqd and consume from them, several separated by ``;``."""

    Channel = NsqChannel
    scheme = "nsq"
    driver_type = driver_name = "nsq"
    default_port = NSQD_TCP_PORT
    can_parse_url = True
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic"])
    )
    connection_errors = (
        *virtual.Transport.connection_errors,
        ConnectionFailed,
        RefusedError,
        NotFoundError,
        ProtocolError,
        ServerError,
        PublishNotSent,
        PublishUnknown,
        PublishRefused,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        # Producer and consumer use all hosts of the URL; kombu must not switch between them.
        client.cycle = None
        self.settings = read_settings(self.scheme, client)
        self.options = self.settings.client_options(drain_timeout_s=DRAIN_TIMEOUT_S)
        self.channel_name: str = client.transport_options.get("channel", CHANNEL)
        self.messages = TaskMessages(self.settings, self.channel_name, self.options, self._wake_hub)
        self._producer: Producer | None = None
        self._hub: Any = None
        self._wake_receiver: socket.socket | None = None
        self._wake_sender: socket.socket | None = None

    def driver_version(self) -> str:
        return __version__

    # -- life -----------------------------------------------------------------------------------

    def establish_connection(self) -> Any:
        """Check that an nsqd accepts this client. Raises its error if none does."""
        failure: Exception | None = None
        is_announced = bool(self.settings.lookupd_http_addresses)
        for address in nsqd_addresses(self.settings):
            try:
                open_connection(
                    parse_address(address), self.options, is_announced=is_announced
                ).close()
                return super().establish_connection()
            except self.connection_errors as exc:
                failure = failure or exc
        raise failure or NotFoundError("there is no nsqd")

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        self.messages.stop()
        if self._wake_receiver is not None and self._wake_sender is not None:
            if not self.messages.is_forked:  # the poller is the parent's, too
                self._hub.remove(self._wake_receiver)
            self._wake_receiver.close()
            self._wake_sender.close()
            self._wake_receiver = self._wake_sender = None
        if self._producer is not None:
            self._producer.stop(self.options.publish_timeout_s)
            self._producer = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        # A descriptor, although the hub has `call_soon`: without one it sleeps 0.1 s at a time.
        self._hub = loop
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        loop.add_reader(self._wake_receiver, self._deliver_arrived)

    # -- consuming ------------------------------------------------------------------------------

    def queues_changed(self) -> None:
        """Subscribe to the consumed queues soon, or unsubscribe from all immediately."""
        if not self._consumed_queues():
            self.messages.subscribe(())
        elif self._hub is not None:
            self._hub.call_soon(self._subscribe)

    def _consumed_queues(self) -> set[str]:
        return {queue for channel in self.channels for queue in channel._active_queues}

    def _subscribe(self) -> None:
        self.messages.subscribe(self._consumed_queues())

    def _wake_hub(self) -> None:
        if self._wake_sender is not None:
            with suppress(OSError):  # full, and so readable, or closed
                self._wake_sender.send(b"\0")

    def _deliver_arrived(self) -> None:
        if self._wake_receiver is None:
            return  # closed in this iteration of the hub
        with suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        if (message := self.messages.take(0)) is not None:
            # One at a time: with the solo pool the delivery runs the task, and signals wait.
            self._deliver_message(message)
            self._wake_hub()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises ``TimeoutError`` if none arrives in time."""
        self._subscribe()
        message = self.messages.take(timeout)
        if message is None:
            raise TimeoutError
        self._deliver_message(message)

    def _deliver_message(self, message: Message) -> None:
        payload = decode_payload(message.body)
        defer_s = seconds_until_eta(payload["headers"])
        if message.topic not in self._callbacks:  # cancelled meanwhile
            message.requeue(0, backoff=False)
        elif defer_s > MIN_DEFER_S:
            # nsqd forgets delays when it restarts. A worker that waited would use up its prefetch.
            message.requeue(defer_s, backoff=False)
        else:
            tag = next(self.Channel._delivery_tags)
            payload["properties"]["delivery_tag"] = tag
            payload["properties"]["delivery_info"]["redelivered"] = message.attempts > 1
            self.messages.hold(tag, message)
            self._callbacks[message.topic](payload)

    # -- publishing and administration ----------------------------------------------------------

    def publish(self, topic: str, body: bytes, defer_s: float) -> None:
        """Publish a task. Raises `PublishError`."""
        if self._producer is None:
            self._producer = Producer(
                self.settings.nsqd_tcp_addresses,
                self.options,
                lookupd_http_addresses=self.settings.lookupd_http_addresses,
            )
        if defer_s <= 0:
            self._producer.publish(topic, body)
            return
        try:
            self._producer.publish_deferred(topic, body, defer_s)
        except PublishRejected as exc:
            raise refuse_delay(exc, f"an eta in {defer_s:.0f} s") from None

    def ask_nsqds(self, question: Callable[[str, NsqdHTTPClient], int]) -> list[int]:
        """Ask all nsqd about the channel over HTTP. Raises the first error."""
        with open_cluster(self.settings) as cluster:
            answers, failures = cluster.ask_nsqds(partial(question, self.channel_name))
        if failures:
            raise failures[0].error
        return list(answers.values())


class LookupdTransport(Transport):
    """``nsqlookupd://HOST:4161``: use the nsqd that are registered with nsqlookupd."""

    scheme = "nsqlookupd"
    default_port = LOOKUPD_HTTP_PORT


def decode_payload(body: bytes) -> dict[str, Any]:
    """Return a message of kombu. Celery logs and drops a body of another kind as unknown."""
    try:
        payload = loads(body.decode())
        properties, headers = payload["properties"], payload["headers"]
        # kombu would fail here for a damaged body, and leave the message unanswered.
        virtual.Channel.decode_body(virtual.Channel, payload["body"], properties["body_encoding"])
        if isinstance(properties["delivery_info"], dict) and isinstance(headers, dict):
            return dict(payload)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return {
        "body": body.decode("utf-8", "backslashreplace"),
        "content-type": "text/plain",
        "content-encoding": "utf-8",
        "headers": {},
        "properties": {"delivery_info": {}},
    }


def _queue_depth(queue: str, channel: str, nsqd: NsqdHTTPClient) -> int:
    topics = nsqd.stats(queue, channel).topics or ()
    return sum(t.depth + sum(c.depth for c in t.channels) for t in topics)


def _empty_queue(queue: str, channel: str, nsqd: NsqdHTTPClient) -> int:
    count = 0
    for topic in nsqd.stats(queue, channel).topics or ():
        count += topic.depth + sum(c.depth + c.deferred_count for c in topic.channels)
        nsqd.administer("empty", queue)
        for of_topic in topic.channels:
            nsqd.administer("empty", queue, of_topic.channel_name)
    return count


TRANSPORT_ALIASES["nsq"] = f"{__name__}:Transport"
TRANSPORT_ALIASES["nsqlookupd"] = f"{__name__}:LookupdTransport"
