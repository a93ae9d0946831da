"""What the console shows of an nsqd and of an nsqlookupd that are gone."""

from __future__ import annotations

import html
import re

import pytest
from plugins.browser import ServePages
from plugins.clusters import RunningCluster
from plugins.console import ask
from plugins.waiting import patience_s, wait_until

from nsqtools.cluster import sampling
from nsqtools.http.http_api import HTTPAccess

WAIT_S = sampling.COUNTED_S + 20


def up_of(url: str, what: str = "up") -> dict[str, int]:
    """``nsq_up`` or ``nsq_lookupd_up`` by address."""
    lines = re.findall(rf'^nsq_{what}{{\w+="(.*)"}} (\d)$', text_of(url, "/metrics"), re.M)
    return {address: int(value) for address, value in lines}


def text_of(url: str, path: str) -> str:
    answer = ask(url + path)
    assert answer.status == 200, path
    return answer.text


def problems_of(url: str) -> str:
    """The text of the first page's list of problems."""
    page = text_of(url, "/")
    found = re.search(r'<section id="problems".*?</section>', page, re.S)
    assert found is not None
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", found[0])).split())


@pytest.fixture
def watched(
    cluster: RunningCluster, serve_pages: ServePages, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The address of a console that looks for nsqd at each sample."""
    monkeypatch.setattr(sampling, "LOOKUP_S", 0.0)
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "billing")
        nsqd.publish("orders", *[b"x"] * 5)
    cluster.wait_for_topic("orders", 2)
    lookupds = [each.http_address for each in cluster.lookupds]
    url = serve_pages(lookupd_http=lookupds, access=HTTPAccess(timeout_s=patience_s(0.5)))
    wait_until(lambda: list(up_of(url).values()) == [1, 1], what="both are seen")
    return url


def test_an_nsqd_that_died_is_down_and_a_critical_problem_until_it_is_back(
    cluster: RunningCluster, watched: str
) -> None:
    dead, living = (nsqd.http_address for nsqd in cluster.nsqds)
    cluster.nsqds[0].kill()
    wait_until(
        lambda: all(len(each.json("/nodes")["producers"]) == 1 for each in cluster.lookupds),
        what="nsqlookupd has forgotten it",
        timeout_s=20,
    )

    wait_until(lambda: up_of(watched) == {dead: 0, living: 1}, what="it is down", timeout_s=WAIT_S)
    problem = f"gone {dead} since 20"
    wait_until(lambda: problem in problems_of(watched), what="it is a problem", timeout_s=20)
    assert "5 messages wait" in problems_of(watched)  # of the other one alone
    assert "<b>1</b> does not" in text_of(watched, "/")
    assert f"{dead}</a>" in text_of(watched, "/nodes")
    assert "gone since 20" in text_of(watched, f"/nodes/{dead}")
    metrics = text_of(watched, "/metrics")
    assert set(re.findall(r'nsq_channel_depth{.*node="(.*)"}', metrics)) == {living}
    labels = f'severity="critical",kind="gone",topic="",channel="",node="{dead}"'
    assert f"nsq_problem{{{labels}}} " in metrics

    lookupds = dict.fromkeys((lookupd.http_address for lookupd in cluster.lookupds), 0)
    for lookupd in cluster.lookupds:  # those that are processes hang, the others are dead
        getattr(lookupd, "pause", lookupd.kill)()
    wait_until(
        lambda: up_of(watched, "lookupd_up") == lookupds, what="they are missed", timeout_s=WAIT_S
    )
    # which changes nothing about the nsqd
    wait_until(lambda: up_of(watched) == {dead: 0, living: 1}, what="all else", timeout_s=WAIT_S)
    assert all(address in problems_of(watched) for address in lookupds)
    for path in ("/nodes", "/topics/orders/billing", f"/nodes/{living}"):
        assert text_of(watched, path)

    cluster.nsqds[0].start()
    wait_until(lambda: up_of(watched) == {dead: 1, living: 1}, what="it is back", timeout_s=WAIT_S)
    assert "gone" not in problems_of(watched)
