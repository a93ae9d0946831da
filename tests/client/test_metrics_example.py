"""The example of nsq-python(7) for OpenTelemetry, with its real SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.daemons import GoNsqd
from plugins.readme import parse
from plugins.waiting import patience_s

GUIDE = Path(__file__).parents[2] / "man" / "nsq-python.7.md"

BEFORE = """
import json, os, signal, sys, threading, time
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
api.set_meter_provider(MeterProvider([reader]))


def points():
    data = reader.get_metrics_data()
    if data is None:
        return
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    count = getattr(point, "value", None) or getattr(point, "count", None)
                    yield metric.name, metric.unit, dict(point.attributes), count


def publish_and_stop():
    producer.publish("orders", b"order 42")
    producer.publish_many("orders", [b"order 43", b"fails"])
    try:
        producer.publish("orders", b"x" * 2000)
    except Exception:
        pass
    until = time.monotonic() + float(sys.argv[1])
    while sum(n for name, _, _, n in points() if name == "nsq.handling") < 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
"""

AFTER = """
print(json.dumps(sorted(points(), key=str)))
"""


def test_what_is_published_and_handled_is_counted(go_nsqd: Callable[..., GoNsqd]) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    nsqd = go_nsqd("-max-msg-size=1000")
    [example] = [
        block.text
        for block in parse(GUIDE.name, GUIDE.read_text("utf-8"))
        if "opentelemetry" in block.text
    ]
    run = "consumer.run(lambda message: print(message.body)"
    assert run in example
    example = example.replace(run, "consumer.run(handle").replace(
        "\nconsumer.run(",
        '\nhandle = lambda message: 1 / 0 if message.body == b"fails" else None\n'
        "threading.Thread(target=publish_and_stop).start()\nconsumer.run(",
    )
    program = BEFORE + example.replace("127.0.0.1:4150", nsqd.tcp_address) + AFTER
    done = subprocess.run(
        [sys.executable, "-c", program, str(patience_s(20))],
        capture_output=True,
        text=True,
        timeout=patience_s(40),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["nsq.handling", "s", {"outcome": "NoneType", "topic": "orders"}, 2],
        ["nsq.handling", "s", {"outcome": "ZeroDivisionError", "topic": "orders"}, 1],
        ["nsq.published", "", {"outcome": "PublishRejected", "topic": "orders"}, 1],
        ["nsq.published", "", {"outcome": "ok", "topic": "orders"}, 3],
    ]
