"""``nsq tail`` as a process: output, ends and refusals."""

import fcntl
import json
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.cli import RunNsq, SpawnNsq, TerminalNsq
from plugins.clusters import RunningCluster
from plugins.http_server import MakeScripted
from plugins.servers import GoNsqd, GoNsqlookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import tail
from nsqtools.cli.running import channel_watch
from nsqtools.cli.running.channel_watch import ChannelWatch


@pytest.fixture
def clicks(nsqd: GoNsqd) -> GoNsqd:
    """An nsqd with the topic clicks, its channel c and three messages."""
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", b"one", b"two\x1b[31m", b"\xff\x00three")
    return nsqd


def place(nsqd: GoNsqd) -> list[str]:
    return ["tail", "-t", "clicks", "-c", "c", *nsqd.options]


def is_subscribed(nsqd: GoNsqd, clients: int = 1) -> bool:
    channels = nsqd.topic_stats("clicks")["channels"]
    return sum(channel["client_count"] for channel in channels) == clients


def test_the_default_channel_is_its_own_and_ephemeral(spawn_nsq: SpawnNsq, clicks: GoNsqd) -> None:
    process = spawn_nsq(["tail", "-t", "clicks", *clicks.options, "-n", "1"])
    wait_until(lambda: is_subscribed(clicks), what="tail has subscribed")
    names = clicks.channels("clicks")
    clicks.publish("clicks", b"new")

    assert process.communicate(timeout=patience_s(10))[0] == b"new\n"
    assert [name for name in names if re.fullmatch(r"tail\d{6}#ephemeral", name)]
    assert clicks.depth("clicks", "c") == 4


@pytest.mark.parametrize("is_given", [False, True])
def test_a_backlog_on_an_nsqd_that_joins_later_is_not_lost(
    spawn_nsq: SpawnNsq, clicks: GoNsqd, go_nsqd: MakeNsqd, lookupd: GoNsqlookupd, is_given: bool
) -> None:
    late = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    late.publish("clicks", b"waits")
    late.stop()
    addresses = late.options if is_given else ["--lookupd-http-address", lookupd.http_address]
    quick = ["reconnect_base=100ms", "reconnect_max=100ms", "lookupd_poll_interval=100ms"]
    place = ["-t", "clicks", *clicks.options, *addresses]
    process = spawn_nsq(["tail", *place, *(f"-X{option}" for option in quick)])
    wait_until(lambda: is_subscribed(clicks), what="tail has subscribed")
    late.start()
    wait_until(lambda: "include_mem=false&topic=clicks" in late.log, what="the look", timeout_s=20)
    # The check happens while connected. Otherwise, an nsqd that starts in between is missed.
    wait_until(lambda: "TCP: new client" in late.log, what="the connection")
    late.create_channel("clicks", "keeps")  # now tail can consume without losing messages
    wait_until(lambda: is_subscribed(late), what="tail has subscribed there, too", timeout_s=20)
    assert late.depth("clicks", "keeps") == 1
    process.terminate()
    assert b"not consuming from %s" % late.tcp_address.encode() in process.communicate()[1]


@pytest.mark.parametrize("is_given", [False, True])
def test_an_nsqd_that_drops_packets_delays_no_other(
    spawn_nsq: SpawnNsq,
    clicks: GoNsqd,
    scripted_lookupd: MakeScripted,
    unreachable_address: str,
    is_given: bool,
) -> None:
    """Neither the check over HTTP nor the connection over TCP waits for it."""
    if is_given:
        http = ["--nsqd-http-address", clicks.http_address, "--nsqd-http-address"]
        place = [*clicks.options, "--nsqd-tcp-address", unreachable_address]
        place += [*http, unreachable_address]
    else:
        lookupd = scripted_lookupd()
        lookupd.list_nsqd(clicks.tcp_address, unreachable_address)
        ports = clicks.http_address, unreachable_address
        for listed, address in zip(lookupd.answer["producers"], ports, strict=True):
            listed["http_port"] = int(address.rpartition(":")[2])
        place = ["--lookupd-http-address", lookupd.address]
    process = spawn_nsq(["tail", "-t", "clicks", *place, "-X", "dial_timeout=1h"])
    wait_until(lambda: is_subscribed(clicks), what="tail has subscribed", timeout_s=20)
    clicks.publish("clicks", b"new")
    assert process.stdout.readline() == b"new\n"


@pytest.mark.alone
def test_a_lone_message_appears_within_milliseconds(spawn_nsq: SpawnNsq, clicks: GoNsqd) -> None:
    process = spawn_nsq([*place(clicks), "--format", "{timestamp}\\n"])
    for _ in range(3):
        process.stdout.readline()
    delays_ms = []
    for n in range(15):
        clicks.publish("clicks", b"%d" % n)
        delays_ms.append((time.time_ns() - int(process.stdout.readline())) / 1e6)

    assert sorted(delays_ms)[len(delays_ms) // 2] < 50  # nsq_tail: above 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_tail_and_no_message_stays_in_flight(
    spawn_nsq: SpawnNsq, clicks: GoNsqd, number: signal.Signals
) -> None:
    process = spawn_nsq(place(clicks))
    wait_until(lambda: is_subscribed(clicks), what="tail has subscribed")
    out, err = process.end(number)

    assert (process.returncode, err) == (128 + number, b"")
    printed = out.count(b"\n")

    def waiting_and_in_flight() -> tuple[int, int]:
        stats = clicks.channel_stats("clicks", "c")
        return stats["depth"], stats["in_flight_count"]

    wait_until(lambda: waiting_and_in_flight() == (3 - printed, 0), what="the rest waits again")


def test_a_terminated_peek_leaves_no_message_in_flight(
    spawn_nsq: SpawnNsq, clicks: GoNsqd, dead_address: str
) -> None:
    # With an nsqd that does not answer, the depth is unknown, and peek waits for more messages.
    words = ["--nsqd-http-address", dead_address, "--exit-idle", "1m"]
    process = spawn_nsq(["peek", *place(clicks)[1:], *words])

    def wait_for(in_flight: int) -> None:
        counts = partial(clicks.channel_stats, "clicks", "c")
        wait_until(lambda: counts()["in_flight_count"] == in_flight, what=f"{in_flight} in flight")

    wait_for(3)
    process.end(signal.SIGTERM)
    assert process.returncode == 143
    wait_for(0)


def test_a_second_signal_ends_tail_immediately(spawn_nsq: SpawnNsq, clicks: GoNsqd) -> None:
    clicks.publish("clicks", *([b"x" * 10_000] * 200))
    process = spawn_nsq(place(clicks))  # its output is not read, so it blocks in a write

    def unread() -> int:  # bytes; a pipe holds 65,536
        waiting = fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder)

    wait_until(lambda: unread() > 50_000, what="the pipe is full", timeout_s=15)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)

    assert process.wait(patience_s(5)) == 130


def test_a_closed_stdout_is_status_141_without_a_message(
    spawn_nsq: SpawnNsq, clicks: GoNsqd
) -> None:
    process = spawn_nsq(place(clicks))
    process.stdout.readline()
    process.stdout.close()
    clicks.publish("clicks", *([b"x"] * 100))

    assert process.wait(patience_s(10)) == 141
    assert process.stderr.read() == b""
    wait_until(lambda: clicks.depth("clicks", "c") >= 99, what="what was not written waits again")


def test_sharing_a_channel_is_reported_and_confirmed_on_a_terminal(
    spawn_nsq: SpawnNsq, run_nsq: RunNsq, nsq_on_a_terminal: TerminalNsq, clicks: GoNsqd
) -> None:
    spawn_nsq([*place(clicks), "--where", "false"])
    wait_until(lambda: is_subscribed(clicks), what="a consumer")
    warning = "clicks/c has 1 consumer, "

    child = nsq_on_a_terminal(place(clicks), columns=250)
    child.expect_exact(warning)
    child.expect_exact("[y/N]")
    assert is_subscribed(clicks)  # still only the first consumer
    child.sendline("")
    child.wait()

    assert child.exitstatus == 1
    assert warning in run_nsq([*place(clicks), "--for", "1ms"]).err
    assert warning not in run_nsq([*place(clicks), "--for", "1ms", "--force"]).err


def test_an_empty_or_new_channel_is_reported_without_a_terminal(
    run_nsq: RunNsq, nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_watch, "IDLE_REPORT_S", (0.1, 60.0))
    nsqd.create_channel("orders", "a")
    place = ["-t", "orders", *nsqd.options]

    looked_at = run_nsq(["peek", *place, "-c", "a"])
    assert looked_at == (0, b"", "nsq: channel orders/a is empty\n")
    assert "CLIENT" not in nsqd.log  # peek did not subscribe

    new = run_nsq(["tail", *place, "--for=100ms", "-c", "hook"])
    empty = run_nsq(["to-exec", *place, f"--for={patience_s(0.4):g}s", "-c", "a", "true"])

    nsqd.post("/pub", b"late", topic="orders", defer="60000")
    wait_until(
        lambda: nsqd.channel_stats("orders", "a")["deferred_count"] == 1, what="it is deferred"
    )
    deferred = run_nsq(["peek", *place, "-c", "a"])

    line = "nsq: channel orders/hook is new: it gets what is published from now on\n"
    assert new.err.startswith(line)
    assert empty.err.startswith("nsq: no message for 100ms: channel orders/a is empty\n")
    assert deferred == (0, b"", "nsq: channel orders/a is empty, 1 deferred\n")


def test_json_in_a_pipe_escapes_bidirectional_and_c1_controls(
    run_nsq: RunNsq, clicks: GoNsqd
) -> None:
    body = "gpj.\u202egnp\x9b31m é"
    clicks.post("/channel/empty", topic="clicks", channel="c")
    clicks.publish("clicks", body.encode())

    out = run_nsq([*place(clicks), "--json", "-n", "1"]).out.decode()

    assert r'"gpj.\u202egnp\u009b31m é"' in out
    assert json.loads(out)["body"] == body


@pytest.mark.parametrize("how", [["--where", ".a"], ["--pick", ".a"]])
def test_messages_a_filter_cannot_judge_are_reported_and_requeued(
    run_nsq: RunNsq, clicks: GoNsqd, how: list[str]
) -> None:
    clicks.publish("clicks", b'{"a": 1}')
    limits = ["--until-empty", "--format", "{body}"]

    peeked = run_nsq(["peek", *place(clicks)[1:], *how])
    lasting = run_nsq([*place(clicks), *how, *limits])

    for result, line in ((peeked, "not printed:"), (lasting, "not printed and requeued:")):
        assert "its body cannot be judged: parse error" in result.err
        assert f"nsq: 3 messages {line} --where or --pick failed\n" in result.err
    assert (lasting.status, lasting.out) == (6, b'{"a": 1}' if how[0] == "--where" else b"1")
    assert unfinished(clicks, "clicks", "c") == 3


@pytest.mark.parametrize("command", [["tail"], ["to-exec", "true"]])
def test_filtered_messages_count_as_received_for_the_idle_report(
    run_nsq: RunNsq, clicks: GoNsqd, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    done: list[Callable[[], int]] = []

    @contextmanager
    def at_the_end(*args: Any, **_: Any) -> Iterator[None]:
        done.append(args[1])
        yield

    monkeypatch.setattr(ChannelWatch, "idle_report", at_the_end)
    limits = ["--grep", "nothing", "--exit-idle", f"{patience_s(1):g}s"]
    run_nsq([command[0], *place(clicks)[1:], *limits, *command[1:]])
    assert done[0]() == 3


def test_peek_lasts_until_every_nsqd_could_send(
    run_nsq: RunNsq, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer messages in flight than there are nsqd, they deliver one after another."""
    monkeypatch.setattr(tail, "MIN_IN_FLIGHT", 1)
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "a")
    cluster.wait_for_topic("orders", 2)
    look = ["peek", "-t", "orders", "-c", "a", "-n", "1", "--exit-idle", "50ms"]
    for nsqd in cluster.nsqds:
        nsqd.publish("orders", b"one")
        result = run_nsq([*look, *cluster.lookupd_options])
        assert (result.status, result.out) == (0, b"one\n")
        nsqd.post("/channel/empty", topic="orders", channel="a")


def test_until_empty_ends_under_load_and_with_a_sample(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: GoNsqd
) -> None:
    bodies = [b"%d" % n for n in range(1000)]
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", *bodies)
    result = run_nsq([*place(nsqd), "--sample", "30%", "--until-empty"])
    assert 200 < result.out.count(b"\n") < 400  # seven standard deviations around 300
    wait_until(lambda: nsqd.depth("clicks", "c") == 0, what="an empty channel")

    nsqd.publish("clicks", *bodies)
    pub = ["pub", "-t", "clicks", "--nsqd-tcp-address", nsqd.tcp_address, "x{n}"]
    spawn_nsq([*pub, "--repeat", "100000", "--interval", "20ms"])
    result = run_nsq([*place(nsqd), "--until-empty"])
    assert result.status == 0
    assert set(result.out.splitlines()) >= set(bodies)


def test_nsqd_gets_one_request_at_the_start_and_one_per_poll(
    clicks: GoNsqd, run_nsq: RunNsq
) -> None:
    earlier = clicks.log.count(" 200 GET ")
    began_s = time.monotonic()
    result = run_nsq([*place(clicks), "--until-empty", "--exit-idle=10s"])
    polls = (time.monotonic() - began_s) / channel_watch.POLL_S
    requests = re.findall(r" 200 GET (\S+)", clicks.log)[earlier:]
    assert result.status == 0
    assert set(requests) == {requests[0]}
    assert requests[0].startswith("/stats?")
    assert "topic=clicks" in requests[0]
    assert 2 <= len(requests) <= 1 + polls
