"""Every change that the console can make, made in a browser on a Go nsqd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from plugins.browser import OpenPage, ServePages, expect
from plugins.console import ask
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.real_nsqd


class Site(NamedTuple):
    """A console, and the cluster it may change."""

    url: str
    nsqd: GoNsqd
    lookupd: GoNsqlookupd

    def fill(self, topic: str) -> None:
        """Create a topic with a channel that has five messages."""
        self.nsqd.create_channel(topic, "work")
        self.nsqd.publish(topic, *(b"%d" % n for n in range(5)))
        wait_until(lambda: self.nsqd.depth(topic, "work") == 5, what="the messages are there")
        self.wait_for(f"{topic}/work")

    def wait_for(self, queue: str) -> None:
        """Wait until the queue is sampled."""
        wait_until(lambda: ask(f"{self.url}/topics/{queue}").status == 200, what="it is sampled")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, serve_pages: ServePages) -> Iterator[Site]:
    with ExitStack() as stack:
        lookupd = stack.enter_context(GoNsqlookupd())
        flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
        nsqd = stack.enter_context(GoNsqd(tmp_path_factory.mktemp("nsqd"), flag))
        nsqd.create_topic("first")
        wait_until(lambda: lookupd.producers("first"), what="nsqd is registered")
        url = serve_pages(
            lookupd_http=[lookupd.http_address],
            nsqd_http=[nsqd.http_address],
            allow_changes=True,
            show_messages=True,
        )
        yield Site(url, nsqd, lookupd)


def confirm(page: Page, verb: str, name: str = "") -> None:
    if name:
        page.locator("input[name=confirm]").fill(name)
    page.get_by_role("button", name=verb, exact=True).click()
    page.get_by_role("status").get_by_text("Done").wait_for()


def test_a_topic_and_a_channel_are_created(site: Site, open_page: OpenPage) -> None:
    tab = open_page(site.url + "/")
    page = tab.page

    page.get_by_role("link", name="Create a topic").click()
    page.locator("input[name=topic]").fill("not a name")
    page.get_by_role("button", name="Show the plan").click()
    assert "invalid topic name" in page.get_by_role("alert").inner_text()
    assert page.locator("input[name=topic]").input_value() == "not a name"
    tab.complaints.clear()  # of the status 400
    page.locator("input[name=topic]").fill("made.here")
    page.get_by_role("button", name="Show the plan").click()
    assert site.nsqd.http_address in page.locator("main").inner_text()
    confirm(page, "Create")
    assert site.nsqd.topic_stats("made.here")["channels"] == []
    site.wait_for("made.here")
    page.goto(site.url + "/topics/made.here")
    page.get_by_role("link", name="Add a channel").click()
    page.locator("input[name=channel]").fill("archive")
    page.get_by_role("button", name="Show the plan").click()
    confirm(page, "Create")
    assert site.nsqd.depth("made.here", "archive") == 0


def test_a_channel_is_paused_unpaused_and_emptied_after_typing_its_name(
    site: Site, open_page: OpenPage
) -> None:
    site.fill("pausing")
    tab = open_page(site.url + "/topics/pausing/work")
    page = tab.page

    for done, offered in (("pause", "Unpause"), ("unpause", "Pause")):  # changed elsewhere
        site.nsqd.post(f"/channel/{done}", topic="pausing", channel="work")
        page.get_by_role("link", name=offered, exact=True).wait_for()
    page.get_by_role("link", name="Pause", exact=True).click()
    confirm(page, "Pause")
    assert site.nsqd.channel_stats("pausing", "work")["paused"]
    page.goto(site.url + "/topics/pausing/work")
    page.locator(".title .tag", has_text="paused").wait_for()
    page.get_by_role("link", name="Peek").click()
    page.locator("select[name=for_s]").select_option("2")
    page.get_by_role("button", name="Peek").click()
    page.get_by_text("No message came in 2 s: the channel is paused").wait_for()
    page.goto(site.url + "/act?action=unpause&topic=pausing&channel=work")
    confirm(page, "Unpause")
    assert not site.nsqd.channel_stats("pausing", "work")["paused"]

    page.goto(site.url + "/topics/pausing/work")
    page.get_by_role("link", name="Empty", exact=True).click()
    assert "5 messages will be lost" in page.locator("main").inner_text()
    page.locator("input[name=confirm]").fill("wrong")
    page.get_by_role("button", name="Empty").click()
    assert "not typed" in page.get_by_role("alert").inner_text()
    assert site.nsqd.depth("pausing", "work") == 5
    confirm(page, "Empty", "work")
    assert site.nsqd.depth("pausing", "work") == 0
    tab.complaints.clear()  # of the status 400


def test_a_topic_is_emptied_with_its_channels_deleted_and_tombstoned(
    site: Site, open_page: OpenPage
) -> None:
    site.fill("whole")
    page = open_page(site.url + "/act?action=empty&topic=whole").page

    assert "keep their 5 messages" in page.locator("main").inner_text()
    page.locator("input[name=channels]").check()
    confirm(page, "Empty", "whole")
    assert site.nsqd.depth("whole", "work") == 0

    page.goto(site.url + "/topics/whole")
    page.get_by_role("link", name="Delete", exact=True).click()
    confirm(page, "Delete", "whole")
    assert "whole" not in site.nsqd.topics()
    wait_until(lambda: not site.lookupd.producers("whole"), what="it is taken back")

    site.fill("moving")
    wait_until(lambda: site.lookupd.producers("moving"), what="the topic is registered")
    page.goto(site.url + "/topics/moving")
    page.get_by_role("link", name="Tombstone").click()
    confirm(page, "Tombstone", "moving")
    assert "moving" not in site.nsqd.topics()


def test_a_channel_is_emptied_on_one_of_two_nsqd(
    site: Site, serve_pages: ServePages, open_page: OpenPage, tmp_path: Path
) -> None:
    with GoNsqd(tmp_path) as other:
        for nsqd in (site.nsqd, other):
            nsqd.create_channel("split", "work")
            nsqd.publish("split", b"1", b"2")
            wait_until(lambda nsqd=nsqd: nsqd.depth("split", "work") == 2, what="its messages")  # type: ignore[misc]
        own_address, other_address = site.nsqd.http_address, other.http_address
        url = serve_pages(nsqd_http=[own_address, other_address], allow_changes=True)
        page = open_page(f"{url}/act?action=empty&topic=split&node={other_address}").page
        page_text = page.locator("main").inner_text()
        assert "Empty its channels too (2 messages)" in page_text  # the messages on that nsqd
        assert "keep their" not in page_text
        page.goto(f"{url}/topics/split/work")

        row = page.locator("table[aria-label='On each nsqd'] tr", has_text=other_address)
        row.get_by_role("link", name=f"Empty on {other_address}").click()
        page_text = page.locator("main").inner_text()
        assert f"on {other_address}" in page_text
        assert own_address not in page_text
        confirm(page, "Empty", "work")
        wait_until(lambda: other.depth("split", "work") == 0, what="it is empty there")
        assert site.nsqd.depth("split", "work") == 2


def test_copies_of_messages_are_shown_without_taking_any(site: Site, open_page: OpenPage) -> None:
    site.nsqd.publish("backlog", b"1", b"2")
    site.wait_for("backlog")
    tab = open_page(site.url + "/messages?topic=backlog")
    page = tab.page
    page.get_by_role("button", name="Listen").click()
    page.get_by_text("its backlog would be lost").wait_for()  # the topic has no channel
    assert site.nsqd.topic_stats("backlog")["depth"] == 2
    tab.complaints.clear()  # of the status 400

    site.fill("read")
    page.goto(site.url + "/messages?topic=read")
    body = '{"name":"<script>alert(1)</script>","n":1.50,"n":2}\u202e'.encode()
    stopped = threading.Event()

    def publish() -> None:
        while not stopped.wait(0.1):
            site.nsqd.publish("read", body[:-3], body)

    page.locator("select[name=count]").select_option("10")
    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        page.get_by_role("button", name="Listen").click()
        page.locator("article").first.wait_for()
    finally:
        stopped.set()
        publisher.join()
    bodies = page.locator("article pre").all_inner_texts()
    assert '{\n  "name": "<script>alert(1)</script>",\n  "n": 1.50,\n  "n": 2\n}' in bodies
    assert any(r"\u202e" in text for text in bodies)
    channel = site.nsqd.channel_stats("read", "work")
    assert channel["depth"] == channel["message_count"]
    wait_until(
        lambda: len(site.nsqd.topic_stats("read")["channels"]) == 1,
        what="the channel of its own is gone",
    )


def test_peeking_at_a_channel_requeues_its_messages(site: Site, open_page: OpenPage) -> None:
    site.fill("waiting")
    page = open_page(site.url + "/topics/waiting/work").page

    page.get_by_role("link", name="Peek").click()
    assert "one attempt more" in page.locator("main").inner_text()
    page.locator("select[name=for_s]").select_option("2")
    page.get_by_role("button", name="Peek").click()
    expect(page.locator("article pre")).to_have_text(["0", "1", "2", "3", "4"])
    wait_until(lambda: site.nsqd.depth("waiting", "work") == 5, what="all are back")
    [channel] = site.nsqd.topic_stats("waiting")["channels"]
    assert (channel["channel_name"], channel["requeue_count"]) == ("work", 5)


def test_changes_need_permission_and_the_token_of_the_form(
    site: Site, serve_pages: ServePages, open_page: OpenPage
) -> None:
    url = serve_pages(nsqd_http=[site.nsqd.http_address])
    tab = open_page(url + "/topics/first")

    for name in ("Pause", "Empty", "Delete", "Tombstone", "Messages", "Add a channel"):
        assert tab.page.get_by_role("link", name=name, exact=True).count() == 0
    tab.page.goto(url + "/act?action=delete&topic=first")
    assert "read-only" in tab.page.locator("main").inner_text()
    for path in ("/act?action=delete&topic=first", "/messages?topic=first"):
        assert ask(url + path, "POST", body="confirm=first").status == 403
    # the console that allows changes refuses a form without its token
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    delete = site.url + "/act?action=delete&topic=first"
    for token in ("", "csrf_token=wrong&"):
        assert ask(delete, "POST", headers=headers, body=f"{token}confirm=first").status == 403
    assert site.nsqd.topic_stats("first")["depth"] == 0
    tab.complaints.clear()  # of the status 403
