"""Sinks alone: what they do with what a command prints, and with answers in an order that is rare."""

from __future__ import annotations

import queue
import time

from plugins.waiting import patience_s

from nsqtools.forward.exec_sink import ExecSettings, ExecSink
from nsqtools.forward.parcel import Outcome, Parcel
from nsqtools.testing import fake_batch


def parcel_of(body: bytes) -> Parcel:
    return Parcel(fake_batch([body]), [body], "clicks", 0.0)


def test_a_command_that_prints_without_end_is_ended_in_time() -> None:
    """Also where its output is passed on more slowly than it comes."""
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    settings = ExecSettings("/bin/sh", ("sh", "-c", "yes"), "run", timeout_s=0.2)
    sink = ExecSink(settings, lambda stream, data: time.sleep(0.03))
    try:
        sink.submit(parcel_of(b"1"), lambda parcel, outcome: outcomes.put(outcome))
        assert outcomes.get(timeout=patience_s(10)).error == "sh took longer than 0.2 s"
    finally:
        sink.stop(1.0)
