"""Spans of OpenTelemetry, with the names of its conventions for messaging.

NSQ has no headers. A trace continues in the handler of a message only if the publisher puts its
context into the body: `traced_publish` adds ``traceparent`` and ``tracestate`` to a JSON object,
where CloudEvents have them too.

Without the package opentelemetry everything works, without spans. The package is imported only
where OTEL_ variables are set or the program uses it, because that takes 50 ms. Exporters are set up
by opentelemetry-instrument, or by the program.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from nsqtools.client.message import Message

FIELDS = ("traceparent", "tracestate")

Attributes = dict[str, str | int]
SpanOfMessage = Callable[[Message], AbstractContextManager[object]]
NO_SPAN = nullcontext()  # one for all messages: making it would cost more than entering it


def _attributes(operation: str, kind: str, topic: str) -> Attributes:
    return {
        "messaging.system": "nsq",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _is_enabled() -> bool:
    return "opentelemetry.trace" in sys.modules or any(
        name.startswith("OTEL_") for name in os.environ
    )


def process_spans(channel: str) -> SpanOfMessage:
    """Return what makes the span of handling a message: a span ``process TOPIC`` if enabled."""
    if not _is_enabled():
        return lambda message: NO_SPAN
    try:
        from opentelemetry import propagate, trace
    except ModuleNotFoundError:
        return lambda message: NO_SPAN
    tracer = trace.get_tracer("nsqtools")

    def span(message: Message) -> AbstractContextManager[object]:
        attributes = _attributes("process", "process", message.topic)
        attributes["messaging.destination.subscription.name"] = channel
        attributes["messaging.message.id"] = message.id.decode("ascii", "replace")
        attributes["messaging.message.body.size"] = len(message.body)
        host, _, port = message.nsqd.rpartition(":")
        attributes |= {"server.address": host.strip("[]"), "server.port": int(port)}
        return tracer.start_as_current_span(
            f"process {message.topic}",
            propagate.extract(_trace_fields(message.body)),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
        )

    return span


def _trace_fields(body: bytes) -> dict[str, str]:
    if b'"traceparent"' not in body:  # nearly all bodies, which are not decoded for it
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    return {name: fields[name] for name in FIELDS if isinstance(fields.get(name), str)}


@contextmanager
def traced_publish(topic: str, fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the JSON of an object to publish, with the context of a span ``publish TOPIC``.

    The span lasts as long as the block. Without opentelemetry the JSON has only ``fields``.

        with traced_publish("orders", {"id": 42}) as body:
            producer.publish("orders", body)

    Raises ``TypeError`` and ``ValueError`` for fields that JSON does not have.
    """
    try:
        from opentelemetry import propagate, trace
    except ModuleNotFoundError:
        yield json.dumps(fields).encode()
        return
    span = trace.get_tracer("nsqtools").start_as_current_span(
        f"publish {topic}",
        kind=trace.SpanKind.PRODUCER,
        attributes=_attributes("publish", "send", topic),
    )
    with span:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        context = {name: carrier[name] for name in FIELDS if name in carrier}
        yield json.dumps({**fields, **context}).encode()
