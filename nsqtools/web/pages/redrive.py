"""The page that publishes messages of a channel of dead letters again.

The source is a topic whose messages are bodies that consumers gave up (``dead_letter=``). Messages
are published before they are finished, so a failure in between doubles messages and loses none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsqtools.client.message import Message
from nsqtools.client.producer import Producer
from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.names import check_topic
from nsqtools.web.pages.messages import COUNTS, addresses_with_channels, take_messages
from nsqtools.web.pages.site import Site

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
    return await run_in_threadpool(_page, site, request, is_confirmed)


def _page(site: Site, request: Request, is_confirmed: bool) -> Response:
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
    context.audit.write("begun", "redrive", origin, **subject, count=count)
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
        context.audit.write(state, "redrive", origin, **subject, messages=len(done))
    return len(done)
