"""nsqadmin's API compared with the real nsqadmin 1.3.0 on the same Go cluster, field by field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from plugins.clients import take
from plugins.console import Answer, Console, MakeConsole, ask
from plugins.daemons import Daemon, EmbeddedLookupServer, GoNsqd, GoNsqlookupd
from plugins.http_server import MakeServer
from plugins.raw_client import RawPeer
from plugins.servers import AnyNsqd, MakeNsqd, Serve
from plugins.waiting import wait_until
from starlette.exceptions import HTTPException

from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.web.api import ROUTES, newest_version, read_body, sum_latencies

LATENCY = ("-e2e-processing-latency-percentile=0.99,0.5", "-e2e-processing-latency-window-time=10m")


class Side(NamedTuple):
    """The real nsqadmin (``theirs``) and our console, on one cluster."""

    theirs: str
    console: Console
    nsqds: list[GoNsqd]
    lookupd: GoNsqlookupd

    def both(self, path: str, method: str = "GET", body: str | None = None) -> list[Answer]:
        """Return the answers of nsqadmin and of our console."""
        return [ask(url + path, method, body=body) for url in (self.theirs, self.console.url)]


@pytest.fixture
def side(
    serve: Serve, go_nsqd: MakeNsqd, lookupd: GoNsqlookupd, console: MakeConsole
) -> Iterator[Side]:
    flags = f"-lookupd-tcp-address={lookupd.tcp_address}"
    nsqds = [go_nsqd(flags, *LATENCY) for _ in range(2)]
    for nsqd in nsqds:
        nsqd.create_channel("orders", "billing")
        nsqd.publish("orders", b"a", b"b", b"c")
    nsqds[0].create_channel("clicks", "archive")
    lookupd.post("/topic/create", topic="planned")
    lookupd.post("/channel/create", topic="planned", channel="later")
    wait_until(
        lambda: len(lookupd.producers("orders")) == 2 and lookupd.producers("clicks"),
        what="all is registered",
        timeout_s=20,
    )
    where = f"-lookupd-http-address={lookupd.http_address}"
    admin = serve(Daemon("nsqadmin", [where], listeners={"HTTP": "http_address"}))
    running = console(f"-{where}", "--allow-changes")
    steady = ClientOptions(max_in_flight=1)  # the count of a ready consumer does not change
    first = nsqds[0].tcp_address
    with Consumer("orders", "billing", nsqd_tcp_addresses=first, options=steady) as consumer:
        for _ in range(3):
            take(consumer, 1)[0].finish()
        wait_until(
            lambda: nsqds[0].channel_stats("orders", "billing")["clients"][0]["finish_count"] == 3,
            what="all is finished",
        )
        yield Side(f"http://{admin.http_address}", running, nsqds, lookupd)


def by_node(document: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer by nsqd. Their order is random for equal host names."""
    return {part["node"]: part for part in document["nodes"]}


def documents(side: Side, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answers of nsqadmin and of our console, with sorted nodes and topics."""
    theirs, ours = side.both(path)
    assert (theirs.status, ours.status) == (200, 200), path
    for header in ("content-type", "x-nsq-content-type"):
        assert ours.headers[header] == theirs.headers[header]
    expected, document = theirs.json(), ours.json()
    for answer in (expected, document):
        if path == "/api/nodes":
            answer["nodes"].sort(key=lambda node: node["http_port"])
            for node in answer["nodes"]:
                node["topics"].sort(key=lambda topic: topic["topic"])
    return expected, document


def test_lists_equal_those_of_nsqadmin(side: Side) -> None:
    for path in ("/api/topics", "/api/topics?inactive=true", "/api/nodes", "/api/counter"):
        expected, document = documents(side, path)
        assert document == expected, path


def test_a_node_equals_that_of_nsqadmin(side: Side) -> None:
    for nsqd in side.nsqds:
        expected, document = documents(side, f"/api/nodes/{nsqd.http_address}")
        for answer in (expected, document):
            channels = [channel for topic in answer["topics"] for channel in topic["channels"]]
            for client in [client for channel in channels for client in channel["clients"]]:
                del client["connected"]
        assert document == expected


def test_without_nsqlookupd_the_nsqd_are_queried(side: Side, console: MakeConsole) -> None:
    alone = console(*(f"--nsqd-http-address={nsqd.http_address}" for nsqd in side.nsqds))
    assert alone.get("/api/topics").json()["topics"] == ["clicks", "orders"]
    nodes = alone.get("/api/nodes").json()["nodes"]
    assert [node["remote_addresses"] for node in nodes] == [None, None]
    ports = {nsqd.tcp_address.rpartition(":")[2] for nsqd in side.nsqds}
    assert {str(node["tcp_port"]) for node in nodes} == ports


def test_a_channel_equals_that_of_nsqadmin(side: Side) -> None:
    expected, document = documents(side, "/api/topics/orders/billing")
    for answer in (expected, document):
        first = by_node(answer)[side.nsqds[0].http_address]
        for client in (*answer["clients"], *first["clients"]):
            assert client.pop("connected") % 1_000_000_000 == 0
    assert by_node(document) == by_node(expected)
    # The min of nsqadmin is that of the last nsqd; ours is the smallest measured value.
    for answer in (expected, document):
        for percentile in answer["e2e_processing_latency"]["percentiles"]:
            del percentile["min"]
    del expected["nodes"], document["nodes"]
    assert document == expected


def test_a_topic_has_the_sums_of_nsqadmin_and_numbers_per_nsqd(side: Side) -> None:
    expected, document = documents(side, "/api/topics/orders")
    assert document.keys() == expected.keys()
    for key in ("node", "depth", "memory_depth", "backend_depth", "message_count", "paused"):
        assert document[key] == expected[key]
    [theirs], [ours] = expected["channels"], document["channels"]
    assert ours.keys() == theirs.keys()
    counts = [key for key, value in theirs.items() if isinstance(value, int)]
    assert {key: ours[key] for key in counts} == {key: theirs[key] for key in counts}
    assert set(by_node(ours)) == {nsqd.http_address for nsqd in side.nsqds}
    for nsqd in side.nsqds:
        [channel] = by_node(document)[nsqd.http_address]["channels"]
        assert channel["depth"] == nsqd.depth("orders", "billing")
    expected, document = documents(side, "/api/topics/clicks")
    assert by_node(document) == by_node(expected)


def test_errors_equal_those_of_nsqadmin(side: Side) -> None:
    node = side.nsqds[0].http_address
    for path, method, body in [
        ("/api/nothing", "GET", None),
        ("/api/topics/orders", "PUT", None),
        ("/api/nodes/nowhere:1", "GET", None),
        ("/api/topics", "POST", None),
        ("/api/topics", "POST", "{}"),
        ("/api/topics", "POST", '{"topic":"a b"}'),
        ("/api/topics", "POST", '{"topic":"a","channel":"a b"}'),
        ("/api/topics/orders", "POST", "{}"),
        ("/api/topics/orders", "POST", '{"action":"explode"}'),
        (f"/api/nodes/{node}", "DELETE", "x"),
        (f"/api/nodes/{node}", "DELETE", "{}"),
        ("/ping", "GET", None),
    ]:
        theirs, ours = side.both(path, method, body)
        assert (ours.status, ours.text) == (theirs.status, theirs.text), path


def test_a_topic_or_channel_on_no_nsqd_is_404_or_has_zeros(side: Side) -> None:
    for path, code in [
        ("/api/topics/nothing", "TOPIC_NOT_FOUND"),
        ("/api/topics/orders/nothing", "CHANNEL_NOT_FOUND"),
    ]:
        for method, body in (("GET", None), ("POST", '{"action":"pause"}'), ("DELETE", None)):
            answer = ask(side.console.url + path, method, body=body)
            assert (answer.status, answer.json()) == (404, {"message": code}), (path, method)
    planned = side.console.get("/api/topics/planned").json()
    assert (planned["depth"], planned["nodes"]) == (0, [])


def test_changes_act_like_those_of_nsqadmin(side: Side) -> None:
    first, second = side.nsqds
    for url in (side.theirs, side.console.url):

        def change(path: str, method: str = "POST", at: str = url, **body: str) -> None:
            answer = ask(f"{at}/api{path}", method, body=json.dumps(body))
            assert (answer.status, answer.json()) == (200, {"message": ""}), (at, path, answer)

        change("/topics", TOPIC="made", channel="too")
        assert side.lookupd.json("/channels", topic="made")["channels"] == ["too"]
        change("/topics/orders", action="pause")
        assert [nsqd.topic_stats("orders")["paused"] for nsqd in side.nsqds] == [True, True]
        change("/topics/orders", action="unpause")
        change("/topics/orders/billing", action="pause")
        assert second.channel_stats("orders", "billing")["paused"]
        change("/topics/orders/billing", action="unpause")
        second.publish("orders", b"lost")
        wait_until(lambda: not second.depth("orders"), what="it is in the channel")
        change("/topics/orders/billing", action="empty")
        assert second.depth("orders", "billing") == 0
        assert not second.channel_stats("orders", "billing")["paused"]
        first.create_channel("doomed", "too")
        wait_until(
            lambda: (
                side.lookupd.producers("doomed")
                and "too" in side.lookupd.json("/channels", topic="doomed")["channels"]
            ),
            what="it is registered, and its channel: nsqd registers each on its own",
            timeout_s=20,
        )
        change("/topics/doomed/too", "DELETE")
        assert first.topic_stats("doomed")["channels"] == []
        change("/topics/doomed", "DELETE")
        assert "doomed" not in first.topics()
        first.create_topic("tomb")
        wait_until(lambda: side.lookupd.producers("tomb"), what="it is registered", timeout_s=20)
        change(f"/nodes/{first.http_address}", "DELETE", topic="tomb")
        assert "tomb" not in first.topics()


def test_changes_are_refused_unless_they_are_allowed(
    go_nsqd: MakeNsqd, console: MakeConsole
) -> None:
    nsqd = go_nsqd()
    nsqd.create_topic("orders")
    where = f"--nsqd-http-address={nsqd.http_address}"
    only_looks = console(where)
    admins = ("--admin-user=ann", "--admin-user=jürgen", "--acl-http-header", "X-User")
    of_ann = console(where, "--allow-changes", *admins, "--trusted-proxy", "127.0.0.0/8")
    of_nobody = console(where, "--allow-changes", *admins, "--trusted-proxy", "10.0.0.0/8")
    names = {"topic": "orders", "channel": "c", "node": nsqd.http_address}
    of_path = ((f"/api{path}".format(**names), methods) for path, methods in ROUTES.items())
    calls = [(verb, path) for path, methods in of_path for verb in methods if verb != "GET"]
    assert len(calls) == 6
    for running, header in [(only_looks, "ann"), (of_ann, "bob"), (of_nobody, "ann")]:
        for method, path in calls:
            answer = ask(running.url + path, method, headers={"X-User": header})
            assert (answer.status, answer.json()) == (403, {"message": "FORBIDDEN"})
    pause = json.dumps({"action": "pause"})
    for name in ("ann", "jürgen".encode().decode("latin-1")):  # as a proxy would send it
        assert of_ann.post("/api/topics/orders", pause, headers={"X-User": name}).status == 200
    assert nsqd.topic_stats("orders")["paused"]


def test_changes_are_audited_and_notified_or_not_made(
    go_nsqd: MakeNsqd, console: MakeConsole, http_server: MakeServer, tmp_path: Path
) -> None:
    nsqd, endpoint, log = go_nsqd(), http_server(), tmp_path / "audit"
    where = f"--nsqd-http-address={nsqd.http_address}", f"--audit-log={log}"
    notified = f"--notification-http-endpoint={endpoint.url.removeprefix('http://')}/noted"
    running = console(*where, notified, "--allow-changes")

    headers = {"User-Agent": "x/1"}
    created = running.post("/api/topics", '{"topic":"orders","channel":"c"}', headers=headers)
    assert created.status == 200
    wait_until(lambda: len(endpoint.requests) == 2, what="both are notified")
    first, second = (json.loads(request.body) for request in endpoint.requests)
    kinds = [endpoint.requests[0].headers[name] for name in ("Accept", "Content-Type")]
    assert kinds == ["*/*", "application/json"]
    assert list(first) == ["action", "topic", "timestamp", "remote_ip", "user_agent", "url", "via"]
    assert (first["action"], second["action"]) == ("create_topic", "create_channel")
    assert (second["channel"], first["user_agent"]) == ("c", "x/1")
    assert first["url"] == f"{running.url}/api/topics"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["state"] for line in lines] == ["begun", "done"] * 2
    assert [line["action"] for line in lines] == ["create_topic"] * 2 + ["create_channel"] * 2
    assert lines[1]["steps"][0]["address"] == nsqd.http_address
    assert log.stat().st_mode & 0o777 == 0o600
    log.unlink()
    log.mkdir()
    refused = running.post("/api/topics", '{"topic":"b"}')
    assert refused.status == 502
    assert "cannot write the audit log" in refused.json()["message"]
    assert nsqd.topics() == ["orders"]


def test_a_silent_nsqd_is_listed_and_its_topics_are_not_inactive(
    serve: Serve, console: MakeConsole
) -> None:
    lookupd = serve(EmbeddedLookupServer())
    with RawPeer(lookupd.tcp_address) as nsqd:
        nsqd.identify(broadcast_address="127.0.0.1", http_port=1)
        nsqd.ask(b"REGISTER orders\n")
        lookupd.post("/topic/create", topic="old")
        running = console(f"--lookupd-http-address={lookupd.http_address}")
        inactive = running.get("/api/topics?inactive=true").json()
        [node] = running.get("/api/nodes").json()["nodes"]
        page = running.get("/lookup").text

    assert (node["hostname"], node["http_port"], node["version"]) == ("nsqd", 1, "1.3.0")
    assert node["topics"] == [{"topic": "orders", "tombstoned": False}]
    assert inactive["topics"] == {"old": None}
    assert re.findall('<th scope="row">(old|orders)<', page) == ["old"]
    assert inactive["message"].startswith("WARNING: cannot connect to ")


def test_one_nsqd_down_is_a_warning_and_all_down_are_an_error(
    any_nsqd: AnyNsqd, console: MakeConsole
) -> None:
    nsqd = any_nsqd()
    nsqd.create_topic("orders")
    here, dead = f"--nsqd-http-address={nsqd.http_address}", "--nsqd-http-address=127.0.0.1:1"

    running = console(here, dead, "--allow-changes")
    unreachable = console(dead).get("/api/topics/orders")

    answers = [running.get(path) for path in ("/api/topics", "/api/topics/orders")]
    for answer in (*answers, running.post("/api/topics/orders", '{"action":"pause"}')):
        assert answer.status == 200
        assert answer.json()["message"].startswith("WARNING: cannot connect to http://127.0.0.1:1")
    for path in ("/api/nodes/127.0.0.1:1", "/api/topics/orders/c"):
        assert running.get(path).status == 502
    assert unreachable.status == 502
    assert unreachable.json()["message"].startswith(
        "UPSTREAM_ERROR: failed to query any nsqd: cannot"
    )


def test_a_body_is_read_like_nsqadmin_or_refused() -> None:
    assert read_body(b' {"Topic":"a","other":[1]} and more') == {"topic": "a"}
    wrong = {b"": "EOF", b" \n": "EOF", b"[1]": "not an object", b'{"topic":1}': "wrong type"}
    wrong |= dict.fromkeys((b"x", b"[" * 100_000, b"\xff", b'{"x":NaN}'), "invalid JSON")
    for body, complaint in wrong.items():
        with pytest.raises(HTTPException, match=complaint):
            read_body(body)


def test_latencies_are_weighted_by_count_and_the_newest_version_wins() -> None:
    def part(count: int, value: float) -> dict[str, Any]:
        one = {"average": value, "count": count, "max": value, "min": value, "quantile": 0.5}
        return {"count": count, "percentiles": [one]}

    together = sum_latencies([part(1, 10), part(3, 30), part(0, 0)], "t", "c")

    [found] = together["percentiles"]
    assert found == {"average": 25, "count": 4, "max": 30, "min": 10, "quantile": 0.5}
    assert newest_version(["1.2.1", "1.10.0", "1.3.0-alpha", "1." + "0" * 5000]) == "1.10.0"
