"""Keys of ``nsq top`` that change the cluster: by the plan of the commands, and agreed to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.screens import NsqOnAScreen, TerminalScreen
from plugins.servers import Serve
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer

ENTER, ESCAPE, DOWN = "\r", "\x1b", "\x1b[B"
Start = Callable[..., TerminalScreen]


@pytest.fixture
def start(nsq_on_a_screen: NsqOnAScreen) -> Start:
    def start(nsqd: Nsqd, *options: str) -> TerminalScreen:
        here = f"--nsqd-http-address={nsqd.http_address}"
        return nsq_on_a_screen(["top", here, "--interval", "100ms", *options], columns=100)

    return start


def filled(nsqd: Nsqd) -> Nsqd:
    """Give it clicks/arch with 3 messages."""
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b'{"n": 1}', b"\x1b[31mred", b"c")
    wait_until(lambda: nsqd.depth("clicks", "arch") == 3, what="the messages are in the channel")
    return nsqd


@pytest.fixture
def nsqd(serve: Serve, data_path: Callable[[], Path]) -> Nsqd:
    nsqd: Nsqd = serve(EmbeddedServer(data_path()))
    return filled(nsqd)


def channels(nsqd: Nsqd) -> list[str]:
    return [each["channel_name"] for each in nsqd.topic_stats("clicks")["channels"]]


def test_without_allow_changes_every_key_of_a_change_says_how(start: Start, nsqd: Nsqd) -> None:
    top = start(nsqd)
    top.wait_for("clicks")
    for key in "puedtv":
        top.press("j")
        top.wait_for("? help", gone="read-only")
        top.press(key)
        top.wait_for("read-only: start nsq top with --allow-changes")
    assert nsqd.depth("clicks", "arch") == 3
    assert not nsqd.topic_stats("clicks")["paused"]


def test_a_channel_is_paused_unpaused_emptied_and_deleted(
    start: Start, any_nsqd: Callable[..., Nsqd]
) -> None:
    nsqd = filled(any_nsqd())
    top = start(nsqd, "--allow-changes")
    top.wait_for("clicks")
    top.press(ENTER)
    top.wait_for("arch")

    top.press("p")
    top.wait_for(f"pause channel clicks/arch on nsqd {nsqd.http_address}", "y go on")
    top.press("y")
    top.wait_for("pause channel clicks/arch: done on 1 nsqd", "arch (paused)")
    assert nsqd.channel_stats("clicks", "arch")["paused"]
    top.press("u")
    top.wait_for("y go on")
    top.press("y")
    top.wait_for("unpause channel clicks/arch: done", gone="(paused)")

    top.press("e")
    top.wait_for("3 messages are lost", "type arch and Enter")
    top.press("arc\r")
    top.wait_for("arc_")
    assert nsqd.depth("clicks", "arch") == 3
    top.press("h\r")
    top.wait_for("empty channel clicks/arch: done on 1 nsqd")
    assert nsqd.depth("clicks", "arch") == 0

    top.press("d")
    top.wait_for("type arch and Enter")
    top.press("arch")
    top.press(ESCAPE)
    top.wait_for("topics > clicks", gone="type arch")
    assert channels(nsqd) == ["arch"]
    top.press("d")
    top.wait_for("type arch and Enter")
    top.press("arch\r")
    top.wait_for("delete channel clicks/arch: done on 1 nsqd", "has no channels")
    assert channels(nsqd) == []


def test_a_plan_names_who_is_connected_and_a_failure_is_said(start: Start, nsqd: Nsqd) -> None:
    top = start(nsqd, "--allow-changes")
    top.wait_for("clicks")
    with Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["clients"], what="it is there")
        top.press("d")
        top.wait_for("connected, may create it again", "type clicks and Enter")
    nsqd.post("/topic/delete", topic="clicks")
    top.press("clicks\r")
    top.wait_for("delete topic clicks failed: ", "TOPIC_NOT_FOUND")


def test_peek_shows_messages_and_gives_them_back(start: Start, nsqd: Nsqd) -> None:
    top = start(nsqd, "--allow-changes")
    top.wait_for("clicks")
    top.press("v")
    top.wait_for("v shows messages of a channel")
    top.press(ENTER)
    top.wait_for("arch")
    top.press("v")
    top.wait_for("peek clicks/arch", '{"n": 1}', r"\x1b[31mred", "3 messages shown and given back")
    top.press(ESCAPE)
    top.wait_for("topics > clicks", gone="peek")
    wait_until(lambda: nsqd.depth("clicks", "arch") == 3, what="they are given back")


def test_tail_follows_a_topic_and_takes_nothing_from_its_channels(start: Start, nsqd: Nsqd) -> None:
    top = start(nsqd, "--allow-changes")
    top.wait_for("clicks")
    top.press("t")
    top.wait_for("tail clicks", "waiting on tail")
    wait_until(
        lambda: (
            [
                each["client_count"]
                for each in nsqd.topic_stats("clicks")["channels"]
                if each["channel_name"].startswith("tail")
            ]
            == [1]
        ),
        what="it has subscribed",
    )
    nsqd.publish("clicks", b"hello\x1b[31m")
    top.wait_for(r"hello\x1b[31m")
    top.press(" ")
    top.wait_for("[frozen]")
    nsqd.publish("clicks", b"unseen")
    top.wait_for("1 not shown", gone="unseen")
    top.press(ESCAPE)
    top.wait_for("? help", gone="tail clicks")
    wait_until(lambda: channels(nsqd) == ["arch"], what="the channel of the tail is gone")
    assert nsqd.depth("clicks", "arch") == 5


def test_a_tail_that_would_destroy_a_backlog_is_refused(start: Start, nsqd: Nsqd) -> None:
    nsqd.publish("alone", b"a")
    top = start(nsqd, "--allow-changes")
    top.wait_for("alone", "clicks")
    top.press("t")
    top.wait_for("tail alone", "would be destroyed")
    top.press(ESCAPE)
    top.wait_for("clicks", gone="destroyed")
    assert nsqd.depth("alone") == 1
