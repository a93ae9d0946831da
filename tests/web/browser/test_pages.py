"""The pages in a real browser, on a cluster of Go daemons with consumers and problems."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

import axe_core_python
import pytest
from plugins.browser import REFRESH_S, OpenPage, ServePages, Tab, expect
from plugins.console import ask
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.hostile_cluster import HostileCluster, raw_marks
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions

pytestmark = pytest.mark.real_nsqd

# It is evaluated, as the policy of the pages forbids foreign scripts.
AXE = (Path(next(iter(axe_core_python.__path__))) / "axe.min.js").read_text() + "; undefined"
LONG = "a-channel-whose-name-is-as-long-as-a-name-can-be-" + "x" * 15


class Site(NamedTuple):
    """A console, and the two nsqd it shows."""

    url: str
    nsqd: GoNsqd
    other: GoNsqd


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, serve_pages: ServePages) -> Iterator[Site]:
    with ExitStack() as stack:
        lookupd = stack.enter_context(GoNsqlookupd())
        flags = [f"-lookupd-tcp-address={lookupd.tcp_address}"]
        flags += ["-e2e-processing-latency-percentile=1.0,0.95"]
        paths = [tmp_path_factory.mktemp("nsqd") for _ in range(2)]
        pair = [stack.enter_context(GoNsqd(path, *flags)) for path in paths]
        for nsqd in pair:
            for channel in ("archive", "billing", LONG):
                nsqd.create_channel("orders", channel)
            nsqd.publish("orders", *(b'{"n": %d}' % n for n in range(20)))
        pair[0].create_topic("orphans")
        pair[0].publish("orphans", b"waiting")
        pair[0].create_channel("paused", "ledger")
        pair[0].post("/channel/pause", topic="paused", channel="ledger")
        lookupd.post("/topic/create", topic="registered-only")
        consumer = Consumer(
            "orders",
            "billing",
            nsqd_tcp_addresses=[nsqd.tcp_address for nsqd in pair],
            options=ClientOptions(client_id="biller", hostname="till-1", max_in_flight=2),
        )
        thread = threading.Thread(target=consumer.run, args=(lambda _: time.sleep(0.05),))
        stack.callback(thread.join)
        stack.callback(consumer.stop)
        thread.start()
        url = serve_pages(
            lookupd_http=[lookupd.http_address], allow_changes=True, show_messages=True
        )
        wait_until(lambda: len(lookupd.producers("orders")) == 2, what="both are registered")
        yield Site(url, *pair)


DELETE = "/act?action=delete&topic=orders&channel=billing"
PAGES = f"""/ /topics/orders /topics/orders/{LONG} /topics/orders/billing /consumers /nodes /lookup
    /consumer?hostname=till-1&client_id=biller /messages?topic=orders /act?action=create {DELETE}"""

CUT_NUMBERS = (
    "[...document.querySelectorAll('.n, .tile b')]"
    ".filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth)"
    ".map(each => each.textContent)"
)
"""Numbers that are partly hidden."""


def test_every_page_is_accessible_and_fits_desktops_and_phones(
    site: Site, open_page: OpenPage
) -> None:
    tab = open_page(site.url + "/")
    for page in (*PAGES.split(), f"/nodes?node={site.nsqd.http_address}"):
        tab.page.goto(site.url + page)
        for width in (1280, 375):
            tab.size(width)
            assert tab.page.locator("main h1").count() == 1, page
            assert tab.overflow() <= 0, f"{page} at {width}"
            assert not tab.page.evaluate(CUT_NUMBERS), f"{page} at {width}"
        assert findings(tab) == [], page
        tab.page.emulate_media(color_scheme="dark")
        assert findings(tab, "color-contrast") == [], page
        tab.page.emulate_media(color_scheme="light")


def findings(tab: Tab, *rules: str) -> list[str]:
    """Return the violations that axe-core finds, of some rules or of all."""
    tab.page.evaluate(AXE)
    only = f", runOnly: {list(rules)}" if rules else ""
    results = tab.page.evaluate(f"axe.run(document, {{resultTypes: ['violations']{only}}})")
    return [
        f"{finding['id']}: {node['html'][:120]} {node['failureSummary'][:160]}"
        for finding in results["violations"]
        for node in finding["nodes"][:3]
    ]


def test_a_new_topic_joins_the_table_and_the_focus_is_kept(site: Site, open_page: OpenPage) -> None:
    tab = open_page(site.url + "/")
    row = tab.page.locator("tbody tr", has_text="orders/archive")
    row.locator("a").first.focus()

    site.nsqd.create_topic("fresh")

    tab.page.locator("tbody tr", has_text="fresh").wait_for()
    assert tab.page.evaluate("document.activeElement.textContent") == "orders/archive"
    topic_page = open_page(site.url + "/topics/fresh").page
    site.nsqd.post("/topic/delete", topic="fresh")
    tab.page.locator("tbody tr", has_text="fresh").wait_for(state="detached")
    expect(topic_page.locator(".age")).to_contain_text("no nsqd that answers has the topic fresh")


def test_a_dead_nsqd_is_reported_and_blocks_nothing(
    serve_pages: ServePages, open_page: OpenPage, tmp_path: Path
) -> None:
    with GoNsqd(tmp_path) as nsqd:
        tab = open_page(serve_pages(nsqd_http=[nsqd.http_address]) + "/")
        assert "No topics yet" in tab.page.locator(".empty").inner_text()
        assert "read-only" in tab.page.locator(".status").inner_text()
    tab.page.get_by_text("No nsqd responds").wait_for()
    problem = tab.page.locator("#problems .critical")
    problem.wait_for()
    assert nsqd.http_address in problem.inner_text()


def test_a_hidden_or_held_tab_is_not_updated(site: Site, open_page: OpenPage) -> None:
    page = open_page(site.url + "/topics/orphans").page
    age, depth = page.locator(".age"), page.locator(".tile b").first
    page.evaluate("document.body.dataset.same = 'page'")
    expect(age).to_contain_text("ago")
    page.keyboard.press("p")
    expect(age).to_contain_text("held")
    held = page.locator(".status time").inner_text()
    depth_before = int(depth.inner_text())
    site.nsqd.publish("orphans", b"unseen")
    page.wait_for_timeout(3000 * REFRESH_S)
    assert page.locator(".status time").inner_text() == held
    assert depth.inner_text() == f"{depth_before}"
    page.keyboard.press("p")
    expect(depth).to_have_text(f"{depth_before + 1}")
    assert "held" not in age.inner_text()

    hide = (
        "hidden => { Object.defineProperty(document, 'hidden',"
        " {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }"
    )
    page.evaluate(hide, True)
    site.nsqd.publish("orphans", b"unseen too")
    page.wait_for_timeout(3000 * REFRESH_S)
    assert depth.inner_text() == f"{depth_before + 1}"
    page.evaluate(hide, False)
    expect(depth).to_have_text(f"{depth_before + 2}")
    assert page.evaluate("document.body.dataset.same") == "page"  # patched, not loaded again


def test_keyboard_and_mouse_search_select_open_and_sort(site: Site, open_page: OpenPage) -> None:
    page = open_page(site.url + "/").page

    page.keyboard.press("?")
    assert page.locator("dialog#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog#keys").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("billing")
    page.wait_for_url("**/?q=billing")  # a slow next key may search for "bill" first
    by_depth = page.locator("thead a", has_text="Depth")
    expect(by_depth).to_have_attribute("href", "?q=billing&order=asc")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.locator("tr.chosen").inner_text().startswith("orders/billing")
    page.keyboard.press("Enter")
    page.wait_for_url("**/topics/orders/billing")
    page.keyboard.press("u")
    page.wait_for_url("**/topics/orders")
    for arrow in ("Down", "Down", "Up"):
        page.keyboard.press(f"Arrow{arrow}")
    assert page.locator("tr.chosen").count() == 1

    page.goto(site.url + "/")  # sorted and filtered
    page.locator("thead a", has_text="Topic / channel").click()
    page.wait_for_url("**sort=**")
    names = page.locator("tbody th a").all_inner_texts()
    assert names == sorted(names)
    page.locator(".filters a", has_text="Paused").click()
    expect(page.locator("tbody th a")).to_have_text(["paused/ledger"])


def test_a_key_toggles_dark_and_light_and_the_choice_is_kept(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page(site.url + "/").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)

    page.keyboard.press("d")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    assert open_page(site.url + "/", scheme="dark").page.evaluate(ground) == dark


def test_every_page_works_without_scripts(site: Site, open_page: OpenPage) -> None:
    page = open_page(site.url + "/?q=billing", script=False).page
    page.locator("tbody a").first.click()
    assert page.locator("h1").inner_text().startswith("billing")
    for path in ("/", "/topics/orders/billing", "/nodes", DELETE):
        page.goto(site.url + path)
        assert page.locator("main h1").count() == 1
        assert not page.locator("#theme").is_visible()


def test_a_topic_is_charted_as_a_sum_or_per_channel(site: Site, open_page: OpenPage) -> None:
    page = open_page(site.url + "/topics/orders").page
    page.locator(".chart canvas").first.wait_for()
    range_text = page.locator(".chart .range").first
    depths = page.locator("table[aria-label=Channels] td.strong")

    # billing comes last, once it is empty; the others show an age if the test takes long
    expect(depths).to_have_text([re.compile("^40"), re.compile("^40"), "0"])
    expect(range_text).to_contain_text("now: waiting 80")
    page.get_by_role("link", name="Each channel").click()
    expect(range_text).to_contain_text("archive 40")
    expect(range_text).to_contain_text(f"{LONG} 40")

    # The chart is loaded again after a gap and after the clock was set back.
    page.keyboard.press("p")  # so that no other point arrives
    for at in (1, time.time() + 3600):
        event = f"new CustomEvent('nsq:point', {{ detail: {{ t: {at} }} }})"
        with page.expect_request("**/series*"):
            page.evaluate(f"document.dispatchEvent({event})")


def test_problems_of_a_kind_are_one_line_that_opens_to_the_remedy(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page(site.url + "/", width=375).page
    kind = page.locator("#problems details", has_text="no consumers")

    row = page.locator("tbody tr").first.bounding_box()
    assert row is not None
    assert row["y"] + 60 < 667  # the first queue is visible on a phone without scrolling
    expect(kind.locator(".amount")).to_have_text("2")
    kind.locator("summary").click()
    expect(kind).to_contain_text("Start its consumers. If nobody needs")
    kind.get_by_role("link", name="orders/archive").click()
    page.wait_for_url("**/topics/orders/archive")


def test_a_consumer_is_shown_with_all_details_from_nsqd(site: Site, open_page: OpenPage) -> None:
    page = open_page(site.url + "/topics/orders/billing").page
    row = page.locator("table[aria-label=Consumers] tbody tr").first
    row.wait_for()

    assert "biller" in row.inner_text()
    row.locator("a").first.click()
    page_text = page.locator("main").inner_text()
    for name in ("client id", "hostname", "user agent", "RDY", "in flight", "TLS", " UTC"):
        assert name in page_text
    assert re.search(r"nsqtools/[0-9.]+", page_text)


def test_a_page_of_a_missing_object_is_not_found(site: Site, open_page: OpenPage) -> None:
    tab = open_page(site.url + "/")
    for path in ("/topics/nothing", "/topics/orders/nothing", "/nodes/127.0.0.1:1", "/consumer"):
        tab.page.goto(site.url + path)
        assert tab.page.locator("h1").inner_text() == "Not found"
    assert all("404" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


HOSTILE_PAGES = ("/", "/topics/clicks", "/topics/clicks/archive", "/consumers", "/nodes", "/lookup")
HOSTILE_PAGES += ("/act?action=delete&topic=clicks",)


@pytest.fixture(scope="module")
def hostile_url(scripting_cluster: HostileCluster, serve_pages: ServePages) -> str:
    here = [scripting_cluster.http_address]
    return serve_pages(nsqd_http=here, lookupd_http=here, allow_changes=True, show_messages=True)


def test_hostile_names_are_no_markup_and_have_their_own_pages(
    hostile_url: str, open_page: OpenPage
) -> None:
    tab = open_page(hostile_url + "/")
    for path in HOSTILE_PAGES:
        answer = ask(hostile_url + path)
        assert answer.status == 200
        assert raw_marks(answer.body, is_one_line=False) == [], path
        tab.page.goto(hostile_url + path)
        assert "pwned" not in tab.page.title()
        assert tab.page.locator("main img, main script").count() == 0
        for width in (1280, 375):
            tab.size(width)
            assert tab.overflow() <= 0, f"{path} at {width}"

    tab.page.goto(hostile_url)
    addresses = [link.get_attribute("href") or "" for link in tab.page.locator("tbody th a").all()]
    assert len(addresses) >= 4
    for address in addresses:
        tab.page.goto(urljoin(hostile_url, address))
        assert tab.page.locator("main h1").count() == 1
    assert not tab.complaints
