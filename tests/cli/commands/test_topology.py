"""``nsq topology``, ``nodes`` and ``drain`` on real daemons."""

import os
import signal
import threading
from pathlib import Path

import pexpect
import pytest
from plugins.cli import RunNsq, TerminalNsq
from plugins.clusters import RunningCluster
from plugins.raw_client import RawClient
from plugins.servers import GoNsqlookupd, MakeNsqd, Nsqd
from plugins.waiting import wait_until

from nsqtools.cli.commands import topology
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch

FILE = """\
[topics."clicks"]
channels = ["archive", "billing"]
paused_channels = ["billing"]

[topics."web.views"]
everywhere = false
channels = ["archive"]
paused = true
"""


def channels_of(nsqd: Nsqd) -> dict[str, dict[str, bool]]:
    """Return the channels of each topic, and whether they are paused."""
    return {
        topic["topic_name"]: {c["channel_name"]: c["paused"] for c in topic["channels"] or ()}
        for topic in nsqd.stats()["topics"] or ()
    }


def test_only_unused_topics_and_channels_are_pruned_after_confirmation(
    run_nsq: RunNsq, cluster: RunningCluster, tmp_path: Path
) -> None:
    file = tmp_path / "topology.toml"
    file.write_text('topics."clicks".channels = ["archive"]\n')
    for nsqd in cluster.nsqds:
        for channel in ("archive", "used", "old", "live#ephemeral"):
            nsqd.create_channel("clicks", channel)
        nsqd.create_channel("forgotten", "c")
        nsqd.create_channel("read", "c")
        nsqd.publish("forgotten", b"lost with it")
    for topic in ("clicks", "forgotten", "read"):
        cluster.wait_for_topic(topic, 2)
    command = ["topology", "apply", str(file), "--prune", "--idle", "10ms"]
    command += cluster.lookupd_options

    with (
        RawClient(cluster.nsqds[0].tcp_address) as one,
        RawClient(cluster.nsqds[1].tcp_address) as other,
    ):
        one.subscribe("clicks", "used")
        other.subscribe("read", "c")
        unasked = run_nsq(command)
        assert (unasked.status, "--yes" in unasked.err) == (2, True)
        assert "delete topic forgotten" in unasked.err
        pruned = run_nsq([*command, "--yes"])

    assert pruned.status == 0, pruned.err
    for channels in map(channels_of, cluster.nsqds):
        assert channels.keys() == {"clicks", "read"}
        assert channels["clicks"].keys() - {"live#ephemeral"} == {"archive", "used"}


def test_a_byte_order_mark_before_a_topology_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(f"\ufeff{FILE}")

    assert topology.read_topology(file).topics.keys() == {"clicks", "web.views"}


def test_watch_applies_the_topology_to_an_nsqd_that_joins_later(
    run_nsq: RunNsq,
    lookupd: GoNsqlookupd,
    go_nsqd: MakeNsqd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "WATCH_S", 0.2)
    file = tmp_path / "topology.toml"
    file.write_text(FILE)
    channels = {"archive": False, "billing": True}

    def join_and_terminate() -> None:
        try:
            wait_until(lambda: "clicks" in lookupd.json("/topics")["topics"], what="the topics")
            joined = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
            wait_until(lambda: channels_of(joined).get("clicks") == channels, what="its channels")
            has_joined.set()
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    has_joined, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=join_and_terminate)
    other.start()
    command = ["topology", "apply", str(file), "--watch"]
    result = run_nsq([*command, f"--lookupd-http-address={lookupd.http_address}"])
    ended.set()
    other.join()

    assert (result.status, has_joined.is_set()) == (143, True), result.err


def test_a_silent_nsqd_is_drained_until_it_is_empty(
    run_nsq: RunNsq, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy nsqd may send nothing for a while as well."""
    silences = iter([True])
    next_batch = Consumer.next_batch

    def silent_first(consumer: Consumer, timeout_s: float) -> Batch | None:
        return None if next(silences, False) else next_batch(consumer, timeout_s)

    monkeypatch.setattr(Consumer, "next_batch", silent_first)
    source, target = cluster.nsqds
    source.create_channel("clicks", "archive")
    source.publish("clicks", b"one", b"two")  # one at a time is in flight

    result = run_nsq(["drain", source.http_address, "--to", target.http_address, "--yes"])

    assert result.status == 0, result.err
    assert "2 messages moved, 0 left" in result.err


def test_a_drain_moves_messages_as_large_as_both_nsqd_accept(
    go_nsqd: MakeNsqd, run_nsq: RunNsq
) -> None:
    source, target = go_nsqd("-max-msg-size=3000000"), go_nsqd("-max-msg-size=3000000")
    source.create_channel("clicks", "archive")
    source.publish("clicks", b"x" * 2_000_000)
    result = run_nsq(["drain", source.http_address, "--to", target.http_address, "--yes"])
    assert result.status == 0, result.err
    assert target.channel_stats("clicks", "archive")["depth"] == 1


def test_an_interrupt_at_the_confirmation_of_prune_deletes_nothing(
    nsq_on_a_terminal: TerminalNsq, cluster: RunningCluster, tmp_path: Path
) -> None:
    cluster.nsqds[0].create_topic("forgotten")
    (tmp_path / "empty.toml").write_text("")
    command = ["topology", "apply", str(tmp_path / "empty.toml"), "--prune", "--idle", "0s"]
    asking = nsq_on_a_terminal([*command, *cluster.nsqd_options])
    asking.expect_exact("Go on?")
    asking.sendintr()
    asking.expect(pexpect.EOF)
    assert (asking.wait(), "forgotten" in channels_of(cluster.nsqds[0])) == (130, True)
