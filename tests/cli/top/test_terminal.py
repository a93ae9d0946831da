"""``nsq top`` on a real terminal: how it takes it, what it leaves behind, and its exit status."""

from __future__ import annotations

import signal
import termios
from collections.abc import Callable

import pexpect
import pytest
from plugins.cli import NSQ, RunNsq, end_terminal
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.screens import NsqOnAScreen, TerminalScreen
from plugins.servers import DataPath, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

OpenTop = Callable[..., TerminalScreen]
ENTER = "\r"
LEAVES_SCREEN, SHOWS_CURSOR, LEAVES_MOUSE = b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l"


@pytest.fixture
def nsqd(serve: Serve, data_path: DataPath) -> Nsqd:
    nsqd: Nsqd = serve(EmbeddedServer(data_path()))
    nsqd.create_channel("clicks", "arch")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    return nsqd


def click(column: int, line: int) -> str:
    return f"\x1b[<0;{column};{line}M\x1b[<0;{column};{line}m"


def test_keys_the_mouse_and_another_size_reach_it(top: TerminalScreen, nsqd: Nsqd) -> None:
    lines = top.wait_for("clicks", "views (paused)", "q quit")
    assert (lines[0][:8], lines[2][:7], len(lines)) == ("nsq top ", "topics ", 24)
    top.see("/vie\x7f\x7f\x7fcli\r", "filter: cli", gone="views")
    top.see("\x1b", "views")
    for mark in "▲▼":
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
    assert [each["topic_name"] for each in nsqd.stats()["topics"]] == ["views"]
    assert b"\x1b[33m" in top.raw  # a paused topic is yellow


@pytest.mark.parametrize(
    ("way", "status"),
    [("q", 0), ("\x03\x03\x03", 130), ("\x1c", 131), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_the_terminal_is_left_as_it_was(
    open_top: OpenTop, way: str | signal.Signals, status: int
) -> None:
    top = open_top()
    before = termios.tcgetattr(top.child.child_fd)
    top.wait_for("clicks")
    assert termios.tcgetattr(top.child.child_fd) != before
    if isinstance(way, str):
        top.press(way)
    else:
        top.child.kill(way)

    assert top.wait_for_end() == status
    assert all(each in top.raw for each in (LEAVES_MOUSE, SHOWS_CURSOR, LEAVES_SCREEN))


def test_it_ends_with_its_terminal(top: TerminalScreen) -> None:
    top.wait_for("clicks")
    top.child.ptyproc.fileobj.close()
    top.child.closed = top.child.ptyproc.closed = True  # pexpect is not to close it again

    wait_until(lambda: not top.child.isalive(), what="it has ended")
    assert top.child.exitstatus == 129


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


def test_messages_take_the_place_of_the_screen_and_stay_where_they_are(
    top: TerminalScreen, nsqd: Nsqd
) -> None:
    def channels(topic: str) -> list[str]:
        return [each["channel_name"] for each in nsqd.topic_stats(topic)["channels"]]

    nsqd.publish("clicks", b'{"n": 1}', b"\x1b[31mred")
    nsqd.publish("views", b"a")
    top.wait_for("clicks")
    top.see("v", "v shows messages of a channel")
    top.see(ENTER, "topics > clicks", "arch")
    top.see("v", '{"n": 1}', r"\x1b[31mred", "2 messages shown and given back", "Enter goes back")
    top.see(ENTER, "topics > clicks", gone="Enter goes back")
    wait_until(lambda: nsqd.depth("clicks", "arch") == 2, what="they are given back")
    top.see("\x1b", "views")
    top.see("t", "tail of clicks")
    wait_until(lambda: len(channels("clicks")) == 2, what="it has subscribed")
    nsqd.publish("clicks", b"hello\x1b[31m")
    top.wait_for(r"hello\x1b[31m")
    top.see("\x03", "views", "q quit", gone="goes back")
    wait_until(lambda: channels("clicks") == ["arch"], what="the channel of the tail is gone")
    assert nsqd.depth("clicks", "arch") == 3
    top.see("jt", "would be destroyed", "Enter goes back")  # the topic has no channel
    assert nsqd.depth("views") == 1
    top.see(ENTER, "q quit", gone="Enter goes back")
    top.see("kt", "tail of clicks")
    top.child.kill(signal.SIGTERM)
    assert top.wait_for_end() == 143


def test_an_nsqd_that_hangs_holds_up_neither_keys_nor_the_others(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd, go_nsqd: MakeNsqd
) -> None:
    hanging = go_nsqd()
    here = [f"--nsqd-http-address={each.http_address}" for each in (nsqd, hanging)]
    top = nsq_on_a_screen(["top", *here, "--interval", "200ms"])
    top.wait_for("clicks", "2 nsqd")
    hanging.pause()

    top.wait_for("1 silent", f"gone {hanging.http_address}")
    nsqd.create_topic("orders")
    top.wait_for("orders", f"gone {hanging.http_address}")
    top.see(ENTER, "topics > clicks")
    hanging.resume()
    top.wait_for("2 nsqd  ", gone="gone")
    hanging.pause()
    top.press("q")
    assert top.wait_for_end() == 0
    hanging.resume()


def test_where_there_is_no_screen_to_fill_it_says_so(
    run_nsq: RunNsq, nsq_on_a_screen: NsqOnAScreen
) -> None:
    piped = run_nsq(["top"])
    assert piped.status == 2
    assert "nsq stat --interval" in piped.err
    nobody = ["top", "--nsqd-http-address=127.0.0.1:1"]
    for screen, status, said in (
        (nsq_on_a_screen(["top"], TERM="dumb"), 2, b"TERM=dumb"),
        (nsq_on_a_screen(["top"], columns=39), 2, b"nsq top needs 40 columns"),
        (nsq_on_a_screen(nobody), 4, b"cannot connect"),
        (nsq_on_a_screen(["top", "--columns", "dpth"]), 2, b"unknown column 'dpth'"),
    ):
        assert screen.wait_for_end() == status
        assert said in screen.raw
        assert b"\x1b[?1049h" not in screen.raw


def test_without_colors_and_on_a_terminal_of_another_encoding_it_is_whole(
    nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd
) -> None:
    here = f"--nsqd-http-address={nsqd.http_address}"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
    top = nsq_on_a_screen(["top", here, "--columns=depth,trend"], **plain)

    top.wait_for("clicks", "topic?", "views (paused)")
    top.see("c", "[x] depth")
    top.press("qq")
    assert top.wait_for_end() == 0
    assert top.raw.isascii()
    assert not any(b"\x1b[%dm" % color in top.raw for color in range(30, 38))
    assert b"\x1b[38;" not in top.raw
