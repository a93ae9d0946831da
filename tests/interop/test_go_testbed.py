"""The test bed itself: what fails, freezes and comes back does so as the fixtures promise.

That daemons start, publish, register and are restarted every other test of this folder shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until


def test_what_nsqd_refuses_fails_the_test_with_its_answer(nsqd: GoNsqd) -> None:
    with pytest.raises(AssertionError, match=r"400 .*INVALID_TOPIC"):
        nsqd.create_topic("no spaces")
    with pytest.raises(LookupError, match="'never_made'"):
        nsqd.depth("never_made")


def test_a_flag_that_nsqd_refuses_fails_with_its_log(go_nsqd: Callable[..., GoNsqd]) -> None:
    with pytest.raises(AssertionError, match="it ended") as failure:
        go_nsqd("-node-id=99999")
    assert "node-id" in str(failure.value)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_kill_keeps_what_was_on_disk_only(go_nsqd: Callable[..., GoNsqd], on_disk: bool) -> None:
    nsqd = go_nsqd(*(("-mem-queue-size=0", "-sync-every=1") if on_disk else ()))
    nsqd.publish("clicks", b"plain", b"with\nnewline and \x00", b"\xff\xfe not UTF-8")
    depth = nsqd.data_path / "clicks.diskqueue.meta.dat"
    if on_disk:
        wait_until(lambda: depth.exists() and depth.read_text().startswith("3\n"), what="a sync")
    topics = nsqd.data_path / "nsqd.dat"
    wait_until(lambda: "clicks" in topics.read_text(), what="the topic to be persisted")

    nsqd.kill()
    nsqd.start()

    assert nsqd.depth("clicks") == (3 if on_disk else 0)


def test_a_paused_nsqd_answers_after_resume_and_can_be_stopped(nsqd: GoNsqd) -> None:
    nsqd.create_topic("clicks")
    nsqd.pause()
    state = Path(f"/proc/{nsqd.pid}/stat")
    wait_until(lambda: state.read_text().split()[2] == "T", what="nsqd to be stopped")
    nsqd.resume()
    assert nsqd.depth("clicks") == 0
    nsqd.pause()
    nsqd.stop()
    assert "NSQ: bye" in nsqd.log
