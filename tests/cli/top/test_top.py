"""``nsq top`` on a real terminal: what the screen shows, what keys do, what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.http_api import Nsqd
from plugins.screens import NsqOnAScreen, TerminalScreen
from plugins.waiting import wait_until

from nsqtools.cli.top.keyboard import parse_keys
from nsqtools.cli.top.screen import short, sparkline
from nsqtools.cli.top.view import TopView
from nsqtools.client.consumer import Consumer
from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.queue_rows import rows_of
from nsqtools.cluster.sampling import Sample
from nsqtools.protocol.stats import read_stats

UP, DOWN, ENTER, ESCAPE = "\x1b[A", "\x1b[B", "\r", "\x1b"


@pytest.fixture
def nsqd(any_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd with clicks/arch (3 messages), clicks/live and the paused topic views."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.create_channel("clicks", "live")
    nsqd.publish("clicks", b"a", b"b", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    return nsqd


@pytest.fixture
def top(nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd) -> TerminalScreen:
    here = f"--nsqd-http-address={nsqd.http_address}"
    return nsq_on_a_screen(["top", here, "--interval", "100ms"])


def test_topics_fill_80_by_24(top: TerminalScreen) -> None:
    lines = top.wait_for("clicks", "▁▁", "q quit")

    assert lines[0].startswith("nsq top ")
    assert "1 nsqd  2 topics  depth 6  in 0.0/s  fin 0.0/s" in lines[0]
    assert lines[1] == "topics"
    assert lines[2].split() == ["topic▼", "depth", "in/s", "fin/s", "clients", "channels", "trend"]
    assert lines[3].split()[:6] == ["clicks", "6", "0.0", "0.0", "0", "2"]
    assert lines[4].startswith("views (paused)")
    assert lines[5:23] == [""] * 18
    assert lines[23].startswith("↑↓ select")
    assert len(lines) == 24


def test_one_looks_into_a_topic_and_a_channel_and_back(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.wait_for("views")
    top.press(ENTER)
    lines = top.wait_for("topics > clicks", "arch", "live")
    assert lines[3].split()[:4] == ["arch", "3", "0", "0"]

    with Consumer("clicks", "live", nsqd_tcp_addresses=[nsqd.tcp_address]):
        top.press(DOWN)
        top.press(ENTER)
        lines = top.wait_for("topics > clicks > live", "nsqtools/", nsqd.http_address)
        assert lines[2].split() == ["client▼", "nsqd", "ready", "in-fl", "done", "requeued"]

    top.press(ESCAPE)
    top.wait_for("topics > clicks", gone="> live")
    top.press(ESCAPE)
    assert top.wait_for("views")[1] == "topics"


def test_lines_are_sorted_reversed_and_filtered(top: TerminalScreen) -> None:
    def first_topics(lines: list[str]) -> list[str]:
        return [line.split()[0] for line in lines[3:5] if line]

    top.wait_until(lambda lines: first_topics(lines) == ["clicks", "views"], what="by name")
    top.press("r")
    top.wait_until(lambda lines: first_topics(lines) == ["views", "clicks"], what="reversed")
    top.press("r")
    top.press("s")
    assert "depth▼" in top.wait_for("depth▼")[2]
    top.press("/")
    top.wait_for("type a part of the name")
    top.press("vie\r")
    top.wait_until(lambda lines: first_topics(lines) == ["views"], what="filtered")
    top.press(ESCAPE)
    top.wait_until(lambda lines: first_topics(lines) == ["clicks", "views"], what="all again")


def test_it_follows_the_cluster_until_it_is_frozen(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.wait_for("clicks")
    nsqd.publish("clicks", b"d")
    top.wait_for("depth 8")
    top.press(" ")
    top.wait_for("[frozen]")
    nsqd.create_topic("orders")
    top.press(" ")
    top.wait_for("orders", gone="[frozen]")
    nsqd.kill()
    top.wait_for("cannot connect to")


def test_it_survives_resizing(top: TerminalScreen) -> None:
    top.wait_for("clicks", "q quit")
    for columns, height in ((50, 8), (120, 30)):
        top.resize(columns, height)
        top.wait_until(
            lambda lines, last=height - 1: (
                lines[0].startswith("nsq top")
                and lines[3].startswith("clicks")
                and lines[last].startswith("↑↓ select")
            ),
            what=f"a screen of {columns}x{height}",
        )


@pytest.mark.parametrize(("way", "status"), [("q", 0), ("\x03", 130)])
def test_the_terminal_is_left_as_it_was(top: TerminalScreen, way: str, status: int) -> None:
    import termios

    before = termios.tcgetattr(top.child.child_fd)
    top.wait_for("clicks")
    wait_until(lambda: termios.tcgetattr(top.child.child_fd) != before, what="keys come at once")
    top.press(way)

    top.child.expect_exact(b"\x1b[?1049l")
    shown_cursor = top.child.before + (top.child.after or b"")
    wait_until(lambda: termios.tcgetattr(top.child.child_fd) == before, what="the mode is back")
    rest = top.child.read()
    top.child.close()
    assert b"\x1b[?25h" in shown_cursor + rest
    assert top.child.exitstatus == status


def test_a_dead_nsqd_is_counted_and_the_rest_shown(
    nsq_on_a_screen: NsqOnAScreen, cluster: RunningCluster
) -> None:
    first, second = cluster.nsqds
    first.create_topic("clicks")
    second.kill()

    screen = nsq_on_a_screen(["top", *cluster.nsqd_options])

    assert "1 nsqd, 1 not answering" in screen.wait_for("clicks")[0]


def test_without_a_terminal_or_a_server_it_says_so(
    run_nsq: RunNsq, nsq_on_a_screen: NsqOnAScreen
) -> None:
    piped = run_nsq(["top"])
    nobody = nsq_on_a_screen(["top", "--nsqd-http-address=127.0.0.1:1"])

    assert piped.status == 2
    assert "nsq stat --interval" in piped.err
    assert nobody.wait_for_end() == 4
    assert b"\x1b[?1049h" not in nobody.raw


def look(**depths: int) -> Sample:
    """A look at one nsqd whose topics are so deep."""
    topics = [{"topic_name": name, "depth": depth} for name, depth in depths.items()]
    report = NodeReport("a:1", 0.0, read_stats({"topics": topics}))
    return Sample(0, rows_of([report]), (report,), (), has_rates=False)


def test_the_selection_stays_with_its_topic_when_lines_change_places() -> None:
    view = TopView()
    view.show(look(clicks=3, views=2, orders=1))
    view.press("s", 10)
    view.press("down", 10)
    assert view.selected == "views"

    view.show(look(clicks=3, views=9, orders=1))
    lines = view.lines()
    assert [line.key for line in lines] == ["views", "clicks", "orders"]
    assert view.position(lines) == 0

    view.show(look(clicks=3, orders=1))
    assert view.position(view.lines()) == 0
    view.press("page down", 10)
    assert view.selected == "orders"


def test_keys_are_read_from_whatever_comes_together() -> None:
    assert parse_keys(b"\x1b[A\x1b[5~jq\r\x7f") == ["up", "page up", "j", "q", "enter", "backspace"]
    assert parse_keys(b"\x1b") == ["escape"]
    assert parse_keys(b"\x1b[1;5Cx\x1bOB") == ["x", "down"]
    assert parse_keys("ü\x00\xff".encode("latin-1")) == []
    assert parse_keys("ü".encode()) == ["ü"]


def test_numbers_stay_short_and_trends_are_bars() -> None:
    assert [short(value) for value in (999_999, 12_345_678, 2.5e9, 0.04, None)] == [
        *("999999", "12.3M", "2.5G", "0.0", "-"),
    ]
    assert sparkline([0, 1, 7, 3.5], 3, unicode=True) == "▂█▅"
    assert sparkline([0, 0], 3, unicode=False) == "__"
