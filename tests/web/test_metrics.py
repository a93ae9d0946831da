"""/metrics of the whole cluster, its dashboard and alerts, and nsqd that are down."""

import html
import json
import re
from typing import Any

import pytest
import yaml
from plugins.browser import ServePages
from plugins.cli import RunNsq
from plugins.clients import Consume, take
from plugins.clusters import RunningCluster
from plugins.console import MakeConsole, ask
from plugins.hostile_cluster import HostileCluster
from plugins.servers import GoNsqlookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until
from prometheus_client.parser import text_string_to_metric_families

from nsqtools.cluster import sampling
from nsqtools.cluster.problems import Fault
from nsqtools.http.http_api import HTTPAccess

METRIC = re.compile(r"\bnsq_[a-z0-9_]+")


def scrape(url: str) -> dict[str, list[Any]]:
    """Return the samples by name, as the library of Prometheus parses them."""
    answer = ask(url + "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def test_a_scrape_has_every_metric_of_the_dashboard_and_alerts(
    lookupd: GoNsqlookupd,
    go_nsqd: MakeNsqd,
    consume: Consume,
    console: MakeConsole,
    run_nsq: RunNsq,
) -> None:
    flags = [f"-lookupd-tcp-address={lookupd.tcp_address}"]
    flags += ["-e2e-processing-latency-percentile=0.99", "-e2e-processing-latency-window-time=10m"]
    first, second = (go_nsqd(*flags) for _ in range(2))
    for nsqd in (first, second):
        nsqd.create_channel("orders", "archive")
        nsqd.publish("orders", b"abc", b"def")
    wait_until(lambda: len(lookupd.producers("orders")) == 2, what="registered", timeout_s=20)
    take(consume(first.tcp_address, topic="orders"), 1)[0].finish()
    url = console(f"--lookupd-http-address={lookupd.http_address}", "--refresh", "100ms").url
    wait_until(lambda: len(scrape(url).get("nsq_channel_depth", ())) == 2, what="both answer")
    samples = scrape(url)

    depth = {
        (row.labels["node"], row.labels["topic"], row.labels["channel"]): row.value
        for row in samples["nsq_channel_depth"]
    }
    assert len(depth) == 2
    assert depth[second.http_address, "orders", "archive"] == 2
    assert {row.value for row in samples["nsq_topic_message_bytes_total"]} == {6}
    assert {row.value for row in samples["nsq_topic_messages_total"]} == {2}
    assert [row.labels["version"] for row in samples["nsq_node_info"]] == ["1.3.0", "1.3.0"]
    [found] = samples["nsq_lookupd_up"]
    assert (found.labels["lookupd"], found.value) == (lookupd.http_address, 1)
    assert {row.value for row in samples["nsq_up"]} == {1}

    def has_latency() -> dict[str, list[Any]] | None:
        samples = scrape(url)
        return samples if "nsq_e2e_latency_seconds" in samples else None

    metric_names = set(wait_until(has_latency, what="a latency", timeout_s=20))
    dashboard = run_nsq(["web", "--print", "dashboard"]).out.decode()
    alerts = run_nsq(["web", "--print", "alerts"]).out.decode()

    panels = json.loads(dashboard)["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [rule for group in yaml.safe_load(alerts)["groups"] for rule in group["rules"]]
    assert {"alert", "expr", "labels", "annotations"} <= set(rules[0])
    for text in (*expressions, *(rule["expr"] for rule in rules)):
        assert set(METRIC.findall(text)) <= metric_names, text
        assert METRIC.search(text), text
        for opening, closing in ("()", "{}", "[]"):
            assert text.count(opening) == text.count(closing), text
    assert set(METRIC.findall(dashboard + alerts)) <= metric_names
    # the alerts use the console's names of problems
    words = {fault.severity.word for fault in Fault} | {fault.word for fault in Fault}
    in_alerts = re.findall(r'nsq_problem{\w+="(.*?)"', " ".join(rule["expr"] for rule in rules))
    assert {"critical", "warning", "paused"} == set(in_alerts) <= words
    # summaries use only labels that the metrics have
    labels = {name: set(samples[0].labels) for name, samples in scrape(url).items()}
    for rule in rules:
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            names = METRIC.findall(rule["expr"])
            assert label == "instance" or label in labels[names[0]], rule["alert"]


def test_hostile_names_stay_inside_their_labels(
    hostile_cluster: HostileCluster, console: MakeConsole
) -> None:
    here = hostile_cluster.http_address
    where = f"--lookupd-http-address={here}", f"--nsqd-http-address={here}"
    running = console(*where, "--allow-changes")

    assert all(name.startswith("nsq_") for name in scrape(running.url))
    for path in ("/api/topics", "/api/nodes", "/api/counter", "/api/topics/clicks/archive"):
        answer = running.get(path)
        assert answer.status == 200, answer
        answer.json()
        assert b"\x1b" not in answer.body
    refused = running.post("/api/topics/clicks", '{"action":"pause"}')
    assert refused.status == 502
    refused.json()
    wait_until(lambda: running.get("/ping").status == 200, what="it goes on")
    assert "\x1b" not in running.log
    assert "Traceback" not in running.log


WAIT_S = sampling.COUNTED_S + 20


def up(url: str, daemon: str = "node") -> dict[str, float]:
    """Return by address whether each nsqd, or each ``lookupd``, is up."""
    samples = scrape(url)["nsq_up" if daemon == "node" else "nsq_lookupd_up"]
    return {sample.labels[daemon]: sample.value for sample in samples}


def text_of(url: str, path: str) -> str:
    answer = ask(url + path)
    assert answer.status == 200, path
    return answer.text


def find_problems(url: str) -> str:
    """Return the text of the list of problems on the first page."""
    section = re.search(r'<section id="problems".*?</section>', text_of(url, "/"), re.S)
    assert section is not None
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", section[0])).split())


def test_a_dead_nsqd_is_down_and_a_critical_problem_until_it_is_back(
    cluster: RunningCluster, serve_pages: ServePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "LOOKUP_S", 0.0)
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "billing")
        nsqd.publish("orders", *[b"x"] * 5)
    cluster.wait_for_topic("orders", 2)
    lookupds = [lookupd.http_address for lookupd in cluster.lookupds]
    url = serve_pages(lookupd_http=lookupds, access=HTTPAccess(timeout_s=patience_s(0.5)))
    dead, living = (nsqd.http_address for nsqd in cluster.nsqds)
    wait_until(lambda: up(url) == {dead: 1, living: 1}, what="both are seen")
    cluster.nsqds[0].kill()
    wait_until(
        lambda: all(len(lookupd.json("/nodes")["producers"]) == 1 for lookupd in cluster.lookupds),
        what="nsqlookupd has forgotten it",
        timeout_s=20,
    )

    wait_until(lambda: up(url) == {dead: 0, living: 1}, what="it is down", timeout_s=WAIT_S)

    def is_told() -> bool:  # the running nsqd may be late for a moment
        text = find_problems(url)
        samples = scrape(url)
        problems = [set(sample.labels.values()) for sample in samples["nsq_problem"]]
        return (
            "5 messages when last seen " in text
            and "5 waiting" in text  # only of the other nsqd
            and "<b>1</b> of 2 nsqd respond" in text_of(url, "/")
            and {sample.labels["node"] for sample in samples["nsq_channel_depth"]} == {living}
            and {"critical", "gone", "", dead} in problems
        )

    wait_until(is_told, what="it is a problem", timeout_s=20)
    assert f"{dead}</a>" in text_of(url, "/nodes")
    page = text_of(url, f"/nodes/{dead}")
    assert "5 messages when last seen " in page
    assert "The numbers below are those of " in page
    assert re.search(r"<dt>Depth</dt>\s*<dd><b>5</b>", page)
    assert "No topics" not in page
    left_out = f'Sums exclude <a href="/nodes?node={dead}">{dead}</a>: 5 waiting when last seen '
    for path in ("/", "/topics/orders", "/topics/orders/billing"):
        assert left_out.replace(":", "%3A", 1) in text_of(url, path)
        assert "<b>5</b> <small>without 1 nsqd</small>" in text_of(url, path)

    for lookupd in cluster.lookupds:  # Go processes are stopped, embedded ones are killed
        getattr(lookupd, "pause", lookupd.kill)()
    missed = dict.fromkeys(lookupds, 0)
    wait_until(lambda: up(url, "lookupd") == missed, what="they are missed", timeout_s=WAIT_S)
    # the state of the nsqd does not change
    wait_until(lambda: up(url) == {dead: 0, living: 1}, what="all else", timeout_s=WAIT_S)
    assert all(address in find_problems(url) for address in lookupds)
    for path in ("/nodes", "/topics/orders/billing", f"/nodes/{living}"):
        assert text_of(url, path)

    cluster.nsqds[0].start()
    wait_until(lambda: up(url) == {dead: 1, living: 1}, what="it is back", timeout_s=WAIT_S)
    assert "gone" not in find_problems(url)
