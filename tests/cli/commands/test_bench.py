"""``nsq bench`` as a process: right counts, nothing left behind, and a reason where it fails."""

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq, TerminalNsq
from plugins.clusters import RunningCluster, ValidJson
from plugins.processes import descendants, is_alive
from plugins.servers import AnyNsqd, GoNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.commands.bench import Load, sub

A_MOMENT = f"--for={patience_s(0.4):g}s"  # enough to publish some on a busy machine
QUICK = f"--warm-up={patience_s(0.2):g}s"
PROMPT = "--warm-up=0s"

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(nsqd: GoNsqd, run_nsq: RunNsq, valid_json: ValidJson) -> Measure:
    """Run a measurement and return its document, after checking that its topic was deleted."""

    def run(*arguments: str, of: Nsqd = nsqd, status: int = 0) -> dict[str, Any]:
        topics_before = of.topics()
        result = run_nsq(["bench", *arguments, *of.options, "--json"])
        assert result.status == status, result.err
        wait_until(lambda: of.topics() == topics_before, what="the topic of its own is gone")
        document: dict[str, Any] = valid_json("bench", result.out)
        assert document["intact"] is (status == 0)
        return document

    return run


def test_a_measurement_counts_what_nsqd_counts(nsqd: GoNsqd, measure: Measure) -> None:
    nsqd.create_topic("mine")

    named = measure("pub", "-t", "mine", "-n", "1234", PROMPT)
    unnamed = measure("pub", A_MOMENT, "--connections=2", "--size=50-100", QUICK)
    e2e = measure("e2e", "-n", "5000", "--batch=10", "--connections=2", QUICK)
    sub = measure("sub", "-n", "10001", "--connections=2")
    part = measure("sub", "-n", "50000", "--for=20ms")
    large = measure("pub", "-n", "60", "--size=100KiB", PROMPT)
    one = measure("sub", "-n", "1")
    idle = measure("pub", "-n", "1", PROMPT, "--connections=2")  # one has nothing to publish

    assert (named["messages"], named["published"], named["consumed"]) == (1234, 1234, None)
    assert (named["bytes"], named["latency_ms"]["count"]) == (1234 * 200, 13)  # batches of 100
    assert nsqd.topic_stats("mine")["message_count"] == 1234
    assert 50 < unnamed["bytes"] / unnamed["messages"] < 100
    assert unnamed["topic"].endswith("#ephemeral")
    assert large["batch"] == 51  # 5 MiB of 100 KiB
    assert one["messages_per_s"] > 0
    assert idle["client_cpu"] < 2  # of a processor
    latency = e2e["latency_ms"]
    assert e2e["messages"] == latency["count"] == 5000
    assert e2e["published"] == e2e["consumed"] > 5000  # the warm-up
    figures = [latency[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert figures == sorted(figures)
    assert sub["published"] == sub["consumed"] == sub["messages"] == 10_001
    assert sub["latency_ms"] is None
    assert part["consumed"] < part["published"] == 50_000


def test_a_named_topic_keeps_its_channels_and_ignores_other_messages(
    nsqd: GoNsqd, spawn_nsq: SpawnNsq, measure: Measure
) -> None:
    nsqd.create_channel("clicks", "archive")

    measure("e2e", "-t", "clicks", "-n", "200", PROMPT)
    measure("sub", "-t", "clicks", "-n", "300")

    wait_until(lambda: nsqd.channels("clicks") == ["archive"], what="those of the bench are gone")
    wait_until(lambda: nsqd.depth("clicks", "archive") >= 500, what="the copies of all")

    depth_before = nsqd.depth("clicks", "archive")
    lines = ["short", "a line that is longer than a stamp", "--repeat=200000", "--rate=2000"]
    spawn_nsq(["pub", "-t", "clicks", f"--nsqd-tcp-address={nsqd.tcp_address}", *lines])
    wait_until(lambda: nsqd.depth("clicks", "archive") > depth_before, what="the other publishes")

    document = measure("e2e", "-t", "clicks", "--rate=2000", "--for=500ms", QUICK)
    assert document["published"] == document["consumed"]
    assert 0 < document["messages"] <= 1000  # the rate
    document = measure("sub", "-t", "clicks", "-n", "2000")
    assert (document["missing"], document["repeated"]) == (0, 0)


def test_discarded_messages_are_counted_as_missing(go_nsqd: MakeNsqd, measure: Measure) -> None:
    small = go_nsqd("-mem-queue-size=1")

    document = measure("e2e", "--count=1000", "--batch=1000", PROMPT, of=small, status=1)

    assert document["missing"] == 1000 - document["consumed"] > 0


def test_a_channel_that_nsqlookupd_still_lists_is_reported(
    cluster: RunningCluster, run_nsq: RunNsq
) -> None:
    nsqd = cluster.nsqds[0]
    nsqd.create_topic("clicks")
    cluster.wait_for_topic("clicks", 1)

    result = run_nsq(["bench", "sub", "-t", "clicks", "-n", "10", *nsqd.options])

    assert re.search(r"nsq channel delete clicks bench_\w+\n", result.err), result.err


def test_a_topic_that_nsqlookupd_still_lists_is_reported(
    cluster: RunningCluster, run_nsq: RunNsq
) -> None:
    result = run_nsq(["bench", "sub", "-n", "10", *cluster.nsqds[0].options])

    assert re.search(r"nsq topic delete bench_\w+\n", result.err), result.err


def test_the_default_backlog_of_large_messages_is_at_most_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    monkeypatch.setattr(
        Load, "measure", lambda self, mode, publishing, *_, **__: counts.append(publishing.count)
    )
    for size in (200, 1 << 20):
        sub(None, load=Load(size=(size, size)))

    assert counts == [200_000, 1024]


@pytest.mark.parametrize("mode", ["e2e", "sub"])
def test_an_interrupted_measurement_reports_its_figures_so_far(
    nsqd: GoNsqd, spawn_nsq: SpawnNsq, valid_json: ValidJson, mode: str
) -> None:
    endless = ["--count=2000000"] if mode == "sub" else ["--for=1h", "--warm-up=0s"]
    process = spawn_nsq(["bench", mode, *endless, *nsqd.options, "--json", "--size=16"])
    # sub is interrupted while it fills its topic, e2e after some answers
    enough = 100 if mode == "sub" else 10_000
    wait_until(lambda: published(nsqd) > enough, what="it is under way", timeout_s=60)

    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=patience_s(60))

    document = valid_json("bench", out)
    assert (process.returncode, document["interrupted"]) == (130, True)
    assert (document["messages"] > 0) is (mode != "sub")
    wait_until(lambda: nsqd.topics() == [], what="the topic is gone", timeout_s=20)


def published(nsqd: Nsqd) -> int:
    """The messages in the fullest topic, over all time."""
    return max((topic["message_count"] for topic in nsqd.stats()["topics"] or []), default=0)


@pytest.mark.parametrize("mode", ["pub", "sub"])
def test_a_killed_nsqd_ends_the_measurement(nsqd: GoNsqd, spawn_nsq: SpawnNsq, mode: str) -> None:
    process = spawn_nsq(["bench", mode, "--for=1h", "--count=50000000", *nsqd.options])
    wait_until(lambda: published(nsqd) > 100, what="it is under way")

    nsqd.kill()
    _, err = process.communicate(timeout=patience_s(30))

    lines = err.decode().splitlines()
    undeleted = [line for line in lines if " may not have been deleted: " in line]
    error, *hint = lines[len(undeleted) :]
    assert process.returncode == 4, err.decode()
    assert error.startswith("nsq: error: not "), err.decode()
    # There is no hint if all were answered and the next one was certainly not sent.
    assert [line.startswith("hint: ") for line in hint] in ([True], []), err.decode()
    assert bool(undeleted) is (mode == "sub")  # the topic of pub was in memory only


def test_workers_end_with_the_killed_command(nsqd: GoNsqd, spawn_nsq: SpawnNsq) -> None:
    process = spawn_nsq(["bench", "pub", "--for=1h", *nsqd.options])
    wait_until(lambda: published(nsqd) > 100, what="it is under way")
    workers = [worker.pid for worker in descendants(process.pid)]
    process.kill()
    process.wait()

    assert workers
    wait_until(lambda: not any(map(is_alive, workers)), what="the workers are gone")


def test_a_terminal_shows_progress_and_one_line_per_figure(
    nsqd: GoNsqd, nsq_on_a_terminal: TerminalNsq
) -> None:
    command = ["bench", "e2e", "-n", "3000", *nsqd.options]
    child = nsq_on_a_terminal(command, env={"NO_COLOR": "1"})

    child.expect(r"publishing and consuming: [\d,]+ messages after \d")
    page = child.read()

    assert re.search(r"mode +e2e", page)
    assert re.search(r"p99\.9_ms +\d", page)


def test_a_topic_behind_tls_is_checked_with_the_given_ca(
    any_nsqd: AnyNsqd, certificates: Certificates, run_nsq: RunNsq
) -> None:
    nsqd = any_nsqd(*certificates.server.nsqd_flags)
    nsqd.create_channel("mine", "other")
    where = [f"--nsqd-tcp-address={nsqd.tcp_address}", f"--tls-ca-file={certificates.ca}"]
    where += [f"--nsqd-http-address=https://{nsqd.https_address}", "--tls"]

    done = run_nsq(["bench", "e2e", "-t", "mine", "-n", "100", PROMPT, *where])
    wrong = run_nsq(["bench", "e2e", "-t", "mina", "-n", "100", PROMPT, *where])

    assert (done.status, nsqd.topic_stats("mine")["message_count"]) == (0, 100), done.err
    assert (wrong.status, nsqd.topics()) == (3, ["mine"]), wrong.err
