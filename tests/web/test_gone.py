"""What the console shows of an nsqd that is gone, and of an nsqlookupd that is silent."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest
from plugins.clusters import KINDS, RunningCluster
from plugins.console import Console
from plugins.waiting import wait_until

from nsqtools.cluster import sampling

WAIT_S = sampling.LOOKUP_S + sampling.COUNTED_S + 20


def up_of(console: Console, what: str = "up") -> dict[str, int]:
    """``nsq_up`` or ``nsq_lookupd_up`` by address."""
    lines = re.findall(rf'^nsq_{what}{{\w+="(.*)"}} (\d)$', console.get("/metrics").text, re.M)
    return {address: int(value) for address, value in lines}


def problems_of(console: Console) -> str:
    """The text of the first page's list of problems."""
    page = console.get("/").text
    found = re.search(r'<section id="problems".*?</section>', page, re.S)
    assert found is not None
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", found[0])).split())


@pytest.fixture
def watched(cluster: RunningCluster, console: Callable[..., Console]) -> Console:
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "billing")
        nsqd.publish("orders", *[b"x"] * 5)
    cluster.wait_for_topic("orders", 2)
    running = console(*cluster.lookupd_options, "--refresh", "200ms")
    wait_until(lambda: list(up_of(running).values()) == [1, 1], what="both are seen")
    return running


def test_an_nsqd_that_died_is_down_and_a_critical_problem(
    cluster: RunningCluster, watched: Console
) -> None:
    dead, living = (nsqd.http_address for nsqd in cluster.nsqds)
    cluster.nsqds[0].kill()
    wait_until(
        lambda: all(len(each.json("/nodes")["producers"]) == 1 for each in cluster.lookupds),
        what="nsqlookupd has forgotten it",
        timeout_s=20,
    )

    wait_until(lambda: up_of(watched) == {dead: 0, living: 1}, what="it is down", timeout_s=WAIT_S)
    wait_until(
        lambda: f"gone {dead} since 20" in problems_of(watched),
        what="it is a problem",
        timeout_s=20,
    )
    assert "5 messages wait" in problems_of(watched)  # of the other one alone
    assert "<b>1</b> does not" in watched.get("/").text
    assert f"{dead}</a>" in watched.get("/nodes").text
    assert "gone since 20" in watched.get(f"/nodes/{dead}").text
    assert set(re.findall(r'nsq_channel_depth{.*node="(.*)"}', watched.get("/metrics").text)) == {
        living
    }


@pytest.mark.parametrize("cluster", KINDS[:1], indirect=True)
def test_silent_nsqlookupd_are_the_problem_and_the_nsqd_stay_as_they_are(
    cluster: RunningCluster, watched: Console
) -> None:
    """One hangs, the other is dead."""
    nsqds = [nsqd.http_address for nsqd in cluster.nsqds]
    lookupds = [lookupd.http_address for lookupd in cluster.lookupds]

    hanging, dead = cluster.lookupds
    hanging.pause()  # type: ignore[attr-defined]
    dead.kill()
    wait_until(
        lambda: up_of(watched, "lookupd_up") == dict.fromkeys(lookupds, 0),
        what="they are missed",
        timeout_s=WAIT_S,
    )

    assert up_of(watched) == dict.fromkeys(nsqds, 1)
    problems = problems_of(watched)
    assert "no answer 2" in problems
    assert all(address in problems for address in lookupds)
    assert "gone" not in problems
    assert "10 messages wait" in problems
    assert "2 nsqd answer" in watched.get("/").text
    assert watched.get("/topics/orders").status == 200
    assert watched.get("/topics/orders/billing").status == 200
    page = watched.get("/nodes").text
    assert all(f"{address}</a>" in page for address in nsqds)
    assert watched.get(f"/nodes/{nsqds[0]}").status == 200
