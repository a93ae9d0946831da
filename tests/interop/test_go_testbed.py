"""The test bed itself: real daemons start, die, freeze and come back as the fixtures promise."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

BODIES = (b"plain", b"with\nnewline and \x00", b"\xff\xfe not UTF-8")


def test_publishes_over_http_and_reads_the_statistics(nsqd: GoNsqd) -> None:
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", *BODIES)

    wait_until(lambda: nsqd.depth("clicks", "archive") == 3, what="the channel to have all three")
    assert nsqd.depth("clicks") == 0
    assert nsqd.topic_stats("clicks")["message_bytes"] == sum(map(len, BODIES))


def test_an_http_error_fails_the_test_with_the_answer(nsqd: GoNsqd) -> None:
    with pytest.raises(AssertionError, match=r"400 .*INVALID_TOPIC"):
        nsqd.create_topic("no spaces")


def test_statistics_of_an_unknown_topic_are_an_error(nsqd: GoNsqd) -> None:
    with pytest.raises(LookupError, match="'never_made'"):
        nsqd.depth("never_made")


def test_an_orderly_restart_keeps_ports_and_messages(any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", *BODIES)
    addresses = nsqd.tcp_address, nsqd.http_address

    nsqd.stop()
    nsqd.start()

    assert (nsqd.tcp_address, nsqd.http_address) == addresses
    wait_until(
        lambda: nsqd.depth("clicks") + nsqd.depth("clicks", "archive") == 3,
        what="all of them, one of which may be between topic and channel",
    )


def test_a_kill_keeps_what_was_on_disk(go_nsqd: Callable[..., GoNsqd]) -> None:
    nsqd = go_nsqd("-mem-queue-size=0", "-sync-every=1")
    nsqd.publish("clicks", *BODIES)
    depth = nsqd.data_path / "clicks.diskqueue.meta.dat"
    wait_until(lambda: depth.exists() and depth.read_text().startswith("3\n"), what="a sync")
    topics = nsqd.data_path / "nsqd.dat"
    wait_until(lambda: "clicks" in topics.read_text(), what="the topic to be persisted")

    nsqd.kill()
    nsqd.start()

    assert nsqd.depth("clicks") == 3


def test_a_kill_loses_what_was_in_memory(nsqd: GoNsqd) -> None:
    nsqd.create_topic("clicks")
    nsqd.publish("clicks", *BODIES)
    assert nsqd.depth("clicks") == 3

    nsqd.kill()
    nsqd.start()
    nsqd.create_topic("clicks")

    assert nsqd.depth("clicks") == 0


def test_a_paused_nsqd_answers_after_resume(nsqd: GoNsqd) -> None:
    nsqd.create_topic("clicks")
    nsqd.pause()
    state = Path(f"/proc/{nsqd.pid}/stat")
    if state.exists():
        wait_until(lambda: state.read_text().split()[2] == "T", what="nsqd to be stopped")
    nsqd.resume()
    assert nsqd.depth("clicks") == 0


def test_stopping_a_paused_nsqd_does_not_hang(nsqd: GoNsqd) -> None:
    nsqd.pause()
    nsqd.stop()
    assert "NSQ: bye" in nsqd.log


def test_a_flag_that_nsqd_refuses_fails_with_its_log(go_nsqd: Callable[..., GoNsqd]) -> None:
    with pytest.raises(AssertionError, match="it ended") as failure:
        go_nsqd("-node-id=99999")
    assert "node-id" in str(failure.value)


def test_nsqd_registers_with_nsqlookupd(
    nsqlookupd: Callable[..., GoNsqlookupd], go_nsqd: Callable[..., GoNsqd]
) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    nsqd.create_topic("clicks")
    tcp_port = nsqd.tcp_address.rpartition(":")[2].encode()
    wait_until(
        lambda: b'"tcp_port":' + tcp_port in lookupd.get("/nodes"), what="nsqd to be registered"
    )


def test_nsq_tail_prints_what_was_published(
    nsqd: GoNsqd, go_program: Callable[[str], Path]
) -> None:
    nsqd.publish("clicks", *BODIES)
    tail = subprocess.Popen(
        [go_program("nsq_tail"), "-topic=clicks", f"-nsqd-tcp-address={nsqd.tcp_address}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with tail:
        assert tail.stdout is not None
        expected = b"".join(body + b"\n" for body in BODIES)
        assert tail.stdout.read(len(expected)) == expected
        tail.send_signal(signal.SIGTERM)
