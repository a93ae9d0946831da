"""The programs of nsq-python(7) that run until a signal, each with a real nsqd.

The tests check the promises of the guide; tests/test_readme.py runs the other programs.
"""

import io
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.readme import UNTIL_SIGNAL, commands_of, parse
from plugins.servers import GoNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Producer

GUIDE = Path(__file__).parents[2] / "man" / "nsq-python.7.md"
BLOCKS = parse(GUIDE.name, GUIDE.read_text("utf-8"))
HEADINGS = [
    "Run a worker in your own program",
    "Insert in batches",
    "Write an asyncio worker",
    "Export metrics and traces",
]


def program_of(heading: str, nsqd: Nsqd, **changes: str) -> str:
    """The first program under a heading, adapted to this nsqd."""
    blocks = [block for block in BLOCKS if (block.heading, block.language) == (heading, "python")]
    text = blocks[0].text
    for old, new in {"127.0.0.1:4150": nsqd.tcp_address, **changes}.items():
        assert old in text
        text = text.replace(old, new)
    return text


@contextmanager
def running(program: str, directory: Path) -> Iterator[None]:
    """Run a program during the block; at SIGTERM it must exit successfully."""
    output, command = directory / "output", [sys.executable, "-c", program]
    with ExitStack() as cleanup, output.open("wb") as file:
        process = subprocess.Popen(command, cwd=directory, stdout=file, stderr=file)
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience_s(20)) == 0, output.read_text()


def test_all_services_of_the_guide_are_tested() -> None:
    assert [block.heading for block in BLOCKS if UNTIL_SIGNAL in block.text] == HEADINGS


def test_the_worker_of_the_guide(
    nsqd: GoNsqd, spawn_nsq: SpawnNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel("orders", "billing")
    nsqd.create_topic("orders.dead")
    order = b'{"id": %d, "customer": "%s"}'
    misfits = [b"no JSON", b'{"id": 1}', order % (1, b"")]
    nsqd.publish("orders", *misfits, *[order % (number, b"ann") for number in range(20)])
    monkeypatch.chdir(tmp_path)
    [shop] = [block.text for block in BLOCKS if block.text.startswith("# shop.py")]
    (tmp_path / "shop.py").write_text(shop)
    [block] = [b for b in BLOCKS if (b.heading, b.language) == ("Run a worker", "sh")]
    [command] = commands_of(block)
    words = command.text.partition(" #")[0].replace("8080", "0").split()[1:]
    process = spawn_nsq([*words, *nsqd.options])
    wait_until(lambda: unfinished(nsqd, "orders", "billing") == 0, what="the bills")
    out, _ = process.end(signal.SIGTERM)
    assert process.returncode == 143
    assert out.count(b"billed") == 20
    assert set(bodies_in(nsqd, "orders.dead", 3)) == set(misfits)


def test_the_program_that_serves(nsqd: GoNsqd, tmp_path: Path) -> None:
    nsqd.create_channel("orders", "billing")
    nsqd.publish("orders", *[b"%d" % number for number in range(20)])
    with running(program_of("Run a worker in your own program", nsqd), tmp_path):
        wait_until(lambda: unfinished(nsqd, "orders", "billing") == 0, what="the bills")
    assert (tmp_path / "output").read_text().count("billed") == 20


def test_the_bulk_inserter_of_the_guide(nsqd: GoNsqd, tmp_path: Path) -> None:
    nsqd.create_channel("rows", "database")
    rows = [b"row %d" % number for number in range(1200)]
    nsqd.publish("rows", *rows)
    with running(program_of("Insert in batches", nsqd), tmp_path):
        wait_until(lambda: unfinished(nsqd, "rows", "database") == 0, what="the inserts")
    with closing(sqlite3.connect(tmp_path / "rows.db")) as database:
        inserted = [row for (row,) in database.execute("SELECT body FROM rows")]
    assert sorted(inserted) == sorted(rows)


def test_the_asyncio_worker_of_the_guide(nsqd: GoNsqd, tmp_path: Path) -> None:
    nsqd.create_channel("orders", "invoicing")
    nsqd.publish("orders", *[b"%d" % number for number in range(100)])
    with running(program_of("Write an asyncio worker", nsqd), tmp_path):
        wait_until(lambda: unfinished(nsqd, "orders", "invoicing") == 0, what="the invoices")
    assert len(set(bodies_in(nsqd, "invoices", 100))) == 100


def test_the_web_application_of_the_guide(nsqd: GoNsqd) -> None:
    names: dict[str, Any] = {}
    heading = "Publish from a web request"
    unreachable = {"nsqd-2:4150": "127.0.0.1:1", "timeout_s=2": f"timeout_s={patience_s(2)}"}
    exec(program_of(heading, nsqd, **unreachable), names)
    statuses: list[str] = []

    def request(body: bytes) -> str:
        environ = {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        names["application"](environ, lambda status, headers: statuses.append(status))
        return statuses[-1]

    try:
        assert request(b"order 42") == "202 Accepted"
        assert request(b"") == "400 Bad Request"
        assert bodies_in(nsqd, "orders", 1) == [b"order 42"]
        nsqd.stop()
        wait_until(lambda: request(b"order 43").startswith("503"), what="a refusal")
    finally:
        names["producer"].stop()


RECORDED = """
import json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
metrics.set_meter_provider(MeterProvider([reader]))
tracing = TracerProvider()
tracing.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(tracing)
"""

REPORTED = """
producer.stop()
def of(attributes):
    return attributes["messaging.operation.name"], attributes.get("error.type")
points = [
    (metric.name, metric.unit, *of(point.attributes), getattr(point, "value", None) or point.count)
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
    for point in metric.data.data_points
]
seen = [
    (span.name, span.kind.name, *of(span.attributes), span.status.status_code.name,
     span.parent is not None)
    for span in spans.get_finished_spans()
]
json.dump([sorted(points, key=str), sorted(seen, key=str)], open("seen", "w"))
"""


def test_metrics_and_spans_have_conventional_names(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    nsqd = go_nsqd("-max-msg-size=1000")
    nsqd.create_channel("orders", "worker")
    nsqd.create_topic("invoices")
    with Producer(nsqd.tcp_address) as producer:
        producer.publish_many("orders", [b"order 42", b"x" * 995])  # its invoice is too large
    program = RECORDED + program_of("Export metrics and traces", nsqd) + REPORTED
    with running(program, tmp_path):
        stats = partial(nsqd.channel_stats, "orders", "worker")
        wait_until(lambda: stats()["deferred_count"] == 1, what="one requeued")
        wait_until(lambda: unfinished(nsqd, "orders", "worker") == 1, what="one handled")
        wait_until(lambda: nsqd.depth("invoices") == 1, what="the invoice")
    failed = "PublishRejected"
    assert json.loads((tmp_path / "seen").read_text()) == [
        [
            ["messaging.client.sent.messages", "{message}", "send", failed, 1],
            ["messaging.client.sent.messages", "{message}", "send", None, 1],
            ["messaging.process.duration", "s", "process", failed, 1],
            ["messaging.process.duration", "s", "process", None, 1],
        ],
        [
            ["process orders", "CONSUMER", "process", None, "ERROR", False],
            ["process orders", "CONSUMER", "process", None, "UNSET", False],
            ["send invoices", "PRODUCER", "send", None, "ERROR", True],
            ["send invoices", "PRODUCER", "send", None, "UNSET", True],
        ],
    ]
