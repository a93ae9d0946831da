"""A cluster of 1,000 topics with 3 channels each, on 10 nsqd: what a page costs and sends."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from plugins.console import MakeConsole, ask
from plugins.embedded import EmbeddedServer
from plugins.servers import DataPath, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.web.pages.snapshot import PAGE_LINES

TOPICS, CHANNELS, NODES = 1000, 3, 10


def make_queues(nsqd: EmbeddedServer, topics: range) -> None:
    for topic in topics:
        for channel in range(CHANNELS):
            nsqd.create_channel(f"topic-{topic:04}", f"channel-{channel}")


def events(url: str) -> Generator[dict[str, Any], None, None]:
    """The changes that an open page is sent."""
    with urllib.request.urlopen(url, timeout=patience_s(20)) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_a_page_of_many_queues_is_one_page_and_only_what_changed_is_sent(
    console: MakeConsole, serve: Serve, tmp_path: Path
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path))
    make_queues(nsqd, range(60))
    url = console(f"--nsqd-http-address={nsqd.http_address}", "--refresh=250ms").url
    wait_until(lambda: ask(url + "/topics/topic-0000").status == 200, what="the first sample")

    page = ask(url + "/")
    with closing(events(url + "/?live=1")) as changes:
        whole = next(changes)
        # rates and sparklines appear with the first samples; then there is only another time
        wait_until(lambda: len(str(next(changes))) < len(str(whole)) / 10, what="a small change")
        nsqd.publish("topic-0007", b"1")
        [change] = wait_until(
            lambda: [each for each in [next(changes)] if "topic-0007" in str(each["parts"])],
            what="the change of that topic",
        )

    assert page.text.count('<tr data-part="row-') == PAGE_LINES
    assert len(page.body) < 100_000
    assert "page=2" in page.text
    assert '<tr data-part="row-' in ask(url + "/?page=99").text  # the last one
    assert len(whole["lists"]["rows"]) == PAGE_LINES
    top = [html for name, html in change["parts"].items() if name.startswith("row-")]
    assert sum("topic-0007" in html for html in top) == CHANNELS


@pytest.mark.slow
@pytest.mark.alone
def test_a_large_cluster_is_shown_within_a_second(
    console: MakeConsole, serve: Serve, data_path: DataPath
) -> None:
    nsqds = [serve(EmbeddedServer(data_path())) for _ in range(NODES)]
    with ThreadPoolExecutor(NODES) as workers:
        list(workers.map(make_queues, nsqds, (range(at, TOPICS, NODES) for at in range(NODES))))
    addresses = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in nsqds]
    url = console(*addresses).url
    wait_until(lambda: ask(url + "/topics/topic-0999").status == 200, what="a sample")

    took_s = []
    for path in ("/", "/?sort=name", "/topics/topic-0500", "/topics/topic-0500/channel-1"):
        began_s = time.monotonic()
        assert ask(url + path).status == 200
        took_s.append(time.monotonic() - began_s)

    assert max(took_s) < 1, took_s
