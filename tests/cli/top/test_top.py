"""``nsq top`` on a terminal: what its screens show of an nsqd, and what keys do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.screens import TerminalScreen
from plugins.servers import DataPath, Serve
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer

OpenTop = Callable[..., TerminalScreen]
ENTER, ESCAPE, LEFT, BACKSPACE = "\r", "\x1b", "\x1b[D", "\x7f"
LEAVES_SCREEN = b"\x1b[?1049l"


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
    open_top: OpenTop, nsqd: Nsqd, run_nsq: RunNsq
) -> None:
    shown = [
        "! 2 warning  no consumers (2) clicks/arch: 3 messages wait",
        "topics  left out: in_flight, trend, e2e_ms, timed_out",
        "topic▼              depth  waiting  ingress   finish  requeue  clients  channels",
        "clicks                  0        6      0.0      0.0      0.0        0         2",
        "views (paused)          0        0      0.0        -        -        0         0",
        *[""] * 17,
        "? help  q quit  ↑↓ select  ⏎ open  Esc back  s sort  r reverse  / filter",
    ]
    lines = open_top().wait_until(lambda lines: lines[1:24] == shown, what="the topics")
    assert lines[0].startswith("nsq top ")
    assert "1 nsqd  2 topics  waiting 6  ingress 0.0/s" in lines[0]

    here = [f"--nsqd-http-address={nsqd.http_address}", "-o", "tsv", "--columns"]
    listed = run_nsq(["topic", "list", *here, "topic,depth,waiting"])
    stat = run_nsq(["stat", "--once", *here, "topic,channel,depth"])
    assert b"clicks\t0\t6\n" in listed.out
    assert b"clicks\t-\t0\n" in stat.out


def test_a_topic_and_a_channel_are_looked_into_and_left(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(ENTER, "topics > clicks", "arch", "live")
    arch = ["arch", "3", "0", "0"]
    top.wait_until(lambda lines: lines[4].split()[:4] == arch, what="the channel")

    with Consumer("clicks", "live", nsqd_tcp_addresses=[nsqd.tcp_address]):
        top.see("j" + ENTER, "topics > clicks > live > [consumers]", nsqd.http_address)
        top.wait_until(lambda lines: lines[3].startswith("client_id▼"), what="the consumers")
        [consumer] = nsqd.stats("clicks")["topics"][0]["channels"][1]["clients"]
        top.wait_for(consumer["remote_address"])

    top.see(ESCAPE, "topics > clicks", gone="> live")
    top.press(ESCAPE)
    top.wait_until(lambda lines: lines[2].startswith("topics  "), what="all topics")


def test_all_nsqd_and_all_consumers_have_views(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.press("\t")
    node = [nsqd.http_address, "OK", "6"]
    lines = top.wait_until(lambda lines: lines[4].split()[:3] == node, what="the nsqd")
    assert lines[2].startswith("nsqd")
    top.see("\t", "client_id▼", "no consumers")
    top.see("\x1b[Z\x1b[Zn", "topics > clicks > [nsqd]", nsqd.http_address)
    top.see(ENTER, f"nsqd > {nsqd.http_address} > clicks", "arch")


@pytest.mark.parametrize(
    ("ahead", "text"), [("/de", "de"), (f"?deq/zz{ENTER}/", "zz"), (f"cde{ENTER}/zz", "zz")]
)
def test_keys_typed_ahead_reach_what_the_key_before_opened(
    top: TerminalScreen, ahead: str, text: str
) -> None:
    lines = top.see(ahead, f"filter: {text}_")
    assert not any("planning" in line or "type clicks" in line for line in lines)


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def test_what_is_pasted_is_text_and_never_keys(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(pasted("d") + "/" + pasted("vie"), "filter: vie_")
    top.see(ESCAPE, gone="filter")
    top.see("p", "y go on")
    top.press(pasted("y"))
    top.see(ESCAPE, gone="y go on")
    assert not nsqd.topic_stats("clicks")["paused"]
    top.see("d", "type clicks")
    top.see(pasted("clicks"), "do nothing: clicks_")
    top.see(ENTER, "delete topic clicks: done", "views (paused)")


def test_columns_order_and_filter_are_chosen_at_the_start_and_by_keys(open_top: OpenTop) -> None:
    top = open_top("--columns=depth,waiting", "--sort=waiting", "--filter=waiting>0")
    lines = top.wait_for("clicks", "q quit")
    assert lines[3].split() == ["topic", "depth", "waiting▼"]
    assert "filter: waiting>0" in lines[2]
    assert not any(line.startswith("views") for line in lines)

    lines = top.see("c", "[x] depth", "[ ] disk", "↑↓ select  space show or hide  Enter done")
    assert lines[0] == "columns"
    top.press(f" \x1b[Bj {ENTER}")
    names = ["topic", "waiting▼", "disk"]
    top.wait_until(lambda lines: lines[3].split() == names, what="the columns")


def test_frozen_means_frozen(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(" ", "[frozen]")
    for _ in range(3):  # it may be drawing yet
        top.go_on()
    frozen = top.lines
    nsqd.create_topic("orders")
    for _ in range(10):  # samples
        top.go_on()
    top.press("jk")
    top.wait_until(lambda lines: lines == frozen, what="all as it was")
    top.see(" ", "orders", gone="[frozen]")
    nsqd.kill()
    top.wait_for("1 silent", "! 1 critical", f"gone {nsqd.http_address}: since")
    top.see("!", "critical gone: Start it again")


def test_an_error_of_ours_ends_it_and_is_said(
    open_top: OpenTop, nsq_env: dict[str, str], tmp_path: Path
) -> None:
    bug = "from nsqtools.cli.top.view import TopView\nTopView.go_down = lambda *_: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(bug)
    top = open_top(PYTHONPATH=f"{tmp_path}:{nsq_env['PYTHONPATH']}")
    top.wait_for("clicks", "q quit")
    top.press(ENTER)
    assert top.wait_for_end() == 1
    assert b"unexpected ZeroDivisionError" in top.raw.rpartition(LEAVES_SCREEN)[2]


# -- changes --------------------------------------------------------------------------------------


def test_keys_change_nothing_unless_they_may(open_top: OpenTop) -> None:
    top = open_top()
    top.wait_for("clicks", "q quit")
    for key in "puedtv":
        top.see(key, "read-only: start nsq top with --allow-changes")
        top.see("j", "? help", gone="read-only")


def test_a_channel_is_paused_unpaused_emptied_and_deleted(open_top: OpenTop, nsqd: Nsqd) -> None:
    top = open_top("--allow-changes", columns=100)
    top.wait_for("clicks", "q quit")
    top.see(ENTER, "arch")

    top.see("p", "pause channel", f"clicks/arch on nsqd {nsqd.http_address}", "y go on")
    top.see("y", "pause channel clicks/arch: done on 1 nsqd", "arch (paused)")
    assert nsqd.channel_stats("clicks", "arch")["paused"]
    top.see("u", "y go on")
    top.see("y", "unpause channel clicks/arch: done", gone="(paused)")

    top.see("e", "3 messages are lost", "type arch and Enter to go on, Esc to do nothing: _")
    top.see(f"y{ENTER}{BACKSPACE}arcj{BACKSPACE}{ENTER}", ": arc_")
    assert nsqd.depth("clicks", "arch") == 3
    top.see(f"h{ENTER}", "empty channel clicks/arch: done on 1 nsqd")
    assert nsqd.depth("clicks", "arch") == 0

    top.see("d", "type arch and Enter")
    top.see(f"arch{ESCAPE}", "topics > clicks", gone="type arch")
    assert channels(nsqd) == ["arch", "live"]
    top.see("d", "type arch and Enter")
    top.see(f"arch{ENTER}", "delete channel clicks/arch: done on 1 nsqd", gone="arch  ")
    assert channels(nsqd) == ["live"]


def test_what_is_not_agreed_to_is_not_done(top: TerminalScreen, nsqd: Nsqd) -> None:
    for keys in (ESCAPE, "n", ENTER, "q", LEFT + ESCAPE):
        top.see("p", "y go on")
        top.see(keys, "? help", gone="y go on")
        top.see("y/x", "filter: x_")  # the y was taken, too
        top.see(ESCAPE, gone="filter")
        assert not nsqd.topic_stats("clicks")["paused"]
    top.see("e", "the channels of clicks keep their", gone="--channels")


def test_a_plan_that_comes_after_another_key_is_not_shown(top: TerminalScreen) -> None:
    top.press("dj")  # in one read: the plan comes later
    top.see("n", "topics > views > [nsqd]", gone="type clicks")


def test_a_plan_names_who_is_connected_and_a_failure_is_said(open_top: OpenTop, nsqd: Nsqd) -> None:
    top = open_top("--allow-changes", columns=100)
    top.wait_for("clicks", "q quit")
    with Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["clients"], what="it is there")
        top.see("d", "connected, may create it again", "type clicks and Enter")
    nsqd.post("/topic/delete", topic="clicks")
    top.see(f"clicks{ENTER}", "delete topic clicks failed: ", "TOPIC_NOT_FOUND")
