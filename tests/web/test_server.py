"""The console as a server: connections, streams, compression, and a large cluster."""

import gzip
import json
import os
import re
import resource
import shutil
import socket
import struct
import time
import urllib.request
import zlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from plugins.cli import RunNsq
from plugins.console import Console, MakeConsole, ask
from plugins.servers import AnyNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.http.http_server import IdleConnections
from nsqtools.web.app import MAX_REQUESTS
from nsqtools.web.pages.snapshot import PAGE_LINES

TOLD = "Too many open files"


@pytest.fixture
def running(console: MakeConsole) -> Console:
    return console("--nsqd-http-address=127.0.0.1:1", "--refresh=100ms")


def connected(running: Console) -> socket.socket:
    address = urlsplit(running.url)
    return socket.create_connection((address.hostname or "", address.port or 0), patience_s(20))


def test_without_descriptors_connections_wait_and_the_log_has_one_line(running: Console) -> None:
    wait_until(lambda: "nsq_up" in running.get("/metrics").text, what="everything is loaded")
    pid = running.process.pid
    room = len(os.listdir(f"/proc/{pid}/fd")) + 5
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, room))

    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(running))
        wait_until(lambda: TOLD in running.log, what="it says so")
    wait_until(lambda: running.get("/ping").status == 200, what="it serves again", timeout_s=20)

    assert running.log.count(TOLD) == 1
    assert "Traceback" not in running.log
    assert "asyncio" not in running.log


def test_no_password_of_an_address_is_shown(console: MakeConsole, go_nsqd: MakeNsqd) -> None:
    nsqd, secret = go_nsqd(), "hushhush"
    running = console(
        f"--nsqd-http-address=http://ann:{secret}@{nsqd.http_address}",
        f"--lookupd-http-address=http://ann:{secret}@127.0.0.1:1/?token={secret}",
        f"--notification-http-endpoint=http://ann:{secret}@127.0.0.1:1/hook?token={secret}",
        "--allow-changes",
    )
    wait_until(
        lambda: f'nsq_up{{node="{nsqd.http_address}"}} 1' in running.get("/metrics").text,
        what="it is up",
    )
    assert running.post("/api/topics", b'{"topic":"t"}').status == 200
    wait_until(lambda: "cannot notify http://127.0.0.1:1/hook" in running.log, what="it says so")

    paths = ["/", "/nodes", f"/nodes/{nsqd.http_address}", "/lookup", "/metrics", "/api/nodes"]
    paths += ["/api/topics", "/topics/t", "/api/topics/t"]
    texts = {path: running.get(path).text for path in paths}
    assert [path for path, text in texts.items() if secret in text] == []
    assert secret not in running.log
    assert "Traceback" not in running.log


def test_pages_are_compressed_and_static_files_are_cached(
    console: MakeConsole, go_nsqd: MakeNsqd
) -> None:
    nsqd = go_nsqd()
    nsqd.create_channel("orders", "work")
    running = console(f"--nsqd-http-address={nsqd.http_address}", "--refresh=100ms")
    wait_until(lambda: "orders" in running.get("/").text, what="the first sample")
    takes = {"Accept-Encoding": "gzip"}

    for path in ("/", "/metrics"):
        packed = running.get(path, headers=takes)
        assert packed.headers["content-encoding"] == "gzip"
        assert b"orders" in gzip.decompress(packed.body)
        assert "content-encoding" not in running.get(path).headers
    static = re.search(r'href="(/static/console.css[^"]*)"', running.get("/").text)
    assert static is not None
    assert "immutable" in running.get(static[1]).headers["cache-control"]
    assert running.get("/static/console.css").headers["cache-control"] == "no-store"

    request = urllib.request.Request(running.url + "/topics/orders?live=1", headers=takes)
    with urllib.request.urlopen(request, timeout=patience_s(20)) as stream:
        unpack = zlib.decompressobj(wbits=31)
        text = b""
        while text.count(b"event: pieces") < 3:  # events that were compressed once for all streams
            text += unpack.decompress(stream.read1())
            # the links are those of a normal page, although the stream rendered this sample
            assert "live=1" not in running.get("/topics/orders").text
    assert b"orders" in text


def test_silent_connections_and_closed_streams_lock_nobody_out(running: Console) -> None:
    descriptors = Path(f"/proc/{running.process.pid}/fd")
    stream_request = (
        b"GET /?live=1 HTTP/1.1\r\nHost: %b\r\n\r\n" % urlsplit(running.url).netloc.encode()
    )
    assert running.get("/").status == 200
    descriptors_before = len(list(descriptors.iterdir()))

    for _ in range(5):
        with ExitStack() as stack:
            for _ in range(20):
                stream = stack.enter_context(connected(running))
                stream.sendall(stream_request)
                assert b"Transfer-Encoding: chunked" in stream.recv(1 << 16)
    wait_until(
        lambda: len(list(descriptors.iterdir())) <= descriptors_before + 5, what="all are closed"
    )

    for _ in range(MAX_REQUESTS + 10):
        with connected(running) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(stream_request)  # closed with a reset before the answer

    wait_until(lambda: running.get("/").status == 200, what="there is room", timeout_s=20)

    with ExitStack() as stack:
        many = range(MAX_REQUESTS + 10)
        silent = [stack.enter_context(connected(running)) for _ in many]
        assert running.get("/ping").status == 200
        assert silent[0].recv(1) == b""  # the longest idle connection


def test_the_longest_idle_connections_are_closed_for_new_ones() -> None:
    idle: Any = IdleConnections(most=3, most_of_one=2)
    aborted: list[str] = []
    a, b, c, d, e = (Mock(abort=partial(aborted.append, name)) for name in "abcde")
    for connection in (a, b, c):
        idle.add(connection, "10.0.0.1", 10.0, 100.0)
    idle.close_late(14.9)
    assert aborted == []  # their requests may still arrive
    idle.close_late(15.0)
    assert aborted == ["a"]  # the oldest of three of one address
    idle.remove(b)
    idle.add(d, "10.0.0.2", 15.0, 100.0)
    idle.add(e, "10.0.0.3", 15.0, 50.0)
    idle.add(b, "10.0.0.4", 15.0, 100.0)
    assert aborted == ["a", "c"]  # the oldest of all
    idle.close_late(71.0)
    assert aborted == ["a", "c", "e"]


TOPICS, CHANNELS, NODES = 1000, 3, 10


def make_queues(nsqd: Nsqd, topics: range) -> None:
    for topic in topics:
        for channel in range(CHANNELS):
            nsqd.create_channel(f"topic-{topic:04}", f"channel-{channel}")


def events(url: str) -> Generator[dict[str, Any], None, None]:
    """Yield the changes that are sent to an open page."""
    with urllib.request.urlopen(url, timeout=patience_s(20)) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_many_queues_are_paged_and_only_changes_are_sent(
    console: MakeConsole, embedded_nsqd: AnyNsqd
) -> None:
    nsqd = embedded_nsqd()
    make_queues(nsqd, range(60))
    url = console(f"--nsqd-http-address={nsqd.http_address}", "--refresh=250ms").url
    wait_until(lambda: ask(url + "/topics/topic-0000").status == 200, what="the first sample")

    page = ask(url + "/")
    with closing(events(url + "/?live=1")) as changes:
        first_change = next(changes)
        # Rates and sparklines appear with the first samples. Then only the time changes.
        wait_until(
            lambda: len(str(next(changes))) < len(str(first_change)) / 10, what="a small change"
        )
        nsqd.publish("topic-0007", b"1")
        [change] = wait_until(
            lambda: [event for event in [next(changes)] if "topic-0007" in str(event["parts"])],
            what="the change of that topic",
        )

    assert page.text.count('<tr data-part="row-') == PAGE_LINES
    assert len(page.body) < 100_000
    assert "page=2" in page.text
    assert '<tr data-part="row-' in ask(url + "/?page=99").text  # the last page
    assert len(first_change["lists"]["rows"]) == PAGE_LINES
    top = [html for name, html in change["parts"].items() if name.startswith("row-")]
    assert sum("topic-0007" in html for html in top) == CHANNELS


@pytest.mark.slow
@pytest.mark.alone
def test_a_large_cluster_is_shown_within_a_second(
    console: MakeConsole, embedded_nsqd: AnyNsqd
) -> None:
    nsqds = [embedded_nsqd() for _ in range(NODES)]
    with ThreadPoolExecutor(NODES) as workers:
        list(workers.map(make_queues, nsqds, (range(at, TOPICS, NODES) for at in range(NODES))))
    addresses = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in nsqds]
    url = console(*addresses).url
    wait_until(lambda: ask(url + "/topics/topic-0999").status == 200, what="a sample")

    def took_s(path: str) -> float:
        began_s = time.monotonic()
        assert ask(url + path).status == 200
        return time.monotonic() - began_s

    for path in (
        "/?page=%d",
        "/?sort=name&page=%d",
        "/topics/topic-%04d",
        "/topics/topic-%04d/channel-1",
    ):
        # The fastest of several requests, as other processes may slow some down. No address is
        # requested twice, as its page would be cached.
        assert min(took_s(path % number) for number in range(1, 6)) < 1, path


def test_an_unhealthy_nsqd_is_not_reported_as_silent(
    console: MakeConsole, go_nsqd: MakeNsqd, run_nsq: RunNsq
) -> None:
    nsqd = go_nsqd("-mem-queue-size=0")
    shutil.rmtree(nsqd.data_path)
    with pytest.raises(AssertionError, match="EXITING"):
        nsqd.publish("orders", b"x")
    at = f"--nsqd-http-address={nsqd.http_address}"
    assert "NOK - open" in run_nsq(["ping", at]).out.decode()
    running = console(at, "--refresh=100ms")
    pages = {"/nodes": "not well", f"/nodes/{nsqd.http_address}": "It is not well:</b> NOK - open"}
    for page, status_text in pages.items():
        wait_until(
            lambda page=page, status_text=status_text: status_text in running.get(page).text,
            what=status_text,
        )


def test_charted_channels_stay_the_same_when_others_become_deeper(
    console: MakeConsole, go_nsqd: MakeNsqd
) -> None:
    nsqd = go_nsqd()
    for name in "abcdefghi":
        nsqd.create_channel("many", name)
    nsqd.publish("many", b"x")
    running = console(f"--nsqd-http-address={nsqd.http_address}", "--refresh=100ms")

    def newest_depth() -> object:
        depths = running.get("/series?topic=many&channel=a").json().get("depth")
        return depths and depths[-1]

    wait_until(lambda: newest_depth() == 1, what="the message")
    link = re.search(r'href="([^"]*)">Each channel', running.get("/topics/many").text)
    assert link is not None
    nsqd.post("/channel/empty", topic="many", channel="a")
    wait_until(lambda: newest_depth() == 0, what="it is empty")
    page = running.get("/topics/many" + unescape(link[1])).text
    source = re.search(r'data-series="([^"]*)"', page)
    assert source is not None
    assert "depth a" in running.get(unescape(source[1])).json()
