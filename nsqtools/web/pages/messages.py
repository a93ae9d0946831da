"""The pages of messages: copies of new ones of a topic, a peek into a channel, and the redrive.

nsqd shows a message only by delivering it. A new channel gets a copy of every later message, and an
ephemeral one disappears with its last connection. The trap is a topic without a channel: its whole
backlog would go to the new channel and be lost with it. So the page connects only to nsqd where the
topic has another channel. A peek is a consumer that requeues its messages. Each message has one
more attempt afterwards, so only users who may make changes can peek.

JSON is indented without changing a token: numbers keep their digits, and objects keep the order of
their keys and duplicate keys.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.message import Message
from nsqtools.client.producer import Producer
from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import EPHEMERAL, check_topic
from nsqtools.protocol.text import indented, json_tokens
from nsqtools.tail import peek
from nsqtools.web.actions import WebContext
from nsqtools.web.pages.site import Site

COUNTS = (1, 10, 50, 100)
TIMES_S = (2, 5, 10, 30)


async def show_messages(site: Site, request: Request) -> Response:
    """Show the form; for a form that was sent, what came.

    Listening makes a channel, so it takes a form and its token.
    """
    if not site.context.settings.show_messages:
        raise HTTPException(403, "messages are not shown by this console (--show-messages)")
    fields = await site.context.form(request) if request.method == "POST" else None
    return await run_in_threadpool(_page, site, request, fields)


def _page(site: Site, request: Request, fields: dict[str, str] | None) -> Response:
    context = site.context
    topic = request.query_params.get("topic", "")
    channel = request.query_params.get("channel", "")
    if channel:
        context.check_changes(request)
    if not context.user(request).may_read(topic, channel or None):
        raise HTTPException(403, "the users file does not let you read these messages")
    row = site.snapshot().queue(topic, channel)
    if row is None:
        raise NotFoundError(f"no nsqd that answers has {topic}/{channel}".rstrip("/"))
    count = _one_of(COUNTS, (fields or {}).get("count"), 10)
    for_s = _one_of(TIMES_S, (fields or {}).get("for_s"), 5)
    copies: list[tuple[Message, ShownBody]] | None = None
    left_out: list[str] = []
    if fields is not None:
        context.log_reading(request, topic, channel)
        check_topic(topic)
        addresses, left_out = addresses_with_channels(context.cluster, topic, channel)
        received: list[Message] = []
        name = channel or f"nsq-web-{secrets.token_hex(4)}{EPHEMERAL}"
        take_messages(context, addresses, topic, name, count, for_s, received.extend)
        copies = [(message, shown_body(message.body)) for message in received]
    return site.page(
        request,
        "messages.html",
        f"Messages of {topic}",
        row=row,
        topic=topic,
        channel=channel,
        count=count,
        for_s=for_s,
        copies=copies,
        left_out=left_out,
    )


def _one_of(allowed: tuple[int, ...], text: str | None, usual: int) -> int:
    return next((value for value in allowed if str(value) == text), usual)


MAX_SHOWN = 64 * 1024
MAX_DEPTH = 100


class ShownBody(NamedTuple):
    """``kind`` is "JSON", "text" or "binary"; ``left_out`` counts the bytes that are not shown."""

    kind: str
    text: bytes
    left_out: int


def shown_body(body: bytes) -> ShownBody:
    """Return a body as it is shown. Controls in it are not escaped yet."""
    if len(body) > MAX_SHOWN:
        return ShownBody(_kind(body[:MAX_SHOWN]), body[:MAX_SHOWN], len(body) - MAX_SHOWN)
    if body.lstrip()[:1] in (b"{", b"["):
        try:
            json.loads(body, parse_int=str, parse_float=str)
            tokens = json_tokens(body.decode())
            return ShownBody("JSON", indented(tokens, tokens, MAX_DEPTH).encode(), 0)
        except (ValueError, RecursionError):
            pass  # not JSON, or too deep to read
    return ShownBody(_kind(body), body, 0)


def _kind(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        is_cut = error.start >= MAX_SHOWN - 4 and error.reason == "unexpected end of data"
        return "text" if is_cut else "binary"
    return "text"


def addresses_with_channels(
    cluster: Cluster, topic: str, channel: str = ""
) -> tuple[list[str], list[str]]:
    """Return where to connect to, and a line for each nsqd that has to be left out.

    Raises `NotFoundError` when no nsqd has the topic, `ConfigurationError` when none is left.
    """
    answers, failures = cluster.ask_nsqds(
        lambda client: (client.info(), client.stats(topic).topics or ())
    )
    found, left_out = [], [f"{failure.error}" for failure in failures]
    is_known = False
    for address, (info, topics) in answers.items():
        for topic_stats in (stats for stats in topics if stats.topic_name == topic):
            is_known, names = True, [stats.channel_name for stats in topic_stats.channels]
            if not names and not channel:
                why = "the topic has no channel there, and its backlog would be lost"
                left_out.append(f"{address}: {why}")
            elif not channel or channel in names:
                found.append(cluster.tcp_address(address, info))
    if not is_known:
        raise NotFoundError(f"no nsqd that answers has the topic {topic}")
    if not found:
        raise ConfigurationError(
            f"{topic} cannot be listened to without loss",
            hint="; ".join(left_out) + ". Create a channel first.",
        )
    return found, left_out


MAX_LISTENERS = 4
_listeners = threading.BoundedSemaphore(MAX_LISTENERS)


def take_messages(
    context: WebContext,
    addresses: list[str],
    topic: str,
    channel: str,
    count: int,
    for_s: float,
    use: Callable[[Sequence[Message]], None],
) -> None:
    """Pass up to ``count`` messages that come within ``for_s`` to ``use``. Raises `NsqError`.

    Messages that ``use`` does not finish are requeued.
    """
    if not _listeners.acquire(blocking=False):
        text = f"{MAX_LISTENERS} others are listening already"
        raise NsqError(text, hint="Try again in a moment.")
    try:
        peek(
            topic,
            channel,
            ConnectionSettings(tuple(addresses)),
            count,
            use,
            options=context.options,
            idle_s=for_s,
            for_s=for_s,
            on_start=context.listen,
        )
    finally:
        _listeners.release()
    if context.watcher.is_stopped:
        raise NsqError("nsq web is being stopped")


# -- redrive --------------------------------------------------------------------------------------

# The source is a topic whose messages are bodies that consumers gave up (``dead_letter=``).
# Messages are published before they are finished, so a failure in between doubles messages and
# loses none.

# Silence of an nsqd after which it has no further message.
IDLE_S = 2
_SUFFIX = re.compile(r"[._-](dead|dlq|dead[._-]?letters?|failed)$")


async def redrive(site: Site, request: Request) -> Response:
    """Show the form or the plan; for a plan that was confirmed, publish the messages.

    Raises ``HTTPException`` 403 for users that may not change these topics.
    """
    site.context.check_changes(request)
    is_confirmed = request.method == "POST"
    if is_confirmed:
        await site.context.form(request)
    return await run_in_threadpool(_redrive_page, site, request, is_confirmed)


def _redrive_page(site: Site, request: Request, is_confirmed: bool) -> Response:
    context, snapshot, query = site.context, site.snapshot(), request.query_params
    topic, channel, destination = (query.get(name, "") for name in ("topic", "channel", "to"))
    for name, of in ((topic, channel), (destination, "")) if destination else ((topic, channel),):
        context.check_change(request, TopicChange(action=Action.EMPTY, topic=name, channel=of))
    if not context.user(request).may_read(topic, channel):  # The destination may be readable.
        raise HTTPException(403, "the users file does not let you read these messages")
    row = snapshot.queue(topic, channel) if channel else None
    if row is None:
        raise NotFoundError(f"no nsqd that answers has the channel {topic}/{channel}")
    count = next((count for count in COUNTS if str(count) == query.get("count")), 1)
    refusal, published = "", None
    if destination:
        try:
            check_topic(destination)
            if destination == topic:
                refusal = "The messages are in this topic already."
            elif snapshot.queue(destination, "") is None:
                refusal = f"The topic {destination} does not exist."
        except ConfigurationError as error:
            refusal = f"{error}"
        if is_confirmed and not refusal:
            published = _publish(site, request, topic, channel, destination, count)
    return site.page(
        request,
        "redrive.html",
        f"Redrive {topic}/{channel}",
        400 if refusal else 200,
        row=row,
        topic=topic,
        channel=channel,
        destination=destination or _SUFFIX.sub("", topic),
        count=count,
        is_plan=bool(destination) and not refusal,
        refusal=refusal,
        published=published,
    )


def _publish(
    site: Site, request: Request, topic: str, channel: str, destination: str, count: int
) -> int:
    """Publish up to ``count`` messages, then finish them; return their number.

    Raises `NsqError` if they were not all published; they are requeued then.
    """
    context = site.context
    addresses, _ = addresses_with_channels(context.cluster, topic, channel)
    origin = context.origin(request)
    subject = {"topic": topic, "channel": channel, "destination": destination}
    context.audit("begun", "redrive", origin, **subject, count=count)
    done: list[Message] = []

    def publish(messages: Sequence[Message]) -> None:
        if messages:
            with Producer(addresses, context.options) as producer:
                producer.publish_many(destination, [message.body for message in messages])
            for message in messages:
                message.finish()
            done.extend(messages)

    try:
        take_messages(context, addresses, topic, channel, count, IDLE_S, publish)
    finally:
        state = "done" if done else "failed"
        context.audit_result(state, "redrive", origin, **subject, messages=len(done))
    return len(done)
