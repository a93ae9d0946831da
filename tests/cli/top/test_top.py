"""``nsq top`` by textual's pilot: what its screens show of an nsqd, and what keys do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.cli import RunNsq
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.servers import DataPath, Serve
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer

Open = Callable[..., Any]


@pytest.fixture
def nsqd(serve: Serve, data_path: DataPath) -> Nsqd:
    """An nsqd with clicks/arch (3 messages), clicks/live and the paused topic views."""
    nsqd: Nsqd = serve(EmbeddedServer(data_path()))
    nsqd.create_channel("clicks", "arch")
    nsqd.create_channel("clicks", "live")
    nsqd.publish("clicks", b'{"n": 1}', b"\x1b[31mred", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    wait_until(lambda: nsqd.depth("clicks", "live") == 3, what="the messages are in the channels")
    return nsqd


def channels(nsqd: Nsqd) -> list[str]:
    return [each["channel_name"] for each in nsqd.topic_stats("clicks")["channels"]]


def test_topics_fill_80_by_24_and_depth_means_what_it_means_elsewhere(
    open_top: Open, nsqd: Nsqd, run_nsq: RunNsq
) -> None:
    lines = open_top(nsqd, allows_changes=False).wait_for("clicks", " 0.0 ", "q quit")

    assert lines[0].startswith("nsq top ")
    assert "1 nsqd  2 topics  waiting 6  ingress 0.0/s" in lines[0]
    assert lines[1:24] == [
        "! 2 warning  no consumers (2) clicks/arch: 3 messages wait",
        "topics  left out: in_flight, trend, e2e_ms, timed_out",
        "topic▼              depth  waiting  ingress   finish  requeue  clients  channels",
        "clicks                  0        6      0.0      0.0      0.0        0         2",
        "views (paused)          0        0      0.0        -        -        0         0",
        *[""] * 17,
        "? help  q quit  ↑↓ select  ⏎ open  Esc back  s sort  r reverse  / filter",
    ]

    here = [f"--nsqd-http-address={nsqd.http_address}", "-o", "tsv", "--columns"]
    listed = run_nsq(["topic", "list", *here, "topic,depth,waiting"])
    stat = run_nsq(["stat", "--once", *here, "topic,channel,depth"])
    assert b"clicks\t0\t6\n" in listed.out
    assert b"clicks\t-\t0\n" in stat.out


def test_a_topic_and_a_channel_are_looked_into_and_left(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    lines = top.see("enter", "topics > clicks", "arch", "live")
    assert lines[4].split()[:4] == ["arch", "3", "0", "0"]

    with Consumer("clicks", "live", nsqd_tcp_addresses=[nsqd.tcp_address]):
        top.press("down", "enter")
        lines = top.wait_for("topics > clicks > live > [consumers]", nsqd.http_address)
        assert lines[3].split()[0] == "client_id▼"
        [consumer] = nsqd.stats("clicks")["topics"][0]["channels"][1]["clients"]
        top.wait_for(consumer["remote_address"])

    top.see("escape", "topics > clicks", gone="> live")
    assert top.see("escape", "views")[2].startswith("topics  ")


def test_all_nsqd_and_all_consumers_have_views(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    lines = top.see("tab", nsqd.http_address)
    assert lines[2].startswith("nsqd")
    [node] = [line.split() for line in lines if line.startswith(nsqd.http_address)]
    assert node[1:3] == ["OK", "6"]
    top.see("tab", "client_id▼", "no consumers")
    top.see(["shift+tab", "shift+tab", "n"], "topics > clicks > [nsqd]", nsqd.http_address)
    top.see("enter", f"nsqd > {nsqd.http_address} > clicks", "arch")


@pytest.mark.parametrize("ahead", ["/de", "?deq", "cde\r"])
def test_keys_typed_ahead_reach_what_the_key_before_opened(
    open_top: Open, nsqd: Nsqd, ahead: str
) -> None:
    top = open_top(nsqd)
    top.type(ahead)
    top.wait_for("filter: de_" if ahead[0] == "/" else "? help")
    assert not any("planning" in line or "type clicks" in line for line in top.lines)


def test_what_is_pasted_is_text_and_never_keys(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    top.paste("d")
    top.press("/")
    top.paste("vie")
    top.wait_for("filter: vie_")
    top.see(["escape", "p"], "y go on")
    top.paste("y")
    top.see(["escape", "d"], "type clicks")
    top.paste("clicks")
    top.wait_for("do nothing: clicks_")
    top.see("enter", "delete topic clicks: done", "views (paused)")


def test_columns_order_and_filter_are_chosen_at_the_start_and_by_keys(
    open_top: Open, nsqd: Nsqd
) -> None:
    top = open_top(nsqd, columns=("depth", "waiting"), sort="waiting", filter="waiting>0")
    lines = top.wait_for("clicks")
    assert lines[3].split() == ["topic", "depth", "waiting▼"]
    assert "filter: waiting>0" in lines[2]
    assert not any(line.startswith("views") for line in lines)

    lines = top.see("c", "[x] depth", "[ ] disk")
    assert (lines[0], lines[-1]) == ("columns", "↑↓ select  space show or hide  Enter done")
    top.press("space", "down", "j", "space", "enter")
    assert top.wait_for("disk", gone="[x]")[3].split() == ["topic", "waiting▼", "disk"]


def test_the_mouse_selects_opens_and_sorts(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    lines = top.wait_for("clicks", "views")
    place = lines[3].index("waiting")
    for mark in "▼▲":
        top.click(place, 3)
        top.wait_for(f"waiting{mark}")
    top.click(2, 4)
    top.click(2, 4)
    top.wait_for("topics > views", "topic views has no channels")
    top.click(2, 21)
    top.press("left", "home")
    top.wheel(1)
    top.wait_until(lambda _: top.app.view.selected == "clicks", what="the wheel selects")
    top.wheel(-1)
    top.wait_until(lambda _: top.app.view.selected == "views", what="the wheel selects")
    top.see("m", "the mouse is the terminal's")


def test_frozen_means_frozen(open_top: Open, sample_of: Callable[..., Any], nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    frozen = top.see("space", "[frozen]")
    nsqd.create_topic("orders")
    top.app.view.show(sample_of({"a:1": {"orders": 1}}))
    top.press("down", "up")
    assert top.lines == frozen
    top.see("space", "orders", gone="[frozen]")
    nsqd.kill()
    top.wait_for("1 silent", "! 1 critical", f"gone {nsqd.http_address}: since")
    top.see("exclamation_mark", "critical gone: Start it again")


def test_an_error_of_ours_ends_it_and_is_raised(open_top: Open, nsqd: Nsqd) -> None:
    bug = RuntimeError("a bug")
    top = open_top(nsqd)
    top.app.view.go_down = Mock(side_effect=bug)
    top.type("\r")
    top.wait_until(lambda _: top.app.return_value is bug, what="it has ended")
    top.app.exit(None)


# -- changes --------------------------------------------------------------------------------------


def test_keys_change_nothing_unless_they_may(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd, allows_changes=False)
    for key in "puedtv":
        top.see(key, "read-only: start nsq top with --allow-changes")
        top.see("j", "? help", gone="read-only")


def test_a_channel_is_paused_unpaused_emptied_and_deleted(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd, width=100)
    top.see("enter", "arch")

    top.see("p", "pause channel", f"clicks/arch on nsqd {nsqd.http_address}", "y go on")
    top.see("y", "pause channel clicks/arch: done on 1 nsqd", "arch (paused)")
    assert nsqd.channel_stats("clicks", "arch")["paused"]
    top.see("u", "y go on")
    top.see("y", "unpause channel clicks/arch: done", gone="(paused)")

    lines = top.see("e", "3 messages are lost")
    assert lines[-1] == "type arch and Enter to go on, Esc to do nothing: _"
    top.see(["y", "enter", "backspace", *"arcj", "backspace", "enter"], ": arc_")
    assert nsqd.depth("clicks", "arch") == 3
    top.see(["h", "enter"], "empty channel clicks/arch: done on 1 nsqd")
    assert nsqd.depth("clicks", "arch") == 0

    top.see("d", "type arch and Enter")
    top.see([*"arch", "escape"], "topics > clicks", gone="type arch")
    assert channels(nsqd) == ["arch", "live"]
    top.see("d", "type arch and Enter")
    top.see([*"arch", "enter"], "delete channel clicks/arch: done on 1 nsqd", gone="arch  ")
    assert channels(nsqd) == ["live"]


def test_what_is_not_agreed_to_is_not_done(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    for keys in (["escape"], ["n"], ["enter"], ["q"], ["left", "escape"]):
        top.see("p", "y go on")
        top.press(*keys)
        top.wait_for("? help", gone="y go on")
        top.press("y")
        assert not nsqd.topic_stats("clicks")["paused"]
    top.see("e", "the channels of clicks keep their", gone="--channels")


def test_a_plan_that_comes_after_another_key_is_not_shown(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd)
    top.type("dj")  # in one read: the plan comes later
    top.wait_for("views")
    top.see("n", "topics > views > [nsqd]", gone="type clicks")


def test_a_plan_names_who_is_connected_and_a_failure_is_said(open_top: Open, nsqd: Nsqd) -> None:
    top = open_top(nsqd, width=100)
    with Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["clients"], what="it is there")
        top.see("d", "connected, may create it again", "type clicks and Enter")
    nsqd.post("/topic/delete", topic="clicks")
    top.see([*"clicks", "enter"], "delete topic clicks failed: ", "TOPIC_NOT_FOUND")
