"""``nsq top`` on a real terminal: what the screen shows, what keys do, what it leaves behind."""

from __future__ import annotations

import signal
import socket
import termios
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest
from plugins.cli import NSQ, RunNsq, end_terminal
from plugins.clusters import RunningCluster
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.screens import NsqOnAScreen, TerminalScreen
from plugins.servers import Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer

UP, DOWN, ENTER, ESCAPE = "\x1b[A", "\x1b[B", "\r", "\x1b"
LEAVES_SCREEN, SHOWS_CURSOR, LEAVES_MOUSE = b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l"


@pytest.fixture
def nsqd(serve: Serve, data_path: Callable[[], Path]) -> Nsqd:
    """An nsqd with clicks/arch (3 messages), clicks/live and the paused topic views."""
    nsqd: Nsqd = serve(EmbeddedServer(data_path()))
    nsqd.create_channel("clicks", "arch")
    nsqd.create_channel("clicks", "live")
    nsqd.publish("clicks", b"a", b"b", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    wait_until(lambda: nsqd.depth("clicks", "live") == 3, what="the messages are in the channels")
    return nsqd


@pytest.fixture
def top(nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd) -> TerminalScreen:
    here = f"--nsqd-http-address={nsqd.http_address}"
    return nsq_on_a_screen(["top", here, "--interval", "100ms"])


def test_topics_fill_80_by_24(top: TerminalScreen) -> None:
    lines = top.wait_for("clicks", " 0.0 ", "q quit")

    assert lines[0].startswith("nsq top ")
    assert "1 nsqd  2 topics  waiting 6  ingress 0.0/s  finish 0.0/s" in lines[0]
    assert lines[1].startswith("topics  left out: ")
    heading = ["topic▼", "depth", "waiting", "ingress", "finish", "requeue", "clients", "channels"]
    assert lines[2].split() == heading
    assert lines[3].split() == ["clicks", "0", "6", "0.0", "0.0", "0.0", "0", "2"]
    assert lines[4].startswith("views (paused)")
    assert lines[5:23] == [""] * 18
    assert lines[23].startswith("? help  q quit")
    assert len(lines) == 24


def test_depth_means_what_it_means_in_stat_and_topic_list(
    top: TerminalScreen, nsqd: Nsqd, run_nsq: RunNsq
) -> None:
    top.wait_for("clicks")
    here = f"--nsqd-http-address={nsqd.http_address}"
    listed = run_nsq(["topic", "list", here, "-o", "tsv", "--columns", "topic,depth,waiting"])
    stat = run_nsq(["stat", here, "--once", "-o", "tsv", "--columns", "topic,channel,depth"])

    [clicks] = [line.split() for line in top.lines if line.startswith("clicks")]
    assert clicks[:3] == ["clicks", "0", "6"]
    assert b"clicks\t0\t6\n" in listed.out
    assert b"clicks\t-\t0\n" in stat.out


def test_one_looks_into_a_topic_and_a_channel_and_back(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.wait_for("views")
    top.press(ENTER)
    lines = top.wait_for("topics > clicks", "arch", "live")
    assert lines[3].split()[:4] == ["arch", "3", "0", "0"]

    with Consumer("clicks", "live", nsqd_tcp_addresses=[nsqd.tcp_address]):
        top.press(DOWN)
        top.press(ENTER)
        lines = top.wait_for("topics > clicks > live > [consumers]", nsqd.http_address)
        assert lines[2].split()[0] == "client_id▼"
        [consumer] = nsqd.stats("clicks")["topics"][0]["channels"][1]["clients"]
        top.wait_for(consumer["remote_address"])

    top.press(ESCAPE)
    top.wait_for("topics > clicks", gone="> live")
    top.press(ESCAPE)
    assert top.wait_for("views")[1].startswith("topics  ")


def test_all_nsqd_and_all_consumers_have_views(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.wait_for("clicks")
    top.press("\t")
    lines = top.wait_for(nsqd.http_address)
    assert lines[1].startswith("nsqd")
    [node] = [line.split() for line in lines if line.startswith(nsqd.http_address)]
    assert node[1:3] == ["OK", "6"]
    top.press("\t")
    top.wait_for("client_id▼", "no consumers")
    top.press("1")
    top.wait_for("clicks")
    top.press("n")
    top.wait_for("topics > clicks > [nsqd]", nsqd.http_address)
    top.press(ENTER)
    top.wait_for(f"nsqd > {nsqd.http_address} > clicks", "arch")


def test_a_topic_without_channels_says_so(top: TerminalScreen, nsqd: Nsqd) -> None:
    nsqd.publish("lonely", b"a", b"b")
    top.wait_for("lonely")
    top.press(DOWN)
    top.press(ENTER)
    top.wait_for("topic lonely has no channels: its 2 messages wait until one is created")


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
    top.wait_for("words or depth>1000")
    top.press("waiting>5\r")
    top.wait_until(lambda lines: first_topics(lines) == ["clicks"], what="filtered by number")
    top.press("/\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7fvie\r")
    top.wait_until(lambda lines: first_topics(lines) == ["views"], what="filtered by name")
    top.press(ESCAPE)
    top.wait_until(lambda lines: first_topics(lines) == ["clicks", "views"], what="all again")


def test_the_command_line_chooses_columns_order_and_filter(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd
) -> None:
    here = f"--nsqd-http-address={nsqd.http_address}"
    chosen = ["--columns", "messages,waiting", "--sort", "waiting", "--filter", "waiting > 0"]

    lines = nsq_on_a_screen(["top", here, *chosen]).wait_for("clicks")

    assert lines[2].split() == ["topic", "messages", "waiting▼"]
    assert "filter: waiting>0" in lines[1]
    assert not any(line.startswith("views") for line in lines)


def test_columns_are_chosen_by_keys(top: TerminalScreen) -> None:
    top.wait_for("clicks")
    top.press("c")
    top.wait_for("[x] depth", "[ ] disk")
    top.press(f" {DOWN}{DOWN} {ENTER}")
    lines = top.wait_for("disk", gone="[x]")
    assert "depth" not in lines[2]


def test_the_mouse_selects_opens_and_sorts(top: TerminalScreen) -> None:
    top.wait_for("clicks", "views")
    top.press("\x1b[<0;3;5M\x1b[<0;3;5m")
    top.press("\x1b[<0;3;5M")
    top.wait_for("topics > views", "topic views has no channels")
    top.press(ESCAPE)
    lines = top.wait_for("clicks")
    place = lines[2].index("waiting") + 1
    top.press(f"\x1b[<0;{place};3M")
    top.wait_for("waiting▼")
    top.press(f"\x1b[<0;{place};3M")
    top.wait_for("waiting▲")


def test_help_lists_the_keys(top: TerminalScreen) -> None:
    top.wait_for("clicks")
    top.press("?")
    top.wait_for("Keys", "look into it", "Esc back")
    top.press("q")
    top.wait_for("clicks", gone="look into it")


def test_frozen_means_frozen(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.wait_for("clicks")
    top.press(" ")
    frozen = top.wait_for("[frozen]")
    nsqd.create_topic("orders")
    nsqd.publish("clicks", *[b"x"] * 50)
    top.press(DOWN)
    after = top.wait_until(lambda lines: lines == frozen, what="nothing but the selection moves")
    for _ in range(5):
        top.press(UP + DOWN)
        after = top.wait_for("[frozen]")
    assert after == frozen

    top.press(" ")
    top.wait_for("orders", gone="[frozen]")
    nsqd.kill()
    top.wait_for("does not answer for", "cannot connect to")


def test_it_survives_resizing(top: TerminalScreen) -> None:
    top.wait_for("clicks", "q quit")
    for columns, height in ((50, 8), (120, 30)):
        top.resize(columns, height)
        top.wait_until(
            lambda lines, last=height - 1: (
                lines[0].startswith("nsq top")
                and any(line.startswith("clicks") for line in lines)
                and lines[last].startswith("? help  q quit")
            ),
            what=f"a screen of {columns}x{height}",
        )
    top.resize(30, 8)
    top.wait_for("nsq top needs 40 columns and …")
    top.resize(80, 24)
    top.wait_for("clicks", gone="needs 40")


@pytest.mark.parametrize(
    ("way", "status"),
    [("q", 0), ("\x03", 130), ("\x1c", 131), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_the_terminal_is_left_as_it_was(
    top: TerminalScreen, way: str | signal.Signals, status: int
) -> None:
    before = termios.tcgetattr(top.child.child_fd)
    top.wait_for("clicks")
    assert termios.tcgetattr(top.child.child_fd) != before
    if isinstance(way, str):
        top.press(way)
    else:
        top.child.kill(way)

    assert top.wait_for_end() == status
    end = top.raw[top.raw.rindex(LEAVES_MOUSE) :]
    assert SHOWS_CURSOR in end
    assert LEAVES_SCREEN in end


def test_it_ends_with_its_terminal(top: TerminalScreen) -> None:
    top.wait_for("clicks")
    top.child.ptyproc.fileobj.close()
    top.child.closed = top.child.ptyproc.closed = True  # pexpect is not to close it again

    wait_until(lambda: not top.child.isalive(), what="it has ended")
    assert top.child.exitstatus == 129


def test_a_second_interrupt_leaves_the_terminal_as_it_was(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd
) -> None:
    """The first one may wait for a lookup that hangs."""
    top = nsq_on_a_screen(["top", f"--nsqd-http-address={nsqd.http_address}"])
    top.wait_for("clicks")
    top.press("\x03\x03\x03")

    assert top.wait_for_end() == 130
    assert LEAVES_SCREEN in top.raw


def test_the_terminal_has_its_modes_back_when_it_ends_and_while_it_is_suspended(
    nsqd: Nsqd, nsq_env: dict[str, str]
) -> None:
    """Under a shell with job control, which is who sees it stop."""
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**nsq_env, "PS1": "ready> ", "TERM": "xterm", "LC_ALL": "C.UTF-8"},
        dimensions=(24, 80),
        timeout=patience_s(15),
    )
    shell.expect_exact("ready> ")
    shell.sendline(f"{' '.join(NSQ)} top --nsqd-http-address={nsqd.http_address}")
    shell.expect_exact(b"clicks")
    for again in (b"fg", b"kill %1"):
        shell.send("\x1a")
        shell.expect_exact(LEAVES_SCREEN)
        shell.expect_exact("Stopped")
        shell.expect_exact("ready> ")
        shell.sendline("stty -a")
        shell.expect_exact(" icanon")
        shell.expect_exact(" echo ")
        shell.expect_exact("ready> ")
        if again == b"fg":
            shell.sendline("fg")
            shell.expect_exact(b"\x1b[?1049h")
            shell.expect_exact(b"clicks")
    shell.sendline("kill %1; fg")
    shell.expect_exact("ready> ")
    end_terminal(shell)


def test_a_dead_nsqd_is_named_and_the_rest_shown(
    nsq_on_a_screen: NsqOnAScreen, cluster: RunningCluster
) -> None:
    first, second = cluster.nsqds
    first.create_topic("clicks")
    second.kill()

    screen = nsq_on_a_screen(["top", *cluster.nsqd_options])

    lines = screen.wait_for("clicks", "2 nsqd, 1 silent", "does not answer for")
    assert "2 nsqd, 1 silent" in lines[0]
    assert lines[1].startswith(f"{second.http_address} does not answer for")
    screen.press("2")
    screen.wait_for(f"{first.http_address}", "silent")


def test_an_nsqd_that_hangs_holds_up_neither_keys_nor_the_others(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd, go_nsqd: Callable[..., GoNsqd]
) -> None:
    hanging = go_nsqd()
    here = [f"--nsqd-http-address={each.http_address}" for each in (nsqd, hanging)]
    top = nsq_on_a_screen(["top", *here, "--interval", "200ms"])
    top.wait_for("clicks", "2 nsqd")
    hanging.pause()

    top.wait_for(f"{hanging.http_address} does not answer for")
    nsqd.create_topic("orders")
    top.wait_for("orders", f"{hanging.http_address} does not answer for")
    top.press(ENTER)
    top.wait_for("topics > clicks")
    hanging.resume()
    top.wait_for("2 nsqd  ", gone="does not answer")
    hanging.pause()
    top.press("q")
    assert top.wait_for_end() == 0
    hanging.resume()


def test_one_that_hangs_from_the_start_is_not_waited_for(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        here = [f"--nsqd-http-address={each}" for each in (nsqd.http_address, address)]

        top = nsq_on_a_screen(["top", *here])

        top.wait_for("clicks", f"{address} does not answer for")


def test_where_there_is_no_screen_to_fill_it_says_so(
    run_nsq: RunNsq, nsq_on_a_screen: NsqOnAScreen
) -> None:
    piped = run_nsq(["top"])
    dumb = nsq_on_a_screen(["top"], TERM="dumb")
    narrow = nsq_on_a_screen(["top"], columns=39)
    nobody = nsq_on_a_screen(["top", "--nsqd-http-address=127.0.0.1:1"])
    unknown = nsq_on_a_screen(["top", "--columns", "dpth"])

    assert piped.status == 2
    assert "nsq stat --interval" in piped.err
    assert dumb.wait_for_end() == 2
    assert b"TERM=dumb" in dumb.raw
    assert narrow.wait_for_end() == 2
    assert b"nsq top needs 40 columns" in narrow.raw
    assert nobody.wait_for_end() == 4
    assert unknown.wait_for_end() == 2
    assert b"unknown column 'dpth'" in unknown.raw
    for screen in (dumb, narrow, nobody, unknown):
        assert b"\x1b[?1049h" not in screen.raw


def test_without_unicode_it_is_ascii(nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd) -> None:
    here = f"--nsqd-http-address={nsqd.http_address}"
    top = nsq_on_a_screen(["top", here], LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")

    top.wait_for("clicks", "topic*")
    top.press("?")
    top.wait_for("Keys")
    top.press("q")
    top.wait_for("clicks")
    assert top.raw.isascii()
