"""``nsq top`` on a terminal: its screens, its keys, and how it ends."""

import asyncio
import signal
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pexpect
import pytest
from plugins.cli import NSQ, NsqOnAScreen, RunNsq, TerminalNsq, TerminalScreen, end_terminal
from plugins.servers import AnyNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer

OpenTop = Callable[..., TerminalScreen]
ENTER, ESCAPE, LEFT, BACKSPACE = "\r", "\x1b", "\x1b[D", "\x7f"
LEAVES_SCREEN, SHOWS_CURSOR, LEAVES_MOUSE = b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l"


@pytest.fixture
def nsqd(embedded_nsqd: AnyNsqd) -> Nsqd:
    """An nsqd with clicks/arch (3 messages), clicks/live and the paused topic views."""
    nsqd = embedded_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.create_channel("clicks", "live")
    nsqd.publish("clicks", b'{"n": 1}', b"\x1b[31mred", b"c")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    wait_until(lambda: nsqd.depth("clicks", "live") == 3, what="the messages are in the channels")
    return nsqd


@pytest.fixture
def open_top(nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd) -> OpenTop:
    """``top = open_top("--sort=depth", columns=100)``; then ``top.see("\\r", "clicks")``."""
    here = f"--nsqd-http-address={nsqd.http_address}"
    command = ["top", here, "--interval", "100ms"]
    return lambda *more, **screen: nsq_on_a_screen([*command, *more], **screen)


@pytest.fixture
def top(open_top: OpenTop) -> TerminalScreen:
    """A top that shows the nsqd and may change it."""
    top = open_top("--allow-changes", columns=100)
    top.wait_for("clicks", "q quit")
    return top


def test_topics_fit_80_by_24_and_depth_agrees_with_other_commands(
    open_top: OpenTop, nsqd: Nsqd, run_nsq: RunNsq
) -> None:
    expected = [
        "! 2 warning  no consumers (2) clicks/arch: 3 waiting",
        "topics  left out: trend, e2e_ms, timed_out",
        "topic          waiting▼  ingress   finish  requeue  in_flight  clients  channels",
        "clicks                6      0.0      0.0      0.0          0        0         2",
        "views (paused)        0      0.0        -        -          0        0         0",
        *[""] * 17,
        "? help  q quit  ↑↓ select  ⏎ open  Esc back  s sort  r reverse  / filter",
    ]
    lines = open_top().wait_until(lambda lines: lines[1:24] == expected, what="the topics")
    assert lines[0].startswith("nsq top ")
    assert "1 nsqd  2 topics  6 waiting  ingress 0.0/s" in lines[0]

    here = [f"--nsqd-http-address={nsqd.http_address}", "-o", "tsv", "--columns"]
    listed = run_nsq(["topic", "list", *here, "topic,depth,waiting"])
    stat = run_nsq(["stat", "--once", *here, "topic,channel,depth"])
    assert b"clicks\t0\t6\n" in listed.out
    assert b"clicks\t-\t0\n" in stat.out


def test_a_topic_and_a_channel_are_opened_and_closed(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(ENTER, "topics > clicks", "arch", "live")
    arch = ["arch", "3", "0", "0"]
    top.wait_until(lambda lines: lines[4].split()[:4] == arch, what="the channel")

    with Consumer("clicks", "live", nsqd_tcp_addresses=[nsqd.tcp_address]):
        top.see("j" + ENTER, "topics > clicks > live > [consumers]", nsqd.http_address)
        top.wait_until(lambda lines: "in_flight▼" in lines[3], what="the consumers")
        [consumer] = nsqd.stats("clicks")["topics"][0]["channels"][1]["clients"]
        top.wait_for(consumer["remote_address"])

    top.see(ESCAPE, "topics > clicks", gone="> live")
    top.press(ESCAPE)
    top.wait_until(lambda lines: lines[2].startswith("topics  "), what="all topics")

    top.press("\t")  # all nsqd, and all consumers
    node = [nsqd.http_address, "OK", "6"]
    lines = top.wait_until(lambda lines: lines[4].split()[:3] == node, what="the nsqd")
    assert lines[2].startswith("nsqd")
    top.see("\t", "in_flight▼", "no consumers")
    top.see("\x1b[Z\x1b[Zn", "topics > clicks > [nsqd]", nsqd.http_address)
    top.see(ENTER, f"nsqd > {nsqd.http_address} > clicks", "arch")


def test_keys_typed_ahead_reach_the_screen_just_opened(top: TerminalScreen) -> None:
    for ahead, text in (("/de", "de"), (f"?deq/zz{ENTER}/", "zz"), (f"cde{ENTER}/yy", "yy")):
        lines = top.see(ahead, f"filter: {text}_")
        assert not any("planning" in line or "type clicks" in line for line in lines)
        top.see(ESCAPE, "clicks", gone="filter")


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def test_pasted_text_is_never_taken_as_keys(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(pasted("d") + "/" + pasted("vie"), "filter: vie_")
    top.see(ESCAPE, gone="filter")
    top.see("p", "y go on")
    top.press(pasted("y"))
    top.see(ESCAPE, gone="y go on")
    assert not nsqd.topic_stats("clicks")["paused"]
    top.see("d", "type clicks")
    top.see(pasted("clicks"), "do nothing: clicks_")
    top.see(ENTER, "delete topic clicks: done", "views (paused)")


def test_columns_order_and_filter_follow_options_and_keys(open_top: OpenTop) -> None:
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


def test_a_frozen_screen_does_not_change(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see(" ", "[frozen]")
    for _ in range(3):  # it may still be drawing
        top.go_on()
    frozen = top.lines
    nsqd.create_topic("orders")
    for _ in range(10):  # samples
        top.go_on()
    top.press("jk")
    top.wait_until(lambda lines: lines == frozen, what="all as it was")
    top.see(" ", "orders", gone="[frozen]")
    nsqd.kill()
    top.wait_for("0 of 1 nsqd respond", "! 1 critical", f"gone {nsqd.http_address}: ")
    top.see("!", "critical gone: Start it again")


def test_an_unexpected_error_ends_top_and_is_printed(
    open_top: OpenTop, nsq_env: dict[str, str], tmp_path: Path
) -> None:
    bug = "from nsqtools.cli.top.view import TopView\nTopView.go_down = lambda *_: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(bug)
    top = open_top(PYTHONPATH=f"{tmp_path}:{nsq_env['PYTHONPATH']}")
    top.wait_for("clicks", "q quit")
    top.press(ENTER)
    assert top.wait_for_end() == 1
    assert b"unexpected ZeroDivisionError" in top.raw.rpartition(LEAVES_SCREEN)[2]


def test_keys_change_nothing_without_allow_changes(open_top: OpenTop) -> None:
    top = open_top()
    top.wait_for("clicks", "q quit")
    for key in "puedtv":
        top.see(key, "read-only: start nsq top with --allow-changes")
        top.see("j", "? help", gone="read-only")


def test_a_channel_is_paused_unpaused_emptied_and_deleted(top: TerminalScreen, nsqd: Nsqd) -> None:
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
    assert nsqd.channels("clicks") == ["arch", "live"]
    top.see("d", "type arch and Enter")
    top.see(f"arch{ENTER}", "delete channel clicks/arch: done on 1 nsqd", gone="arch  ")
    assert nsqd.channels("clicks") == ["live"]


def test_an_action_is_executed_only_after_confirmation(top: TerminalScreen, nsqd: Nsqd) -> None:
    top.see("p?", "open it")
    reason = "the plan has come, and is not shown over the help"
    top.wait_until(lambda _: nsqd.log.partition("clients=true")[2].count("GET") > 3, what=reason)
    top.see(ESCAPE, "q quit", gone="planning")
    for keys in (ESCAPE, "n", ENTER, "q", LEFT + ESCAPE):
        top.see("p", "y go on")
        top.see(keys, "? help", gone="y go on")
        top.see("y/x", "filter: x_")  # the y was consumed as well
        top.see(ESCAPE, gone="filter")
        assert not nsqd.topic_stats("clicks")["paused"]
    top.see("e", "the channels of clicks keep their", gone="--channels")
    top.see(ESCAPE, "? help", gone="keep their")
    top.press("dj")  # in one read: the plan arrives later and is not shown
    top.see("n", "topics > views > [nsqd]", gone="type clicks")


def test_a_plan_names_connected_clients_and_a_failure_is_shown(
    top: TerminalScreen, nsqd: Nsqd
) -> None:
    with Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["clients"], what="it is there")
        top.see("d", "connected, may create it again", "type clicks and Enter")
    nsqd.post("/topic/delete", topic="clicks")
    top.see(f"clicks{ENTER}", "delete topic clicks failed: ", "TOPIC_NOT_FOUND")


def click(column: int, line: int) -> str:
    return f"\x1b[<0;{column};{line}M\x1b[<0;{column};{line}m"


def test_top_handles_keys_the_mouse_and_a_resize(top: TerminalScreen, nsqd: Nsqd) -> None:
    lines = top.wait_for("clicks", "views (paused)", "q quit")
    assert (lines[0][:8], lines[2][:7], len(lines)) == ("nsq top ", "topics ", 24)
    top.see("/vie\x7f\x7f\x7fcli\r", "filter: cli", gone="views")
    top.see("\x1b", "views")
    for mark in "▼▲▼":
        top.see(click(1, 4), f"topic{mark}")
    top.see(click(3, 6) * 2, "topics > views", "topic views has no channels")
    top.see("?", "Keys")
    wheel_up, wheel_down = "\x1b[<64;3;6M", "\x1b[<65;3;6M"
    top.see(wheel_down * 5, "Columns", gone="Keys")
    top.see("q", "topics > views")
    top.see("\x1b[Dmm", "clicks", "the mouse is ours")
    for wheel, topic in ((wheel_up, "clicks"), (wheel_down, "views")):
        top.press(wheel)
        top.wait_until(lambda _, topic=topic: top.selected.startswith(topic), what="it selects")  # type: ignore[misc]
    top.see("j", gone="the mouse")
    top.resize(30, 8)
    top.wait_for("nsq top needs 40 columns and")
    top.resize(60, 10)
    top.wait_until(lambda lines: lines[9].startswith("? help  q quit"), what="a smaller screen")
    top.see("kd", "delete topic clicks on nsqd", "type clicks and Enter")
    top.see("clicks\r", "delete topic clicks: done on 1 nsqd", "views (paused)")
    assert nsqd.topics() == ["views"]
    assert b"\x1b[33m" in top.raw  # a paused topic is yellow


@pytest.mark.parametrize(
    ("way", "status"),
    [("q", 0), ("\x03\x03\x03", 130), ("\x1c", 131), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_the_terminal_is_restored_at_the_end(
    open_top: OpenTop, way: str | signal.Signals, status: int
) -> None:
    top = open_top()
    modes = termios.tcgetattr(top.child.child_fd)
    top.wait_for("clicks")
    assert termios.tcgetattr(top.child.child_fd) != modes
    top.child.kill(signal.SIGCONT)  # as after SIGSTOP
    top.wait_until(lambda _: top.raw.count(b"\x1b[?1049h") == 2, what="it begins again")
    top.press(way) if isinstance(way, str) else top.child.kill(way)

    top.wait_until(lambda _: termios.tcgetattr(top.child.child_fd) == modes, what="its modes")
    assert top.wait_for_end() == status
    assert all(sequence in top.raw for sequence in (LEAVES_MOUSE, SHOWS_CURSOR, LEAVES_SCREEN))


def test_top_resumes_on_the_event_loop_not_in_the_signal_handler() -> None:
    """The handler may interrupt a write and would then wait for its lock."""
    from nsqtools.cli.top.app import (
        Terminal,  # at the top, every worker would load textual
    )

    handlers = {number: signal.getsignal(number) for number in (signal.SIGCONT, signal.SIGTSTP)}
    resumed: list[str] = []

    async def receive_signal() -> None:
        driver = Terminal(cast(Any, SimpleNamespace(encoding="utf-8", end_with_terminal=print)))
        driver._writer_thread = cast(Any, object())
        driver.resume_application_mode = lambda: resumed.append("resumed")  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGCONT)
        assert not resumed
        await asyncio.sleep(0)

    try:
        asyncio.run(receive_signal())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert resumed == ["resumed"]


def test_top_ends_when_its_terminal_closes(top: TerminalScreen) -> None:
    top.child.ptyproc.fileobj.close()
    top.child.closed = top.child.ptyproc.closed = True  # pexpect must not close it again

    wait_until(lambda: not top.child.isalive(), what="it has ended")
    assert top.child.exitstatus == 129


def test_top_works_on_a_terminal_without_a_size(nsq_on_a_terminal: TerminalNsq, nsqd: Nsqd) -> None:
    command = ["top", f"--nsqd-http-address={nsqd.http_address}", "--interval", "100ms"]
    top = nsq_on_a_terminal(command, {"TERM": "xterm"}, 0, lines=0, encoding=None)
    top.expect_exact(b"clicks")
    top.send(b"q")
    top.expect(pexpect.EOF)
    top.wait()
    assert top.exitstatus == 0


def test_terminal_modes_are_restored_at_the_end_and_while_suspended(
    nsqd: Nsqd, nsq_env: dict[str, str]
) -> None:
    """Run under a shell with job control, which sees it stop."""
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**nsq_env, "PS1": "ready> ", "TERM": "xterm", "LC_ALL": "C.UTF-8"},
        dimensions=(24, 80),
        timeout=patience_s(15),
    )

    def expect(*texts: str | bytes) -> None:
        for text in texts:
            shell.expect_exact(text)

    expect("ready> ")
    for begin in (f"{' '.join(NSQ)} top --nsqd-http-address={nsqd.http_address}", "fg"):
        shell.sendline(begin)
        expect(b"\x1b[?1049h", "clicks")
        shell.send("\x1a")
        expect(LEAVES_SCREEN, "Stopped", "ready> ")
        shell.sendline("stty -a")
        expect(" icanon", " echo ", "ready> ")
    shell.sendline("kill %1; fg")
    expect("ready> ")
    end_terminal(shell)


def test_messages_are_shown_in_place_of_the_screen_and_requeued(
    top: TerminalScreen, nsqd: Nsqd
) -> None:
    nsqd.publish("views", b"a")
    top.see("v", "v shows messages of a channel")
    top.see(ENTER, "topics > clicks", "arch")
    top.see("v", '{"n": 1}', r"\x1b[31mred", "3 messages shown and requeued", "Enter returns")
    top.see(ENTER, "topics > clicks", gone="Enter returns")
    wait_until(lambda: nsqd.depth("clicks", "arch") == 3, what="they are requeued")
    top.see("\x1b", "views")
    top.see("t", "tail of clicks")
    wait_until(lambda: len(nsqd.channels("clicks")) == 3, what="it has subscribed")
    nsqd.publish("clicks", b"hello\x1b[31m")
    top.wait_for(r"hello\x1b[31m")
    top.see("\x03", "views", "q quit", gone="returns")
    wait_until(lambda: nsqd.channels("clicks") == ["arch", "live"], what="that of the tail is gone")
    assert nsqd.depth("clicks", "arch") == 4
    top.see("jt", "has no channel", "Enter returns")  # the topic has no channel
    assert nsqd.depth("views") == 1
    top.see(ENTER, "q quit", gone="Enter returns")
    top.see("kt", "tail of clicks")
    top.child.kill(signal.SIGTERM)
    assert top.wait_for_end() == 143


def test_a_hanging_nsqd_delays_neither_keys_nor_other_nsqd(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd, go_nsqd: MakeNsqd
) -> None:
    hanging = go_nsqd()
    here = [f"--nsqd-http-address={node.http_address}" for node in (nsqd, hanging)]
    top = nsq_on_a_screen(["top", *here, "--interval", "200ms"])
    top.wait_for("clicks", "2 nsqd")
    hanging.pause()

    top.wait_for("1 of 2 nsqd respond", f"gone {hanging.http_address}")
    nsqd.create_topic("orders")
    top.wait_for("orders", f"gone {hanging.http_address}")
    top.see(ENTER, "topics > clicks")
    hanging.resume()
    top.wait_for("2 nsqd  ", gone="gone")
    hanging.pause()
    top.press("q")
    assert top.wait_for_end() == 0
    hanging.resume()


def test_top_works_without_color_and_in_another_encoding(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd
) -> None:
    here = f"--nsqd-http-address={nsqd.http_address}"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
    top = nsq_on_a_screen(["top", here, "--columns=depth,trend"], **plain)

    top.wait_for("clicks", "topic?", "views (paused)")
    top.child.send(b"\xe9" + b"2" * 4096)  # more than one read
    top.see(["1", "c"], "[x] depth")
    top.press("qq")
    assert top.wait_for_end() == 0
    assert top.raw.isascii()
    assert not any(b"\x1b[%dm" % color in top.raw for color in range(30, 38))
    assert b"\x1b[38;" not in top.raw
