"""Sinks alone: commands that print without end, and answers in an order that is rare."""

import errno
import itertools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.daemons import GoNsqd
from plugins.processes import is_alive
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer_io import ConsumerIO
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.opening import ReloadedValue
from nsqtools.forward import BatchForm, EndpointMode, Redirects
from nsqtools.forward.command_starter import Starter
from nsqtools.forward.curl_pool import CurlPool
from nsqtools.forward.dispatcher import Dispatcher
from nsqtools.forward.exec_sink import ExecSettings, ExecSink
from nsqtools.forward.forwarder import Forwarder, ForwardSettings, forward_to
from nsqtools.forward.http_pool import Answer, HttpPool
from nsqtools.forward.http_requests import (
    Endpoint,
    HttpRequest,
    RequestBuilder,
    RequestSecrets,
    parse_header,
)
from nsqtools.forward.http_sink import HttpSettings, HttpSink, parse_policy
from nsqtools.forward.httpcore_pool import HttpcorePool
from nsqtools.forward.nsq_sink import LoopGuard
from nsqtools.forward.parcel import DELIVERED, Counters, Fate, Outcome, Parcel, Report
from nsqtools.tail import RunLimits
from nsqtools.testing import fake_batch


def parcel_of(body: bytes) -> Parcel:
    return Parcel(fake_batch([body]), [body], "clicks", 0.0)


def outcomes_of(sink: ExecSink, *parcels: Parcel) -> list[tuple[int, Outcome]]:
    """What becomes of parcels, one after the other, and how many messages it is said of."""
    outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    found = []
    try:
        for parcel in parcels:
            sink.submit(parcel, lambda parcels, outcome: outcomes.put((len(parcels), outcome)))
            missing = len(parcel)
            while missing:
                found.append(outcomes.get(timeout=patience_s(10)))
                missing -= found[-1][0]
    finally:
        sink.stop(1.0)
    return found


def test_a_command_that_prints_without_end_is_ended_in_time() -> None:
    """Also where its output is passed on more slowly than it comes."""
    settings = ExecSettings("/bin/sh", ("sh", "-c", "yes"), "run", timeout_s=0.2)
    sink = ExecSink(settings, lambda stream, data: time.sleep(0.03))
    [(_, outcome)] = outcomes_of(sink, parcel_of(b"1"))
    assert outcome.error == "sh took longer than 0.2 s"


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


def test_a_run_without_a_pipe_to_spare_holds_up_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, pipe = itertools.count(1), os.pipe

    def scarce() -> tuple[int, int]:
        if next(calls) == 3:  # after the one of the process that starts it, and that of its stdout
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe()

    sink = ExecSink(ExecSettings("/bin/cat", ("cat",), "run"), lambda stream, data: None)
    monkeypatch.setattr(os, "pipe", scarce)
    ended = outcomes_of(sink, parcel_of(b"1"), parcel_of(b"1"))
    assert [outcome.fate for _, outcome in ended] == [Fate.UNREACHABLE, Fate.DELIVERED]


def test_of_a_batch_only_what_the_command_got_is_delivered() -> None:
    settings = ExecSettings("/bin/cat", ("cat",), "run", batch=2)
    sink = ExecSink(settings, lambda stream, data: None)
    parcel = Parcel(fake_batch([b"1", b"2"]), [b"1", b"2"], "clicks", 0.0)
    parcel.messages[0].finish()  # as if nsqd had taken it back
    ended = [(count, outcome.fate) for count, outcome in outcomes_of(sink, *sink.parts(parcel))]
    assert ended == [(1, Fate.FAILED), (1, Fate.DELIVERED)]


def test_a_stop_waits_for_no_whole_batch() -> None:
    settings = ExecSettings("/bin/cat", ("cat",), "run", batch=9, batch_wait_s=3600)
    sink, counters = ExecSink(settings, lambda stream, data: None), Counters()
    dispatcher = Dispatcher(sink, counters, max_attempts=0, dead_letters=None, on_circuit=Mock())
    dispatcher.send(parcel_of(b"1"))
    dispatcher.drain(patience_s(10), lambda: None)
    assert counters.totals.delivered == 1


def http_sink(*headers: str, **settings: Any) -> tuple[HttpSink, Any]:
    """One with two endpoints, and in place of its pool one whose requests the test answers."""
    pool = Mock(call_soon=lambda call: (call(), pool.start.call_args.args[1]()))
    builder = RequestBuilder(content_type="text/plain", headers=list(map(parse_header, headers)))
    endpoints = [Endpoint(f"http://{name}/") for name in "ab"]
    return HttpSink(endpoints, builder, HttpSettings(**settings), pool), pool


def answer_last(pool: Any, status: int, **more: str) -> None:
    _, answered = pool.send.call_args.args
    pool.call_soon(lambda: answered(Answer(status, **more), False))


def test_another_host_does_not_get_the_secrets_that_it_is_redirected_to() -> None:
    secrets = ["Authorization: Bearer secret", "cookie: secret", "X-Id: 1"]
    sink, pool = http_sink(*secrets, redirects=Redirects.FOLLOW)
    sink.submit(parcel_of(b"1"), Mock())
    answer_last(pool, 307, location="/there")
    answer_last(pool, 307, location=pool.send.call_args.args[0].url.replace("http", "https"))
    answer_last(pool, 307, location="https://elsewhere/")

    requests = [call.args[0] for call in pool.send.call_args_list]
    assert [str(request.headers).count("secret") for request in requests] == [2, 2, 2, 0]
    assert b"X-Id: 1" in requests[3].headers


@pytest.mark.parametrize("engine", [CurlPool, HttpcorePool])
def test_what_cannot_be_begun_fails_alone_a_url_that_is_too_long_and_all_without_a_file_to_spare(
    engine: type[HttpPool], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_socket(*_: object, **more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def error_of(url: str, name: str) -> str:
        request = HttpRequest(url, [], None, name, allows_private=True)
        pool.call_soon(lambda: pool.send(request, lambda answer, _: answers.put(answer)))
        return answers.get(timeout=patience_s(10)).error

    pool, answers = engine(1.0, 1.0, None), queue.SimpleQueue[Answer]()
    pool.start(lambda now: None, lambda: None)
    try:
        for _ in range(2):  # the second one does not get the address of what was sent before
            error = error_of("http://127.0.0.1:1/" + "x" * 9_000_000, "a:80")
            assert error.startswith("a:80: " if engine is CurlPool else "cannot connect to a:80 (")
        monkeypatch.setattr(socket, "socket", no_socket)
        error = error_of("http://127.0.0.1:1/", "a:1")
        assert pool.failure is None
    finally:
        pool.stop()
    assert error == "cannot connect to a:1 (Too many open files)"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("form", BatchForm)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_json_in_a_batch_is_plain_utf8(form: BatchForm, encoding: str) -> None:
    """Joined with others in UTF-8 it is none, and the byte of a line break may be half a letter."""
    builder = RequestBuilder(content_type="", batch=form)
    with pytest.raises(ValueError):
        builder.build(Endpoint("http://a/"), [parcel_of('["\u0a05",\n2]'.encode(encoding))])


@pytest.mark.parametrize("rules", [["404=retry", "4xx=drop"], ["4XX=drop", "404=retry"]])
def test_a_status_of_its_own_is_stronger_than_its_class_in_any_order(rules: list[str]) -> None:
    policy = parse_policy(rules)
    actions = [policy[status].value for status in (200, 400, 404, 429, 500)]
    assert actions == ["ok", "drop", "retry", "drop", "retry"]


def test_what_no_endpoint_has_answered_may_be_there_from_each() -> None:
    (sink, pool), report = http_sink(), Mock()
    sink.submit(parcel_of(b"1"), report)
    for _ in range(2):
        answer_last(pool, 0, error="broken")
    [(_, outcome)] = (call.args for call in report.call_args_list)
    assert (outcome.fate, outcome.repeated) == (Fate.FAILED, 2)


@pytest.mark.parametrize(("mode", "names"), [("failover", "abbb"), ("round-robin", "babb")])
def test_an_endpoint_that_hangs_keeps_one_message_waiting(mode: str, names: str) -> None:
    """Where it takes turns, and where it is tried again after it has failed."""
    sink, pool = http_sink(mode=EndpointMode(mode), policy=parse_policy(["503=ok"]))
    if mode == "failover":
        sink._circuits[0].failed(0.0, is_hopeless=True)
    for _ in names:
        sink.submit(parcel_of(b"1"), Mock())
        if pool.send.call_args.args[0].name == "b:80":
            answer_last(pool, 200)
    asked = [call.args for call in pool.send.call_args_list]
    assert "".join(request.name[0] for request, _ in asked) == names
    answered = {request.name: done for request, done in asked}["a:80"]
    pool.call_soon(lambda: answered(Answer(503), False))
    assert not any(each.retry_at for each in sink._circuits)


def forwarder_to(
    sink: Any, nsqd: GoNsqd, topics: Sequence[str] = ("clicks",), **more: Any
) -> Forwarder:
    """Of topics with a message each, until nothing comes."""
    for topic in topics:
        nsqd.create_channel(topic, "c")
        nsqd.publish(topic, b"1")
    more = {"nsqd_tcp_addresses": nsqd.tcp_address, "exit_idle_s": patience_s(1), **more}
    return forward_to(sink, [*topics], "c", **more)


def test_a_forwarder_does_not_go_on_without_a_consumer_that_a_defect_has_ended(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConsumerIO, "received", None)
    with pytest.raises(RuntimeError, match="the I/O thread failed"):
        forwarder_to(Mock(), nsqd).run()


@pytest.mark.parametrize("method", ["parts", "submit"])
def test_a_sink_with_a_defect_ends_the_run_at_once(nsqd: GoNsqd, method: str) -> None:
    sink = Mock(parts=lambda parcel: [parcel])
    setattr(sink, method, Mock(side_effect=KeyError(method)))
    with pytest.raises(KeyError):
        forwarder_to(sink, nsqd, options=ClientOptions(drain_timeout_s=3600)).run()
    wait_until(lambda: nsqd.depth("clicks", "c") == 1, what="it is given back")


def test_a_command_whose_output_is_lost_has_finished_nothing(nsqd: GoNsqd) -> None:
    def cannot_write(stream: int, data: bytes) -> None:
        raise OutputError("cannot write to stdout (No space left on device)")

    sink = ExecSink(ExecSettings("/bin/echo", ("echo", "1"), "c"), cannot_write)
    forwarder = forwarder_to(sink, nsqd, exit_idle_s=None)
    with pytest.raises(OutputError):
        forwarder.run()
    totals = forwarder.counters.totals
    assert (totals.delivered, totals.requeued) == (0, 1)  # by us, before the consumer stops
    wait_until(lambda: nsqd.depth("clicks", "c") == 1, what="it is given back")


def test_a_sink_that_is_busy_adds_to_no_count_of_attempts(nsqd: GoNsqd, tmp_path: Path) -> None:
    fates = [Fate.BUSY, Fate.BUSY, Fate.FAILED, Fate.DELIVERED]

    def submit(parcel: Parcel, report: Report) -> None:
        report([parcel], Outcome(fates.pop(0), "scripted", retry_after_s=0))

    sink = Mock(parts=lambda parcel: [parcel], submit=submit)
    more = {"max_attempts": 2, "dead_letter_file": tmp_path / "dead"}
    forwarder = forwarder_to(sink, nsqd, **more)
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
    with pytest.raises(ConfigurationError, match="would return"):  # by what is begun itself
        guard.check("c")


EVIL = b"\r\nX-Evil: \0A=\xff"


def test_an_id_that_is_none_is_no_header_and_no_variable_of_a_command() -> None:
    """A hostile nsqd may send anything as one."""
    parcel = parcel_of(b"1")
    [message] = parcel.messages
    message.id = EVIL
    parcel.messages._source.in_flight[EVIL] = message
    secrets = ReloadedValue((), lambda: RequestSecrets(key=b"key"))
    builder = RequestBuilder(content_type="a\r\nX-Evil: \udcff", secrets=secrets)
    headers = builder.build(Endpoint("http://a/"), [parcel]).headers
    assert not [each for each in headers if b"\n" in each or b"\0" in each]

    printed: list[bytes] = []
    settings = ExecSettings("/usr/bin/env", ("env",), "run")
    sink = ExecSink(settings, lambda stream, data: printed.append(data))
    [(_, outcome)] = outcomes_of(sink, parcel)
    assert outcome.fate is Fate.DELIVERED
    assert b"\nNSQ_MESSAGE_ID=" in (environment := b"".join(printed))
    assert b"\nA=" not in environment
    assert "\\xff" in repr(message)


def test_an_outage_is_no_attempt_of_what_had_come_before_it(nsqd: GoNsqd, tmp_path: Path) -> None:
    """Nor where the sink had not been given it yet."""
    timeout_s = max(1.0, patience_s(0.6))  # in which a busy machine lets it touch what it holds
    over_at, failed = 0.0, set[str]()

    def have_come() -> bool:
        return all(nsqd.channel_stats(topic, "c")["in_flight_count"] for topic in "abc")

    def submit(parcel: Parcel, report: Report) -> None:
        nonlocal over_at
        if not over_at:  # the first; another waits in the client
            wait_until(have_come, what="all of them", timeout_s=20)
            over_at = time.monotonic() + 1.2 * timeout_s
        if time.monotonic() < over_at:
            report([parcel], Outcome(Fate.UNREACHABLE, "away"))
        elif parcel.topic in failed:
            report([parcel], DELIVERED)
        else:
            failed.add(parcel.topic)
            report([parcel], Outcome(Fate.FAILED, "scripted", retry_after_s=0))

    more = {"options": ClientOptions(msg_timeout_s=timeout_s), "max_attempts": 2}
    sink = Mock(parts=lambda parcel: [parcel], submit=submit)
    forwarder = forwarder_to(sink, nsqd, "abc", dead_letter_file=tmp_path / "dead", **more)
    forwarder.run()

    totals = forwarder.counters.totals
    assert (totals.delivered, totals.dead_lettered) == (3, 0)


def test_what_is_delivered_together_is_asked_for_together(scripted_nsqd: ScriptedNsqd) -> None:
    place = ConnectionSettings((scripted_nsqd.address,))
    topics = ConsumedTopics(["clicks"], place)
    settings = ForwardSettings(topics, "archive", ClientOptions(), batch=100)
    forwarder = Forwarder(settings, Mock(), dead_letters=None, limits=RunLimits())
    running = threading.Thread(target=forwarder.run)
    running.start()
    try:
        scripted_nsqd.subscribed("RDY 100").close()
    finally:
        forwarder.stop()
        running.join()
