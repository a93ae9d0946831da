"""Sinks alone: commands with endless output, and answers in an unusual order."""

import errno
import itertools
import os
import queue
import resource
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
from nsqtools.forward.http_pool import HttpPool, HttpReply
from nsqtools.forward.http_requests import (
    Endpoint,
    HttpRequest,
    RequestBuilder,
    RequestSecrets,
    parse_header,
)
from nsqtools.forward.http_sink import HttpSettings, HttpSink, parse_policy
from nsqtools.forward.httpcore_pool import HttpcorePool
from nsqtools.forward.nsq_sink import LoopGuard, parse_rule
from nsqtools.forward.parcel import DELIVERED, Counters, Fate, Outcome, Parcel, Report
from nsqtools.tail import RunLimits
from nsqtools.testing import fake_batch


def parcel_of(body: bytes) -> Parcel:
    return Parcel(fake_batch([body]), [body], "clicks", 0.0)


def outcomes_of(sink: ExecSink, *parcels: Parcel) -> list[tuple[int, Outcome]]:
    """Submit parcels one by one; return the outcomes with the number of their messages."""
    outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    received = []
    try:
        for parcel in parcels:
            sink.submit(parcel, lambda parcels, outcome: outcomes.put((len(parcels), outcome)))
            missing = len(parcel)
            while missing:
                received.append(outcomes.get(timeout=patience_s(10)))
                missing -= received[-1][0]
    finally:
        sink.stop(1.0)
    return received


@pytest.mark.parametrize("rule", [r"(a)=\2", r"(a)=\g<b>", "(=a", "[[:alpha:]]=a", "a", "a="])
def test_a_rule_that_cannot_rename_is_refused(rule: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--map "):
        parse_rule(rule)


def test_a_rule_may_ignore_case() -> None:
    pattern, name = parse_rule(r"(?i)EU\.(.*)=\1")
    match = pattern.fullmatch("eu.clicks")
    assert match is not None
    assert match.expand(name) == "clicks"


def test_a_command_with_endless_output_is_ended_in_time() -> None:
    """Also if its output is forwarded more slowly than it is printed."""
    settings = ExecSettings("/bin/sh", ("sh", "-c", "yes"), "run", timeout_s=0.2)
    sink = ExecSink(settings, lambda stream, data: time.sleep(0.03))
    [(_, outcome)] = outcomes_of(sink, parcel_of(b"1"))
    assert outcome.error == "sh took longer than 0.2 s"


def test_a_command_that_a_killed_starter_did_not_report_ends(tmp_path: Path) -> None:
    starter = Starter()
    with (tmp_path / "pid").open("w+b") as file:
        words = [b"/bin/sh", b"-c", b"echo $PPID $$; exec sleep 1000"]
        starter.start(1, words, [], [file.fileno()] * 3)
        wait_until(lambda: (tmp_path / "pid").read_bytes().endswith(b"\n"), what="the command")
    parent, command = map(int, (tmp_path / "pid").read_text().split())
    os.kill(parent, signal.SIGKILL)
    starter.lost()  # before its report was read
    wait_until(lambda: not is_alive(command), what="the end of the command")


def test_a_failed_pipe_does_not_block_later_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, pipe = itertools.count(1), os.pipe

    def scarce() -> tuple[int, int]:
        if next(calls) == 3:  # after the pipes of the starter and of the command's stdout
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe()

    sink = ExecSink(ExecSettings("/bin/cat", ("cat",), "run"), lambda stream, data: None)
    monkeypatch.setattr(os, "pipe", scarce)
    ended = outcomes_of(sink, parcel_of(b"1"), parcel_of(b"1"))
    assert [outcome.fate for _, outcome in ended] == [Fate.UNREACHABLE, Fate.DELIVERED]


def test_a_body_beyond_the_limit_of_file_sizes_is_not_cut_off() -> None:
    """The standard input of a command is a file in memory, to which `ulimit -f` applies."""
    sink = ExecSink(ExecSettings("/bin/cat", ("cat",), "run"), Mock())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        [(_, outcome)] = outcomes_of(sink, parcel_of(b"x" * 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (outcome.fate, outcome.error) == (Fate.FAILED, "cannot start cat (File too large)")


def test_only_messages_that_the_command_received_are_delivered() -> None:
    settings = ExecSettings("/bin/cat", ("cat",), "run", batch=2)
    sink = ExecSink(settings, lambda stream, data: None)
    parcel = Parcel(fake_batch([b"1", b"2"]), [b"1", b"2"], "clicks", 0.0)
    parcel.messages[0].finish()  # as if nsqd had requeued it
    ended = [(count, outcome.fate) for count, outcome in outcomes_of(sink, *sink.parts(parcel))]
    assert ended == [(1, Fate.FAILED), (1, Fate.DELIVERED)]


def test_a_stop_does_not_wait_for_a_full_batch() -> None:
    settings = ExecSettings("/bin/cat", ("cat",), "run", batch=9, batch_wait_s=3600)
    sink, counters = ExecSink(settings, lambda stream, data: None), Counters()
    dispatcher = Dispatcher(sink, counters, max_attempts=0, dead_letters=None, on_circuit=Mock())
    dispatcher.send(parcel_of(b"1"))
    dispatcher.drain(patience_s(10), lambda: None)
    assert counters.totals.delivered == 1


def http_sink(*headers: str, **settings: Any) -> tuple[HttpSink, Any]:
    """A sink with two endpoints, and a pool whose requests the test answers."""
    pool = Mock(call_soon=lambda call: (call(), pool.start.call_args.args[1]()))
    builder = RequestBuilder(content_type="text/plain", headers=list(map(parse_header, headers)))
    endpoints = [Endpoint(f"http://{name}/") for name in "ab"]
    return HttpSink(endpoints, builder, HttpSettings(**settings), pool), pool


def answer_last(pool: Any, status: int, **more: str) -> None:
    _, answered = pool.send.call_args.args
    pool.call_soon(lambda: answered(HttpReply(status, **more), False))


def test_a_redirect_to_another_host_carries_no_secrets() -> None:
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
def test_a_request_that_cannot_start_fails_alone(
    engine: type[HttpPool], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_socket(*_: object, **more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def error_of(url: str, name: str) -> str:
        request = HttpRequest(url, [], None, name, allows_private=True)
        pool.call_soon(lambda: pool.send(request, lambda answer, _: answers.put(answer)))
        return answers.get(timeout=patience_s(10)).error

    pool, answers = engine(1.0, 1.0, None), queue.SimpleQueue[HttpReply]()
    pool.start(lambda now: None, lambda: None)
    try:
        for _ in range(2):  # the second must not report the address of the first
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
    """UTF-16 among UTF-8 is invalid, and half a character may be the byte of a line break."""
    builder = RequestBuilder(content_type="", batch=form)
    with pytest.raises(ValueError):
        builder.build(Endpoint("http://a/"), [parcel_of('["\u0a05",\n2]'.encode(encoding))])


def test_many_invalid_batches_behind_a_slow_endpoint_are_all_refused() -> None:
    """Each one is refused when its turn comes, without a call inside that of the one before."""
    pool, report = Mock(call_soon=lambda call: (call(), pool.start.call_args.args[1]())), Mock()
    builder = RequestBuilder(content_type="", batch=BatchForm.JSON)
    settings = HttpSettings(concurrency=1, batch_count=2, linger_s=9.0)
    sink = HttpSink([Endpoint("http://a/")], builder, settings, pool)
    for body in (b"1", b"2", *[b"not JSON"] * 1000):
        sink.submit(parcel_of(body), report)
    answer_last(pool, 200)
    fates = [call.args[1].fate for call in report.call_args_list]
    assert (fates.count(Fate.REFUSED), fates.count(Fate.DELIVERED)) == (1000, 1)


@pytest.mark.parametrize("rules", [["404=retry", "4xx=drop"], ["4XX=drop", "404=retry"]])
def test_a_single_status_overrides_its_class_in_any_order(rules: list[str]) -> None:
    policy = parse_policy(rules)
    actions = [policy[status].value for status in (200, 400, 404, 429, 500)]
    assert actions == ["ok", "drop", "retry", "drop", "retry"]


def test_an_unanswered_message_may_have_reached_every_endpoint() -> None:
    (sink, pool), report = http_sink(), Mock()
    sink.submit(parcel_of(b"1"), report)
    for _ in range(2):
        answer_last(pool, 0, error="broken")
    [(_, outcome)] = (call.args for call in report.call_args_list)
    assert (outcome.fate, outcome.repeated) == (Fate.FAILED, 2)


@pytest.mark.parametrize(("mode", "names"), [("failover", "abbb"), ("round-robin", "babb")])
def test_a_hanging_endpoint_delays_a_single_message(mode: str, names: str) -> None:
    """In round-robin, and when a failed endpoint is tried again."""
    sink, pool = http_sink(mode=EndpointMode(mode), policy=parse_policy(["503=ok"]))
    if mode == "failover":
        sink._circuits[0].failed(0.0, is_hopeless=True)
    for _ in names:
        sink.submit(parcel_of(b"1"), Mock())
        if pool.send.call_args.args[0].name == "b:80":
            answer_last(pool, 200)
    requests = [call.args for call in pool.send.call_args_list]
    assert "".join(request.name[0] for request, _ in requests) == names
    answered = {request.name: done for request, done in requests}["a:80"]
    pool.call_soon(lambda: answered(HttpReply(503), False))
    assert not any(circuit.retry_at for circuit in sink._circuits)


def forwarder_to(
    sink: Any, nsqd: GoNsqd, topics: Sequence[str] = ("clicks",), **arguments: Any
) -> Forwarder:
    """Forward topics with one message each, until they are idle."""
    for topic in topics:
        nsqd.create_channel(topic, "c")
        nsqd.publish(topic, b"1")
    arguments = {"nsqd_tcp_addresses": nsqd.tcp_address, "exit_idle_s": patience_s(1), **arguments}
    return forward_to(sink, [*topics], "c", **arguments)


def test_a_forwarder_ends_with_a_consumer_that_failed(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConsumerIO, "received", None)
    with pytest.raises(RuntimeError, match="the I/O thread failed"):
        forwarder_to(Mock(), nsqd).run()


@pytest.mark.parametrize("method", ["parts", "submit"])
def test_an_exception_of_a_sink_ends_the_run_immediately(nsqd: GoNsqd, method: str) -> None:
    sink = Mock(parts=lambda parcel: [parcel])
    setattr(sink, method, Mock(side_effect=KeyError(method)))
    with pytest.raises(KeyError):
        forwarder_to(sink, nsqd, options=ClientOptions(drain_timeout_s=3600)).run()
    wait_until(lambda: nsqd.depth("clicks", "c") == 1, what="it is given back")


def test_a_command_whose_output_is_lost_finishes_no_message(nsqd: GoNsqd) -> None:
    def cannot_write(stream: int, data: bytes) -> None:
        raise OutputError("cannot write to stdout (No space left on device)")

    sink = ExecSink(ExecSettings("/bin/echo", ("echo", "1"), "c"), cannot_write)
    forwarder = forwarder_to(sink, nsqd, exit_idle_s=None)
    with pytest.raises(OutputError):
        forwarder.run()
    totals = forwarder.counters.totals
    assert (totals.delivered, totals.requeued) == (0, 1)  # requeued before the consumer stops
    wait_until(lambda: nsqd.depth("clicks", "c") == 1, what="it is given back")


def test_a_busy_sink_does_not_count_as_an_attempt(nsqd: GoNsqd, tmp_path: Path) -> None:
    fates = [Fate.BUSY, Fate.BUSY, Fate.FAILED, Fate.DELIVERED]

    def submit(parcel: Parcel, report: Report) -> None:
        report([parcel], Outcome(fates.pop(0), "scripted", retry_after_s=0))

    sink = Mock(parts=lambda parcel: [parcel], submit=submit)
    options = {"max_attempts": 2, "dead_letter_file": tmp_path / "dead"}
    forwarder = forwarder_to(sink, nsqd, **options)
    forwarder.run()

    totals = forwarder.counters.totals
    assert (totals.delivered, totals.dead_lettered, totals.requeued) == (1, 0, 3)


def test_a_hanging_nsqd_delays_only_one_loop_check(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.forward.nsq_sink.LOOK_S", patience_s(60))
    place = ConnectionSettings((nsqd.tcp_address,), nsqd_http_addresses=(nsqd.http_address,))
    guard = LoopGuard(place, place, {"a": "b", "b": "c", "c": "a"}.__getitem__)
    guard.check("a")
    nsqd.pause()
    guard.check("b")
    with pytest.raises(ConfigurationError, match="would return"):  # found from the topics alone
        guard.check("c")


EVIL = b"\r\nX-Evil: \0A=\xff"


def test_an_invalid_message_id_injects_no_header_or_variable() -> None:
    """A hostile nsqd may send any bytes as an id."""
    parcel = parcel_of(b"1")
    [message] = parcel.messages
    message.id = EVIL
    parcel.messages._source.in_flight[EVIL] = message
    secrets = ReloadedValue((), lambda: RequestSecrets(key=b"key"))
    builder = RequestBuilder(content_type="a\r\nX-Evil: \udcff", secrets=secrets)
    headers = builder.build(Endpoint("http://a/"), [parcel]).headers
    assert not [header for header in headers if b"\n" in header or b"\0" in header]

    printed: list[bytes] = []
    settings = ExecSettings("/usr/bin/env", ("env",), "run")
    sink = ExecSink(settings, lambda stream, data: printed.append(data))
    [(_, outcome)] = outcomes_of(sink, parcel)
    assert outcome.fate is Fate.DELIVERED
    assert b"\nNSQ_MESSAGE_ID=" in (environment := b"".join(printed))
    assert b"\nA=" not in environment
    assert "\\xff" in repr(message)


def test_an_outage_is_no_attempt_for_messages_received_before_it(
    nsqd: GoNsqd, tmp_path: Path
) -> None:
    """The same holds for a message that the sink has not received yet."""
    timeout_s = max(1.0, patience_s(0.6))  # a busy machine needs that to touch in time
    over_at, failed = 0.0, set[str]()

    def have_come() -> bool:
        return all(nsqd.channel_stats(topic, "c")["in_flight_count"] for topic in "abc")

    def submit(parcel: Parcel, report: Report) -> None:
        nonlocal over_at
        if not over_at:  # the first message; another waits in the client
            wait_until(have_come, what="all of them", timeout_s=20)
            over_at = time.monotonic() + 1.2 * timeout_s
        if time.monotonic() < over_at:
            report([parcel], Outcome(Fate.UNREACHABLE, "away"))
        elif parcel.topic in failed:
            report([parcel], DELIVERED)
        else:
            failed.add(parcel.topic)
            report([parcel], Outcome(Fate.FAILED, "scripted", retry_after_s=0))

    options = {"options": ClientOptions(msg_timeout_s=timeout_s), "max_attempts": 2}
    sink = Mock(parts=lambda parcel: [parcel], submit=submit)
    forwarder = forwarder_to(sink, nsqd, "abc", dead_letter_file=tmp_path / "dead", **options)
    forwarder.run()

    totals = forwarder.counters.totals
    assert (totals.delivered, totals.dead_lettered) == (3, 0)


def test_rdy_is_the_size_of_a_batch(scripted_nsqd: ScriptedNsqd) -> None:
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
