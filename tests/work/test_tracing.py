"""Spans of publishing and handling, and the context that travels in a body."""

import json
import os
import sys
import threading

import pytest
from plugins.archives import unfinished
from plugins.servers import AnyNsqd
from plugins.waiting import wait_until

from nsqtools import Message, Producer, traced_publish
from nsqtools.testing import fake_message
from nsqtools.work.tracing import process_spans
from nsqtools.work.worker import WorkService, WorkSettings

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return spans


def test_a_trace_continues_from_the_publisher_to_the_handler(
    spans: InMemorySpanExporter, embedded_nsqd: AnyNsqd
) -> None:
    nsqd = embedded_nsqd()
    nsqd.create_channel("orders", "billing")

    def bill(message: Message) -> None:
        raise LookupError("no such customer")

    settings = WorkSettings(
        topics=["orders"], channel="billing", nsqd_tcp_addresses=[nsqd.tcp_address]
    )
    worker = WorkService(bill, settings)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        with Producer(nsqd.tcp_address) as producer, traced_publish("orders", {"id": 42}) as body:
            producer.publish("orders", body)
        wait_until(lambda: len(spans.get_finished_spans()) == 2, what="both spans")
    finally:
        worker.stop()
        thread.join()
    assert unfinished(nsqd, "orders", "billing") == 1
    fields = json.loads(body)
    assert fields.pop("id") == 42
    assert fields.keys() == {"traceparent"}
    published, processed = sorted(spans.get_finished_spans(), key=lambda span: span.name)[::-1]
    assert (published.name, published.kind.name) == ("publish orders", "PRODUCER")
    assert (processed.name, processed.kind.name) == ("process orders", "CONSUMER")
    assert processed.parent is not None
    assert published.context is not None
    assert processed.parent.span_id == published.context.span_id
    assert processed.status.status_code.name == "ERROR"
    assert published.attributes == {
        "messaging.system": "nsq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
    }
    host, _, port = nsqd.tcp_address.rpartition(":")
    attributes = dict(processed.attributes or {})
    assert len(str(attributes.pop("messaging.message.id"))) == 16
    assert attributes == {
        "messaging.system": "nsq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.body.size": len(body),
        "server.address": host,
        "server.port": int(port),
    }


@pytest.mark.parametrize(
    ("body", "parent"),
    [
        (b'{"traceparent": "00-%s-%s-01"}' % (TRACE_ID.encode(), SPAN_ID.encode()), SPAN_ID),
        (b'{"traceparent": "nonsense"}', None),
        (b'{"traceparent": 1}', None),
        (b'["traceparent"]', None),
        (b'"traceparent" is no JSON', None),
        (b"\xff", None),
    ],
)
def test_the_trace_context_is_that_of_a_cloud_event(
    spans: InMemorySpanExporter, body: bytes, parent: str | None
) -> None:
    with process_spans("billing")(fake_message(body, topic="orders")):
        pass
    [span] = spans.get_finished_spans()
    assert (f"{span.parent.span_id:016x}" if span.parent else None) == parent


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with traced_publish("orders", {"id": 42}) as body:
        assert body == b'{"id": 42}'
    with process_spans("billing")(fake_message(b"")) as span:
        assert span is None


def test_opentelemetry_is_not_imported_unless_it_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with process_spans("billing")(fake_message(b"")) as span:
        assert span is None
    assert "opentelemetry.trace" not in sys.modules
