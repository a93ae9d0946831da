"""Whatever a hostile cluster says stays text: in names, addresses, ids, versions and errors."""

from __future__ import annotations

from urllib.parse import urljoin

import pytest
from plugins.browser import OpenPage, ServePages
from plugins.console import ask
from plugins.hostile_cluster import HostileCluster, raw_marks

PAGES = ("/", "/topics/clicks", "/topics/clicks/archive", "/consumers", "/nodes", "/lookup")


@pytest.fixture(scope="module")
def url(scripting_cluster: HostileCluster, serve_pages: ServePages) -> str:
    address = scripting_cluster.http_address
    return serve_pages(
        nsqd_http=[address], lookupd_http=[address], allow_changes=True, show_messages=True
    )


def test_no_page_takes_a_name_for_markup_and_none_is_too_wide(
    url: str, open_page: OpenPage
) -> None:
    tab = open_page(url + "/")
    for path in (*PAGES, "/act?action=delete&topic=clicks"):
        tab.page.goto(url + path)
        assert "pwned" not in tab.page.title()
        assert tab.page.locator("main img, main script").count() == 0
        for width in (1280, 375):
            tab.size(width)
            assert tab.overflow() <= 0, f"{path} at {width}"


def test_no_page_has_a_control_or_a_character_that_reverses_a_line(url: str) -> None:
    for path in PAGES:
        answer = ask(url + path)
        assert answer.status == 200
        assert raw_marks(answer.body, is_one_line=False) == [], path
        assert "<script>document" not in answer.text


def test_a_topic_with_any_name_has_a_page(url: str, open_page: OpenPage) -> None:
    tab = open_page(url + "/")
    links = tab.page.locator("tbody th a")

    addresses = [links.nth(at).get_attribute("href") or "" for at in range(links.count())]
    assert len(addresses) >= 4
    for address in addresses:
        tab.page.goto(urljoin(url, address))
        assert tab.page.locator("main h1").count() == 1
    assert not tab.complaints
