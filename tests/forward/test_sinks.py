"""Sinks alone: commands that print without end, and answers in an order that is rare."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.daemons import GoNsqd
from plugins.processes import is_alive
from plugins.waiting import patience_s, wait_until

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer_io import ConsumerIO
from nsqtools.errors import ConfigurationError
from nsqtools.forward import BatchForm, Redirects
from nsqtools.forward.command_starter import Starter
from nsqtools.forward.exec_sink import ExecSettings, ExecSink
from nsqtools.forward.forwarder import forward_to
from nsqtools.forward.http_pool import Answer, HttpPool
from nsqtools.forward.http_requests import Endpoint, HttpRequest, RequestBuilder, parse_header
from nsqtools.forward.http_sink import HttpSettings, HttpSink
from nsqtools.forward.nsq_sink import LoopGuard
from nsqtools.forward.parcel import Fate, Outcome, Parcel, Report
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


def test_a_command_of_which_its_starter_had_no_time_to_tell_ends_with_it(tmp_path: Path) -> None:
    starter = Starter()
    with (tmp_path / "pid").open("w+b") as file:
        words = [b"/bin/sh", b"-c", b"echo $PPID $$; exec sleep 1000"]
        starter.start(1, words, [], [file.fileno()] * 3)
        wait_until(lambda: (tmp_path / "pid").read_bytes().endswith(b"\n"), what="the command")
    parent, command = map(int, (tmp_path / "pid").read_text().split())
    os.kill(parent, signal.SIGKILL)
    starter.lost()  # and nothing of it was read
    wait_until(lambda: not is_alive(command), what="the end of the command")


def test_another_host_does_not_get_the_secrets_that_it_is_redirected_to() -> None:
    secrets = ["Authorization: Bearer secret", "cookie: secret", "X-Id: 1"]
    builder = RequestBuilder(content_type="text/plain", headers=list(map(parse_header, secrets)))
    pool = Mock(call_soon=lambda call: (call(), pool.start.call_args.args[1]()))
    settings = HttpSettings(redirects=Redirects.FOLLOW)
    HttpSink([Endpoint("http://a/")], builder, settings, pool).submit(parcel_of(b"1"), Mock())
    for place in ("/there", "https://a/there", "https://elsewhere/"):
        _, answered = pool.send.call_args.args
        pool.call_soon(lambda: answered(Answer(307, location=place), False))  # noqa: B023

    requests = [call.args[0] for call in pool.send.call_args_list]
    assert [str(request.headers).count("secret") for request in requests] == [2, 2, 2, 0]
    assert b"X-Id: 1" in requests[3].headers


def test_a_url_that_is_too_long_for_libcurl_fails_alone() -> None:
    pool, answers = HttpPool(1.0, 1.0, None), queue.SimpleQueue[Answer]()
    request = HttpRequest("http://a/" + "x" * 9_000_000, [], None, "a:80", allows_private=True)
    pool.start(lambda now: None, lambda: None)
    try:
        for _ in range(2):  # the second one does not get the address of what was sent before
            pool.call_soon(lambda: pool.send(request, lambda answer, _: answers.put(answer)))
            assert answers.get(timeout=patience_s(10)).error.startswith("a:80: ")
        assert pool.failure is None
    finally:
        pool.stop()


@pytest.mark.parametrize("form", BatchForm)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_json_in_a_batch_is_plain_utf8(form: BatchForm, encoding: str) -> None:
    """Joined with others in UTF-8 it is none, and the byte of a line break may be half a letter."""
    builder = RequestBuilder(content_type="", batch=form)
    with pytest.raises(ValueError):
        builder.build(Endpoint("http://a/"), [parcel_of('["\u0a05",\n2]'.encode(encoding))])


def test_a_forwarder_does_not_go_on_without_a_consumer_that_a_defect_has_ended(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", b"1")
    monkeypatch.setattr(ConsumerIO, "received", None)
    place: Any = {"nsqd_tcp_addresses": nsqd.tcp_address, "exit_idle_s": patience_s(1)}
    forwarder = forward_to(Mock(), "clicks", "c", **place)
    with pytest.raises(RuntimeError, match="the I/O thread failed"):
        forwarder.run()


def test_a_sink_that_is_busy_adds_to_no_count_of_attempts(nsqd: GoNsqd, tmp_path: Path) -> None:
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", b"1")
    fates = [Fate.BUSY, Fate.BUSY, Fate.FAILED, Fate.DELIVERED]

    def submit(parcel: Parcel, report: Report) -> None:
        report([parcel], Outcome(fates.pop(0), "scripted", retry_after_s=0))

    sink = Mock(parts=lambda parcel: [parcel], submit=submit)
    more: Any = {"nsqd_tcp_addresses": nsqd.tcp_address, "exit_idle_s": patience_s(1)}
    more |= {"max_attempts": 2, "dead_letter_file": tmp_path / "dead"}
    forwarder = forward_to(sink, "clicks", "c", **more)
    forwarder.run()

    totals = forwarder.counters.totals
    assert (totals.delivered, totals.dead_lettered, totals.requeued) == (1, 0, 3)


def test_an_nsqd_that_hangs_holds_up_one_check_for_loops_and_not_that_of_each_topic(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.forward.nsq_sink.LOOK_S", patience_s(60))
    place = ConnectionSettings((nsqd.tcp_address,), nsqd_http_addresses=(nsqd.http_address,))
    guard = LoopGuard(place, place, {"a": "b", "b": "c", "c": "a"}.__getitem__)
    guard.check("a")
    nsqd.pause()
    guard.check("b")
    with pytest.raises(ConfigurationError, match="would come back"):  # by what is begun itself
        guard.check("c")
