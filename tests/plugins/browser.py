"""A real browser, and the console that it shows.

    open_page     a factory: ``open_page(url, width=375)`` opens a tab that is closed with the test
    serve_pages   a factory of consoles on this process' threads, for a file of tests:
                  ``serve_pages(nsqd_http=[..], allow_changes=True)``

A message on the console of a tab, such as an error of a script or a violation of the content
security policy, fails the test that opened the tab, unless the test removes the message from
``tab.complaints``. Each file has its own browser, because no other test of the worker can run an
event loop while playwright runs. Without chromium and playwright the tests are skipped; with
``CI=true`` they fail.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from plugins.servers import need
from plugins.waiting import patience_s, wait_for_threads, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

    from nsqtools.http.http_api import HTTPAccess

REFRESH_S = 0.25


class Tab:
    """An open page. ``complaints`` are the messages on its console."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def size(self, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 800})

    def overflow(self) -> int:
        """The number of pixels by which the page is wider than the window."""
        root = "document.documentElement"
        return int(self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))


def expect(locator: Any) -> Any:
    """playwright's ``expect`` with patience; collecting the tests does not import playwright."""
    from playwright.sync_api import expect

    expect.set_options(timeout=patience_s(5) * 1000)
    return expect(locator)


OpenPage = Callable[..., Tab]
ServePages = Callable[..., str]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "open_page" in getattr(item, "fixturenames", ()):
        need("" if CHROMIUM else "there is no chromium: apt-get install chromium")
        need("" if find_spec("playwright") else "playwright is missing: pip install playwright")


@pytest.fixture(scope="module")
def window() -> Iterator[BrowserContext]:
    """The window of all ordinary tabs, because a new window costs as much as a page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            # its sandbox does not work as root, as in a container of CI
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=patience_s(30) * 1000,
        )
        with browser.new_context(reduced_motion="reduce") as context:
            yield context
        browser.close()


@pytest.fixture
def open_page(window: BrowserContext) -> Iterator[OpenPage]:
    opened: list[Tab] = []
    with ExitStack() as closing:

        def open_page(
            url: str, *, width: int = 1280, scheme: str = "light", script: bool = True
        ) -> Tab:
            context = window
            if not script:
                assert window.browser is not None
                context = window.browser.new_context(java_script_enabled=False)
                closing.callback(context.close)
            page = context.new_page()
            closing.callback(page.close)
            page.set_default_timeout(patience_s(10) * 1000)
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            tab = Tab(page)
            tab.size(width)
            opened.append(tab)
            page.goto(url, wait_until="load")
            return tab

        yield open_page
    window.clear_cookies()
    complaints = [complaint for tab in opened for complaint in tab.complaints]
    assert not complaints, f"the page said: {complaints}"


@pytest.fixture(scope="module")
def serve_pages() -> Iterator[ServePages]:
    from nsqtools.client.options import ClientOptions
    from nsqtools.cluster.directory import Cluster, ClusterAddresses
    from nsqtools.http.listen import listen
    from nsqtools.web.access import WebSettings
    from nsqtools.web.actions import WebContext
    from nsqtools.web.app import WebServer

    with ExitStack() as stack:

        def serve(
            *,
            nsqd_http: Sequence[str] = (),
            lookupd_http: Sequence[str] = (),
            access: HTTPAccess | None = None,
            **settings: Any,
        ) -> str:
            addresses = ClusterAddresses(tuple(nsqd_http), tuple(lookupd_http), ())
            cluster = stack.enter_context(Cluster(addresses, access))
            web_settings = WebSettings(
                **{"listen": "127.0.0.1:0", "refresh_s": REFRESH_S, **settings}
            )
            listener = stack.enter_context(listen(web_settings.listen))
            context = WebContext(web_settings, cluster, ClientOptions())
            server = WebServer(context, listener)
            # an open request that connects after the end would leave its socket open
            stack.callback(wait_for_threads, "nsq-sample")
            thread = threading.Thread(target=server.run, args=(lambda: None,))
            stack.callback(thread.join)
            stack.callback(server.stop)
            thread.start()
            wait_until(lambda: context.watcher.latest is not None, what="the first sample")
            return server.url.rstrip("/")

        yield serve
