"""The watcher: shared samples, consumers on demand, and an end without waiting."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.clients import InBackground
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_for_threads, wait_until

from nsqtools.authd.authority import AuditFile
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.http.http_api import HTTPAccess
from nsqtools.web import actions
from nsqtools.web.access import WebSettings
from nsqtools.web.actions import RequestOrigin, plan_change
from nsqtools.web.pages import messages
from nsqtools.web.pages.site import RecentAnswers
from nsqtools.web.watcher import MAX_CPU_SHARE, Watcher


@contextmanager
def watching(*addresses: str, refresh_s: float = 0.1) -> Iterator[Watcher]:
    with Cluster(ClusterAddresses(addresses), HTTPAccess(timeout_s=patience_s(1))) as cluster:
        watcher = Watcher(cluster, refresh_s)
        watcher.start()
        try:
            yield watcher
        finally:
            watcher.stop()
            watcher._thread.join()
            wait_for_threads("nsq-sample")


@pytest.fixture
def nsqd(embedded_nsqd: AnyNsqd) -> Nsqd:
    started = embedded_nsqd()
    started.create_channel("orders", "billing")
    return started


def test_samples_continue_after_a_failure_and_a_clock_set_back(
    nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(nsqd.http_address) as watcher:
        first = asyncio.run(watcher.newer(None, patience_s(20)))
        assert first is not None
        with monkeypatch.context() as patch:
            fault = Mock(side_effect=RuntimeError("can't start new thread"))
            patch.setattr(threading.Thread, "start", fault)
            wait_until(lambda: caplog.records, what="a sample failed")
        logged = {(record.getMessage(), record.exc_info) for record in caplog.records}
        assert logged == {("a sample failed: can't start new thread", False)}
        ahead = watcher.latest = first._replace(time_s=1e12)  # as if the clock was set back since
        second = asyncio.run(watcher.newer(ahead, patience_s(20)))

        assert second is not None
        assert first.time_s < second.time_s < ahead.time_s
        queues = {(row.node, row.topic, row.channel) for row in second.rows}
        assert queues == {(nsqd.http_address, "orders", name) for name in ("", "billing")}
        assert all(c.clients is None for c in second.reports[0].stats.topics[0].channels)  # type: ignore[index]
        assert watcher.history.series([("", "orders", "billing")], "depth", since_s=0)


def test_a_wait_ends_with_its_timeout_or_the_watcher(nsqd: Nsqd) -> None:
    with watching(nsqd.http_address, refresh_s=1000) as watcher, ThreadPoolExecutor() as threads:
        only = asyncio.run(watcher.newer(None, patience_s(20)))
        assert asyncio.run(watcher.newer(only, 0.01)) is None

        def wait() -> object:
            return asyncio.run(watcher.newer(only, patience_s(60)))

        waits = [threads.submit(wait) for _ in range(3)]
        wait_until(lambda: all(wait.running() for wait in waits), what="the waits have begun")
        watcher.stop()
        assert [wait.result(patience_s(10)) for wait in waits] == [None] * 3


def test_concurrent_and_recent_requests_share_an_answer() -> None:
    recent, calls, may_answer = RecentAnswers(), [], threading.Event()

    def ask(_: object) -> object:
        calls.append(True)
        may_answer.wait(patience_s(20))
        return object()

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(recent.get, "orders", ask, "now") for _ in range(4)]
        may_answer.set()
        identities = {id(answer.result()) for answer in answers}

    assert (len(identities), len(calls)) == (1, 1)
    assert recent.get("clicks", ask, "now") is not recent.get("orders", ask, "now")
    assert recent.get("orders", ask, "later") is not recent.get("orders", ask, "now")


def test_expensive_samples_are_taken_less_often() -> None:
    with Cluster(ClusterAddresses(["127.0.0.1:1"])) as cluster:
        watcher = Watcher(cluster, 2.0)
        watcher._note_cost(0.01)
        assert not watcher.is_slowed
        for _ in range(50):
            watcher._note_cost(1.0)
        assert watcher.is_slowed
        assert watcher.interval_s == pytest.approx(1.0 / MAX_CPU_SHARE, rel=0.01)
        for _ in range(50):
            watcher._note_cost(0.01)
        assert watcher.interval_s == 2.0


def test_listening_to_messages_does_not_delay_the_end(
    nsqd: Nsqd, in_background: InBackground
) -> None:
    with Cluster(ClusterAddresses([nsqd.http_address])) as cluster:
        context = actions.WebContext(WebSettings(), cluster, ClientOptions())
        arguments = [nsqd.tcp_address], "orders", "billing", 1, 3600.0
        listening = in_background(messages.take_messages, context, *arguments, lambda _: None)
        wait_until(lambda: context.listening, what="it listens")
        context.stop()
        with pytest.raises(NsqError, match="is being stopped"):
            listening.result(patience_s(20))


def test_a_plan_to_delete_names_producers_that_create_the_topic_again(
    go_nsqd: Callable[..., Nsqd],
) -> None:
    nsqd = go_nsqd()
    with (
        Producer(nsqd.tcp_address) as producer,
        Cluster(ClusterAddresses([nsqd.http_address])) as cluster,
    ):
        producer.publish("orders", b"a")
        plan = plan_change(cluster, TopicChange(action=Action.DELETE, topic="orders"))

    assert [step.messages for step in plan.steps] == [1]
    [note] = plan.notes
    assert note.startswith(f"1 connected producer published to it on {nsqd.http_address}")


def test_an_invalid_change_is_refused() -> None:
    for action, topic, channel, node in (
        (Action.PAUSE, "a b", "", ""),
        (Action.PAUSE, "a", "c/d", ""),
        (Action.TOMBSTONE, "a", "", ""),
        (Action.DELETE, "a", "", "n:1"),
        (Action.CREATE, "a", "", "n:1"),
    ):
        with pytest.raises(ConfigurationError):
            TopicChange(action=action, topic=topic, channel=channel, node=node)


def test_a_full_disk_leaves_no_partial_line_in_the_audit_log(small_disk: Path) -> None:
    path, spare = small_disk / "audit", small_disk / "spare"
    audit = AuditFile(path)
    spare.write_bytes(bytes(40 << 10))
    with suppress(OutputError):
        while spare.exists():
            audit.write(state="begun", action="pause_topic")
    spare.unlink()
    audit.write(state="done", action="pause_topic")
    states = [json.loads(line)["state"] for line in path.read_text().splitlines()]
    assert set(states[:-1]) == {"begun"}
    assert states[-1] == "done"


def test_a_stopped_notifier_reports_what_a_hanging_endpoint_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actions, "STOP_S", 0.01)
    monkeypatch.setattr(actions, "MAX_PENDING", 3)
    change, origin = TopicChange(action=Action.CREATE, topic="t"), RequestOrigin("", "", "", "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        notifier = actions.Notifier(url)
        notifier.notify(change, origin)
        with silent.accept()[0]:  # the first one is being sent
            for _ in range(4):
                notifier.notify(change, origin)
            notifier.stop()
            assert caplog.messages == [
                f"cannot notify {url} (a notification is dropped, too many are pending)",
                f"cannot notify {url} (4 notifications not sent)",
            ]
    wait_for_threads("nsq-notifier")
